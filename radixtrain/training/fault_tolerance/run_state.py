"""What a checkpoint holds of a run, and how a run resumes from it with the current settings.

Each setting that changed is applied, or refused by name.
"""

from __future__ import annotations

import json
import logging
import os
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from radixtrain import __version__
from radixtrain.checkpoints.folder import Checkpoint, read_run
from radixtrain.checkpoints.tensors import bytes_of, part_like, whole
from radixtrain.distributed import ranks
from radixtrain.errors import UserError
from radixtrain.hf.backbone import pretrained_model_of
from radixtrain.training.optimizer import set_hyperparameters

logger = logging.getLogger(__name__)

# Keys that change what the model computes.
PARTS_OF_THE_MODEL = (
    *("use_peft", "lora_r", "lora_alpha", "lora_target_modules", "use_dora", "use_rslora"),
    *("load_in_4bit", "bnb_4bit_quant_type", "bnb_4bit_compute_dtype", "bnb_4bit_use_double_quant"),
)
# Keys of `data` that decide how steps are drawn: a position among other steps would mean nothing.
DRAWING = ("batch_size", "shuffle_dataset", "group_by_prefix", "seed", "val_size")
OF_NO_MODEL = ("transformers_version", "architectures", "dtype", "torch_dtype", "use_cache")  # in a config.json


@dataclass(frozen=True)
class Position:
    """A position between two optimizer steps.

    num_batches: DataLoader items that were trained on, over all epochs.
    num_steps: optimizer steps among them; a step that was skipped is an item without one.
    validation_pending: whether a validation was due here and has not been finished.
    """

    num_batches: int
    num_steps: int
    validation_pending: bool = False

    def __post_init__(self) -> None:
        if min(self.num_steps, self.num_batches) < 0:
            raise UserError(f"ckpt_path: {self.num_steps} steps after {self.num_batches} batches, as no run has taken")


# Saving


def checkpoint_of(module: Any, data: Any, optimizer: torch.optim.Optimizer, record: Mapping[str, Any]) -> Checkpoint:
    """Return what a checkpoint holds of a run; every rank calls this. Nothing is copied, but for numbers.

    module, data: a `RadixModule` and an `SFTData`. record: its progress, see `Record`.

    If `remember_base` found frozen weights, only the trained ones are kept, and that digest. The random generators
    are those before the step that is being computed, if there is one.
    """
    weights = _weights_of(module, is_partial=module.base_digest is not None)
    moments, numbers = _moments_of(module, optimizer)
    settings = dict(module.hparams)
    if (base := Path(settings["model_name_or_path"])).is_dir():
        settings["model_name_or_path"] = str(base.absolute())  # `export` may run in another folder
    run = {
        "version": __version__,
        "step": module.position.num_steps,
        "num_skipped": module.guard.num_skipped,
        "position": asdict(module.position),
        "rows": data.state_dict(),
        "generators": ranks().gather(module.generators_before_step or generator_states()),
        "numbers": numbers,
        "model": settings,
        "data": dict(data.hparams),
        "config": _config_of(module.model),
        "base": module.base_digest,
        "record": record,
        "wandb_run": module.wandb_run,
    }
    return Checkpoint(weights, moments, run)


def remember_base(module: Any) -> None:
    """Keep a digest of frozen weights with the module, before it is converted to the precision of the run."""
    frozen = _frozen(module)
    if frozen and trained_weights(module):
        module.base_digest = module.base_digest or _digest(frozen)


def trained_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return what training changes, each weight once: all that a partial checkpoint holds."""
    return {name: weight for name, weight in module.named_parameters() if weight.requires_grad}


def _weights_of(module: nn.Module, is_partial: bool) -> dict[str, Tensor]:
    state = module.state_dict()  # FSDP2 leaves weights whole after a pass; this puts their parts back into the module
    if is_partial:
        return {name: state[name] for name in trained_weights(module)}
    once, all_names = (dict(module.named_parameters(remove_duplicate=each)) for each in (True, False))
    tied = all_names.keys() - once.keys()
    return {name: weight for name, weight in state.items() if name not in tied}


def _moments_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return what the optimizer keeps for each weight, as `WEIGHT.MOMENT`: tensors, and numbers."""
    tensors, numbers = dict[str, Tensor](), dict[str, float]()
    names: dict[Tensor, str] = {weight: name for name, weight in module.named_parameters()}
    for weight, moments in optimizer.state.items():
        for moment, value in moments.items():
            kind: Any = tensors if isinstance(value, Tensor) else numbers
            kind[f"{names[weight]}.{moment}"] = value
    return tensors, numbers


def _frozen(module: nn.Module) -> list[Tensor]:
    return [parameter for parameter in module.parameters() if not parameter.requires_grad]


def _digest(tensors: Iterable[Tensor]) -> str:
    """Digest the bytes of tensors, one after the other. Sharded ones are gathered: every rank calls this."""
    digest = xxhash.xxh3_128()
    for tensor in tensors:
        digest.update(bytes_of(whole(tensor)))
    return digest.hexdigest()


def _config_of(model: nn.Module) -> Any:
    """Return what in the configuration determines the computation, without names of folders and versions."""
    config = pretrained_model_of(model).config.to_dict()
    kept = {name: value for name, value in config.items() if name not in OF_NO_MODEL and not name.startswith("_")}
    return json.loads(json.dumps(kept, default=str))


# Random generators


def generator_states() -> dict[str, Any]:
    """Return the states of Python's, NumPy's and torch's random generators, of all CUDA devices too, as JSON.

    Skips CUDA if the process has not used it: it has drawn nothing there, and a query would initialize CUDA, which a
    forked process cannot do.
    """
    name, keys, *rest = cast(Any, np.random.get_state())  # noqa: NPY002
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    states = [state.numpy().tobytes().hex() for state in (torch.get_rng_state(), *cuda)]
    return {"python": random.getstate(), "numpy": [name, keys.tolist(), *rest], "torch": states[0], "cuda": states[1:]}


def set_generator_states(states: Mapping[str, Any]) -> None:
    """Restore what `generator_states` returned. If the number of CUDA devices differs, warn and leave theirs."""
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(tuple(states["numpy"]))  # noqa: NPY002
    first, *cuda = (
        torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8) for text in (states["torch"], *states["cuda"])
    )
    torch.set_rng_state(first)
    was, now = len(cuda), torch.cuda.device_count() if torch.cuda.is_initialized() else 0
    if was == now:
        torch.cuda.set_rng_state_all(cuda)
    else:
        logger.warning("the run was on %d CUDA devices and is on %d: dropout will draw other numbers there", was, now)


def set_states_of_ranks(states: list[Mapping[str, Any]]) -> None:
    """Set the random generators of this rank.

    states: of all ranks, by rank. If there is another number of ranks now, dropout draws other numbers than the run
        would have drawn, and the log says so.
    """
    rank, size = ranks().rank, ranks().size
    if len(states) != size:
        logger.info("the run was on %d ranks and is on %d: dropout will draw other numbers", len(states), size)
    if rank < len(states):
        set_generator_states(states[rank])
    else:
        seed_per_rank()


def seed_per_rank() -> None:
    """Seed this rank for its own dropout masks; rank 0 continues as a single process would.

    Called once all that must be equal on the ranks, such as a new adapter, has been drawn from the seed of the run.
    """
    if not ranks().is_first:
        torch.manual_seed(torch.initial_seed() + ranks().rank)


# Resuming


def template_date(checkpoint: str | None) -> str:
    """Return the date that the chat template of a run sees: that of its start, today if it starts now.

    checkpoint: from which the run resumes, or None.
    """
    saved = {} if checkpoint is None else read_run(Path(checkpoint))["data"]
    return saved.get("template_date") or date.today().isoformat()


def check_settings_of_run(checkpoint: Path, module: Any, data: Any) -> None:
    """Raise UserError, before rows are read, if a setting prevents the resume.

    checkpoint: of the run. module, data: a `RadixModule` and an `SFTData` with the current settings.
    """
    saved = read_run(checkpoint)
    _check_parts_of_the_model(saved, module)
    was, now = (settings.get("optimizer") for settings in (saved["model"], module.hparams))
    if was != now:
        raise UserError(f"ckpt_path: model.optimizer was {was} and is {now}, which keeps other moments; set {was}")
    draws = [_drawing(settings) for settings in (saved["data"], data.hparams)]
    if changed := [f"data.{change}".replace("data.seed", "seed_everything") for _, change in _changes(*draws)]:
        raise UserError(f"ckpt_path: {', '.join(changed)}, which would change the steps; use the value of the run")


def check_same_model(checkpoint: Checkpoint, module: Any) -> None:
    """Raise UserError if the checkpoint is of another model: other adapters, configuration or frozen weights."""
    run = checkpoint.run
    _check_parts_of_the_model(run, module)
    saved, current = run["config"], _config_of(module.model)
    for name in saved:  # a key that only one has may come with another version of transformers
        if name in current and saved[name] != current[name]:
            raise UserError(
                f"ckpt_path: the checkpoint is of a model with another configuration: {name} was {saved[name]} and is "
                f"{current[name]}"
            )
    if run["base"] is not None:
        module.base_digest = _digest(_frozen(module))
        if module.base_digest != run["base"]:
            raise UserError(
                f"ckpt_path: the checkpoint holds only the trained weights, and the others in "
                f"{module.hparams.model_name_or_path} are not those of the run; give the model that it started from"
            )


def load_weights(module: nn.Module, checkpoint: Checkpoint) -> None:
    """Load the weights of a checkpoint into a module, which has those of the base model if it holds only adapters.

    The module may be sharded: then every rank calls this, and takes its parts.

    Raises UserError, and changes nothing, unless they are the weights of this module, or exactly its trained ones.
    """
    own = _weights_of(module, is_partial=checkpoint.run["base"] is not None)
    for name in (*own, *checkpoint.weights):
        here, saved = (str(tuple(each[name].shape)) if name in each else "absent" for each in (own, checkpoint.weights))
        if here != saved:
            raise UserError(
                f"ckpt_path: the checkpoint is of another model than the configuration's: {name} is {saved} in the "
                f"checkpoint and {here} here; give the --model keys of the run that wrote it"
            )
    parts = {name: part_like(weight, own[name]) for name, weight in checkpoint.weights.items()}
    module.load_state_dict(parts, strict=False)  # the same names, but for tied and frozen weights


def load_moments(module: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: Checkpoint) -> None:
    """Load what the optimizer keeps for each weight, of which each rank takes its part.

    Raises UserError if the checkpoint has it for a weight that the optimizer does not change.
    """
    by_name: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, value in {**checkpoint.moments, **checkpoint.run["numbers"]}.items():
        of_weight, _, moment = name.rpartition(".")
        by_name[of_weight][moment] = value
    names = {weight: name for name, weight in module.named_parameters()}
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    state = {
        number: {
            moment: part_like(value, weight) if isinstance(value, Tensor) else value
            for moment, value in by_name.pop(names[weight]).items()
        }
        for number, weight in enumerate(weights)
        if names[weight] in by_name
    }
    if by_name:
        raise UserError(f"ckpt_path: its optimizer changed {next(iter(by_name))}, and this one does not")
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def restore_position(checkpoint: Checkpoint, module: Any) -> None:
    """Give the module its position and the count of skipped steps.

    Raises UserError if the data differ, or more steps or epochs were taken than this run has.
    """
    run = checkpoint.run
    module.position = Position(**run["position"])
    module.guard.num_skipped = run["num_skipped"]
    if not module.steps_per_epoch:
        return
    module.trainer.datamodule.load_state_dict(run["rows"])
    check_not_beyond(module.trainer, module.position, module.steps_per_epoch)


def check_not_beyond(trainer: Any, position: Position, epoch_length: int) -> None:
    """Raise UserError if more steps or epochs were taken than this run has."""
    epochs = -(-position.num_batches // epoch_length)
    for what, taken in (("steps", position.num_steps), ("epochs", epochs)):
        limit = getattr(trainer, f"max_{what}")
        if limit not in (None, -1) and taken > limit:
            raise UserError(
                f"ckpt_path: {taken:,} {what} were begun, and trainer.max_{what} is {limit:,}; raise it to continue"
            )


def apply_settings(module: Any, optimizer: Any, scheduler: Any) -> None:
    """Give optimizer and schedule, which are restored, the settings of this run.

    The learning rate is that of the schedule at this step, as if the run had had these settings from the beginning.
    """
    set_hyperparameters(optimizer, scheduler, module, module.hparams)
    rate = optimizer.param_groups[0]["lr"]
    logger.info("resumes after step %s, with a learning rate of %.3g", f"{module.position.num_steps:,}", rate)


def _check_parts_of_the_model(run: Mapping[str, Any], module: Any) -> None:
    changes = _changes(run["model"], module.hparams)
    if changed := [f"model.{change}" for name, change in changes if name in PARTS_OF_THE_MODEL]:
        raise UserError(f"ckpt_path: {', '.join(changed)}, which would change the model; use the value of the run")


def _drawing(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of an `SFTData` that affect draws. With a `validation_file`, `val_size` does not."""
    found = {name: settings[name] for name in DRAWING if name in settings}
    return {**found, "val_size": 0} if settings.get("validation_file") else found


def _changes(saved: Mapping[str, Any], current: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield keys that both have, and `lora_r was 8 and is 16` for values that differ."""
    for name, now in current.items():
        if name in saved and saved[name] != json.loads(json.dumps(now, default=os.fspath)):
            yield name, f"{name} was {_in_yaml(saved[name])} and is {_in_yaml(now)}"


def _in_yaml(value: object) -> Any:
    """Write a value as a configuration does: true, false and null for Python's words, anything else unchanged."""
    return json.dumps(value) if value is None or isinstance(value, bool) else value
