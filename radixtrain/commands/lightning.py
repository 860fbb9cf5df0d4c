"""`radixtrain fit`, `validate`, `test`, `predict` and `verify`: Lightning's command line with radixtrain's settings."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import yaml
from jsonargparse import ArgumentError, set_parsing_settings
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint, ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from transformers.utils.logging import disable_progress_bar

from radixtrain.commands import commands_of
from radixtrain.data.datamodule import SFTData
from radixtrain.data.tokens.tokenization import load_tokenizer
from radixtrain.errors import UserError, first_line
from radixtrain.hf.scores import named_scores, needs_labels
from radixtrain.training.callbacks import PredictionWriter, RunSummary, SaveOnSigterm
from radixtrain.training.checkpoint import check_checkpoint_file, check_model_folder, save_hf_folder
from radixtrain.training.evaluate_generation import EvaluateGeneration
from radixtrain.training.first_checks import check_monitors, check_room, earlier_run, num_stored_parameters
from radixtrain.training.first_screen import show_first_screen, steps_between_logs
from radixtrain.training.model_card import documents
from radixtrain.training.module import RadixModule
from radixtrain.training.progress_bar import NoticeHandler, progress_bar
from radixtrain.training.trainer import Trainer

__all__ = ["RadixCLI", "run"]

logger = logging.getLogger(__name__)

NAMES = commands_of("lightning")
OUR_OWN = ("verify", "inspect", "report")  # methods that our trainer adds to Lightning's
WITHOUT_WEIGHTS = ("inspect", "report")  # which read the model's config and tokenizer only, and set up the data
DEFAULT_EPOCHS = 3  # Hugging Face's num_train_epochs; if only trainer.max_steps is set, the run has that many steps
# What Lightning raises for settings that it refuses: in turn for `devices: 0`, `strategy: nonsense`, `devices: -1` on a
# CPU, and `strategy: xla` without torch_xla. Nothing of ours runs while it makes the trainer.
REFUSED_BY_LIGHTNING = (MisconfigurationException, ValueError, TypeError, ModuleNotFoundError)
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
        parser.add_class_arguments(EvaluateGeneration, "evaluate_generation")
        parser.link_arguments("output_dir", "trainer.default_root_dir")
        parser.link_arguments("dedup", "model.dedup")
        parser.link_arguments("dedup", "data.dedup")
        parser.link_arguments("seed_everything", "data.seed", compute_fn=_data_seed)
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
            _check_seed(self.config[self.config.subcommand].seed_everything)
        except ArgumentError as error:
            if re.search(r"next_tokens\b.*\b(True|False)\b", str(error), re.DOTALL):
                raise ArgumentError(None, QUOTES) from None
            raise

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        """A CSV logger and a checkpoint of the last step unless the configuration names others."""
        config = self._get(self.config_init, "trainer")
        output_dir = Path(self._get(self.config, "output_dir"))
        if config.logger in (None, True):
            kwargs["logger"] = CSVLogger(output_dir, name="logs")
        if config.max_epochs is None and config.max_steps == -1:
            kwargs["max_epochs"] = DEFAULT_EPOCHS
        _check_trainer_settings(config)
        data = self._get(self.config, "data")
        self.evaluation: EvaluateGeneration = self._get(self.config_init, "evaluate_generation")
        has_validation = bool(data.validation_file or data.val_size)
        if self.subcommand == "fit" and self.evaluation.logged and not has_validation:
            raise UserError("evaluate_generation needs rows: set data.validation_file or data.val_size")
        check_monitors(_as_list(config.callbacks), has_validation, self.evaluation.logged)
        callbacks = self._callbacks(config, output_dir)
        if config.fast_dev_run and not _has(callbacks, Checkpoint):
            kwargs["enable_checkpointing"] = False
        try:
            trainer = super().instantiate_trainer(**kwargs, callbacks=callbacks)
        except REFUSED_BY_LIGHTNING as error:
            raise UserError(f"trainer: {first_line(error)}") from None
        if trainer.world_size != 1:
            raise UserError(
                f"trainer: {trainer.world_size} devices: radixtrain trains on one so far; set trainer.devices to 1 and "
                f"trainer.num_nodes to 1"
            )
        return trainer

    def _callbacks(self, config: Any, output_dir: Path) -> list[Any]:
        """Those of the configuration, then ours; the progress line and checkpoints only if it has none of its own."""
        checkpoints = output_dir / "checkpoints"
        self.summary = RunSummary(output_dir)
        callbacks = [
            *_as_list(config.callbacks),
            self.summary,
            PredictionWriter(output_dir),
            *([self.evaluation] if self.evaluation.logged else []),
            SaveOnSigterm(checkpoints),
        ]
        if config.enable_progress_bar is not False and not _has(callbacks, ProgressBar):
            callbacks.append(progress_bar())
        has_none = config.enable_checkpointing is not False and not _has(callbacks, Checkpoint)
        self.has_our_checkpoints = has_none and not config.fast_dev_run  # which would replace those of a run
        if self.has_our_checkpoints:
            callbacks.append(ModelCheckpoint(checkpoints, "{step}", save_last=True, enable_version_counter=False))
        return callbacks

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        """Checkpoints are read as weights, never as code, unless `weights_only` says otherwise."""
        kwargs = super()._prepare_subcommand_kwargs(subcommand)
        if subcommand not in OUR_OWN and kwargs.get("weights_only") is None:
            kwargs["weights_only"] = True
        return {**kwargs, "return_predictions": False} if subcommand == "predict" else kwargs

    def _run_subcommand(self, subcommand: str) -> None:
        """Data and model are loaded before the trainer starts, so that an error in either leaves nothing written."""
        written = self._check_before_reading(subcommand)
        if subcommand not in WITHOUT_WEIGHTS:
            self.datamodule.setup(subcommand)
            self.model.configure_model()
        if subcommand in ("fit", "validate"):
            self.evaluation.prepare(self.model, self.datamodule)
        self.model.answers.options = replace(self.evaluation.options, seed=self.datamodule.hparams.seed)
        trainer = cast(Any, self.trainer)
        trainer.typed = self.typed
        if subcommand == "fit":
            trainer.log_every_n_steps = steps_between_logs(trainer, self.datamodule)
            config, evaluates = self._get(self.config, "trainer"), self.evaluation.line()
            show_first_screen(trainer, self.model, self.datamodule, config, written, evaluates)
        try:
            super()._run_subcommand(subcommand)
        except MisconfigurationException as error:
            raise UserError(f"trainer: {first_line(error)}") from None

    def _check_before_reading(self, subcommand: str) -> int:
        """Weights, checkpoint and room for what is written, since to read the rows may take long.

        Returns the bytes that `fit` writes; 0 for other commands.
        """
        model, written = self.model.hparams, 0
        ckpt_path = self.config_init[subcommand].get("ckpt_path")
        if ckpt_path not in (None, "last", "best", "hpc"):
            check_checkpoint_file(ckpt_path)
        if subcommand not in WITHOUT_WEIGHTS:
            num_parameters = num_stored_parameters(model.model_name_or_path)
        if subcommand == "fit":
            check_model_folder(self.model_folder, [model.model_name_or_path])
            output_dir = self._get(self.config, "output_dir")
            written = check_room(output_dir, num_parameters, model, self.has_our_checkpoints)
        notice = earlier_run(subcommand, self.model_folder, model.model_name_or_path, ckpt_path)
        if notice:
            logger.warning("%s", notice)
        return written

    @property
    def model_folder(self) -> Path:
        """Where `fit` leaves the Hugging Face folder."""
        return Path(self._get(self.config, "output_dir")) / "model"

    def after_fit(self) -> None:
        """The trained model as a Hugging Face folder, and the closing lines."""
        if self._get(self.config, "trainer").fast_dev_run:
            return
        data = self.datamodule.hparams
        tokenizer = load_tokenizer(data.model_name_or_path, data.chat_template_path)
        texts = documents(
            self._configuration(),
            self.summary.results(self.trainer, self.model.speed),
            {"rows": str(self.datamodule.reports["train"])},
            has_chat_template=tokenizer.chat_template is not None,
        )
        folder = save_hf_folder(self.model.model, tokenizer, self.model_folder, texts)
        self.summary.print_closing_lines(self.trainer, self.model.speed, folder)

    def _configuration(self) -> dict[str, Any]:
        """What `config.yaml` of the run holds."""
        callbacks = cast(Any, self.trainer).callbacks
        saved = next(callback for callback in callbacks if isinstance(callback, SaveConfigCallback))
        return yaml.safe_load(saved.parser.dump(saved.config, skip_none=False))


def run(argv: Sequence[str]) -> None:
    """Run one of Lightning's commands. `main` prints the errors: UserError, or jsonargparse's ArgumentError."""
    _quiet()
    # A `class_path` is imported before its type is checked, so a configuration could run anything.
    set_parsing_settings(import_path_denylist=["*"], import_path_allowlist=list(ALLOWED_IMPORTS))
    strict = {"exit_on_error": False, "allow_abbrev": False}
    RadixCLI(
        RadixModule,
        SFTData,
        trainer_class=Trainer,
        seed_everything_default=42,
        trainer_defaults={"devices": 1, "log_every_n_steps": 10, "enable_model_summary": False},
        save_config_kwargs={"overwrite": True},
        auto_configure_optimizers=False,
        parser_kwargs={"prog": "radixtrain", **strict, **{name: dict(strict) for name in NAMES}},
        args=list(argv),
    )


def _check_seed(seed: Any) -> None:
    if isinstance(seed, int) and not isinstance(seed, bool) and not 0 <= seed < 2**32:
        raise UserError(f"seed_everything must be from 0 to {2**32 - 1}, got {seed}")


def _check_trainer_settings(config: Any) -> None:
    """Refuse Lightning's settings that would change a step; each error names the key that does it here."""
    if config.accumulate_grad_batches != 1:
        raise UserError(
            "trainer.accumulate_grad_batches: a step is cut by data.max_tokens; set data.batch_size instead"
        )
    if config.gradient_clip_val is not None:
        raise UserError("trainer.gradient_clip_val: set model.max_grad_norm instead")
    if str(config.precision) in ("16", "16-mixed", "16-true"):
        raise UserError(f"trainer.precision {config.precision}: float16 needs a loss scale; use bf16-mixed or 32-true")


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value] if value is not None else []


def _has(callbacks: list[Any], kind: type) -> bool:
    return any(isinstance(callback, kind) for callback in callbacks)


def _data_seed(seed: Any) -> int:
    return seed if isinstance(seed, int) and not isinstance(seed, bool) else 42


def _is_unlabelled(scores: Any) -> bool:
    return not needs_labels(named_scores(scores))


def _quiet() -> None:
    """Show our own log lines, and only those of the libraries that a user can act on."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[NoticeHandler()])
    logging.getLogger("radixtrain").setLevel(logging.INFO)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    disable_progress_bar()
    for noise in (
        "number of training batches",
        "LeafSpec",
        "Total length of",
        "LightningCLI's args",
        "infer the batch indices",
        "pre-optimization",
        "is_gradient_checkpointing",  # PEFT asks by transformers' former name
    ):
        warnings.filterwarnings("ignore", f".*{noise}")
