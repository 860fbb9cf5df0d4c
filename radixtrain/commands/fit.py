"""The commands that read weights and rows, `fit` to `verify`, on Lightning Fabric."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import fields
from datetime import timedelta
from functools import partial
from pathlib import Path

from lightning.fabric.utilities.seed import seed_everything

from radixtrain.commands import EVALUATING
from radixtrain.commands.loggers import TRACKING, check_loggers, continue_wandb_run, errors_of_services, make_loggers
from radixtrain.commands.preflight import (
    check_weights_and_room,
    checkpoint_asked_for,
    checkpoint_of_fit,
    checkpoint_to_evaluate,
    defaults_of_model,
    delete_half_written,
    described_start,
)
from radixtrain.data.datamodule import SFTData
from radixtrain.data.tokens.tokenization import load_tokenizer
from radixtrain.distributed import form_groups, ranks
from radixtrain.errors import UserError, did_you_mean
from radixtrain.screen import print_line, quiet, screens
from radixtrain.settings.commands import RunSettings
from radixtrain.settings.fields import value_of
from radixtrain.settings.read import PRINT, as_tree, print_settings, read
from radixtrain.training.answers.evaluate_generation import OWN_METRICS, EvaluateGeneration
from radixtrain.training.devices.fabric import fabric_of, sp_size_of
from radixtrain.training.devices.launch import launch, leaving_together, meet, one_rank_reports
from radixtrain.training.devices.launcher_env import ON_SEVERAL, default_devices, is_launched, launcher_env
from radixtrain.training.fault_tolerance.failures import explain, last_checkpoint, raise_file_limit
from radixtrain.training.fault_tolerance.run_folder import check_output_dir, locked, rename_earlier_run
from radixtrain.training.fault_tolerance.run_state import template_date
from radixtrain.training.fault_tolerance.saving import SaveCheckpoints
from radixtrain.training.fault_tolerance.signals import Requests, remember_job
from radixtrain.training.loop import Loop
from radixtrain.training.module import RadixModule
from radixtrain.training.optimizer import check_package
from radixtrain.training.results.model_folder import SETTINGS, card_and_settings, save_hf_folder
from radixtrain.training.results.record import Record
from radixtrain.training.runner import Evaluation
from radixtrain.training.start.run_overview import print_overview, steps_between_logs

logger = logging.getLogger(__name__)

FOR_ALL_WEIGHTS = 2e-5  # the default learning rate, and that of configs/sft.yaml
OF_ONE_COMMAND = ("overwrite", "ckpt_path")  # else a second run would discard or resume something
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
        try:
            after = read(self.name, self.words[1:], default_devices() | found)
        except UserError as error:  # the command line by itself was right
            raise UserError(f"{Path(name) / SETTINGS}: {error}; restore the file") from None
        changed = [key for key in found if value_of(after, key) != value_of(before, key)]
        if changed:
            taken = ", ".join(f"{key}: {value_of(after, key)}" for key in changed)
            logger.info("%s, as the run that trained %s", taken, name)
        return after

    def make(self) -> None:
        """Make data, model and runner, with the seed of the run."""
        check_settings(self.settings, self.name)
        self.config = {key: value for key, value in as_tree(self.settings).items() if key not in OF_ONE_COMMAND}
        seed_everything(self.settings.seed_everything, workers=True)
        self.datamodule = SFTData(**vars(self.settings.data))
        self.model = RadixModule(**vars(self.settings.model))
        self.runner = self.make_runner()

    def make_runner(self) -> Loop | Evaluation:
        """Make the loop of `fit`, or what evaluates, on Lightning Fabric."""
        settings, config = self.settings, self.settings.trainer
        self.output_dir = check_output_dir(settings.output_dir)
        loggers = make_loggers(config, self.output_dir)
        if config.max_epochs is None and config.max_steps == -1:
            config.max_epochs = DEFAULT_EPOCHS
        fabric = fabric_of(settings, self.name)
        self.requests = Requests()
        self.evaluation = EvaluateGeneration(**vars(settings.evaluate_generation))
        self.evaluation.interruptible = self.requests.at_once
        check_judges(settings, self.name, self.evaluation.logged)
        arguments = fabric, config, self.output_dir, loggers, self.evaluation, self.config
        if self.name != "fit":
            return Evaluation(*arguments)
        saver = SaveCheckpoints(
            self.output_dir / "checkpoints",
            self.requests,
            every_steps=settings.save_every_steps,
            every_minutes=settings.save_every_minutes,
            total_limit=settings.save_total_limit,
            is_enabled=config.enable_checkpointing,
        )
        record = Record(self.output_dir, saver, settings.save_best, settings.early_stopping)
        return Loop(*arguments, record=record)

    @property
    def timeout(self) -> timedelta:
        """Return how long a rank waits for the others in a step."""
        return timedelta(seconds=self.settings.ddp_timeout)

    def run(self) -> None:
        """Run the command. Only one at a time writes into a folder. Signals stop it, and make `fit` save."""
        raise_file_limit(self.settings.data.dataloader_num_workers)
        with ExitStack() as stack:
            stack.enter_context(self.requests)
            stack.enter_context(leaving_together(self.timeout))
            try:
                meet(self.runner.strategy, self.timeout, partial(described_start, self.settings))
                self.ckpt_path, written = ranks().broadcast_from_rank0(lambda: self._prepare(stack), long_timeout=True)
                self._run_prepared(written)
            except Exception as error:
                if message := explain(error, self.output_dir if self.name == "fit" else None):
                    raise UserError(message) from error
                raise

    def _prepare(self, stack: ExitStack) -> tuple[str | None, int]:
        """Do what rank 0 does before the others: find the checkpoint, and the bytes that `fit` writes, at least.

        stack: the lock of the folder is entered here.
        """
        if self.name in WRITING:
            stack.enter_context(locked(self.output_dir, self.name))
        settings = self.settings
        if self.name == "fit":
            ckpt_path, self.replaces = checkpoint_of_fit(self.output_dir, settings, self.model, self.datamodule)
        else:
            ckpt_path = checkpoint_to_evaluate(self.output_dir, getattr(settings, "ckpt_path", None))
        if self.name in WRITING:
            delete_half_written(self.output_dir)
        is_saving, keeps_best = settings.trainer.enable_checkpointing, settings.save_best is not None
        num_checkpoints = (settings.save_total_limit + 1) * is_saving + keeps_best
        model = self.model.hparams
        return ckpt_path, check_weights_and_room(self.name, model, self.output_dir, ckpt_path, num_checkpoints)

    def _run_prepared(self, written: int) -> None:
        """Load data and model before the runner starts, so that an error in either leaves nothing written.

        written: see `_prepare`.
        """
        if (self.name == "fit" or self.ckpt_path) and self.datamodule.hparams.template_date is None:
            began = ranks().broadcast_from_rank0(partial(template_date, self.ckpt_path))
            self.datamodule.hparams.template_date = began
        self.datamodule.setup(self.name)
        self.model.configure_model()
        if not self.model.hparams.generate:  # which checks each prompt with its answer
            self.model.check_length(self.datamodule.longest())
        if self.name == "fit":
            self.model.check_draws()
        form_groups(sp_size_of(self.settings, self.name), self.timeout)
        self.model.split_rows()
        if self.name in ("fit", "validate"):
            self.evaluation.prepare(self.model, self.datamodule)
        if self.name == "predict":
            self.model.answers.options = self.settings.evaluate_generation
        if isinstance(runner := self.runner, Loop):
            runner.log_every_n_steps = steps_between_logs(runner, self.datamodule)
            self.model.wandb_run = ranks().broadcast_from_rank0(
                lambda: continue_wandb_run(runner.loggers, None if self.replaces else self.ckpt_path)
            )
            if ranks().is_first:
                print_overview(runner, self.model, self.datamodule, written, self.evaluation.line())
                self._open_folder()
        with errors_of_services():
            self._call()

    def _open_folder(self) -> None:
        """Rename an earlier run that this one replaces, just before the first step, and note the job of SLURM."""
        if self.replaces and (earlier := rename_earlier_run(self.output_dir)):
            print_line("earlier run", f"now in {earlier}")
        remember_job(self.output_dir)

    def _call(self) -> None:
        """Call the method of the runner, with the keys of the command. While it trains, a signal waits for the step."""
        of_run = {field.name for field in fields(RunSettings)}
        own = {name: value for name, value in vars(self.settings).items() if name not in of_run}
        with self.requests.deferred() if self.name == "fit" else nullcontext():
            getattr(self.runner, self.name)(self.model, self.datamodule, **own | {"ckpt_path": self.ckpt_path})
        if isinstance(self.runner, Loop):
            self._export(self.runner)

    def _export(self, loop: Loop) -> None:
        """Write `model/` and the end of the summary, and print that. With several ranks, each calls this."""
        of_data, results = self.datamodule.hparams, loop.record.choose_weights()
        tokenizer = load_tokenizer(of_data.model_name_or_path, of_data.chat_template_path)
        data = {**self.config["data"], "template_date": self.datamodule.encoder().template_date}
        rows = {"rows": str(self.datamodule.reports["train"])}
        texts = card_and_settings({**self.config, "data": data}, results, rows)
        loop.record.close(save_hf_folder(self.model.model, tokenizer, self.output_dir / "model", texts))


def run(settings: RunSettings, words: Sequence[str]) -> None:
    """Run a command, here or on ranks that are started for it, or print its settings."""
    name = words[0]
    with screens() if name in ("fit", "predict") else nullcontext(), one_rank_reports():
        num_ranks = 1 if f"--{PRINT}" in words else _num_ranks_to_start(settings, name)
        quiet(speaks=num_ranks == 1 and launcher_env().rank == 0)
        command = Command(settings, words)
        if f"--{PRINT}" in words:
            print_settings(command.settings)
            return
        command.make()
        if num_ranks == 1:
            command.run()
            return
        if name == "fit":  # rank 0 asks again, under the folder's lock
            checkpoint_asked_for(command.output_dir, command.settings)
        if failure := launch(words, num_ranks):
            raise UserError(failure + last_checkpoint(command.output_dir if name == "fit" else None))


def _num_ranks_to_start(settings: RunSettings, name: str) -> int:
    """Return how many ranks this process starts; 1 if it runs the command itself."""
    if name not in ON_SEVERAL or is_launched():
        return 1
    with warnings.catch_warnings(action="ignore"):
        return getattr(fabric_of(settings, name).strategy, "num_processes", 1)


def check_settings(settings: RunSettings, command: str) -> None:
    """Raise UserError if a logger or the optimizer's package would fail. A rate that is low for LoRA warns."""
    if command in TRACKING:
        check_loggers(settings.trainer)
    if command != "fit":
        return
    check_package(settings.model.optimizer)
    if settings.model.use_peft and settings.model.learning_rate == FOR_ALL_WEIGHTS:
        logger.warning(
            "model.learning_rate is %g, as for training all weights; LoRA usually needs 1e-4 to 2e-4", FOR_ALL_WEIGHTS
        )


def check_judges(settings: RunSettings, command: str, of_answers: str | None) -> None:
    """Raise UserError if what judges the model during a run lacks validations, checkpoints, or its metric.

    of_answers: the metric of `evaluate_generation`, such as `eval_exact_match`; None if it is off.
    """
    has_validation = bool(settings.data.validation_file or settings.data.val_size)
    if command == "fit" and of_answers and not has_validation:
        raise UserError("evaluate_generation needs rows: set data.validation_file or data.val_size")
    watched, measured = settings.save_best or "eval_loss", ["eval_loss", *([of_answers] if of_answers else [])]
    metric = watched.removeprefix("eval_")
    for key in ("save_best", "early_stopping"):
        if getattr(settings, key) is None:
            continue
        if watched not in measured and metric in OWN_METRICS:
            raise UserError(f"{key}: {watched} is not measured: set evaluate_generation.metric: {metric}")
        if watched not in measured:
            meant = did_you_mean(watched, measured, f"; a validation measures {', '.join(measured)}")
            raise UserError(f"{key}: no metric {watched!r}{meant}")
        if watched == "eval_loss" and not has_validation:
            raise UserError(f"{key}: eval_loss needs rows for it: set data.validation_file or data.val_size")
        if settings.trainer.limit_val_batches == 0:
            raise UserError(f"{key} needs validations, and trainer.limit_val_batches is 0; leave one of them out")
        if key == "save_best" and not settings.trainer.enable_checkpointing:
            raise UserError(f"{key} needs checkpoints, and trainer.enable_checkpointing is false; leave one out")
