"""The section `trainer`: the keys of Lightning's trainer, with what they do here."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from radixtrain.errors import UserError
from radixtrain.settings.fields import FINITE, TINY, Limits, Section

LoggerName = Literal["csv", "wandb", "tensorboard", "mlflow", "trackio"]
Batches = int | float | None


@dataclass
class TrainerSettings(Section):
    """How a run goes through its steps: arguments of Lightning's trainer. radixtrain fills in what is not here.

    logger: csv, wandb, tensorboard, mlflow, trackio or none. Or a list. The CSV file is written with each of them.
    project: of wandb and trackio, and the experiment of mlflow; null takes that of their environment, or radixtrain.
    run_name: of wandb, trackio and mlflow; null takes the name of output_dir.
    accelerator: cpu or cuda; auto takes CUDA if available.
    strategy: ddp or fsdp2 for several devices; auto is ddp there.
    devices: how many, a list of their numbers, or auto for all; torchrun and srun set it by their processes.
    num_nodes: machines; torchrun and srun set it.
    precision: or bf16-mixed, bf16-true, 64-true. The first word is the dtype of products, and of the weights if true
        follows; mixed keeps the weights in 32 bits.
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
    deterministic: use only operations that give the same bits each time; warn names those that do not.
    benchmark: let cuDNN try its algorithms and use the fastest; not with deterministic.
    inference_mode: evaluate in torch.inference_mode, otherwise in torch.no_grad.
    profiler: measures where the time goes.
    detect_anomaly: look for the operation that made a NaN in the backward pass; slow.
    sync_batchnorm: average the statistics of batch norms over the devices.
    reload_dataloaders_every_n_epochs: create the DataLoaders again after this many.
    enable_autolog_hparams: give the loggers the settings of model and data.
    """

    SECTION: ClassVar[str] = "trainer"

    logger: LoggerName | Literal["none"] | list[LoggerName] = "csv"
    project: str | None = None
    run_name: str | None = None
    accelerator: Literal["auto", "cpu", "cuda", "gpu"] = "auto"
    strategy: str = "auto"
    devices: list[int] | str | int = 1
    num_nodes: int = 1
    precision: (
        Literal["transformer-engine", "transformer-engine-float16", "16-true", "16-mixed", "bf16-true", "bf16-mixed"]
        | Literal["32-true", "64-true", 64, 32, 16, "64", "32", "16", "bf16"]
        | None
    ) = None
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
    deterministic: bool | Literal["warn"] | None = None
    benchmark: bool | None = None
    inference_mode: bool = True
    profiler: Literal["simple", "advanced", "pytorch"] | None = None
    detect_anomaly: bool = False
    sync_batchnorm: bool = False
    reload_dataloaders_every_n_epochs: Annotated[int, Limits(0)] = 0
    enable_autolog_hparams: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if str(self.precision) in ("16", "16-mixed", "16-true"):
            raise UserError(
                f"trainer.precision {self.precision}: float16 needs a loss scale; use bf16-mixed or 32-true"
            )
