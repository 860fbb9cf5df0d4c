"""The trained model as a Hugging Face folder, which is written whole or not at all, with its card and its settings."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from huggingface_hub import ModelCardData
from transformers.utils import cached_file

from radixtrain.checkpoints.atomic import recover, writing
from radixtrain.distributed import ranks
from radixtrain.errors import UserError
from radixtrain.hf.config import check_json_files
from radixtrain.hf.share import restore_model
from radixtrain.training.devices.fsdp2 import gather_on_first
from radixtrain.training.fault_tolerance.nonfinite_guard import check_weights_finite
from radixtrain.training.start.loading import merged
from radixtrain.versions import versions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CARD, SETTINGS = "README.md", "radixtrain.yaml"
MARK = "<!-- written by radixtrain -->"
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
DATA_FILE = re.compile(r"\.(jsonl|ndjson|json|csv|tsv|parquet|arrow)(\.gz|\.zst)?$")
FOLDERS = re.compile(r"(^|_)(path|file|dir)$")
OF_ROWS = ("columns", "chat_template_kwargs")  # settings whose values are no paths, whatever their names
OF_PROCESSOR = ["processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"]
# What `save_pretrained` of models, tokenizers and processors writes. Full names: *.json would match a user's data too.
MODEL_FILES = [
    *("config.json", "generation_config.json", "chat_template.jinja", "adapter"),
    *("model.safetensors", "model-*.safetensors", "model.safetensors.index.json"),
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", SETTINGS),
    *OF_PROCESSOR,
]


def check_model_folder(output_dir: str | os.PathLike[str], reads: Iterable[str | os.PathLike[str] | None] = ()) -> Path:
    """Return the folder, if a model may be written there: absent, empty, or a previous model that can be replaced.

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
    if foreign or (inside and not (target / CARD).is_file()):
        named = ", ".join(sorted(foreign)[:3]) or f"no {CARD} of radixtrain"
        way_out = "move that away, or choose another folder"
        raise UserError(f"{output_dir} holds files that are not a model ({named}) and would be replaced; {way_out}")
    return target


def save_hf_folder(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    output_dir: str | os.PathLike[str],
    documents: Mapping[str, str] | None = None,
) -> Path:
    """Write `model` and `tokenizer` so that `from_pretrained(output_dir)` loads them.

    Every rank of a run calls this; rank 0 writes, and an error there ends the others too.

    model: a `PreTrainedModel`, or a PEFT model, whose adapters go into `adapter/` and are merged into the weights.
        It loses its radix hooks. A model for images gets the processor's files of the folder or hub name that the
        tokenizer was loaded from. A sharded model is gathered, and is afterwards whole on rank 0 only.
    output_dir: replaced as a whole once the new one is complete; see `check_model_folder`.
    documents: names and texts of further files, see `card_and_settings`.
    """
    target = ranks().broadcast_from_rank0(lambda: check_model_folder(output_dir))
    check_weights_finite(model, f"{output_dir} is not written")
    gather_on_first(model)
    ranks().broadcast_from_rank0(lambda: _write(model, tokenizer, target, documents or {}), long_timeout=True)
    return Path(output_dir)


def _write(model: Any, tokenizer: PreTrainedTokenizerBase, target: Path, documents: Mapping[str, str]) -> None:
    with writing(target) as staging:
        restore_model(model)
        if hasattr(model, "merge_and_unload"):
            model.save_pretrained(staging / "adapter")
            model = merged(model)
        model.save_pretrained(staging)
        tokenizer.save_pretrained(staging)
        if model.config.get_text_config() is not model.config:
            _copy_processor(tokenizer.name_or_path, staging)
        for name, text in documents.items():
            (staging / name).write_text(text, encoding="utf-8")
        for path in staging.rglob("*.safetensors"):  # their writer lets only the owner read them
            path.chmod((staging / "config.json").stat().st_mode)


def _copy_processor(source: str, staging: Path) -> None:
    """Copy the files that say how images become tensors, since loading them would need torchvision."""
    for name in OF_PROCESSOR:
        with suppress(OSError):  # a checkpoint has some of them
            path = str(cached_file(source, name))
            check_json_files(str(Path(path).parent), [name])  # a link may lead anywhere
            shutil.copyfile(path, staging / name)


def _is_written_by_us(path: Path) -> bool:
    """Return whether radixtrain wrote a file: a README.md only if it is one of our model cards."""
    if path.name == CARD and path.is_file():
        return MARK in path.read_text(encoding="utf-8", errors="replace")
    return any(path.match(pattern) for pattern in MODEL_FILES)


def card_and_settings(config: Mapping[str, Any], results: Mapping[str, str], data: Mapping[str, str]) -> dict[str, str]:
    """Return names and texts of the files: the card, and the configuration.

    config: with the sections `model` and `data`, and whatever else made the model.
    results: of the run, by name: loss, r, ...
    data: of the training, by name: rows, tokens, ...
    """
    settings = yaml.safe_dump(_without_folders(config), sort_keys=False, allow_unicode=True)
    return {CARD: _card(config, results, data), SETTINGS: settings}


def _without_folders(value: object, key: str = "") -> Any:
    """Return the settings with names only of the files and folders of this machine, since a model may be published."""
    if isinstance(value, Mapping) and key not in OF_ROWS:
        return {name: _without_folders(entry, str(name)) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_without_folders(entry, key) for entry in value]
    return Path(str(value)).name if FOLDERS.search(key) and os.path.isabs(str(value)) else value


def _card(config: Mapping[str, Any], results: Mapping[str, str], data: Mapping[str, str]) -> str:
    """Write the model card. Folders of this machine are not named: only names of the hub are links."""
    settings = {**config.get("data", {}), **config.get("model", {})}
    base, sources = str(settings["model_name_or_path"]), _sources(settings.get("train_file"))
    front = ModelCardData(
        base_model=base if _is_of_hub(base) else None,
        datasets=[source for source in sources if _is_of_hub(source)] or None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["radixtrain", "sft", *(["lora"] if settings.get("use_peft") else [])],
    )
    path = Path(base).resolve()  # the name of a run's folder says more than `model`
    shown = base if _is_of_hub(base) else path.parent.name if (path / SETTINGS).is_file() else path.name
    files = ", ".join(Path(source).name for source in sources)
    sections = {
        "Data": _table({"files": files, **data}),
        "Results": _table(results),
        "Settings": f"All of them are in `{SETTINGS}`.",
        "Versions": _table(versions()),
    }
    body = "\n\n".join(f"## {name}\n\n{text}" for name, text in sections.items() if text)
    made = "`radixtrain` computes once what the rows of a batch have in common; the gradient is the ordinary one."
    head = f"---\n{front.to_yaml()}\n---\n{MARK}\n\n# {shown}, fine-tuned{f' on {files}' if files else ''}"
    return f"{head}\n\nSupervised fine-tuning of `{shown}` with `radixtrain`. {made}\n\n{body}\n"


def _is_of_hub(name: str) -> bool:
    return HUB_NAME.fullmatch(name) is not None and not Path(name).exists() and not DATA_FILE.search(name)


def _sources(files: object) -> list[str]:
    """List what `data.train_file` names: a path, or a list of paths and of mappings with a `path`."""
    listed = files if isinstance(files, list | tuple) else [files] if files else []
    return [str(source["path"]) if isinstance(source, Mapping) else str(source) for source in listed]


def _table(entries: Mapping[str, str]) -> str:
    rows = [
        f"| {name} | {' '.join(text.split()).replace('|', chr(92) + '|')} |" for name, text in entries.items() if text
    ]
    return "\n".join(["| | |", "|---|---|", *rows]) if rows else ""
