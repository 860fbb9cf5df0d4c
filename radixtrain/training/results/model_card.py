"""What stands beside the trained weights: README.md, the model card of Hugging Face, and the settings of the run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCardData

from radixtrain.redaction import masked
from radixtrain.versions import versions

CARD, SETTINGS = "README.md", "radixtrain.yaml"
MARK = "<!-- written by radixtrain -->"
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
DATA_FILE = re.compile(r"\.(jsonl|ndjson|json|csv|tsv|parquet|arrow)(\.gz|\.zst)?$")
SHOWN = (  # settings of the card, if they are in the configuration
    *("batch_size", "max_tokens", "max_length", "split_turns", "assistant_only_loss", "completion_only_loss"),
    *("group_by_prefix", "learning_rate", "lr_scheduler_type", "warmup_steps", "weight_decay", "max_grad_norm"),
    *("adam_beta1", "adam_beta2", "adam_epsilon", "dtype", "use_peft", "dedup"),
)
LORA = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "use_dora", "use_rslora", "load_in_4bit")
USE = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # this folder
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
{inputs}
output = model.generate(**inputs, max_new_tokens=200)
print(tokenizer.decode(output[0][inputs["input_ids"].shape[1]:], skip_special_tokens=True))
```"""
SYSTEM, USER = '{{"role": "system", "content": {}}}', '{"role": "user", "content": "Hello"}'
CHAT = """messages = [{turns}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")"""
PLAIN = 'inputs = tokenizer("Once upon a time", return_tensors="pt")'


def documents(
    config: Mapping[str, Any],
    results: Mapping[str, str],
    data: Mapping[str, str],
    has_chat_template: bool,
    system: str = "",
) -> dict[str, str]:
    """Names and texts of the files: the card, and the configuration without secrets.

    config: with the sections `model` and `data`, and whatever else made the model.
    results: what the run reached, by name: loss, r, ...
    data: what it was trained on, by name: rows, tokens, ...
    system: the system turn of its chats, if it is the same in all, for the example.
    """
    clean = masked(dict(config))
    settings = yaml.safe_dump(clean, sort_keys=False, allow_unicode=True)
    turns = ", ".join([*([SYSTEM.format(repr(masked(system)))] if system else []), USER])
    inputs = CHAT.format(turns=turns) if has_chat_template else PLAIN
    return {CARD: _card(clean, masked(results), masked(data), inputs), SETTINGS: settings}


def _card(config: Mapping[str, Any], results: Mapping[str, str], data: Mapping[str, str], inputs: str) -> str:
    settings = {**config.get("data", {}), **config.get("model", {})}
    base, sources = str(settings["model_name_or_path"]), _sources(settings.get("train_file"))
    path = Path(base).resolve()  # no folder of this machine is shown; that of a run of ours says more than `model`
    shown = base if _is_of_hub(base) else path.parent.name if (path / SETTINGS).is_file() else path.name
    files = ", ".join(Path(source).name for source in sources)
    names = (*SHOWN, *(LORA if settings.get("use_peft") else ()))
    shown_settings = {key: _as_yaml(settings[key]) for key in names if key in settings}
    sections = {
        "Use": USE.format(inputs=inputs),
        "Data": _table({"files": files, **data}),
        "Results": _table(results),
        "Settings": f"{_table(shown_settings)}\n\nAll of them: `{SETTINGS}`.",
        "Versions": _table(versions()),
    }
    body = "\n\n".join(f"## {name}\n\n{text}" for name, text in sections.items() if text)
    made = "`radixtrain` computes once what the rows of a batch have in common; the gradient is the ordinary one."
    head = f"---\n{_front_matter(base, sources, bool(settings.get('use_peft')))}\n---\n{MARK}\n\n"
    head += f"# {shown}, fine-tuned{f' on {files}' if files else ''}"
    return f"{head}\n\nSupervised fine-tuning of `{shown}` with `radixtrain`. {made}\n\n{body}\n"


def _front_matter(base: str, sources: Iterable[str], is_lora: bool) -> str:
    """Only names of the hub are links there, so a folder of this machine is not named."""
    card = ModelCardData(
        base_model=base if _is_of_hub(base) else None,
        datasets=[source for source in sources if _is_of_hub(source)] or None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["radixtrain", "sft", *(["lora"] if is_lora else [])],
    )
    return str(card.to_yaml())


def _is_of_hub(name: str) -> bool:
    return HUB_NAME.fullmatch(name) is not None and not Path(name).exists() and not DATA_FILE.search(name)


def _sources(files: Any) -> list[str]:
    """What `data.train_file` names: a path, or a list of paths and of mappings with a `path`."""
    listed = files if isinstance(files, list | tuple) else [files] if files else []
    return [str(source["path"]) if isinstance(source, Mapping) else str(source) for source in listed]


def _as_yaml(value: Any) -> str:
    return str(yaml.safe_dump(value, default_flow_style=True)).removesuffix("...\n").strip()


def _table(entries: Mapping[str, str]) -> str:
    rows = [
        f"| {name} | {' '.join(text.split()).replace('|', chr(92) + '|')} |" for name, text in entries.items() if text
    ]
    return "\n".join(["| | |", "|---|---|", *rows]) if rows else ""
