"""`<command> --help`: our own keys on a page, or a key or a section in full, without an import that takes seconds."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence

from radixtrain.commands import COMMANDS
from radixtrain.errors import did_you_mean
from radixtrain.settings.commands import OF_COMMAND
from radixtrain.settings.fields import Key, fields_of

CONFIG = Key("config", "a YAML file", "", "a file with these keys; later arguments override it.")
PRINT = Key("print_config", "", "", "print every key with its value, without running.")
# Keys of the section `trainer` that most runs need; `--help trainer` shows the rest.
TRAINER = tuple(f"trainer.{name}" for name in ("max_epochs", "max_steps", "precision", "val_check_interval", "logger"))
SECTIONS = ("model", "data", "evaluate_generation")
WIDEST = 120
INDENT = 42  # column in which explanations begin


def all_keys(command: str) -> tuple[Key, ...]:
    """List every key of a command, those without a section first, those of the section `trainer` last."""
    keys = [key for key in fields_of(OF_COMMAND[command]) if not key.filled_by]
    top = [key for key in keys if "." not in key.name]
    return (CONFIG, *top, *([PRINT] if len(top) < len(keys) else []), *keys[len(top) :])


def keys_of(command: str) -> tuple[Key, ...]:
    """List the keys that the page of a command shows: all but those of the section `trainer`."""
    return tuple(key for key in all_keys(command) if key.help and not key.name.startswith("trainer."))


def topic_of(arguments: Sequence[str]) -> str:
    """Return what `--help` (or `-h`) is about: "" for the page, "all" for every key, or the key or section after it.

    arguments: those after the command, with `--help`, `-h` or `--help_all`.
    """
    if "--help_all" in arguments:
        return "all"
    place = next(index for index, word in enumerate(arguments) if word in ("--help", "-h"))
    after = arguments[place + 1 : place + 2]
    return after[0] if after and not after[0].startswith("-") else ""


def help_text(command: str, topic: str = "") -> str:
    """Write the page of a command; with a topic, its keys in full: a section such as `data`, or one key by name."""
    width = min(WIDEST, shutil.get_terminal_size().columns) if sys.stdout.isatty() else WIDEST
    return _page(command, width) if not topic else _in_full(command, topic.removeprefix("--"), width)


def _page(command: str, width: int) -> str:
    row = COMMANDS[command]
    keys, has_trainer = keys_of(command), row.module == "fit"
    lines = [f"usage: radixtrain {command} [--config FILE] [--key value ...]", row.help]
    sections = [("", [key for key in keys if "." not in key.name])]
    if has_trainer:
        sections += [(name, [key for key in keys if key.name.startswith(f"{name}.")]) for name in SECTIONS]
        sections.append(("trainer", [key for key in all_keys(command) if key.name in TRAINER]))
    for name, listed in sections:
        lines += ["", f"{name}:"] if name else [""]
        lines += [_line(key, width) for key in listed]
    asks = [f"--help KEY: a key in full, such as --help {keys[-1].name.rpartition('.')[2]}"]
    if has_trainer:
        asks[0] += "; --help data: a section, such as data or trainer"
        asks.append("--help_all: every key in full")
    return "\n".join([*lines, "", *asks, ""])


def _line(key: Key, width: int) -> str:
    """Write name, default and the first sentence on one line."""
    default = "required" if key.default is None else "" if key.default == "null" else key.default
    sentence = key.help.partition(". ")[0].removesuffix(".") if not key.help.endswith("...") else key.help
    room = max(20, width - INDENT - 1)
    return f"{f'  --{key.name} {default}'.rstrip():<{INDENT}} {textwrap.shorten(sentence, room, placeholder=' ...')}"


def _in_full(command: str, topic: str, width: int) -> str:
    """Describe every key whose section or last part is the topic; for an unknown topic suggest the nearest ones."""
    keys = [key for key in all_keys(command) if key.help]
    found = [
        key for key in keys if topic in ("all", key.name, *key.name.partition(".")[:1], *key.name.rpartition(".")[2:])
    ]
    if not found:
        return f"no key {topic!r}{did_you_mean(topic, (key.name.rpartition('.')[2] for key in keys))}\n"
    return "\n".join(_entry(key, width) for key in found)


def _entry(key: Key, width: int) -> str:
    values = [f"values: {key.kind}"] if key.kind else []
    default = ["required"] if key.default is None else [f"default: {key.default}"] if key.default else []
    about = [f"    {'; '.join([*values, *default])}"] if values or default else []
    text = textwrap.fill(key.help, width, initial_indent="    ", subsequent_indent="    ")
    return "\n".join([f"--{key.name}", *about, text, ""])
