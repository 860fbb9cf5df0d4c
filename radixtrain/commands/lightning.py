"""`radixtrain fit`, `validate`, `test`, `predict` and `verify`: Lightning's command line with radixtrain's settings."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, cast

import yaml
from jsonargparse import ArgumentError, set_parsing_settings
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from radixtrain.commands import commands_of
from radixtrain.commands.before_reading import (
    WITHOUT_WEIGHTS,
    check_weights_and_room,
    checkpoint_of_fit,
    checkpoint_to_evaluate,
)
from radixtrain.commands.limits import check_interval, check_limits
from radixtrain.commands.loggers import TRACKING, check_loggers, errors_of_wandb, loggers_of
from radixtrain.commands.own_keys import add_own_keys
from radixtrain.commands.quiet import quiet
from radixtrain.commands.run_callbacks import RunCallbacks
from radixtrain.commands.trainer_settings import (
    REFUSED_BY_LIGHTNING,
    check_one_device,
    check_seed,
    check_trainer_settings,
    check_weights_only,
)
from radixtrain.data.datamodule import SFTData
from radixtrain.data.tokens.tokenization import load_tokenizer
from radixtrain.errors import UserError, first_line
from radixtrain.redaction import check_unmasked, masked_arguments
from radixtrain.training.module import RadixModule
from radixtrain.training.results.model_card import documents
from radixtrain.training.results.model_folder import save_hf_folder
from radixtrain.training.results.saved_config import SaveMaskedConfig, mask_what_is_logged
from radixtrain.training.start.first_screen import show_first_screen, steps_between_logs
from radixtrain.training.survival import slurm
from radixtrain.training.survival.checkpoint_io import FolderCheckpointIO
from radixtrain.training.survival.failures import explain
from radixtrain.training.survival.folder_lock import check_one_process, locked
from radixtrain.training.survival.run_folder import EarlierRun, check_output_dir, is_resumed
from radixtrain.training.trainer import Trainer

__all__ = ["RadixCLI", "run"]

NAMES = commands_of("lightning")
OUR_OWN = ("verify", "inspect", "report")  # methods that our trainer adds to Lightning's
WRITING = ("fit", "validate", "test", "predict", "report")  # into output_dir
DEFAULT_EPOCHS = 3  # Hugging Face's num_train_epochs; if only trainer.max_steps is set, the run has that many steps
QUOTES = (
    "model.next_tokens: YAML reads yes, no, on and off without quotes as true and false; write them in double quotes, "
    """on the command line inside single ones: --model.next_tokens='["yes", "no"]'"""
)
ALLOWED_IMPORTS = ("radixtrain", "lightning", "torch", "transformers")


class RadixCLI(LightningCLI):
    """LightningCLI with radixtrain's own settings beside `trainer`, `model` and `data`.

    Its constructor does everything. In the order of the methods: the keys are added and parsed, data, model and trainer
    made (`instantiate_trainer`), the folder locked (`_run_subcommand`), and the command runs (`_run_locked`).
    """

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        add_own_keys(parser)

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        given_by_us = {"model", "dataloaders", "train_dataloaders", "val_dataloaders", "datamodule"}
        return dict.fromkeys(NAMES, given_by_us)

    def _parse_ckpt_path(self) -> None:
        """Does nothing: Lightning would replace the settings that were typed with those of the checkpoint."""

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """As Lightning's, and the values are checked. The error for a word that YAML reads as a truth says so."""
        self.typed = tuple(args[1:])
        try:
            super().parse_arguments(parser, args)
        except ArgumentError as error:
            if re.search(r"next_tokens\b.*\b(True|False)\b", str(error), re.DOTALL):
                raise ArgumentError(None, QUOTES) from None
            raise
        self.settings = self.config[self.config.subcommand]
        check_seed(self.settings.seed_everything)
        check_limits(self.settings)
        check_weights_only(self.settings)
        if self.config.subcommand in TRACKING:
            check_loggers(self.settings)
        check_unmasked(self.settings.as_dict())

    def before_instantiate_classes(self) -> None:
        """What loggers write about themselves is masked; they get every other secret as it is."""
        mask_what_is_logged(self.settings.trainer.logger)

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        """A CSV logger, and checkpoints of our own unless the configuration names others."""
        given = self.config_init[self.subcommand]
        config, data = given.trainer, self.settings.data
        self.output_dir = check_output_dir(given.output_dir)
        kwargs["logger"] = loggers_of(config.logger, self.output_dir)
        if config.max_epochs is None and config.max_steps == -1:
            kwargs["max_epochs"] = DEFAULT_EPOCHS
        check_trainer_settings(config)
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
        check_one_device(trainer)
        trainer.strategy.checkpoint_io = FolderCheckpointIO()
        return trainer

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
        check_one_process()
        with ExitStack() as stack:
            if subcommand in WRITING and not self.is_try:
                stack.enter_context(locked(self.output_dir, subcommand))
            stack.enter_context(self.callbacks.requests)
            stack.enter_context(slurm.hidden())
            try:
                self._run_locked(subcommand, stack)
            except Exception as error:
                if told := explain(error, self.output_dir if subcommand == "fit" else None):
                    raise UserError(told) from error
                raise

    def _run_locked(self, subcommand: str, stack: ExitStack) -> None:
        """Data and model are loaded before the trainer starts, so that an error in either leaves nothing written.

        stack: what `fit` enters here lasts as long as the lock.
        """
        self.ckpt_path = self._checkpoint(subcommand)
        num_checkpoints = self.callbacks.most_checkpoints
        written = check_weights_and_room(
            subcommand, self.model.hparams, self.output_dir, self.ckpt_path, num_checkpoints
        )
        evaluation = self.callbacks.evaluation
        if subcommand not in WITHOUT_WEIGHTS:
            self.datamodule.setup(subcommand)
            self.model.configure_model()
        if subcommand in ("fit", "validate"):
            evaluation.prepare(self.model, self.datamodule)
        self.model.answers.options = replace(evaluation.options, seed=self.datamodule.hparams.seed)
        trainer = cast(Any, self.trainer)
        trainer.typed = masked_arguments(self.typed)
        if subcommand == "fit":
            check_interval(trainer, self.datamodule.steps_per_epoch)
            trainer.log_every_n_steps = steps_between_logs(trainer, self.datamodule)
            shown = self.settings.trainer, written, evaluation.line()
            show_first_screen(trainer, self.model, self.datamodule, *shown)
            stack.enter_context(self._training())
        try:
            with errors_of_wandb():
                super()._run_subcommand(subcommand)
        except MisconfigurationException as error:
            raise UserError(f"trainer: {first_line(error)}") from None

    def _checkpoint(self, subcommand: str) -> str | None:
        """What `ckpt_path` stands for."""
        given = self.config_init[subcommand].get("ckpt_path")
        if subcommand == "fit" and not self.is_try:
            return checkpoint_of_fit(self.output_dir, given, self.settings.overwrite)
        return checkpoint_to_evaluate(self.output_dir, given)

    @contextmanager
    def _training(self) -> Iterator[None]:
        """From the first step to the model: an earlier run is set aside until this one has a checkpoint."""
        if self.is_try:
            yield
            return
        slurm.remember_job(self.output_dir)
        with ExitStack() as stack:
            if not is_resumed(self.output_dir, self.ckpt_path):
                earlier = stack.enter_context(EarlierRun(self.output_dir))
                self.callbacks.saver.on_saved.append(earlier.forget)
            yield

    def fit(self, model: Any, **kwargs: Any) -> None:
        """Lightning's, during which a signal waits for the end of the step."""
        with self.callbacks.requests.deferred():
            self.trainer.fit(model, **kwargs)

    def after_fit(self) -> None:
        """The trained model as a Hugging Face folder, and the closing lines."""
        if self.is_try:
            return
        summary, data = self.callbacks.summary, self.datamodule.hparams
        summary.choose_weights(self.trainer, self.model)
        tokenizer = load_tokenizer(data.model_name_or_path, data.chat_template_path)
        texts = documents(
            self._written_config(),
            summary.results(),
            {"rows": str(self.datamodule.reports["train"])},
            has_chat_template=tokenizer.chat_template is not None,
        )
        folder = save_hf_folder(self.model.model, tokenizer, self.output_dir / "model", texts)
        summary.close(self.trainer, self.model, folder)

    def _written_config(self) -> dict[str, Any]:
        """What `config.yaml` of the run holds."""
        callbacks = cast(Any, self.trainer).callbacks
        saved = next(callback for callback in callbacks if isinstance(callback, SaveMaskedConfig))
        return yaml.safe_load(saved.text())


def run(argv: Sequence[str]) -> None:
    """Run one of Lightning's commands. `main` prints the errors: UserError, or jsonargparse's ArgumentError."""
    quiet()
    # A `class_path` is imported before its type is checked, so a configuration could run anything.
    set_parsing_settings(import_path_denylist=["*"], import_path_allowlist=list(ALLOWED_IMPORTS))
    strict = {"exit_on_error": False, "allow_abbrev": False}
    if list(argv) == sys.argv[1:]:
        sys.argv[1:] = masked_arguments(argv)  # which loggers copy into their files
    RadixCLI(
        RadixModule,
        SFTData,
        trainer_class=Trainer,
        seed_everything_default=42,
        trainer_defaults={"devices": 1, "log_every_n_steps": 10, "enable_model_summary": False},
        save_config_callback=SaveMaskedConfig,
        save_config_kwargs={"overwrite": True},
        auto_configure_optimizers=False,
        parser_kwargs={"prog": "radixtrain", **strict, **{name: dict(strict) for name in NAMES}},
        args=list(argv),
    )
