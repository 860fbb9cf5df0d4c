"""The section `trainer`: the keys of Lightning's trainer, with what they do here."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from radixtrain.settings.section import FINITE, TINY, Limits, Section

# A name, or `class_path` and `init_args` of a class; `commands/classes.py` says which.
Named = str | dict[str, Any]
Batches = int | float | None


@dataclass
class TrainerSettings(Section):
    """How a run goes through its steps: arguments of Lightning's trainer. radixtrain fills in what is not here."""

    SECTION: ClassVar[str] = "trainer"

    logger: Annotated[
        Named | list[Named] | bool | None,
        "wandb, trackio, swanlab, tensorboard, csv or none; a CSV file without it. A class of Lightning, or a list, "
        "too; its options are `trainer.logger.NAME`.",
    ] = None
    accelerator: Annotated[Named, "cpu or cuda; auto takes CUDA if it is there."] = "auto"
    strategy: Annotated[Named, "ddp or fsdp2 for several devices; auto is ddp there. Or a class of Lightning."] = "auto"
    devices: Annotated[
        list[int] | str | int,
        "how many, a list of their numbers, or auto for all; torchrun and srun say it by their processes.",
    ] = 1
    num_nodes: Annotated[int, "machines; torchrun and srun say it."] = 1
    precision: Annotated[
        Literal["transformer-engine", "transformer-engine-float16", "16-true", "16-mixed", "bf16-true", "bf16-mixed"]
        | Literal["32-true", "64-true", 64, 32, 16, "64", "32", "16", "bf16"]
        | None,
        "or bf16-mixed, bf16-true, 64-true. The first word is that of products, and of the weights if `true` follows; mixed "
        "keeps the weights in 32 bits.",
    ] = None
    callbacks: Annotated[
        Named | list[Named] | None,
        "EarlyStopping, ModelCheckpoint, ...: a class of Lightning, or a list; options of the last one are "
        "`trainer.callbacks.NAME`.",
    ] = None
    fast_dev_run: Annotated[int | bool, "a single step, or so many, to try a configuration."] = False
    max_epochs: Annotated[int | None, "passes over the data, if max_steps is not set either. -1 has no end."] = None
    min_epochs: Annotated[int | None, "passes before anything may end the run."] = None
    max_steps: Annotated[int, "optimizer steps of the run. -1 leaves the end to max_epochs."] = -1
    min_steps: Annotated[int | None, "optimizer steps before anything may end the run."] = None
    max_time: Annotated[
        str | dict[str, int] | None,
        "DD:HH:MM:SS, or a mapping such as {hours: 2}: how long each start of the run trains; then it is saved.",
    ] = None
    limit_train_batches: Annotated[
        Batches, "steps of an epoch that are taken, on each device: a number, or with a point a share."
    ] = None
    limit_val_batches: Annotated[Batches, "the same of a validation; 0 leaves validations out."] = None
    limit_test_batches: Annotated[Batches, "the same of `test`."] = None
    limit_predict_batches: Annotated[Batches, "the same of `predict`."] = None
    overfit_batches: Annotated[int | float, "train and validate on the same first steps, so many or a share."] = 0.0
    val_check_interval: Annotated[
        int | float | str | dict[str, int] | None,
        Limits(TINY, FINITE, "above 0"),
        "validate every so many steps, or after a share of the epoch. On one device also a time, as max_time has it.",
    ] = None
    check_val_every_n_epoch: Annotated[
        int | None, Limits(1), "validate after so many epochs; null counts val_check_interval on over the epochs."
    ] = 1
    num_sanity_val_steps: Annotated[
        int | None, "steps of the validation that are tried before training: 2 without this key; -1 all."
    ] = None
    log_every_n_steps: Annotated[
        int | None, Limits(0), "optimizer steps between two lines of the log; a shorter run logs each step."
    ] = 10
    enable_checkpointing: Annotated[bool | None, "false writes no checkpoint."] = None
    enable_progress_bar: Annotated[bool | None, "a bar on a terminal, single lines in a file."] = None
    enable_model_summary: Annotated[bool | None, "print the layers of the model."] = False
    accumulate_grad_batches: Annotated[int, "must be 1: data.batch_size is that of the optimizer step."] = 1
    gradient_clip_val: Annotated[int | float | None, "must be null: model.max_grad_norm does it."] = None
    gradient_clip_algorithm: Annotated[str | None, "has no effect: model.max_grad_norm does it."] = None
    deterministic: Annotated[
        bool | Literal["warn"] | None, "only operations that give the same bits each time; warn says which do not."
    ] = None
    benchmark: Annotated[bool | None, "let cuDNN try its algorithms and take the fastest; not with deterministic."] = (
        None
    )
    inference_mode: Annotated[bool, "evaluate in torch.inference_mode, otherwise in torch.no_grad."] = True
    use_distributed_sampler: Annotated[bool, "has no effect: radixtrain divides each step among the devices."] = True
    profiler: Annotated[Named | None, "simple, advanced or pytorch, or a class of Lightning."] = None
    detect_anomaly: Annotated[bool, "look for the operation that made a NaN in the backward pass; slow."] = False
    barebones: Annotated[bool, "must be false: a run logs its steps and saves them."] = False
    plugins: Annotated[Named | list[Named] | None, "a class of Lightning, or a list, for clusters and files."] = None
    sync_batchnorm: Annotated[bool, "average the statistics of batch norms over the devices."] = False
    reload_dataloaders_every_n_epochs: Annotated[int, Limits(0), "make the DataLoaders anew after so many."] = 0
    enable_autolog_hparams: Annotated[bool, "give the loggers the settings of model and data."] = True
    model_registry: Annotated[str | None, "a name in Lightning's registry of models."] = None
