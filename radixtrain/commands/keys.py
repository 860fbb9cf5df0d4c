"""The keys of the command line, one by one, read from the settings classes; and `<command> --help`.

The page of a command shows our own keys, without an import that takes seconds, and one key in full on request. Checks
and the documentation read the same keys.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from types import NoneType
from typing import Any, Literal, NamedTuple, get_args, get_origin

from radixtrain.commands import COMMANDS
from radixtrain.errors import did_you_mean
from radixtrain.settings.commands import LINKS, OF_COMMAND
from radixtrain.settings.section import default_of, meanings, parts_of

WORDS = {str: "text", int: "integer", float: "number", bool: "true, false", NoneType: "null"}


class Key(NamedTuple):
    """A key of the command line.

    name: with its section, such as `model.learning_rate`. kind: its values in words. type: its annotation.
    default: as YAML writes it; empty for an option that has none; None if the key is required.
    """

    name: str
    kind: str
    default: str | None
    help: str
    type: Any = Any


CONFIG = Key("config", "a YAML file", "", "a file with these keys; later arguments override it.")
PRINT = Key("print_config", "", "", "print every key with its value, without running.")
HELP = Key("help", "", "", "")


def kind_of(part: Any) -> str:
    """Describe the values of a type: `number`, `list of text`, `true, false`."""
    inner = get_args(part)
    if get_origin(part) is Literal:
        return ", ".join(dict.fromkeys(map(str, inner)))
    if get_origin(part) is list:
        return f"list of {' or '.join(map(kind_of, parts_of(inner[0])))}"
    if get_origin(part) is dict or is_dataclass(part):
        return "mapping"
    return WORDS.get(part) or str(getattr(part, "__name__", part))


def as_yaml(default: object) -> str:
    """Write a default as YAML does."""
    if default is None or isinstance(default, bool):
        return {None: "null", True: "true", False: "false"}[default]
    return str(default) if isinstance(default, str | int | float) else "its own defaults"


@cache
def all_keys(command: str) -> tuple[Key, ...]:
    """List every key of a command, those without a section first, those of Lightning's trainer last."""
    keys = list(_keys(OF_COMMAND[command]))
    top = [key for key in keys if "." not in key.name]
    return (CONFIG, *top, *([PRINT] if len(top) < len(keys) else []), *keys[len(top) :])


def keys_of(command: str) -> tuple[Key, ...]:
    """List the keys that the page of a command shows: all but those of Lightning's trainer."""
    return tuple(key for key in all_keys(command) if key.help and not key.name.startswith("trainer."))


def known_keys(command: str) -> dict[str, Key]:
    """Return every key that may be typed, by name."""
    return {key.name: key for key in (HELP, PRINT, *all_keys(command))}


def _keys(settings: Any, section: str = "") -> Iterator[Key]:
    """Yield the keys of a class, and then those of its sections."""
    inside = [field for field in fields(settings) if is_section(field)]
    meant = meanings(settings)
    for field in fields(settings):
        name = f"{section}{field.name}"
        if field not in inside and name not in LINKS:
            kind = ", ".join(dict.fromkeys(", ".join(map(kind_of, parts_of(field.type))).split(", ")))
            default = default_of(field)
            yield Key(
                name, kind, None if default is MISSING else as_yaml(default), meant.get(field.name, ""), field.type
            )
    for field in inside:
        yield from _keys(field.type, f"{section}{field.name}.")


def is_section(field: Field[Any]) -> bool:
    return is_dataclass(field.type)


# Keys of Lightning's trainer that most runs need, with their defaults; `--help trainer` shows the rest.
TRAINER = {
    "trainer.max_epochs": "3",
    "trainer.max_steps": "-1",
    "trainer.precision": "32-true",
    "trainer.val_check_interval": "1.0",
    "trainer.logger": "",
}
SECTIONS = ("model", "data", "evaluate_generation")
WIDEST = 120
INDENT = 42  # column in which explanations begin


def topic_of(arguments: Sequence[str]) -> str | None:
    """Return what `--help` (or `-h`) is about: "" for the page, "all" for every key, or the key or section after it.

    arguments: those after the command. Returns None without `--help`.
    """
    if "--help_all" in arguments:
        return "all"
    place = next((index for index, word in enumerate(arguments) if word in ("--help", "-h")), None)
    if place is None:
        return None
    after = arguments[place + 1 : place + 2]
    return after[0] if after and not after[0].startswith("-") else ""


def help_text(command: str, topic: str = "") -> str:
    """Write the page of a command; with a topic, its keys in full: a section such as `data`, or one key by name."""
    width = min(WIDEST, shutil.get_terminal_size().columns) if sys.stdout.isatty() else WIDEST
    return _page(command, width) if not topic else _in_full(command, topic.removeprefix("--"), width)


def _page(command: str, width: int) -> str:
    row = COMMANDS[command]
    keys, has_trainer = keys_of(command), row.module == "lightning"
    lines = [f"usage: radixtrain {command} [--config FILE] [--key value ...]", row.help]
    sections = [("", [key for key in keys if "." not in key.name])]
    if has_trainer:
        sections += [(name, [key for key in keys if key.name.startswith(f"{name}.")]) for name in SECTIONS]
        known = known_keys(command)
        sections.append(("trainer", [known[name]._replace(default=default) for name, default in TRAINER.items()]))
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
