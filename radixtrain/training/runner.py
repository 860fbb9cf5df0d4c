"""What `fit` and the commands that evaluate have in common: a model on its device, evaluated steps, and the loggers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.loggers import Logger
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from radixtrain.checkpoints.folder import Checkpoint, read_checkpoint
from radixtrain.data.datamodule import SFTData
from radixtrain.distributed import ranks
from radixtrain.errors import UserError, only_warns
from radixtrain.settings.trainer import TrainerSettings
from radixtrain.training.devices.fabric import is_sharded
from radixtrain.training.fault_tolerance.failures import restoring
from radixtrain.training.fault_tolerance.run_state import check_same_model, load_weights
from radixtrain.training.module import RadixModule


class Stage(StrEnum):
    """What a runner does, as its parts ask."""

    FIT = "fit"
    VALIDATE = "validate"
    TEST = "test"
    PREDICT = "predict"
    VERIFY = "verify"


class Runner:
    """A model and its data on the devices of `fabric`.

    settings: of `trainer`. output_dir: of the run. loggers: receive the metrics, on rank 0. parts: are told what
        happens, in their order and before the module: the summary, the saver, the progress bar, ...

    callback_metrics: the newest value of each metric.
    """

    def __init__(
        self,
        fabric: Fabric,
        settings: TrainerSettings,
        output_dir: Path,
        loggers: Sequence[Logger],
        parts: Sequence[Any],
    ):
        self.fabric, self.settings, self.output_dir = fabric, settings, output_dir
        self.loggers: list[Any] = list(loggers)
        self.callbacks = list(parts)
        self.callback_metrics: dict[str, Any] = {}
        self.state = SimpleNamespace(fn=Stage.FIT)
        self.strategy, self.precision_plugin = fabric.strategy, fabric.strategy.precision
        self.default_root_dir = str(output_dir)
        self.ckpt_path: str | None = None
        self.sanity_checking = self.validating = False
        self.num_val_batches: list[int] = []
        self.log_every_n_steps = 10 if settings.log_every_n_steps is None else settings.log_every_n_steps
        self.loaders: list[Any] = []
        _set_determinism(settings)

    @property
    def precision(self) -> str:
        """Return the precision of products and weights, such as `bf16-mixed`."""
        return str(self.precision_plugin.precision)

    @property
    def is_global_zero(self) -> bool:
        """Return whether this rank writes and prints for all."""
        return ranks().is_first

    @property
    def global_step(self) -> int:
        """Return the optimizer steps of the run so far."""
        return self.module.position.num_steps

    def begin(self, stage: Stage, module: RadixModule, data: SFTData, ckpt_path: str | None) -> None:
        self.state.fn, self.module, self.datamodule, self.ckpt_path = stage, module, data, ckpt_path
        module.trainer = data.trainer = self  # type: ignore[assignment]
        if ranks().size == 1:
            self.strategy.setup_environment()
        self.tell_parts("setup", str(stage))
        data.setup(str(stage))
        module.configure_model()
        module.setup(str(stage))

    def load_checkpoint(self) -> Checkpoint:
        """Read the checkpoint and load its weights; each rank has them whole until they are placed on its device."""
        assert self.ckpt_path is not None
        with restoring(self.ckpt_path):
            is_fit, in_memory = self.state.fn == Stage.FIT, not is_sharded(self.strategy)
            checkpoint = read_checkpoint(Path(self.ckpt_path), is_fit, in_memory)
            check_same_model(checkpoint, self.module)
            load_weights(self.module, checkpoint)
        return checkpoint

    def place(self) -> None:
        """Convert the module and move it, or this rank's part of it, to the device."""
        self.precision_plugin.convert_module(self.module)
        self.strategy.module_to_device(self.module)
        if is_sharded(self.strategy):
            self.strategy.setup_module(self.module)

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Close the loggers and the workers at the end, after the parts have learnt of an error."""
        status = "success"
        try:
            yield
        except BaseException as error:
            status = "failed"
            self.tell_parts("on_exception", error)
            raise
        finally:
            self.tell_parts("on_end")
            for loader in self.loaders:
                loader.close()
            if ranks().is_first:
                for log in self.loggers:
                    with only_warns(f"{type(log).__name__} does not get all metrics", Exception):
                        log.finalize(status)

    def tell(self, event: str, *arguments: Any) -> None:
        """Call the method of that name of the parts, then of the module."""
        self.tell_parts(event, *arguments)
        getattr(self.module, event)(*arguments)

    def tell_parts(self, event: str, *arguments: Any) -> None:
        """Call the method of that name of the parts that have it."""
        for part in self.callbacks:
            if hasattr(part, event):
                getattr(part, event)(self, self.module, *arguments)

    @torch.no_grad()
    def evaluate(self, stage: str, name: str, limit: float | int | None) -> dict[str, float]:
        """Compute the mean loss of the first steps of a split, which parts may add to. Returns the metrics.

        stage: `validation` or `test`, as in the names of events. name: of the loss.
        """
        loader = self.datamodule.val_dataloader() if stage == "validation" else self.datamodule.test_dataloader()
        count = limited(len(loader), limit)
        self.num_val_batches = self.num_test_batches = [count]
        total, labels, metrics = 0.0, 0, dict[str, float]()
        with evaluating(self.module), closed(loader):
            self.tell(f"on_{stage}_start")
            for index, step in zip(range(count), loader, strict=False):
                with self.precision_plugin.forward_context():
                    found = self.module.evaluated(name, self.moved(step))
                if found is not None:
                    total, labels = total + float(found), labels + step.num_labels
                self.tell(f"on_{stage}_batch_end", None, step, index)
            if labels:
                metrics[name] = total / labels
            if stage == "validation" and not self.sanity_checking:
                for part in self.callbacks:
                    metrics |= part.measured(self, self.module) if hasattr(part, "measured") else {}
            self.callback_metrics |= metrics
            if not self.sanity_checking:
                self.log(metrics, *self.place_of_logs)
            self.tell(f"on_{stage}_end")
        return metrics

    def moved(self, step: Any) -> Any:
        """Move what a loader gives to the device. Prompts are numbers of the host."""
        return step.to(self.strategy.root_device, non_blocking=True) if hasattr(step, "to") else step

    @property
    def place_of_logs(self) -> tuple[int, int]:
        """Return the number of the step and of the epoch that loggers note now."""
        return 0, 0

    def log_hyperparameters(self) -> None:
        if ranks().is_first:
            for log in self.loggers:
                log.log_hyperparams({**self.datamodule.hparams, **self.module.hparams})
                log.save()

    def log(self, metrics: Mapping[str, Any], step: int = 0, epoch: int = 0) -> None:
        """Give the metrics to the loggers. A failure is a warning; a deleted folder of metrics is made again."""
        if not metrics or not ranks().is_first:
            return
        values = {**{name: float(value) for name, value in metrics.items()}, "epoch": epoch}
        for log in self.loggers:
            with only_warns(f"{type(log).__name__} does not get all metrics", Exception):
                if isinstance(log, CSVLogger) and Path(log.save_dir).is_dir():
                    Path(log.log_dir).mkdir(parents=True, exist_ok=True)
                log.log_metrics(values, step=step)
                log.save()


@contextmanager
def closed(loader: Any) -> Iterator[None]:
    """End the workers of a loader, however its iteration ends."""
    try:
        yield
    finally:
        loader.close()


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Turn dropout off for a while, in the modules that have it on."""
    were_training = [each for each in module.modules() if each.training]
    module.eval()
    try:
        yield
    finally:
        for each in were_training:
            each.training = True


def limited(count: int, limit: float | int | None) -> int:
    """Return how many of `count` steps are taken. limit: a number, a share if it is a float; None for all."""
    if limit is None:
        return count
    if isinstance(limit, int):
        return min(count, limit)
    found = int(count * limit)
    if limit and count and not found:
        raise UserError(f"trainer: {limit} of {count} steps is none; set a larger share, or a number of steps")
    return found


def _set_determinism(settings: TrainerSettings) -> None:
    deterministic = settings.deterministic
    torch.use_deterministic_algorithms(bool(deterministic), warn_only=deterministic == "warn")
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it
    if settings.benchmark is not None:
        torch.backends.cudnn.benchmark = settings.benchmark
    elif deterministic:
        torch.backends.cudnn.benchmark = False
