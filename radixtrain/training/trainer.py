"""A Lightning trainer with one more entry point: `verify`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.loggers import CSVLogger

from radixtrain.data.datamodule import SFTData
from radixtrain.distributed import ranks
from radixtrain.errors import UserError, only_warns
from radixtrain.screen import printable
from radixtrain.training.fault_tolerance.failures import restoring
from radixtrain.training.fault_tolerance.run_state import load_weights, read_checkpoint
from radixtrain.training.module import RadixModule
from radixtrain.verification.report import EquivalenceReport

RESTORING = ("_restore_modules_and_callbacks", "restore_training_state")  # of Lightning's checkpoint connector
LOGGING = ("log_metrics", "save", "finalize")  # methods that loggers run during training and at its end


class Trainer(L.Trainer):
    """Adds `verify`: compare gradients with ordinary Hugging Face on these data."""

    def __init__(self, **settings: Any):
        """Take arguments of Lightning's trainer."""
        super().__init__(**settings)
        connector = self._checkpoint_connector
        for name in RESTORING:
            setattr(connector, name, partial(_restored, self, getattr(connector, name)))
        for log in self.loggers:
            for name in LOGGING:
                setattr(log, name, partial(_logged, log, getattr(log, name)))
            log.log_metrics = partial(_log_from_step_1, self, log.log_metrics)  # type: ignore[method-assign]

    @property
    def received_sigterm(self) -> bool:
        """Return False, or Lightning would raise at a moment of its own choice. `Requests` handles signals."""
        return False

    def verify(
        self,
        model: RadixModule,
        datamodule: SFTData,
        num_steps: int = 1,
        num_sequences: int | None = None,
        ckpt_path: str | None = None,
    ) -> None:
        """Compare the gradient of the first optimizer steps with that of ordinary Hugging Face, tensor by tensor.

        The arguments are those of `Verify`.

        Raises:
            UserError: a gradient or the loss is further from the truth than rounding explains.
        """
        self._move(model, ckpt_path)
        model.trainer = self
        collator = datamodule.step_collator()
        available = datamodule.steps_per_epoch
        failed: list[tuple[int, EquivalenceReport]] = []
        for index in range(min(num_steps, available)):
            features = datamodule.features_of_step(index)[:num_sequences]
            report = model.verify(features, collator)
            print(printable(f"step {index}: {_size_of(features)}\n{report}\n"), flush=True)  # noqa: T201
            failed += [] if report.passed else [(index, report)]
        if failed:
            index, report = failed[0]
            raise UserError(f"verify: step {index}: {report.reason}")
        print(f"verified: {min(num_steps, available)} of {available} steps of an epoch")  # noqa: T201

    def _move(self, model: RadixModule, ckpt_path: str | None) -> None:
        """Load the weights of the checkpoint; convert and move the model as a run does."""
        if ckpt_path is not None:
            with restoring(ckpt_path):
                load_weights(model, read_checkpoint(ckpt_path))
        self.precision_plugin.convert_module(model)
        model.to(self.strategy.root_device)


def _restored(trainer: L.Trainer, method: Callable[..., None], *arguments: object, **keywords: object) -> None:
    with restoring(next(iter(arguments), trainer.ckpt_path)):  # the first method gets the path, and sets the trainer's
        method(*arguments, **keywords)


def _logged(log: object, method: Callable[..., None], *arguments: object, **keywords: object) -> None:
    """Log something. A failure is a warning; a deleted folder of metrics is made again."""
    with only_warns(f"{type(log).__name__} does not get all metrics", Exception):
        if isinstance(log, CSVLogger) and ranks().is_first and Path(log.save_dir).is_dir():
            Path(log.log_dir).mkdir(parents=True, exist_ok=True)
        method(*arguments, **keywords)


def _log_from_step_1(trainer: L.Trainer, method: Callable[..., None], metrics: object, step: int | None = None) -> None:
    """Log with steps counted from 1, as everywhere else. Lightning logs the number of steps before this one."""
    method(metrics, step=step + 1 if step is not None and trainer.state.fn == "fit" else step)


def _size_of(features: Any) -> str:
    num_tokens = sum(len(feature["input_ids"]) for feature in features)
    return f"{len(features)} sequences, {num_tokens:,} tokens"
