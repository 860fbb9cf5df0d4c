"""The record of a run, from which it can be run again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from radixtrain.checkpoints.atomic import check_replaceable, writing_file
from radixtrain.errors import UserError, first_line
from radixtrain.settings.read import read_yaml
from radixtrain.training.fault_tolerance.run_folder import RECORD
from radixtrain.training.results.model_folder import SETTINGS
from radixtrain.training.results.run_progress import SUMMARY

# Keys that say how rows are read, with their types: a command that evaluates a trained model reads them as its run did.
# The chat template is in the model's folder.
READING: dict[str, type] = {
    **{"columns": dict, "system_prompt": str, "chat_template_kwargs": dict, "split_turns": bool, "max_length": int},
    **{"assistant_only_loss": bool, "completion_only_loss": bool, "excess_length_strategy": str, "template_date": str},
}

OF_ONE_COMMAND = ("overwrite", "ckpt_path", "weights_only")  # else a second run would discard or resume something


class RunRecord:
    """Writes `fit.yaml`, `validate.yaml` and so on into the folder of the logs; into `output_dir` if that is elsewhere.

    It has no keys for one command only. In `fit` it is written when training starts, so that a refused run replaces no
    file of the previous one.
    """

    def __init__(self, config: Mapping[str, Any]):
        """Take every key with its value, as a settings file has them."""
        self.config = config

    def setup(self, trainer: Any, pl_module: object, stage: str) -> None:
        output_dir = Path(trainer.default_root_dir).absolute()
        folders = [folder for folder in own_log_folders(trainer) if output_dir in folder.absolute().parents]
        self.path = (folders or [output_dir])[0] / RECORD.format(trainer.state.fn.value)
        check_replaceable(self.path)
        if stage != "fit":
            self.on_train_start(trainer, pl_module)

    def on_train_start(self, trainer: Any, pl_module: object) -> None:
        if trainer.is_global_zero:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with writing_file(self.path) as partial:
                partial.write_text(self.text(), encoding="utf-8")

    def text(self) -> str:
        """Return the configuration in YAML."""
        kept = {name: value for name, value in self.config.items() if name not in OF_ONE_COMMAND}
        return str(yaml.safe_dump(kept, sort_keys=False, allow_unicode=True))


def defaults_of_model(model_name_or_path: str) -> dict[str, Any]:
    """Return keys with values for the evaluation of a model that radixtrain has trained; empty for any other model.

    They say how the run read its rows, its seed, which drew `data.val_size`, and its folder if the model is still
    there.

    Raises UserError if they cannot be read.
    """
    folder = Path(model_name_or_path)
    path = folder / SETTINGS
    if not path.is_file():
        return {}
    try:
        settings = read_yaml(str(path))
        found = {name: settings["data"][name] for name in READING if settings["data"].get(name) is not None}
        seed = settings.get("seed_everything")
    except (OSError, ValueError, yaml.YAMLError, LookupError, TypeError) as error:
        raise UserError(f"{path}: expected the settings of a run ({first_line(error)}); remove or restore it") from None
    for name, value in (*found.items(), ("seed_everything", seed or 0)):
        if not isinstance(value, READING.get(name, int)):
            raise UserError(
                f"{path}: {name} is {value!r}, expected {READING.get(name, int).__name__}; restore the file"
            )
    found = {**{f"data.{name}": value for name, value in found.items()}, "seed_everything": seed}
    home = folder.resolve().parent
    found["output_dir"] = str(home) if (home / SUMMARY).is_file() else None
    return {name: value for name, value in found.items() if value is not None}


def log_folder(trainer: Any) -> Path:
    """Return Lightning's `trainer.log_dir` without its broadcast, so that one rank may call it alone."""
    first = trainer.loggers[0] if trainer.loggers else None
    folder = first.log_dir if isinstance(first, CSVLogger | TensorBoardLogger) else getattr(first, "save_dir", None)
    return Path(folder or trainer.default_root_dir)


def own_log_folders(trainer: Any) -> list[Path]:
    """Return the folders that only a logger of this trainer writes into: of CSV files and of TensorBoard."""
    return [Path(log.log_dir) for log in trainer.loggers if isinstance(log, CSVLogger | TensorBoardLogger)]
