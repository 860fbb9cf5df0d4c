"""The commands that read weights and rows, `fit` to `verify`, on Lightning Fabric."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import fields, replace
from datetime import timedelta
from functools import partial
from typing import Any

import yaml
from lightning.fabric.utilities.seed import seed_everything

from radixtrain.commands import EVALUATING
from radixtrain.commands.before_reading import (
    check_weights_and_room,
    checkpoint_of_fit,
    checkpoint_to_evaluate,
)
from radixtrain.commands.export import export_run
from radixtrain.commands.loggers import continue_wandb_run, errors_of_services, make_loggers
from radixtrain.commands.quiet import quiet, warn_of_variables
from radixtrain.commands.run_parts import RunParts
from radixtrain.commands.trainer_settings import check_interval, check_settings
from radixtrain.data.datamodule import SFTData
from radixtrain.distributed import form_groups, ranks
from radixtrain.errors import UserError
from radixtrain.settings.commands import RunSettings
from radixtrain.settings.fields import value_of
from radixtrain.settings.read import PRINT, as_tree, print_settings, read
from radixtrain.training.answers.evaluate_generation import EvaluateGeneration
from radixtrain.training.devices.fabric import fabric_of
from radixtrain.training.devices.launch import launch, leaving_together, meet, one_rank_reports
from radixtrain.training.devices.launcher_env import ON_SEVERAL, default_devices, is_launched, launcher_env
from radixtrain.training.devices.settings import sp_size_of
from radixtrain.training.evaluate import Evaluation
from radixtrain.training.fault_tolerance import slurm
from radixtrain.training.fault_tolerance.failures import explain, last_checkpoint, raise_file_limit
from radixtrain.training.fault_tolerance.run_folder import check_output_dir, locked, logs_of_run, rename_earlier_run
from radixtrain.training.fault_tolerance.run_state import template_date
from radixtrain.training.loop import Loop
from radixtrain.training.module import RadixModule
from radixtrain.training.progress_bar import screens
from radixtrain.training.results.run_progress import print_line
from radixtrain.training.results.saved_config import RunRecord, defaults_of_model, own_log_folders
from radixtrain.training.runner import Runner
from radixtrain.training.start.preflight import described_start
from radixtrain.training.start.run_overview import print_overview, steps_between_logs

logger = logging.getLogger(__name__)

WRITING = ("fit", "validate", "test", "predict")  # into output_dir
DEFAULT_EPOCHS = 3  # Hugging Face's num_train_epochs; if only trainer.max_steps is set, the run has that many steps


class Command:
    """One of the commands that read a model and rows.

    In the order of the methods: `make` makes data, model and runner, `run` starts the processes of all ranks and locks
    the folder, and `_run_prepared` runs the command, on every rank.
    """

    def __init__(self, settings: RunSettings, words: Sequence[str]):
        """Take the settings, and the command line that they were read from."""
        self.words = tuple(words)
        self.name = self.words[0]
        self.settings = self._with_settings_of_model(settings)

    def _with_settings_of_model(self, before: RunSettings) -> RunSettings:
        """Return the settings over those of the training run, if a model that radixtrain trained is evaluated."""
        name = before.model.model_name_or_path
        found = defaults_of_model(name) if self.name in EVALUATING else {}
        if not found:
            return before
        after = read(self.name, self.words[1:], default_devices() | found)
        changed = [key for key in found if value_of(after, key) != value_of(before, key)]
        if changed:
            taken = ", ".join(f"{key}: {value_of(after, key)}" for key in changed)
            logger.info("%s, as the run that trained %s", taken, name)
        return after

    def make(self) -> None:
        """Make data, model and runner, with the seed of the run."""
        self.config = as_tree(self.settings)
        seed = self.settings.seed_everything
        if seed is not False:
            self.config["seed_everything"] = seed_everything(None if seed is True else seed, workers=True)
        self.datamodule = SFTData(**vars(self.settings.data))
        self.model = RadixModule(**vars(self.settings.model))
        self.runner = self.make_runner()

    def make_runner(self) -> Runner:
        """Make the loop of `fit`, or what evaluates, on Lightning Fabric, with the parts of the run."""
        settings, config = self.settings, self.settings.trainer
        self.output_dir = check_output_dir(settings.output_dir)
        loggers = make_loggers(config, self.output_dir)
        if config.max_epochs is None and config.max_steps == -1:
            config.max_epochs = DEFAULT_EPOCHS
        with slurm.hidden():
            fabric = fabric_of(settings, self.name)
        evaluation = EvaluateGeneration(**vars(settings.evaluate_generation))
        has_validation = bool(settings.data.validation_file or settings.data.val_size)
        if self.name == "fit" and evaluation.logged and not has_validation:
            raise UserError("evaluate_generation needs rows: set data.validation_file or data.val_size")
        self.parts = RunParts(settings, evaluation, self.output_dir, has_validation)
        self.saved = RunRecord(self.config)
        parts = [*self.parts.all, self.saved]
        kind = Loop if self.name == "fit" else Evaluation
        return kind(fabric, config, self.output_dir, loggers or [], parts)

    @property
    def timeout(self) -> timedelta:
        """Return how long a rank waits for the others in a step."""
        return timedelta(seconds=self.settings.ddp_timeout)

    @property
    def sp_size(self) -> int:
        """Return how many ranks compute each micro-batch together, as far as known before the data are read."""
        return sp_size_of(self.settings, self.name)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the runner's method: the keys of the command. A checkpoint is never read as code."""
        of_run = {field.name for field in fields(RunSettings)}
        own = {name: value for name, value in vars(self.settings).items() if name not in of_run}
        fixed = {"ckpt_path": self.ckpt_path, "weights_only": True, "return_predictions": False}
        return {**own, **{name: value for name, value in fixed.items() if name in own}}

    def run(self) -> None:
        """Run the command. Only one at a time writes into a folder. Signals stop it, and make `fit` save."""
        raise_file_limit(self.settings.data.dataloader_num_workers)
        with ExitStack() as stack:
            stack.enter_context(self.parts.requests)
            stack.enter_context(leaving_together(self.timeout))
            try:
                meet(self.runner.strategy, self.timeout, partial(described_start, self.settings))
                self.ckpt_path, written = ranks().broadcast_from_rank0(lambda: self._prepare(stack), long_timeout=True)
                self._run_prepared(written, stack)
            except Exception as error:
                if told := explain(error, self.output_dir if self.name == "fit" else None):
                    raise UserError(told) from error
                raise

    def _prepare(self, stack: ExitStack) -> tuple[str | None, int]:
        """Do what rank 0 does before the others: find the checkpoint, and the bytes that `fit` writes, at least.

        stack: the lock of the folder is entered here.
        """
        if self.name in WRITING:
            stack.enter_context(locked(self.output_dir, self.name))
        ckpt_path = self._checkpoint()
        settings, num_checkpoints = self.model.hparams, self.parts.most_checkpoints
        return ckpt_path, check_weights_and_room(self.name, settings, self.output_dir, ckpt_path, num_checkpoints)

    def _wandb_run(self) -> str:
        """Say the run at Weights & Biases that `fit` continues. Only rank 0 knows whether the folder is replaced."""
        resumed = None if self.replaces else self.ckpt_path
        return continue_wandb_run(self.runner.loggers, resumed)

    def _run_prepared(self, written: int, stack: ExitStack) -> None:
        """Load data and model before the runner starts, so that an error in either leaves nothing written.

        written: see `_prepare`. stack: what `fit` enters here lasts as long as the lock.
        """
        evaluation = self.parts.evaluation
        if (self.name == "fit" or self.ckpt_path) and self.datamodule.hparams.template_date is None:
            began = ranks().broadcast_from_rank0(partial(template_date, self.ckpt_path))
            self.datamodule.hparams.template_date = began
        self.datamodule.setup(self.name)
        self.model.configure_model()
        form_groups(self.sp_size, self.timeout)
        self.model.split_rows()
        if self.name in ("fit", "validate"):
            evaluation.prepare(self.model, self.datamodule)
        self.model.answers.options = replace(evaluation.options, seed=self.datamodule.hparams.seed)
        runner: Any = self.runner
        if self.name == "fit":
            check_interval(runner, self.datamodule.steps_per_epoch)
            runner.log_every_n_steps = steps_between_logs(runner, self.datamodule)
            self.model.wandb_run = ranks().broadcast_from_rank0(self._wandb_run)
            if ranks().is_first:
                print_overview(runner, self.model, self.datamodule, written, evaluation.line())
                stack.enter_context(self._training())
        with errors_of_services():
            self._call()

    def _checkpoint(self) -> str | None:
        """Return the checkpoint that `ckpt_path` stands for."""
        given = getattr(self.settings, "ckpt_path", None)
        if self.name == "fit":
            owners = self.model, self.datamodule
            chosen, self.replaces = checkpoint_of_fit(self.output_dir, self.settings, *owners)
            return chosen
        return checkpoint_to_evaluate(self.output_dir, given)

    @contextmanager
    def _training(self) -> Iterator[None]:
        """Run from the first step to the model: an earlier run that this one replaces is renamed before."""
        with ExitStack() as stack:
            if self.replaces and (earlier := rename_earlier_run(self.output_dir)):
                print_line("earlier run", f"now in {earlier}")
            slurm.remember_job(self.output_dir)
            summary = self.parts.summary
            stack.enter_context(logs_of_run(own_log_folders(self.runner), lambda: summary.first_step is not None))
            yield

    def _call(self) -> None:
        """Call the method of the runner. During training a signal waits for the end of the step."""
        with self.parts.requests.deferred() if self.name == "fit" else nullcontext():
            getattr(self.runner, self.name)(self.model, datamodule=self.datamodule, **self.arguments())
        if self.name == "fit":
            self._export()

    def _export(self) -> None:
        """Write the trained model as a Hugging Face folder, and the last lines."""
        config = yaml.safe_load(self.saved.text())
        owners = self.runner, self.model, self.datamodule
        export_run(*owners, self.parts.summary, self.output_dir, self.settings, config)


def run(settings: RunSettings, words: Sequence[str]) -> None:
    """Run a command, here or on ranks that are started for it, or print its settings."""
    name = words[0]
    with screens() if name in ("fit", "predict") else nullcontext(), one_rank_reports():
        num_ranks = 1 if f"--{PRINT}" in words else _num_ranks_to_start(settings, name)
        quiet(speaks=num_ranks == 1 and launcher_env().rank == 0)
        warn_of_variables(os.environ)
        command = Command(settings, words)
        if f"--{PRINT}" in words:
            print_settings(command.settings)
            return
        check_settings(command.settings, name)
        command.make()
        if num_ranks == 1:
            command.run()
        elif failure := launch(words, num_ranks):
            raise UserError(failure + last_checkpoint(command.output_dir if name == "fit" else None))


def _num_ranks_to_start(settings: RunSettings, name: str) -> int:
    """Return how many ranks this process starts; 1 if it runs the command itself."""
    if name not in ON_SEVERAL or is_launched():
        return 1
    with slurm.hidden(), warnings.catch_warnings(action="ignore"):
        return getattr(fabric_of(settings, name).strategy, "num_processes", 1)
