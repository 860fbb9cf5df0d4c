"""The loop of `fit`: every step is drawn, computed and taken here, and between two steps the run may stop or save.

    until enough steps or epochs are taken:
        for step in the epoch, from where the run is:
            stop? save?                     SaveCheckpoints
            losses, gradients, optimizer    RadixModule.take_step
            log; validate?                  Record

A place in a run is three numbers (items of the loader, steps among them, steps left out), since the order of steps is a
function of (seed, epoch). With the generators, the weights and the moments of the optimizer, a checkpoint is complete.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from radixtrain.checkpoints.folder import Checkpoint, help_to_write, write_checkpoint
from radixtrain.data.datamodule import SFTData
from radixtrain.distributed import add_gradient, ranks
from radixtrain.training.devices.fabric import is_sharded
from radixtrain.training.fault_tolerance.failures import restoring
from radixtrain.training.fault_tolerance.run_state import (
    apply_settings,
    checkpoint_of,
    generator_states,
    load_moments,
    remember_base,
    restore_position,
    set_generator_states,
    set_states_of_ranks,
)
from radixtrain.training.module import RadixModule
from radixtrain.training.optimizer import num_steps_of_run
from radixtrain.training.results.record import Record
from radixtrain.training.runner import Runner, limited

SANITY_STEPS = 2  # of the validation, before the first step


class Loop(Runner):
    """Trains a `RadixModule` on the steps of an `SFTData`. Arguments are those of `Runner`, and a record."""

    def __init__(self, *arguments: Any, record: Record):
        super().__init__(*arguments)
        self.record, self.saver, settings = record, record.saver, self.settings
        self.max_steps, self.max_epochs = settings.max_steps, settings.max_epochs
        self._seconds = settings.max_seconds
        self.is_out_of_time = self.validating = False
        self._unlogged: dict[str, Any] = {}
        self._generators: list[Any] = []
        """Their states on each rank in the checkpoint that the run goes on from, until its first step."""

    def fit(self, module: RadixModule, data: SFTData, ckpt_path: str | None = None) -> None:
        """Train until the steps or epochs of the settings are taken. ckpt_path: a checkpoint to go on from."""
        self.module = module
        with self.ending():
            self.begin("fit", module, data, ckpt_path)
            self.length = module.steps_per_epoch or 0
            checkpoint = self._restored() if ckpt_path else None
            remember_base(module)
            self.place()
            self.record.begin(self)
            self.saver.begin(ckpt_path)
            self.log_hyperparameters()
            configured = module.configure_optimizers()
            self.optimizer, self.scheduler = configured["optimizer"], configured["lr_scheduler"]
            if checkpoint:
                self._restore_optimizer(checkpoint)
            del checkpoint
            self._try_validation()
            self._train()
            if module.position.validation_pending:  # all that was left to do
                self.validate_pending()
                self.saver.save(self, module)

    def _train(self) -> None:
        self._started = time.monotonic()
        self._look_at_the_clock()
        if self._is_over():
            return
        loader = self.datamodule.train_dataloader()
        self.loaders.append(loader)
        self.record.started()
        self.evaluation.try_answers(self)
        self.saver.started(self.module)
        self.bar.start(self.global_step)
        self.write_settings()
        self.module.on_train_start()
        if self.module.position.validation_pending:
            self.validate_pending()
        while not self._is_over():
            self._run_epoch(loader)
        self.log_last_step()
        self.saver.save(self, self.module)
        self.module.on_train_end()

    def _run_epoch(self, loader: Any) -> None:
        """Take the steps of an epoch that the run has not taken yet."""
        epoch, first = divmod(self.module.position.num_batches, self.length)
        loader.sampler.set_epoch(epoch)
        loader.sampler.start = first
        self.module.on_train_epoch_start()
        accumulate = partial(add_gradient, self.module, is_sharded(self.strategy))
        for index, step in zip(range(first, self.length), loader, strict=False):
            self.saver.between_steps(self, self.module)
            self._take_over_generators()
            with self.precision_plugin.forward_context():
                metrics = self.module.take_step(self.moved(step), self.optimizer, self.scheduler, accumulate)
            self._note(metrics)
            self.record.took_step()
            self._look_at_the_clock()
            if self._is_validation_due(index):
                self.validate()
            if self._is_over():
                break
        self.saver.ask()

    def _take_over_generators(self) -> None:
        """Set the random generators of a resumed run: nothing draws between this and its first step."""
        if self._generators:
            with restoring(self.ckpt_path):
                set_states_of_ranks(self._generators)
        self._generators = []
        self.module.generators_before_step = generator_states()

    def _is_over(self) -> bool:
        """Return whether the steps or epochs are taken, or the clock or early stopping has ended the run."""
        position = self.module.position
        is_enough = self.max_steps != -1 and position.num_steps >= self.max_steps
        if not self.length or self.max_epochs == 0 or is_enough or self.is_out_of_time or self.record.why_stop:
            return True
        return self.max_epochs not in (None, -1) and position.num_batches >= self.length * int(self.max_epochs or 0)

    def _look_at_the_clock(self) -> None:
        """End the run when its time is up, by the clock of rank 0."""
        if self._seconds is not None:
            is_late = ranks().is_first and time.monotonic() - self._started >= self._seconds
            self.is_out_of_time = ranks().any(is_late)

    # Validations

    def validate(self) -> None:
        """Compute the loss on the validation rows, and the metric of answers to them."""
        self.optimizer.zero_grad()  # their memory is free for a validation
        self.validating = True
        metrics = self.evaluate("validation", self.settings.limit_val_batches)
        self.validating = False
        self.record.validated(metrics)
        self.bar.validated(self.global_step, metrics)

    def evaluated_step(self) -> None:
        if self.validating:
            self.saver.in_validation(self, self.module)

    def failed(self, error: BaseException) -> None:
        if self.record.first_step is not None:
            self.log_last_step()
            self.record.failed(error)
        self.saver.failed(self, self.module, error)

    def validate_pending(self) -> None:
        """Run the validation in which the run was stopped."""
        self.validate()
        self.module.position = replace(self.module.position, validation_pending=False)

    def _is_validation_due(self, index: int) -> bool:
        """Return whether a validation follows the step of this index in its epoch."""
        if not self._has_validation:
            return False
        interval = self.settings.val_check_interval
        if isinstance(interval, int):
            return self.module.position.num_batches % interval == 0
        return (index + 1) % max(1, int(self.length * interval)) == 0

    @property
    def _has_validation(self) -> bool:
        return "validation" in self.datamodule.conversations and self.settings.limit_val_batches != 0

    def _try_validation(self) -> None:
        """Validate on a few steps before a new run, so that what fails there fails at once."""
        if not self._has_validation or self.ckpt_path or self._is_over():
            return
        before = generator_states()
        whole = limited(len(self.datamodule.sampler_of("validation")), self.settings.limit_val_batches)
        self.evaluate("validation", min(SANITY_STEPS, whole), is_try=True)
        set_generator_states(before)

    # Logs

    def _note(self, metrics: dict[str, Any]) -> None:
        """Log the metrics of a step if it is its turn, or the first of the run. To read them waits for the device."""
        self._unlogged = metrics
        number = self.module.position.num_batches
        is_due = number == 1 or bool(self.log_every_n_steps and number % self.log_every_n_steps == 0)
        if is_due:
            self.log_last_step()
        if metrics:  # else it was left out
            self.bar.took_step(self.global_step, self.num_steps, metrics, is_due)

    def log_last_step(self) -> None:
        """Log the last step, unless it was logged or left out."""
        if self._unlogged:
            self.log(self._unlogged, *self.place_of_logs)
        self._unlogged = {}

    @property
    def place_of_logs(self) -> tuple[int, int]:
        number = self.module.position.num_batches
        return number, max(0, number - 1) // max(1, self.length)

    # Checkpoints

    @property
    def num_steps(self) -> int:
        """Return the optimizer steps of the whole run; -1 if it has no end."""
        return num_steps_of_run(self, self.module.steps_per_epoch)

    def save_checkpoint(self, path: Path) -> None:
        """Write a checkpoint on rank 0; the others give their parts."""
        checkpoint = checkpoint_of(self.module, self.datamodule, self.optimizer, self.record.state())
        if self._generators:  # of the run, which has taken no step since it goes on
            checkpoint.run["generators"] = self._generators
        if is_sharded(self.strategy) and not ranks().is_first:
            help_to_write(checkpoint)
        ranks().broadcast_from_rank0(lambda: write_checkpoint(path, checkpoint))

    def _restored(self) -> Checkpoint:
        """Load the weights, the position and the record. Returns the checkpoint."""
        assert self.ckpt_path is not None
        checkpoint = self.load_checkpoint()
        with restoring(self.ckpt_path):
            restore_position(checkpoint, self.module)
            self._generators = checkpoint.run["generators"]
            self.record.restore(checkpoint.run["record"], self.ckpt_path)
        return checkpoint

    def _restore_optimizer(self, checkpoint: Checkpoint) -> None:
        """Load the moments, of which each rank keeps its part. The schedule follows from the number of steps."""
        with restoring(self.ckpt_path):
            load_moments(self.module, self.optimizer, checkpoint)
        self.scheduler.last_epoch = self.module.position.num_steps
        apply_settings(self.module, self.optimizer, self.scheduler)
