"""The section `trainer`: keys with the names of Lightning's trainer, and what they do here."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, ClassVar, Literal

from radixtrain.errors import UserError, first_line
from radixtrain.settings.fields import FINITE, TINY, Limits, Section

LoggerName = Literal["csv", "wandb", "tensorboard", "mlflow", "trackio"]


@dataclass
class TrainerSettings(Section):
    """How a run goes through its steps.

    logger: csv, wandb, tensorboard, mlflow, trackio or none. Or a list. The CSV file is written with each of them.
    project: of wandb and trackio, and the experiment of mlflow; null takes that of their environment, or radixtrain.
    run_name: of wandb, trackio and mlflow; null takes the name of output_dir.
    accelerator: cpu or cuda; auto takes CUDA if available.
    strategy: ddp or fsdp2 for several devices; auto is ddp there.
    devices: how many, a list of their numbers, or auto for all; torchrun and srun set it by their processes.
    num_nodes: machines; torchrun and srun set it.
    precision: or bf16-mixed, bf16-true, 64-true. The first word is the dtype of products, and of the weights if true
        follows; mixed keeps the weights in 32 bits.
    max_epochs: passes over the data; null is 3, unless max_steps is set. -1 has no end.
    max_steps: optimizer steps of the run. -1 leaves the end to max_epochs.
    max_time: DD:HH:MM:SS, or a mapping such as {hours: 2}: how long each start of the run trains before it is saved.
    limit_val_batches: steps of a validation: a number, or a share if written with a point; 0 skips validations.
    val_check_interval: validate after this many steps, or a share of the epoch.
    check_val_every_n_epoch: validate after this many epochs; null counts val_check_interval across epochs.
    log_every_n_steps: optimizer steps between two lines of the log; a shorter run logs each step.
    enable_checkpointing: false writes no checkpoint.
    enable_progress_bar: a bar on a terminal, single lines in a file.
    deterministic: use only operations that give the same bits each time; warn names those that do not.
    """

    SECTION: ClassVar[str] = "trainer"

    logger: LoggerName | Literal["none"] | list[LoggerName] = "csv"
    project: str | None = None
    run_name: str | None = None
    accelerator: Literal["auto", "cpu", "cuda", "gpu"] = "auto"
    strategy: str = "auto"
    devices: Annotated[list[int] | str | int, Limits(-1, 1_000)] = 1
    num_nodes: int = 1
    precision: (
        Literal["transformer-engine", "transformer-engine-float16", "16-true", "16-mixed", "bf16-true", "bf16-mixed"]
        | Literal["32-true", "64-true", 64, 32, 16, "64", "32", "16", "bf16"]
        | None
    ) = None
    max_epochs: Annotated[int | None, Limits(-1)] = None
    max_steps: Annotated[int, Limits(-1)] = -1
    max_time: str | dict[str, int] | None = None
    limit_val_batches: int | float | None = None
    val_check_interval: Annotated[int | float | None, Limits(TINY, FINITE, "above 0")] = None
    check_val_every_n_epoch: Annotated[int | None, Limits(1)] = 1
    log_every_n_steps: Annotated[int | None, Limits(0)] = 10
    enable_checkpointing: bool | None = None
    enable_progress_bar: bool | None = None
    deterministic: bool | Literal["warn"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if str(self.precision) in ("16", "16-mixed", "16-true"):
            raise UserError(
                f"trainer.precision {self.precision}: float16 needs a loss scale; use bf16-mixed or 32-true"
            )
        limit = self.limit_val_batches or 0
        if limit < 0 or (isinstance(limit, float) and limit > 1):
            raise UserError(f"trainer.limit_val_batches {limit}: a number of steps, or a share from 0.0 to 1.0")
        if isinstance(self.val_check_interval, float) and self.val_check_interval > 1:
            raise UserError(
                f"trainer.val_check_interval {self.val_check_interval}: a number of steps, or a share of an epoch"
            )
        try:
            _ = self.max_seconds
        except (ValueError, TypeError, OverflowError) as error:
            raise UserError(
                f"trainer.max_time must be DD:HH:MM:SS, or a mapping such as {{hours: 2}}; got {self.max_time} "
                f"({first_line(error)})"
            ) from None

    @property
    def max_seconds(self) -> float | None:
        """Return `max_time` in seconds; None without it."""
        if self.max_time is None:
            return None
        given = self.max_time
        if isinstance(given, str):
            given = dict(zip(("days", "hours", "minutes", "seconds"), map(int, given.split(":")), strict=True))
        return timedelta(**given).total_seconds()
