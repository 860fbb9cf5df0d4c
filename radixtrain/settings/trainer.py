"""The section `trainer`: the keys of Lightning's trainer, with what they do here."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from radixtrain.settings.section import FINITE, TINY, Limits, Section

# A name, or `class_path` and `init_args` of a class; `commands/classes.py` says which.
Named = str | dict[str, Any]
Batches = int | float | None


@dataclass
class TrainerSettings(Section):
    """How a run goes through its steps: arguments of Lightning's trainer. radixtrain fills in what is not here.

    logger: wandb, trackio, swanlab, tensorboard, csv or none; a CSV file without it. A class of Lightning, or a list,
        too; its options are `trainer.logger.NAME`.
    accelerator: cpu or cuda; auto takes CUDA if available.
    strategy: ddp or fsdp2 for several devices; auto is ddp there. Or a class of Lightning.
    devices: how many, a list of their numbers, or auto for all; torchrun and srun set it by their processes.
    num_nodes: machines; torchrun and srun set it.
    precision: or bf16-mixed, bf16-true, 64-true. The first word is the dtype of products, and of the weights if true
        follows; mixed keeps the weights in 32 bits.
    callbacks: EarlyStopping, ModelCheckpoint, ...: a class of Lightning, or a list; options of the last one are
        `trainer.callbacks.NAME`.
    fast_dev_run: a single step, or this many, to try a configuration.
    max_epochs: passes over the data, if max_steps is not set either. -1 has no end.
    min_epochs: passes before anything may end the run.
    max_steps: optimizer steps of the run. -1 leaves the end to max_epochs.
    min_steps: optimizer steps before anything may end the run.
    max_time: DD:HH:MM:SS, or a mapping such as {hours: 2}: how long each start of the run trains before it is saved.
    limit_train_batches: steps of an epoch to take on each device: a number, or a share if written with a point.
    limit_val_batches: likewise for a validation; 0 skips validations.
    limit_test_batches: likewise for `test`.
    limit_predict_batches: likewise for `predict`.
    overfit_batches: train and validate on the same first steps: a number or a share.
    val_check_interval: validate after this many steps, or a share of the epoch. On one device also a time, as
        max_time has it.
    check_val_every_n_epoch: validate after this many epochs; null counts val_check_interval across epochs.
    num_sanity_val_steps: steps of the validation to try before training: 2 by default; -1 for all.
    log_every_n_steps: optimizer steps between two lines of the log; a shorter run logs each step.
    enable_checkpointing: false writes no checkpoint.
    enable_progress_bar: a bar on a terminal, single lines in a file.
    enable_model_summary: print the layers of the model.
    accumulate_grad_batches: must be 1: data.batch_size is the batch of the whole optimizer step.
    gradient_clip_val: must be null: model.max_grad_norm does it.
    gradient_clip_algorithm: has no effect: model.max_grad_norm does it.
    deterministic: use only operations that give the same bits each time; warn names those that do not.
    benchmark: let cuDNN try its algorithms and use the fastest; not with deterministic.
    inference_mode: evaluate in torch.inference_mode, otherwise in torch.no_grad.
    use_distributed_sampler: has no effect: radixtrain divides each step among the devices.
    profiler: simple, advanced or pytorch, or a class of Lightning.
    detect_anomaly: look for the operation that made a NaN in the backward pass; slow.
    barebones: must be false: a run logs its steps and saves them.
    plugins: a class of Lightning, or a list, for clusters and files.
    sync_batchnorm: average the statistics of batch norms over the devices.
    reload_dataloaders_every_n_epochs: create the DataLoaders again after this many.
    enable_autolog_hparams: give the loggers the settings of model and data.
    model_registry: a name in Lightning's registry of models.
    """

    SECTION: ClassVar[str] = "trainer"

    logger: Named | list[Named] | bool | None = None
    accelerator: Named = "auto"
    strategy: Named = "auto"
    devices: list[int] | str | int = 1
    num_nodes: int = 1
    precision: (
        Literal["transformer-engine", "transformer-engine-float16", "16-true", "16-mixed", "bf16-true", "bf16-mixed"]
        | Literal["32-true", "64-true", 64, 32, 16, "64", "32", "16", "bf16"]
        | None
    ) = None
    callbacks: Named | list[Named] | None = None
    fast_dev_run: int | bool = False
    max_epochs: int | None = None
    min_epochs: int | None = None
    max_steps: int = -1
    min_steps: int | None = None
    max_time: str | dict[str, int] | None = None
    limit_train_batches: Batches = None
    limit_val_batches: Batches = None
    limit_test_batches: Batches = None
    limit_predict_batches: Batches = None
    overfit_batches: int | float = 0.0
    val_check_interval: Annotated[int | float | str | dict[str, int] | None, Limits(TINY, FINITE, "above 0")] = None
    check_val_every_n_epoch: Annotated[int | None, Limits(1)] = 1
    num_sanity_val_steps: int | None = None
    log_every_n_steps: Annotated[int | None, Limits(0)] = 10
    enable_checkpointing: bool | None = None
    enable_progress_bar: bool | None = None
    enable_model_summary: bool | None = False
    accumulate_grad_batches: int = 1
    gradient_clip_val: int | float | None = None
    gradient_clip_algorithm: str | None = None
    deterministic: bool | Literal["warn"] | None = None
    benchmark: bool | None = None
    inference_mode: bool = True
    use_distributed_sampler: bool = True
    profiler: Named | None = None
    detect_anomaly: bool = False
    barebones: bool = False
    plugins: Named | list[Named] | None = None
    sync_batchnorm: bool = False
    reload_dataloaders_every_n_epochs: Annotated[int, Limits(0)] = 0
    enable_autolog_hparams: bool = True
    model_registry: str | None = None
