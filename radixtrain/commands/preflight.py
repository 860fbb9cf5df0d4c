"""Checks before rows are read, which may take long: checkpoint, weights, room, and that all ranks have the same."""

from __future__ import annotations

import json
import math
import shutil
from itertools import chain
from pathlib import Path
from typing import Any

import xxhash
import yaml
from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError, safe_open

from radixtrain.checkpoints.atomic import tidy_leftovers
from radixtrain.checkpoints.folder import checkpoints_in
from radixtrain.checkpoints.resolve import AUTO, resolve
from radixtrain.commands import EVALUATING
from radixtrain.errors import UserError, bytes_text, first_line, only_warns
from radixtrain.screen import print_line, without_passwords
from radixtrain.settings.commands import RunSettings
from radixtrain.settings.fields import flat
from radixtrain.settings.read import read_yaml
from radixtrain.settings.sections import ModelSettings
from radixtrain.text_files import check_file, read_text
from radixtrain.training.fault_tolerance.failures import existing
from radixtrain.training.fault_tolerance.run_folder import RECORD, check_new_run, check_outside, is_resumed
from radixtrain.training.fault_tolerance.run_state import check_settings_of_run
from radixtrain.training.fault_tolerance.signals import is_restarted
from radixtrain.training.results.model_folder import SETTINGS, check_model_folder
from radixtrain.training.results.record import SUMMARY
from radixtrain.versions import versions

# Keys that say how rows are read: a command that evaluates a trained model reads them as its run did. The chat template
# is in the model's folder.
READING = (
    *("columns", "system_prompt", "chat_template_kwargs", "split_turns", "max_length"),
    *("assistant_only_loss", "completion_only_loss", "excess_length_strategy", "template_date"),
)
WHOLE, SHARDED = "model.safetensors", "model.safetensors.index.json"
MODEL_SUFFIXES = (".json", ".safetensors", ".jinja", ".model", ".txt")
SAMPLES, SAMPLED_BYTES = 64, 1 << 16  # per file: enough, since other weights differ nearly everywhere
OF_A_MACHINE = ("config", "data.cache_dir", "data.dataset_num_proc", "data.dataloader_num_workers")
BYTES = {"float32": 4, "bfloat16": 2, "float64": 8, "auto": 2}
READ = ("model.", "data.", "ckpt_path")  # settings that may name files
# What a killed command may leave, and no later one writes again.
HALF_WRITTEN = (
    *(f"logs/version_*/.{RECORD.format(command)}.partial" for command in ("fit", *EVALUATING)),
    "answers/.step=*.csv.partial",
)


def checkpoint_asked_for(output_dir: Path, settings: Any) -> str | None:
    """Return the `ckpt_path` of `fit`, which is `auto` in a job that SLURM has restarted. No checkpoint is read.

    settings: of `fit`.

    Raises UserError if the folder holds another run, or if this one reads what would be renamed with it.
    """
    ckpt_path, overwrite = settings.ckpt_path, settings.overwrite
    if is_restarted(output_dir):
        ckpt_path, overwrite = AUTO, False
    check_new_run(output_dir, ckpt_path, overwrite)
    if overwrite:
        reads = {key: value for key, value in flat(settings).items() if key.startswith(READ)}
        check_outside(output_dir, reads)
    return ckpt_path


def delete_half_written(output_dir: Path) -> None:
    """Delete what a killed command has half written beside its logs and answers. Requires the lock."""
    with only_warns(f"what a killed run has half written in {output_dir} cannot be deleted"):
        for path in chain.from_iterable(map(output_dir.glob, HALF_WRITTEN)):
            if path.is_file() and not (path.is_symlink() or path.parent.is_symlink()):
                path.unlink()


def checkpoint_of_fit(output_dir: Path, settings: Any, model: object, data: object) -> tuple[str | None, bool]:
    """Return the checkpoint that `fit` resumes from, None if it starts anew, and whether it replaces an earlier run.

    Leftovers of killed runs in the folder of checkpoints are removed.

    settings: of `fit`. model, data: a `RadixModule` and an `SFTData`.

    Raises UserError as `checkpoint_asked_for`, if the checkpoint is not whole, or if its settings do not fit.
    """
    ckpt_path, checkpoints = checkpoint_asked_for(output_dir, settings), output_dir / "checkpoints"
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

    Raises UserError if they cannot be read. `read` checks the values.
    """
    folder = Path(model_name_or_path)
    path = folder / SETTINGS
    if not path.is_file():
        return {}
    try:
        settings = read_yaml(str(path))
        found = {f"data.{name}": settings["data"].get(name) for name in READING}
        found["seed_everything"] = settings.get("seed_everything")
    except (OSError, ValueError, yaml.YAMLError, LookupError, TypeError) as error:
        raise UserError(f"{path}: expected the settings of a run ({first_line(error)}); remove or restore it") from None
    home = folder.resolve().parent
    found["output_dir"] = str(home) if (home / SUMMARY).is_file() else None
    return {name: value for name, value in found.items() if value is not None}


def num_stored_parameters(model_name_or_path: str) -> int | None:
    """Count the numbers in the weights of a folder or a downloaded hub name, from the files' headers.

    Returns None if unknown: the weights are not downloaded yet, or the folder holds only an adapter.

    Raises UserError if there are no weights, or a file of them is incomplete.
    """
    files = _weight_files(model_name_or_path)
    return None if files is None else sum(_num_parameters(path) for path in files)


def check_room(output_dir: Path, num_parameters: int | None, settings: ModelSettings, copies: int) -> int:
    """Return the bytes that the run writes into `output_dir`, at least.

    settings: of a `RadixModule`. copies: checkpoints that exist at once; those of adapters are not counted.

    Raises UserError if the disk has less room.
    """
    weights = BYTES[settings.dtype] * (num_parameters or 0)
    moments = {"adamw": 2 * weights, "muon": weights, "adamw_8bit": 2 * (num_parameters or 0)}[settings.optimizer]
    state = 0 if settings.use_peft else weights + moments
    needed = weights + copies * state
    free = shutil.disk_usage(existing(output_dir)).free
    if needed > free:
        raise UserError(
            f"output_dir {output_dir}: the run writes at least {bytes_text(needed)}, a model and {copies} checkpoints "
            f"of about {bytes_text(state)}, and {bytes_text(free)} are free; name a folder on a larger disk, lower "
            f"save_total_limit, or set trainer.enable_checkpointing: false to keep only the model"
        )
    return needed


def described_start(settings: RunSettings) -> dict[str, str]:
    """Describe what must be the same on all ranks: settings, versions of packages, the files of the model.

    settings: of the command, as parsed.
    """
    alike = {name: value for name, value in flat(settings).items() if name not in OF_A_MACHINE}
    found = {name: without_passwords(str(value)) for name, value in alike.items()}
    found |= {f"the version of {package}": number for package, number in versions().items()}
    name = settings.model.model_name_or_path
    return {**found, f"model.model_name_or_path {name}": _digest_of_model(name)}


def _digest_of_model(model_name_or_path: str) -> str:
    """Digest names, sizes and SAMPLES parts of each file that a model is read from; empty if there are none yet."""
    try:
        folder = Path(model_name_or_path)
        folder = folder if folder.is_dir() else (_weight_files(model_name_or_path) or [folder / WHOLE])[0].parent
        paths = sorted(path for path in folder.iterdir() if path.suffix in MODEL_SUFFIXES)
        digest = xxhash.xxh3_128()
        for path in paths:
            check_file(path)
            size = path.stat().st_size
            digest.update(f"{path.name} {size}\n".encode())
            with path.open("rb") as file:
                for place in sorted({*range(0, size, max(1, size // SAMPLES))}):
                    file.seek(place)
                    digest.update(file.read(SAMPLED_BYTES))
        return digest.hexdigest()
    except (OSError, UserError):  # reported by the rank that reads them
        return ""


def _weight_files(model_name_or_path: str) -> list[Path] | None:
    name, folder = f"model.model_name_or_path {model_name_or_path!r}", Path(model_name_or_path)
    if not folder.is_dir():
        try:
            cached = [try_to_load_from_cache(model_name_or_path, file) for file in (WHOLE, SHARDED)]
        except HFValidationError:  # not a name that the hub could have
            raise UserError(
                f"{name}: expected a repository id, such as Qwen/Qwen3-0.6B, or a folder; there is no "
                f"{folder.absolute()}"
            ) from None
        downloaded = next((Path(path).parent for path in cached if isinstance(path, str)), None)
        if downloaded is None and constants.HF_HUB_OFFLINE:
            raise UserError(
                f"{name}: no such folder, no downloaded weights of that name, and HF_HUB_OFFLINE forbids downloading "
                f"them"
            )
        if downloaded is None:
            return None
        folder = downloaded
    elif (folder / "adapter_config.json").is_file():
        return None
    if (folder / WHOLE).is_file():
        return [folder / WHOLE]
    if not (folder / SHARDED).is_file():
        others = sorted(path.name for pattern in ("*.bin", "*.pt", "*.gguf") for path in folder.glob(pattern))
        hint = f"; {others[0]} is of another format: convert it to safetensors" if others else ""
        raise UserError(f"{name}: no weights ({WHOLE} or {SHARDED}) in the folder{hint}")
    try:
        index = json.loads(read_text(folder / SHARDED))
        shards = sorted({str(shard) for shard in index["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(
            f"{folder / SHARDED}: expected a JSON object with a weight_map; copy or download it again"
        ) from None
    if missing := [shard for shard in shards if not (folder / shard).is_file()]:
        raise UserError(
            f"{name}: {len(missing)} of {len(shards)} files of the weights are missing, {missing[0]} is the first; "
            f"copy or download the model again"
        )
    return [folder / shard for shard in shards]


def _num_parameters(path: Path) -> int:
    """Count the parameters in the header of a safetensors file."""
    try:
        path.open("rb").close()  # the library calls a file missing that it may not read
        with safe_open(path, "pt") as file:
            return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    except PermissionError as error:
        raise UserError(f"{path}: the weights cannot be read: {error.strerror}; let this user read them") from None
    except (SafetensorError, OSError, ValueError) as error:
        reason = f"the file is incomplete or damaged ({first_line(error)}); copy or download it again"
        raise UserError(f"{path}: the weights cannot be read, {reason}") from None
