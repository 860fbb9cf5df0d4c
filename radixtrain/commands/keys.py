"""The keys of the command line, one by one, as the classes of settings have them: for help, checks and pages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from types import NoneType
from typing import Any, Literal, NamedTuple, get_args, get_origin

from radixtrain.settings.commands import LINKS, OF_COMMAND
from radixtrain.settings.section import default_of, meanings, parts_of

WORDS = {str: "text", int: "integer", float: "number", bool: "true, false", NoneType: "null"}


class Key(NamedTuple):
    """name: with its section, such as `model.learning_rate`. kind: its values in words. type: its annotation.

    default: as YAML writes it; empty for an option that has none; None if the key is required.
    """

    name: str
    kind: str
    default: str | None
    help: str
    type: Any = Any


CONFIG = Key("config", "a YAML file", "", "a file with these keys; what comes later overrides it.")
PRINT = Key("print_config", "", "", "print every key with its value, and run nothing.")
HELP = Key("help", "", "", "")


def kind_of(part: Any) -> str:
    """The values of a type in words: `number`, `list of text`, `true, false`."""
    inner = get_args(part)
    if get_origin(part) is Literal:
        return ", ".join(dict.fromkeys(map(str, inner)))
    if get_origin(part) is list:
        return f"list of {' or '.join(map(kind_of, parts_of(inner[0])))}"
    if get_origin(part) is dict or is_dataclass(part):
        return "mapping"
    return WORDS.get(part) or str(getattr(part, "__name__", part))


def as_yaml(default: object) -> str:
    """A default as YAML writes it."""
    if default is None or isinstance(default, bool):
        return {None: "null", True: "true", False: "false"}[default]
    return str(default) if isinstance(default, str | int | float) else "its own defaults"


@cache
def all_keys(command: str) -> tuple[Key, ...]:
    """Every key of a command, those without a section first, those of Lightning's trainer last."""
    keys = list(_keys(OF_COMMAND[command]))
    top = [key for key in keys if "." not in key.name]
    return (CONFIG, *top, *([PRINT] if len(top) < len(keys) else []), *keys[len(top) :])


def keys_of(command: str) -> tuple[Key, ...]:
    """What the page of a command shows: every key but those of Lightning's trainer."""
    return tuple(key for key in all_keys(command) if key.help and not key.name.startswith("trainer."))


def trainer_keys() -> tuple[Key, ...]:
    """The keys of Lightning's trainer."""
    return tuple(key for key in all_keys("fit") if key.name.startswith("trainer."))


def known_keys(command: str) -> dict[str, Key]:
    """What may be typed, by its name."""
    return {key.name: key for key in (HELP, PRINT, *all_keys(command))}


def _keys(settings: Any, section: str = "") -> Iterator[Key]:
    """The keys of a class, and then those of the sections in it."""
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
