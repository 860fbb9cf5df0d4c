"""`<command> --help`: our own keys on a page, without an import that takes seconds; one key in full on request."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence

from radixtrain.commands import COMMANDS
from radixtrain.commands.keys import Key, all_keys, keys_of
from radixtrain.errors import did_you_mean

# Keys of Lightning's trainer that most runs need; the rest is shown by `--help trainer`.
TRAINER = {
    "max_epochs": ("3", "passes over the data, if max_steps is not set either"),
    "max_steps": ("-1", "optimizer steps of the run"),
    "precision": ("32-true", "or bf16-mixed, bf16-true, 64-true"),
    "val_check_interval": ("1.0", "validate every so many steps, or after a share of the epoch"),
    "logger": ("", "wandb, trackio, swanlab, tensorboard, csv or none; a CSV file without it"),
}
# Keys of Lightning's trainer that do more or something else here. They, and those above, are explained in our words.
CHANGED = {
    "accelerator": "cpu or cuda",
    "callbacks": "EarlyStopping, ModelCheckpoint, ...",
    "fast_dev_run": "a single step, to try a configuration",
    "enable_progress_bar": "a bar on a terminal, single lines in a file",
    "log_every_n_steps": "optimizer steps between two lines of the log; a shorter run logs each step",
    "max_time": "DD:HH:MM:SS, or a mapping such as {hours: 2}: how long each start of the run trains; then it is saved",
}
SECTIONS = ("model", "data", "evaluate_generation")
WIDEST = 120
INDENT = 42  # of the explanations


def topic_of(arguments: Sequence[str]) -> str | None:
    """What `--help` (or `-h`) asks for: "" for the page, "all" for Lightning's, or the key or section that follows it.

    arguments: those after the command. None without `--help`.
    """
    if "--help_all" in arguments:
        return "all"
    place = next((index for index, word in enumerate(arguments) if word in ("--help", "-h")), None)
    if place is None:
        return None
    after = arguments[place + 1 : place + 2]
    return after[0] if after and not after[0].startswith("-") else ""


def help_text(command: str, topic: str = "") -> str:
    """The page of a command; with a topic, keys in full: those of a section such as `data`, or one by its name."""
    width = min(WIDEST, shutil.get_terminal_size().columns) if sys.stdout.isatty() else WIDEST
    return _page(command, width) if not topic else _in_full(command, topic.removeprefix("--"), width)


def _page(command: str, width: int) -> str:
    row = COMMANDS[command]
    keys, has_trainer = keys_of(command), row.module == "lightning"
    lines = [f"usage: radixtrain {command} [--config FILE] [--key value ...]", row.help]
    sections = [("", [key for key in keys if "." not in key.name])]
    if has_trainer:
        sections += [(name, [key for key in keys if key.name.startswith(f"{name}.")]) for name in SECTIONS]
        sections.append(("trainer", [Key(f"trainer.{name}", "", *each) for name, each in TRAINER.items()]))
    for name, listed in sections:
        lines += ["", f"{name}:"] if name else [""]
        lines += [_line(key, width) for key in listed]
    asks = [f"--help KEY: a key in full, such as --help {keys[-1].name.rpartition('.')[2]}"]
    if has_trainer:
        asks[0] += "; --help data: a section, such as data or trainer"
        asks.append("--help_all: everything Lightning knows (seconds)")
    return "\n".join([*lines, "", *asks, ""])


def _line(key: Key, width: int) -> str:
    """Name, default and the first sentence, on one line."""
    default = "required" if key.default is None else "" if key.default == "null" else key.default
    sentence = key.help.partition(". ")[0].removesuffix(".") if not key.help.endswith("...") else key.help
    room = max(20, width - INDENT - 1)
    return f"{f'  --{key.name} {default}'.rstrip():<{INDENT}} {textwrap.shorten(sentence, room, placeholder=' ...')}"


def _in_full(command: str, topic: str, width: int) -> str:
    """Every key whose section or last part is the topic; of a topic that is none, the nearest ones."""
    keys = all_keys(command)
    found = [key for key in keys if topic in (key.name, key.name.partition(".")[0], key.name.rpartition(".")[2])]
    if not found:
        return f"no key {topic!r}{did_you_mean(topic, (key.name.rpartition('.')[2] for key in keys))}\n"
    return "\n".join(_entry(key, width) for key in found)


def _entry(key: Key, width: int) -> str:
    values = [f"values: {key.kind}"] if key.kind else []
    default = ["required"] if key.default is None else [f"default: {key.default}"] if key.default else []
    about = [f"    {'; '.join([*values, *default])}"] if values or default else []
    text = textwrap.fill(_meaning(key), width, initial_indent="    ", subsequent_indent="    ")
    return "\n".join([f"--{key.name}", *about, text, ""])


def _meaning(key: Key) -> str:
    """Ours, then Lightning's, for a key of its trainer that we explain, too."""
    section, _, name = key.name.partition(".")
    ours = CHANGED.get(name) or TRAINER.get(name, ("", ""))[1]
    return f"{ours}. Lightning's words: {key.help}" if ours and section == "trainer" else key.help
