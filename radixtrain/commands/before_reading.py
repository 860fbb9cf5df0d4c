"""Checks before rows are read, which may take long: the checkpoint, the weights, room for what is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from radixtrain.checkpoints.atomic import tidy_leftovers
from radixtrain.checkpoints.folder import checkpoints_in
from radixtrain.checkpoints.resolve import AUTO, resolve
from radixtrain.commands import EVALUATING
from radixtrain.errors import UserError, first_line
from radixtrain.screen import print_line
from radixtrain.settings.fields import flat
from radixtrain.settings.read import read_yaml
from radixtrain.training.fault_tolerance.run_folder import check_new_run, check_outside, is_resumed
from radixtrain.training.fault_tolerance.run_state import check_settings_of_run
from radixtrain.training.fault_tolerance.signals import is_restarted
from radixtrain.training.results.model_folder import SETTINGS, check_model_folder
from radixtrain.training.results.record import SUMMARY
from radixtrain.training.start.preflight import check_room, num_stored_parameters

# Keys that say how rows are read, with their types: a command that evaluates a trained model reads them as its run did.
# The chat template is in the model's folder.
READING: dict[str, type] = {
    **{"columns": dict, "system_prompt": str, "chat_template_kwargs": dict, "split_turns": bool, "max_length": int},
    **{"assistant_only_loss": bool, "completion_only_loss": bool, "excess_length_strategy": str, "template_date": str},
}
READ = ("model.", "data.", "ckpt_path")  # settings that may name files


def checkpoint_of_fit(output_dir: Path, settings: Any, model: object, data: object) -> tuple[str | None, bool]:
    """Return the checkpoint that `fit` resumes from, None if it starts anew, and whether it replaces an earlier run.

    A job that SLURM has restarted resumes as with `auto`. Leftovers of killed runs are removed.

    settings: of `fit`. model, data: a `RadixModule` and an `SFTData`.

    Raises UserError if the folder holds another run, if this one reads what would be renamed with it, if the checkpoint
    is not whole, or if its settings do not fit.
    """
    ckpt_path, overwrite = settings.ckpt_path, settings.overwrite
    if is_restarted(output_dir):
        ckpt_path, overwrite = AUTO, False
    checkpoints = output_dir / "checkpoints"
    check_new_run(output_dir, ckpt_path, overwrite)
    if overwrite:
        reads = {key: value for key, value in flat(settings).items() if key.startswith(READ)}
        check_outside(output_dir, reads)
    tidy_leftovers(checkpoints)
    is_start = ckpt_path == AUTO and not checkpoints_in(checkpoints)
    chosen = None if is_start else checkpoint_to_evaluate(output_dir, ckpt_path)
    if chosen is not None:
        check_settings_of_run(Path(chosen), model, data)
    return chosen, not is_resumed(output_dir, ckpt_path)


def checkpoint_to_evaluate(output_dir: Path, ckpt_path: str | None) -> str | None:
    """Return the checkpoint that `ckpt_path` stands for, see `resolve`; None for the weights of the model."""
    return None if ckpt_path is None else str(resolve(ckpt_path, output_dir / "checkpoints"))


def check_weights_and_room(
    command: str, model: Any, output_dir: Path, ckpt_path: str | None, num_checkpoints: int
) -> int:
    """Return the bytes that `fit` writes, at least; 0 for other commands. Evaluations print which weights they use.

    model: settings of a `RadixModule`. num_checkpoints: on the disk at once.

    Raises UserError if there are no weights, or if what `fit` writes has no room or would replace what it reads.
    """
    name, written = model.model_name_or_path, 0
    num_parameters = num_stored_parameters(name)
    if command == "fit":
        check_model_folder(output_dir / "model", [name])
        written = check_room(output_dir, num_parameters, model, num_checkpoints)
    if command in EVALUATING:
        print_line("weights", ckpt_path or name)
    return written


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
