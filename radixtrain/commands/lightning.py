"""The commands that read a model and rows, `fit` to `report`: Lightning's command line with radixtrain's settings."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, cast

from jsonargparse import ArgumentError
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from radixtrain.commands.before_reading import (
    EVALUATING,
    WITHOUT_WEIGHTS,
    check_weights_and_room,
    checkpoint_of_fit,
    checkpoint_to_evaluate,
)
from radixtrain.commands.cli_args import add_cli_args
from radixtrain.commands.export import export_run
from radixtrain.commands.loggers import errors_of_wandb, loggers_of
from radixtrain.commands.quiet import quiet, warn_of_variables
from radixtrain.commands.run_callbacks import RunCallbacks
from radixtrain.commands.trainer_settings import (
    CLASSES,
    REFUSED_BY_LIGHTNING,
    check_interval,
    check_settings,
    check_trainer_settings,
)
from radixtrain.data.datamodule import SFTData
from radixtrain.distributed import form_groups, ranks
from radixtrain.errors import UsageError, UserError, first_line
from radixtrain.redaction import masked_arguments
from radixtrain.training.devices.launch import Processes, local_rank0_reports
from radixtrain.training.devices.launcher_env import launcher_env
from radixtrain.training.devices.settings import check_devices, default_devices, device_settings, sp_size_of
from radixtrain.training.devices.split import choose_sp_size
from radixtrain.training.fault_tolerance import slurm
from radixtrain.training.fault_tolerance.failures import explain, raise_file_limit
from radixtrain.training.fault_tolerance.resume import settings_of_run
from radixtrain.training.fault_tolerance.run_folder import EarlierRun, check_output_dir, locked, logs_of_run
from radixtrain.training.fault_tolerance.saving import FolderCheckpointIO
from radixtrain.training.module import RadixModule
from radixtrain.training.progress_bar import screens
from radixtrain.training.results.saved_config import (
    SaveMaskedConfig,
    defaults_of_model,
    mask_what_is_logged,
    own_log_folders,
)
from radixtrain.training.start.preflight import described_start
from radixtrain.training.start.run_overview import print_overview, steps_between_logs
from radixtrain.training.trainer import Trainer

logger = logging.getLogger(__name__)

OUR_OWN = ("verify", "inspect", "report")  # methods that our trainer adds to Lightning's
WRITING = ("fit", "validate", "test", "predict", "report")  # into output_dir
DEFAULT_EPOCHS = 3  # Hugging Face's num_train_epochs; if only trainer.max_steps is set, the run has that many steps
QUOTES = (
    "model.next_tokens: YAML reads yes, no, on and off without quotes as true and false; write them in double quotes, "
    """on the command line inside single ones: --model.next_tokens='["yes", "no"]'"""
)


class RadixCLI(LightningCLI):
    """LightningCLI with radixtrain's own settings beside `trainer`, `model` and `data`.

    Its constructor does everything. In the order of the methods: the keys are added and parsed, data, model and trainer
    made (`instantiate_trainer`), the processes of all ranks started and the folder locked (`_run_subcommand`), and the
    command runs (`_run_prepared`), on every rank.
    """

    def __init__(self, typed: Sequence[str], **options: Any):
        """typed: the command line, from the command on. options: of `LightningCLI`."""
        self.typed = tuple(typed)
        super().__init__(args=list(typed), **options)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        add_cli_args(parser)

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """Only the one that runs: to make the parser of one takes 0.07 s."""
        return {self.typed[0]: {"model", "dataloaders", "train_dataloaders", "val_dataloaders", "datamodule"}}

    def _parse_ckpt_path(self) -> None:
        """Does nothing: Lightning would replace the settings that were typed with those of the checkpoint."""

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """As Lightning's, and the values are checked. The error for a word that YAML reads as a truth says so."""
        try:
            super().parse_arguments(parser, args)
            self._take_settings_of_model(parser, args)
        except ArgumentError as error:
            if re.search(r"next_tokens\b.*\b(True|False)\b", str(error), re.DOTALL):
                raise ArgumentError(None, QUOTES) from None
            raise
        self.settings = self.config[self.config.subcommand]
        check_settings(self.settings, self.config.subcommand)

    def _take_settings_of_model(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse again, after the keys of its run, if what is evaluated is a model that was trained here."""
        command = self.config.subcommand
        before = self.config[command]
        given = before.get("data.system_prompt")
        found = defaults_of_model(before.model.model_name_or_path, given) if command in EVALUATING else {}
        if not found:
            return
        keys = [f"--{name}={each if isinstance(each, str) else json.dumps(each)}" for name, each in found.items()]
        super().parse_arguments(parser, [command, *keys, *args[1:]])
        after = self.config[command]
        if taken := [f"{name}: {after[name]}" for name in found if after[name] != before[name]]:
            logger.info("%s, as the run that trained %s", ", ".join(taken), before.model.model_name_or_path)

    def before_instantiate_classes(self) -> None:
        """What loggers write about themselves is masked; they get every other secret as it is."""
        mask_what_is_logged(self.settings.trainer.logger)

    def instantiate_classes(self) -> None:
        """As Lightning's. What a class says to its options is one line; jsonargparse repeats it for every type."""
        refused: list[UserError] = []

        def made(kind: type, *args: Any, **options: Any) -> Any:
            try:
                return kind(*args, **options)
            except Exception as error:
                line = f"trainer: {kind.__name__}: {first_line(error)}"
                refused.append(error if isinstance(error, UserError) else UsageError(line))
                raise

        for each in CLASSES:
            self.parser.add_instantiator(made, each)
        try:
            super().instantiate_classes()
        except ValueError:
            if refused:
                raise refused[0] from None
            raise

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        """A CSV logger, and checkpoints of our own unless the configuration names others."""
        given = self.config_init[self.subcommand]
        config, data = given.trainer, self.settings.data
        self.output_dir = check_output_dir(given.output_dir)
        kwargs["logger"] = loggers_of(config.logger, self.output_dir)
        if config.max_epochs is None and config.max_steps == -1:
            kwargs["max_epochs"] = DEFAULT_EPOCHS
        check_trainer_settings(config)
        kwargs.update(device_settings(self.settings, self.typed[0]))
        has_validation = bool(data.validation_file or data.val_size)
        if self.subcommand == "fit" and given.evaluate_generation.logged and not has_validation:
            raise UserError("evaluate_generation needs rows: set data.validation_file or data.val_size")
        self.callbacks = RunCallbacks(given, self.output_dir, has_validation)
        kwargs["callbacks"] = self.callbacks.all
        kwargs["enable_checkpointing"] = self.callbacks.has_checkpoint_callback
        try:
            with slurm.hidden():
                trainer = super().instantiate_trainer(**kwargs)
        except REFUSED_BY_LIGHTNING as error:
            raise UserError(f"trainer: {first_line(error)}") from None
        check_devices(trainer, self.timeout, self.sp_size)
        trainer.strategy.checkpoint_io = FolderCheckpointIO()
        return trainer

    @property
    def timeout(self) -> timedelta:
        """How long a rank waits for the others in a step."""
        return timedelta(seconds=self.settings.ddp_timeout)

    @property
    def sp_size(self) -> int:
        """Ranks that compute each micro-batch together, as far as it is known before the data are read."""
        return sp_size_of(self.settings, self.typed[0])

    @property
    def is_try(self) -> bool:
        """Whether nothing is written."""
        return bool(self.settings.trainer.fast_dev_run)

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        """Checkpoints are read as weights, never as code."""
        kwargs = super()._prepare_subcommand_kwargs(subcommand)
        if "ckpt_path" in kwargs:
            kwargs["ckpt_path"] = self.ckpt_path
        if subcommand not in OUR_OWN:
            kwargs["weights_only"] = True
        return {**kwargs, "return_predictions": False} if subcommand == "predict" else kwargs

    def _run_subcommand(self, subcommand: str) -> None:
        """One command at a time writes into a folder. Signals ask it to stop, and `fit` to save."""
        raise_file_limit(self.settings.data.dataloader_num_workers)
        if subcommand == "fit":
            self.model.run_settings = settings_of_run(self.settings)
        with ExitStack() as stack:
            stack.enter_context(self.callbacks.requests)
            stack.enter_context(slurm.hidden())
            start = partial(described_start, self.settings)
            processes = stack.enter_context(Processes(self.trainer.strategy, self.typed, self.timeout, start))
            try:
                self.ckpt_path, written = processes.joined(lambda: self._prepare(subcommand, stack))
                self._run_prepared(subcommand, written, stack)
            except Exception as error:
                if told := explain(error, self.output_dir if subcommand == "fit" else None, processes.gone):
                    raise UserError(told) from error
                raise

    def _prepare(self, subcommand: str, stack: ExitStack) -> tuple[str | None, int]:
        """What rank 0 does before the others: the checkpoint to take, and the bytes that `fit` writes, at least.

        stack: the lock of the folder is entered here.
        """
        if subcommand in WRITING and not self.is_try:
            stack.enter_context(locked(self.output_dir, subcommand))
        ckpt_path = self._checkpoint(subcommand)
        settings, num_checkpoints = self.model.hparams, self.callbacks.most_checkpoints
        return ckpt_path, check_weights_and_room(subcommand, settings, self.output_dir, ckpt_path, num_checkpoints)

    def _run_prepared(self, subcommand: str, written: int, stack: ExitStack) -> None:
        """Data and model are loaded before the trainer starts, so that an error in either leaves nothing written.

        written: see `_prepare`. stack: what `fit` enters here lasts as long as the lock.
        """
        evaluation, told = self.callbacks.evaluation, ""
        if subcommand not in WITHOUT_WEIGHTS:
            self.datamodule.setup(subcommand)
            self.model.configure_model()
            told = self._form_groups(subcommand)
        if subcommand in ("fit", "validate"):
            evaluation.prepare(self.model, self.datamodule)
        self.model.answers.options = replace(evaluation.options, seed=self.datamodule.hparams.seed)
        trainer = cast(Any, self.trainer)
        trainer.typed = masked_arguments(self.typed[1:])
        if subcommand == "fit":
            check_interval(trainer, self.datamodule.steps_per_epoch)
            trainer.log_every_n_steps = steps_between_logs(trainer, self.datamodule)
            if ranks().is_first:
                shown = self.settings.trainer, written, evaluation.line(), told
                print_overview(trainer, self.model, self.datamodule, *shown)
                stack.enter_context(self._training())
        try:
            with errors_of_wandb():
                super()._run_subcommand(subcommand)
        except MisconfigurationException as error:
            raise UserError(f"trainer: {first_line(error)}") from None

    def _form_groups(self, subcommand: str) -> str:
        """The ranks that compute each micro-batch together; what `sp_size: auto` says of its choice, or nothing."""
        sp_size, told = self.sp_size, ""
        if subcommand == "fit" and self.settings.sp_size == "auto":
            sp_size, told = choose_sp_size(self.trainer, self.model, self.datamodule)
        form_groups(sp_size, self.timeout)
        self.model.split_rows()
        return told

    def _checkpoint(self, subcommand: str) -> str | None:
        """What `ckpt_path` stands for."""
        given = self.config_init[subcommand].get("ckpt_path")
        if subcommand == "fit" and not self.is_try:
            owners = self.model, self.datamodule
            chosen, self.replaces = checkpoint_of_fit(self.output_dir, given, self.settings.overwrite, *owners)
            return chosen
        return checkpoint_to_evaluate(self.output_dir, given)

    @contextmanager
    def _training(self) -> Iterator[None]:
        """From the first step to the model: an earlier run is set aside until this one has a checkpoint."""
        if self.is_try:
            yield
            return
        with ExitStack() as stack:
            if self.replaces:
                earlier = stack.enter_context(EarlierRun(self.output_dir))
                self.callbacks.saver.on_saved.append(earlier.forget)
            slurm.remember_job(self.output_dir)
            summary = self.callbacks.summary
            stack.enter_context(logs_of_run(own_log_folders(self.trainer), lambda: summary.first_step is not None))
            yield

    def fit(self, model: Any, **kwargs: Any) -> None:
        """Lightning's, during which a signal waits for the end of the step."""
        with self.callbacks.requests.deferred():
            self.trainer.fit(model, **kwargs)

    def after_fit(self) -> None:
        """The trained model as a Hugging Face folder, and the last lines."""
        if not self.is_try:
            export_run(
                self.trainer, self.model, self.datamodule, self.callbacks.summary, self.output_dir, self.settings
            )


def run(argv: Sequence[str]) -> None:
    """Run one of Lightning's commands. `main` prints the errors: UserError, or jsonargparse's ArgumentError."""
    with screens() if argv[0] in ("fit", "predict") else nullcontext():
        _run(argv)


def _run(argv: Sequence[str]) -> None:
    quiet(speaks=launcher_env().rank == 0)
    warn_of_variables(os.environ)
    strict = {"exit_on_error": False, "allow_abbrev": False}
    if list(argv) == sys.argv[1:]:
        sys.argv[1:] = masked_arguments(argv)  # which loggers copy into their files
    with local_rank0_reports():
        RadixCLI(
            argv,
            model_class=RadixModule,
            datamodule_class=SFTData,
            trainer_class=Trainer,
            seed_everything_default=42,
            trainer_defaults={**default_devices(), "log_every_n_steps": 10, "enable_model_summary": False},
            save_config_callback=SaveMaskedConfig,
            save_config_kwargs={"overwrite": True},
            auto_configure_optimizers=False,
            parser_kwargs={"prog": "radixtrain", **strict, argv[0]: strict},
        )
