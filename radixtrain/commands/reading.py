"""Reads typed settings of a command: converts each value to the type of its key, or refuses it in one line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import yaml

from radixtrain.commands.keys import Key, is_section, kind_of, known_keys
from radixtrain.commands.typed import shortened
from radixtrain.errors import UsageError, did_you_mean
from radixtrain.settings.commands import LINKS, OF_COMMAND
from radixtrain.settings.section import check_limits, parts_of
from radixtrain.yaml_text import check_yaml, load_yaml

# Types of Python in words.
KINDS = {int: "an integer", float: "a number", bool: "true or false", str: "text", NoneType: "null"}
HELP = " (`radixtrain {} --help {}` says more)"
QUOTES = (
    "model.next_tokens: YAML reads yes, no, on and off without quotes as true and false; write them in double quotes, "
    """on the command line inside single ones: --model.next_tokens='["yes", "no"]'"""
)


def read(command: str, given: Sequence[tuple[str, Any]], defaults: Mapping[str, Any]) -> Any:
    """Build the settings of a command, an instance of its class of `settings/commands.py`.

    given: dotted keys with their values, as text or parsed by YAML; later ones win.
    defaults: of keys that are not given, instead of those of the class.

    Raises UsageError for a value that its key does not take; UserError for a number beyond its limits.
    """
    keys = known_keys(command)
    found = {name: fitted(keys[name], value, command) for name, value in {**defaults, **dict(given)}.items()}
    for name, value in found.items():
        check_limits(name, keys[name].type, value)
    return _built(OF_COMMAND[command], found)


def _loaded(value: object) -> Any:
    """Parse a text as YAML; return it unchanged if that is empty, fails, or is larger than settings ever are.

    Also if that is a text too: YAML takes comments, line breaks and quotes out of it.
    """
    if isinstance(value, str) and value.strip():
        with suppress(yaml.YAMLError, UsageError):
            check_yaml(value)
            loaded = load_yaml(value)
            return value if isinstance(loaded, str) or (loaded is None and "#" in value) else loaded
    return value


def fitted(key: Key, value: object, command: str) -> Any:
    """Convert the value to the type of its key. A text is tried as YAML first, then as itself."""
    candidates = [_loaded(value), value] if isinstance(value, str) else [value]
    shape = next((part for part in parts_of(key.type) if is_dataclass(part)), None)
    if shape is not None:
        return _shapes(key, candidates[0], shape, command)
    if key.type in (bool, int, str):
        if found := [each for each in candidates if type(each) is key.type]:
            return found[0]
        raise UsageError(refusal(key, value, command))
    from pydantic import TypeAdapter, ValidationError  # here, since doctor says that it is missing

    for each in candidates:
        with suppress(ValidationError):
            return TypeAdapter(key.type).validate_python(each, strict=True)
    raise UsageError(refusal(key, value, command))


def _shapes(key: Key, value: Any, shape: Any, command: str) -> Any:
    """Make a class of settings, or a list of them, from mappings."""
    if isinstance(value, list):
        return [_shapes(key, each, shape, command) for each in value]
    if not isinstance(value, dict):
        raise UsageError(f"{key.name} must be {key.kind}; got {shortened(value)}")
    inside = {field.name: Key(f"{key.name}.{field.name}", "", "", "", field.type) for field in fields(shape)}
    for name in value:
        if name not in inside:
            raise UsageError(f"no key {name} in {key.name} (`radixtrain {command} --help {key.name}` lists the keys)")
    return shape(**{name: fitted(inside[name], each, command) for name, each in value.items()})


def refusal(key: Key, value: object, command: str = "") -> str:
    """Write the message for a value that does not fit: what was expected, what came, and the nearest word."""
    if key.name == "model.next_tokens" and isinstance(_loaded(value), list):
        return QUOTES
    parts = [part for part in parts_of(key.type) if not _is_list_of_words(part)]
    choices = list(dict.fromkeys(str(word) for part in parts if get_origin(part) is Literal for word in get_args(part)))
    others = [KINDS.get(part, kind_of(part)) for part in parts if get_origin(part) is not Literal]
    if choices and set(others) <= {"null"}:
        expected = f"one of {', '.join(choices)}"
    else:
        expected = " or ".join(dict.fromkeys([*others, *choices]))
    is_plain = all(part in KINDS or get_origin(part) is Literal for part in parts)
    got = "an empty text" if value == "" else shortened(value)
    meant = did_you_mean(str(value), choices) if choices else ""
    unset = f"; the default is {key.default}" if value is None and key.default else ""
    more = HELP.format(command, key.name) if command and not is_plain else ""
    return f"{key.name} must be {expected}; got {got}{meant}{unset}{more}"


def _is_list_of_words(part: object) -> bool:
    return get_origin(part) is list and get_origin(get_args(part)[0]) is Literal


def _built(settings: Any, found: Mapping[str, Any], section: str = "") -> Any:
    """Build an instance of a class of settings. found: the values that are set, by their dotted keys."""
    values: dict[str, Any] = {}
    for field in fields(settings):
        name = f"{section}{field.name}"
        if is_section(field):
            values[field.name] = _built(field.type, found, f"{name}.")
        elif (value := found.get(name, _linked(name, found))) is not MISSING:
            values[field.name] = value
    return settings(**values)


def _linked(name: str, found: Mapping[str, Any]) -> Any:
    """Return the value of the key that fills in this one; not for `data.seed` if `seed_everything` is a boolean."""
    source = LINKS.get(name, "")
    value = found.get(source, MISSING) if name != "data.predict_unlabelled" else MISSING
    return MISSING if name == "data.seed" and isinstance(value, bool) else value


def printed(settings: object, section: str = "") -> dict[str, Any]:
    """Return every key with its value, as a settings file has them, but not those that another key fills in."""
    return {
        name: _printed(value, f"{section}{name}.")
        for name, value in vars(settings).items()
        if f"{section}{name}" not in LINKS
    }


def _printed(value: object, section: str) -> Any:
    if isinstance(value, list):
        return [_printed(each, section) for each in value]
    return printed(value, section) if is_dataclass(value) else value


def print_settings(settings: object) -> None:
    """Print every key with its value, as a settings file has them."""
    print(yaml.safe_dump(printed(settings), sort_keys=False, allow_unicode=True), end="")  # noqa: T201
