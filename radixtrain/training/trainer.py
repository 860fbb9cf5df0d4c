"""A Lightning trainer with three more entry points: `verify`, `inspect` and `report`."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger

from radixtrain.data.datamodule import SFTData, SharingAcross
from radixtrain.distributed import ranks
from radixtrain.errors import UserError, only_warns
from radixtrain.hf.backbone import parts_of
from radixtrain.hf.config import read_config
from radixtrain.hf.refusals import why_not_across
from radixtrain.inspection.show import show
from radixtrain.report.page import write_page
from radixtrain.report.profiling import RunSetup
from radixtrain.report.terminal import print_report
from radixtrain.report.write import make_report
from radixtrain.screen import printable, screen
from radixtrain.training.fault_tolerance.failures import restoring
from radixtrain.training.fault_tolerance.run_state import load_weights, read_checkpoint
from radixtrain.training.module import RadixModule
from radixtrain.training.optimizer import moment_bytes, optimizer_of
from radixtrain.training.start.loading import layer_period, random_trainable
from radixtrain.verification.report import EquivalenceReport

RESTORING = ("_restore_modules_and_callbacks", "restore_training_state")  # of Lightning's checkpoint connector
LOGGING = ("log_metrics", "save", "finalize")  # what loggers do while a run trains, and at its end


class Trainer(L.Trainer):
    """Adds `verify` (compare gradients with ordinary Hugging Face on these data), `inspect` and `report`.

    typed: the command line after the command, which `report` repeats.
    """

    typed: tuple[str, ...] = ()

    def __init__(self, **settings: Any):
        """settings: arguments of Lightning's."""
        super().__init__(**settings)
        connector = self._checkpoint_connector
        for name in RESTORING:
            setattr(connector, name, partial(_restored, self, getattr(connector, name)))
        for log in self.loggers:
            for name in LOGGING:
                setattr(log, name, partial(_logged, log, getattr(log, name)))
            log.log_metrics = partial(_from_1, self, log.log_metrics)  # type: ignore[method-assign]

    @property
    def received_sigterm(self) -> bool:
        """Never: Lightning would raise at moments of its own choice. Signals are requests, see `Requests`."""
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
        datamodule.step_cost, datamodule.across = model.step_cost, model.sharing_across
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

    def inspect(
        self,
        model: RadixModule,
        datamodule: SFTData,
        step: int = 0,
        micro_batch: int = 0,
        row: int | str | None = None,
        full: bool = False,
    ) -> None:
        """Print a micro-batch of the first epoch as text, or one row of a file. No weights are read.

        The arguments are those of `Inspect`.

        Raises:
            UserError: there is no such step, micro-batch or row, or the data cannot be read.
        """
        show(datamodule, screen(), step=step, micro_batch=micro_batch, row=row, full=full)

    def report(self, model: RadixModule, datamodule: SFTData, max_seconds: float = 45.0) -> None:
        """What the data share and what that brings on this machine, as `report.html` and in the terminal.

        Nothing is trained and no weights are read. max_seconds: see `Report`.
        """
        datamodule.setup("report")
        config = read_config(model.hparams.model_name_or_path)
        setup = self._run_setup(model, config)
        datamodule.across = partial(_across, setup)
        report = make_report(datamodule, setup, self.typed, max_seconds)
        print_report(report)
        path = Path(self.default_root_dir) / "report.html"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_page(report, path)
        print(f"\n{printable(path)}")  # noqa: T201

    def _run_setup(self, model: RadixModule, config: Any) -> RunSetup:
        """How a run with this trainer would train the model."""
        settings, plain = model.hparams, copy(model.hparams)
        plain.activation_checkpointing = False
        is_mixed = str(self.precision) == "bf16-mixed"

        def build(num_layers: int, device: torch.device) -> Any:
            return self.precision_plugin.convert_module(random_trainable(plain, num_layers, device))

        return RunSetup(
            build=build,
            optimizer=lambda built: optimizer_of(built, settings),
            moment_bytes=lambda built: moment_bytes(built, settings),
            forward=self.precision_plugin.train_step_context,
            device=self.strategy.root_device,
            dtype=torch.bfloat16 if is_mixed else next(build(1, torch.device("meta")).parameters()).dtype,
            num_layers=config.get_text_config().num_hidden_layers,
            period=layer_period(config),
            share=float(settings.activation_checkpointing),
            attention=settings.attention,
            kernel=settings.kernel,
            allow_dropout=tuple(settings.allow_dropout or ()),
            max_grad_norm=settings.max_grad_norm,
        )

    def _move(self, model: RadixModule, ckpt_path: str | None) -> None:
        """Load the weights of the checkpoint; convert and move the model as a run does."""
        if ckpt_path is not None:
            with restoring(ckpt_path):
                load_weights(model, read_checkpoint(ckpt_path))
        self.precision_plugin.convert_module(model)
        model.to(self.strategy.root_device)


def _restored(trainer: L.Trainer, method: Callable[..., None], *arguments: Any, **keywords: Any) -> None:
    with restoring(trainer.ckpt_path):
        method(*arguments, **keywords)


def _logged(log: Any, method: Callable[..., None], *arguments: Any, **keywords: Any) -> None:
    """Log something. What does not work is a warning; a folder of metrics that somebody has deleted is made again."""
    with only_warns(f"{type(log).__name__} does not get all metrics", Exception):
        if isinstance(log, CSVLogger) and ranks().is_first and Path(log.save_dir).is_dir():
            Path(log.log_dir).mkdir(parents=True, exist_ok=True)
        method(*arguments, **keywords)


def _from_1(trainer: L.Trainer, method: Callable[..., None], metrics: Any, step: int | None = None) -> None:
    """Count steps as everything else does. Lightning logs with a step the number of those before it."""
    method(metrics, step=step + 1 if step is not None and trainer.state.fn == "fit" else step)


def _across(setup: RunSetup) -> SharingAcross:
    """As `RadixModule.sharing_across`, of a run on one device."""
    parts = parts_of(setup.build(setup.period, torch.device("meta")))
    refused = why_not_across(parts, setup.attention, setup.allow_dropout)
    return SharingAcross(refused, setup.share == 1 or "auto", True)


def _size_of(features: Any) -> str:
    num_tokens = sum(len(feature["input_ids"]) for feature in features)
    return f"{len(features)} sequences, {num_tokens:,} tokens"
