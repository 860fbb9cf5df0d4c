"""`radixtrain fit`, `validate`, `test`, `predict` and `verify`: Lightning's command line with radixtrain's settings."""

from __future__ import annotations

import logging
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import yaml
from jsonargparse import ArgumentError, set_parsing_settings
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from transformers.utils.logging import disable_progress_bar

from radixtrain.checkpoints.choice import newest_valid, resolve
from radixtrain.checkpoints.upkeep import tidy
from radixtrain.commands import commands_of
from radixtrain.commands.limits import check_interval, check_limits
from radixtrain.commands.loggers import TRACKING, check_loggers, errors_of_wandb, loggers_of
from radixtrain.commands.trainer_settings import (
    REFUSED_BY_LIGHTNING,
    as_list,
    check_one_device,
    check_seed,
    check_trainer_settings,
    check_weights_only,
    data_seed,
)
from radixtrain.data.datamodule import SFTData
from radixtrain.data.tokens.tokenization import load_tokenizer
from radixtrain.errors import UserError, first_line
from radixtrain.hf.scores import named_scores, needs_labels
from radixtrain.redaction import check_unmasked, masked_arguments
from radixtrain.training.answers.evaluate_generation import EvaluateGeneration
from radixtrain.training.callbacks import PredictionWriter
from radixtrain.training.module import RadixModule
from radixtrain.training.progress_bar import NoticeHandler, progress_bar
from radixtrain.training.results.best import Best, StopEarly
from radixtrain.training.results.checkpoint import check_model_folder, save_hf_folder
from radixtrain.training.results.closing_lines import say
from radixtrain.training.results.model_card import documents
from radixtrain.training.results.saved_config import SaveMaskedConfig, mask_what_is_logged
from radixtrain.training.results.summary import RunSummary
from radixtrain.training.results.summary_file import weights_text
from radixtrain.training.start.first_checks import (
    check_judges,
    check_monitors,
    check_room,
    earlier_run,
    num_stored_parameters,
)
from radixtrain.training.start.first_screen import show_first_screen, steps_between_logs
from radixtrain.training.survival import slurm
from radixtrain.training.survival.checkpoint_io import FolderCheckpointIO
from radixtrain.training.survival.failures import explain
from radixtrain.training.survival.folder_lock import check_one_process, locked
from radixtrain.training.survival.requests import Requests
from radixtrain.training.survival.run_folder import EarlierRun, check_new_run, check_output_dir, is_resumed
from radixtrain.training.survival.saving import SaveCheckpoints
from radixtrain.training.trainer import Trainer

__all__ = ["RadixCLI", "run"]

logger = logging.getLogger(__name__)

NAMES = commands_of("lightning")
OUR_OWN = ("verify", "inspect", "report")  # methods that our trainer adds to Lightning's
WITHOUT_WEIGHTS = ("inspect", "report")  # which read the model's config and tokenizer only, and set up the data
WRITING = ("fit", "validate", "test", "predict", "report")  # into output_dir
DEFAULT_EPOCHS = 3  # Hugging Face's num_train_epochs; if only trainer.max_steps is set, the run has that many steps
QUOTES = (
    "model.next_tokens: YAML reads yes, no, on and off without quotes as true and false; write them in double quotes, "
    """on the command line inside single ones: --model.next_tokens='["yes", "no"]'"""
)
ALLOWED_IMPORTS = ("radixtrain", "lightning", "torch", "transformers")


class RadixCLI(LightningCLI):
    """LightningCLI with radixtrain's own settings beside `trainer`, `model` and `data`."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument(
            "--output_dir", type=str, default="runs/sft", help="Where checkpoints, logs and the model go."
        )
        parser.add_argument(
            "--dedup",
            type=bool,
            default=True,
            help="False runs the ordinary baseline: stock attention, padded batches.",
        )
        parser.add_argument("--overwrite", type=bool, default=False, help="Replace the run that is in output_dir.")
        parser.add_argument(
            "--save_every_steps", type=int | None, default=None, help="Optimizer steps between two checkpoints."
        )
        parser.add_argument(
            "--save_every_minutes",
            type=float | None,
            default=10.0,
            help="Minutes between two checkpoints. One is written at each end of an epoch, and of the run, too.",
        )
        parser.add_argument(
            "--save_total_limit", type=int, default=2, help="Checkpoints that are kept, besides the best one."
        )
        parser.add_argument(
            "--save_best",
            type=str | None,
            default=None,
            help="A metric of the validations, such as eval_loss: model/ gets the weights that were best by it.",
        )
        parser.add_argument(
            "--early_stopping",
            type=int | None,
            default=None,
            help="End after so many validations without a better value of save_best, or of eval_loss.",
        )
        parser.add_class_arguments(EvaluateGeneration, "evaluate_generation")
        parser.link_arguments("output_dir", "trainer.default_root_dir")
        parser.link_arguments("dedup", "model.dedup")
        parser.link_arguments("dedup", "data.dedup")
        parser.link_arguments("seed_everything", "data.seed", compute_fn=data_seed)
        parser.link_arguments("model.model_name_or_path", "data.model_name_or_path")
        parser.link_arguments("model.scores", "data.predict_unlabelled", compute_fn=_is_unlabelled)
        parser.link_arguments("model.generate", "data.predict_prompts")

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        given_by_us = {"model", "dataloaders", "train_dataloaders", "val_dataloaders", "datamodule"}
        return dict.fromkeys(NAMES, given_by_us)

    def _parse_ckpt_path(self) -> None:
        """Does nothing: Lightning would replace the settings that were typed with those of the checkpoint."""

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """As Lightning's. If YAML has read a word as true or false, the error says how to write it."""
        self.typed = tuple(args[1:])
        try:
            super().parse_arguments(parser, args)
            config = self.config[self.config.subcommand]
            check_seed(config.seed_everything)
            check_limits(config)
            check_weights_only(config)
            if self.config.subcommand in TRACKING:
                check_loggers(config)
            check_unmasked(config.as_dict())
        except ArgumentError as error:
            if re.search(r"next_tokens\b.*\b(True|False)\b", str(error), re.DOTALL):
                raise ArgumentError(None, QUOTES) from None
            raise

    def before_instantiate_classes(self) -> None:
        """What loggers write about themselves is masked; they get every other secret as it is."""
        mask_what_is_logged(self.config[self.config.subcommand].trainer.logger)

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        """A CSV logger, and checkpoints of our own unless the configuration names others."""
        config = self._get(self.config_init, "trainer")
        self.output_dir = check_output_dir(self._get(self.config, "output_dir"))
        kwargs["logger"] = loggers_of(config.logger, self.output_dir)
        if config.max_epochs is None and config.max_steps == -1:
            kwargs["max_epochs"] = DEFAULT_EPOCHS
        check_trainer_settings(config)
        data = self._get(self.config, "data")
        self.evaluation: EvaluateGeneration = self._get(self.config_init, "evaluate_generation")
        has_validation = bool(data.validation_file or data.val_size)
        if self.subcommand == "fit" and self.evaluation.logged and not has_validation:
            raise UserError("evaluate_generation needs rows: set data.validation_file or data.val_size")
        callbacks = self._callbacks(config)
        check_monitors(callbacks, has_validation, self.evaluation.logged)
        check_judges(callbacks, config)
        kwargs["enable_checkpointing"] = _has(callbacks, Checkpoint)
        try:
            with slurm.hidden():
                trainer = super().instantiate_trainer(**kwargs, callbacks=callbacks)
        except REFUSED_BY_LIGHTNING as error:
            raise UserError(f"trainer: {first_line(error)}") from None
        check_one_device(trainer)
        trainer.strategy.checkpoint_io = FolderCheckpointIO()
        return trainer

    def _callbacks(self, config: Any) -> list[Any]:
        """Those of the configuration, then ours; the progress line only if it has none of its own."""
        own = as_list(config.callbacks)
        self.requests = Requests(self.output_dir)
        self.evaluation.interruptible = self.requests.at_once
        self.saver = self._saver(config, is_scheduled=not _has(own, Checkpoint))
        judges = self._judges()
        self.summary = RunSummary(self.output_dir, self.saver, self.best)
        callbacks = [
            *own,
            self.summary,
            PredictionWriter(self.output_dir),
            *([self.evaluation] if self.evaluation.logged else []),
            *judges,
            self.saver,
        ]
        if config.enable_progress_bar is not False and not _has(callbacks, ProgressBar):
            callbacks.append(progress_bar())
        return callbacks

    def _saver(self, config: Any, is_scheduled: bool) -> SaveCheckpoints:
        """is_scheduled: False if a callback of the configuration writes the checkpoints."""
        is_enabled = config.enable_checkpointing is not False and not config.fast_dev_run
        limits = {"every_steps": "save_every_steps", "every_minutes": "save_every_minutes"}
        return SaveCheckpoints(
            self.output_dir / "checkpoints",
            self.requests,
            **{name: self._get(self.config, key) for name, key in limits.items()},
            total_limit=self._get(self.config, "save_total_limit"),
            is_scheduled=is_scheduled,
            is_enabled=is_enabled,
        )

    def _judges(self) -> list[Any]:
        """What looks at the metrics of the validations, before the saver: for the best one, and for no better one."""
        metric, patience = (self._get(self.config, name) for name in ("save_best", "early_stopping"))
        self.best = None if metric is None else Best(metric, self.saver)
        stops = [] if patience is None else [StopEarly(metric or "eval_loss", patience)]
        return [*([self.best] if self.best else []), *stops]

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
        is_try = subcommand in WRITING and bool(self._get(self.config, "trainer").fast_dev_run)
        with ExitStack() as stack:
            if subcommand in WRITING and not is_try:
                stack.enter_context(locked(self.output_dir, subcommand))
            stack.enter_context(self.requests)
            stack.enter_context(slurm.hidden())
            try:
                self._run_alone(subcommand, stack)
            except Exception as error:
                if told := explain(error, self.output_dir if subcommand == "fit" else None):
                    raise UserError(told) from error
                raise

    def _run_alone(self, subcommand: str, stack: ExitStack) -> None:
        """Data and model are loaded before the trainer starts, so that an error in either leaves nothing written."""
        written = self._check_before_reading(subcommand)
        if subcommand not in WITHOUT_WEIGHTS:
            self.datamodule.setup(subcommand)
            self.model.configure_model()
        if subcommand in ("fit", "validate"):
            self.evaluation.prepare(self.model, self.datamodule)
        self.model.answers.options = replace(self.evaluation.options, seed=self.datamodule.hparams.seed)
        trainer = cast(Any, self.trainer)
        trainer.typed = masked_arguments(self.typed)
        if subcommand == "fit":
            check_interval(trainer, self.datamodule.steps_per_epoch)
            trainer.log_every_n_steps = steps_between_logs(trainer, self.datamodule)
            config, evaluates = self._get(self.config, "trainer"), self.evaluation.line()
            show_first_screen(trainer, self.model, self.datamodule, config, written, evaluates)
            stack.enter_context(self._training(config))
        try:
            with errors_of_wandb():
                super()._run_subcommand(subcommand)
        except MisconfigurationException as error:
            raise UserError(f"trainer: {first_line(error)}") from None

    @contextmanager
    def _training(self, config: Any) -> Iterator[None]:
        """From the first step to the model: an earlier run is set aside until this one has a checkpoint."""
        if config.fast_dev_run:
            yield
            return
        slurm.remember_job(self.output_dir)
        with ExitStack() as stack:
            if not is_resumed(self.output_dir, self.ckpt_path):
                earlier = stack.enter_context(EarlierRun(self.output_dir))
                self.saver.on_saved.append(earlier.forget)
            yield

    def fit(self, model: Any, **kwargs: Any) -> None:
        """Lightning's, during which a signal waits for the end of the step."""
        with self.requests.deferred():
            self.trainer.fit(model, **kwargs)

    def _check_before_reading(self, subcommand: str) -> int:
        """Weights, checkpoint and room for what is written, since to read the rows may take long.

        Returns the bytes that `fit` writes; 0 for other commands.
        """
        model, written = self.model.hparams, 0
        self.ckpt_path = self._chosen_checkpoint(subcommand)
        if subcommand not in WITHOUT_WEIGHTS:
            num_parameters = num_stored_parameters(model.model_name_or_path)
        if subcommand == "fit":
            check_model_folder(self.model_folder, [model.model_name_or_path])
            copies = self.saver.most_at_once + (self.best is not None)
            written = check_room(self.output_dir, num_parameters, model, copies)
        if subcommand in ("validate", "test", "predict"):
            say("weights", weights_text(model.model_name_or_path, self.ckpt_path))
        notice = earlier_run(subcommand, self.model_folder, model.model_name_or_path, self.ckpt_path)
        if notice:
            logger.warning("%s", notice)
        return written

    def _chosen_checkpoint(self, subcommand: str) -> str | None:
        """What `ckpt_path` stands for. A job that SLURM has started again goes on from its newest checkpoint."""
        given = self.config_init[subcommand].get("ckpt_path")
        checkpoints = self.output_dir / "checkpoints"
        if subcommand == "fit" and not self._get(self.config, "trainer").fast_dev_run:
            check_new_run(
                self.output_dir, given, self._get(self.config, "overwrite") or slurm.is_restarted(self.output_dir)
            )
            tidy(checkpoints)
            if slurm.is_restarted(self.output_dir):
                chosen = newest_valid(checkpoints)
                for line in chosen.passed_over:
                    logger.warning("%s", line)
                return None if chosen.path is None else str(chosen.path)
        return None if given is None else str(resolve(given, checkpoints))

    @property
    def model_folder(self) -> Path:
        """Where `fit` leaves the Hugging Face folder."""
        return self.output_dir / "model"

    def after_fit(self) -> None:
        """The trained model as a Hugging Face folder, and the closing lines."""
        if self._get(self.config, "trainer").fast_dev_run:
            return
        self.summary.choose_weights(self.trainer, self.model)
        data = self.datamodule.hparams
        tokenizer = load_tokenizer(data.model_name_or_path, data.chat_template_path)
        texts = documents(
            self._configuration(),
            self.summary.results(),
            {"rows": str(self.datamodule.reports["train"])},
            has_chat_template=tokenizer.chat_template is not None,
        )
        folder = save_hf_folder(self.model.model, tokenizer, self.model_folder, texts)
        self.summary.close(self.trainer, self.model, folder)

    def _configuration(self) -> dict[str, Any]:
        """What `config.yaml` of the run holds."""
        callbacks = cast(Any, self.trainer).callbacks
        saved = next(callback for callback in callbacks if isinstance(callback, SaveMaskedConfig))
        return yaml.safe_load(saved.text())


def run(argv: Sequence[str]) -> None:
    """Run one of Lightning's commands. `main` prints the errors: UserError, or jsonargparse's ArgumentError."""
    _quiet()
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


def _has(callbacks: list[Any], kind: type) -> bool:
    return any(isinstance(callback, kind) for callback in callbacks)


def _is_unlabelled(scores: Any) -> bool:
    return not needs_labels(named_scores(scores))


def _quiet() -> None:
    """Show our own log lines, and only those of the libraries that a user can act on."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[NoticeHandler()])
    logging.getLogger("radixtrain").setLevel(logging.INFO)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # Of a kernel that 4-bit layers could run on a CPU, and of layers that no plan for several devices names.
    for name in ("bitsandbytes", "transformers.distributed"):
        logging.getLogger(name).setLevel(logging.ERROR)
    disable_progress_bar()
    for noise in (
        "number of training batches",
        "LeafSpec",
        "Total length of",
        "LightningCLI's args",
        "infer the batch indices",
        "pre-optimization",
        "callbacks used to create the checkpoint",
        "you requested to overfit",
        "is_gradient_checkpointing",  # PEFT asks by transformers' former name
    ):
        warnings.filterwarnings("ignore", f".*{noise}")
