"""The trained model as a Hugging Face folder, which is written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from radixtrain.checkpoints.atomic import recover, writing
from radixtrain.distributed import ranks
from radixtrain.errors import UserError
from radixtrain.hf.prepare import restore_model
from radixtrain.training.devices.fsdp2 import gather_on_first
from radixtrain.training.fault_tolerance.nonfinite_guard import check_weights_finite
from radixtrain.training.results.model_card import CARD, MARK, SETTINGS
from radixtrain.training.start.adapters import merged

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# What `save_pretrained` of models and tokenizers writes. Full names, since *.json would match a user's data too.
MODEL_FILES = [
    *("config.json", "generation_config.json", "chat_template.jinja", "adapter"),
    *("model.safetensors", "model-*.safetensors", "model.safetensors.index.json"),
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", SETTINGS),
]


def check_model_folder(output_dir: str | os.PathLike[str], reads: Iterable[str | os.PathLike[str] | None] = ()) -> Path:
    """The folder, if a model may be written there: absent, empty, or a previous model that can be replaced.

    reads: files and folders that the run reads; none of them may lie inside.

    Raises UserError for anything else, since the folder is replaced as a whole.
    """
    target = Path(output_dir).resolve()
    recover(target)
    for source in reads:
        if source is not None and Path(source).exists() and Path(source).resolve().is_relative_to(target):
            raise UserError(
                f"{output_dir} would be replaced by the model, but {source} is read from there; choose another"
            )
    if target.exists() and not target.is_dir():
        raise UserError(f"{output_dir} is a file; the model needs a folder")
    inside = list(target.iterdir()) if target.exists() else []
    foreign = [path.name for path in inside if not _is_written_by_us(path)]
    if foreign or (inside and not (target / "config.json").is_file()):
        named = ", ".join(sorted(foreign)[:3]) or "no config.json"
        way_out = "move that away, or choose another folder"
        raise UserError(f"{output_dir} holds what is no model ({named}) and would be replaced; {way_out}")
    return target


def save_hf_folder(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    output_dir: str | os.PathLike[str],
    documents: Mapping[str, str] | None = None,
) -> Path:
    """Write `model` and `tokenizer` so that `from_pretrained(output_dir)` loads them.

    Every rank of a run calls it; rank 0 writes, and an error there ends the others too.

    model: a `PreTrainedModel`, or a PEFT model, whose adapters go into `adapter/` and are merged into the weights.
        It loses its radix hooks. One that is sharded is gathered, and is whole on rank 0 only afterwards.
    output_dir: replaced as a whole once the new one is complete; see `check_model_folder`.
    documents: names and texts of files beside them, see `radixtrain/training/results/model_card.py`.
    """
    target = ranks().broadcast_from_rank0(lambda: check_model_folder(output_dir))
    check_weights_finite(model, f"{output_dir} is not written")
    gather_on_first(model)
    ranks().broadcast_from_rank0(lambda: _write(model, tokenizer, target, documents or {}), long_timeout=True)
    return Path(output_dir)


def _write(model: Any, tokenizer: Any, target: Path, documents: Mapping[str, str]) -> None:
    with writing(target) as staging:
        restore_model(model)
        if hasattr(model, "merge_and_unload"):
            model.save_pretrained(staging / "adapter")
            model = merged(model)
        model.save_pretrained(staging)
        tokenizer.save_pretrained(staging)
        for name, text in documents.items():
            (staging / name).write_text(text, encoding="utf-8")


def _is_written_by_us(path: Path) -> bool:
    """A README.md only if it is a model card of ours."""
    if path.name == CARD and path.is_file():
        return MARK in path.read_text(encoding="utf-8", errors="replace")
    return any(path.match(pattern) for pattern in MODEL_FILES)
