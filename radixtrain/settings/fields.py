"""Settings as dataclasses: a field is a key, with type, limits and default, and its meaning is in the docstring."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import reduce
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Union, get_args, get_origin

from radixtrain.errors import UserError

LARGEST = 2**31 - 1
FINITE = 1.7976931348623157e308
TINY = 5e-324  # the smallest number above 0
BELOW_1 = 1 - 2**-53
TYPE_NAMES = {str: "text", int: "integer", float: "number", bool: "true, false", NoneType: "null"}


class Limits(NamedTuple):
    """The least and the largest number that a key takes. words: for the message, if these two do not say it."""

    least: float
    most: float = math.inf
    words: str = ""

    def broken_by(self, number: float) -> str:
        """Say which limit the number breaks, such as `at least 0`; empty if none. NaN breaks every limit."""
        if self.least <= number <= self.most:
            return ""
        return self.words or (f"at most {self.most:,}" if number > self.most else f"at least {self.least:,}")


class FilledBy(NamedTuple):
    """Marks a field that a user does not set: `key` fills it in."""

    key: str


@dataclass
class Section:
    """Settings whose numbers are within their limits. Raises UserError, by the name of the key, for others."""

    SECTION: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for field in fields(self):
            check_limits(f"{self.SECTION}.{field.name}".lstrip("."), field.type, getattr(self, field.name))


class Key(NamedTuple):
    """A key of a command.

    name: with its section, such as `model.learning_rate`. type: its annotation. default: as YAML writes it; empty for
    an option that has none; None if the key is required. filled_by: the key that fills it in, if a user cannot set it.
    """

    name: str
    type: Any
    default: str | None = ""
    help: str = ""
    filled_by: str = ""

    @property
    def kind(self) -> str:
        """Describe its values: `text, null`, `true, false`, `raise, skip`."""
        return ", ".join(dict.fromkeys(", ".join(map(kind_of, parts_of(self.type))).split(", "))) if self.type else ""


def fields_of(settings: Any, section: str = "") -> tuple[Key, ...]:
    """List every key of a class of settings: its own, and then those of its sections."""
    meant, inside = meanings(settings), [field for field in fields(settings) if is_dataclass(field.type)]
    own = [
        Key(
            f"{section}{field.name}",
            field.type,
            None if default_of(field) is MISSING else as_yaml(default_of(field)),
            meant.get(field.name, ""),
            "".join(each.key for each in annotations_of(field.type) if isinstance(each, FilledBy)),
        )
        for field in fields(settings)
        if field not in inside
    ]
    return (*own, *(key for field in inside for key in fields_of(field.type, f"{section}{field.name}.")))


def check_limits(key: str, kind: object, value: object) -> None:
    """Raise UserError for a number beyond a limit. kind: the annotation of the key."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    for limits in (each for each in annotations_of(kind) if isinstance(each, Limits)):
        if words := limits.broken_by(value):
            also = [word for part, word in ((Literal["auto"], "auto"), (NoneType, "null")) if part in parts_of(kind)]
            raise UserError(f"{key} must be {', or '.join([words, *also])}; got {value}")


def parts_of(kind: object) -> tuple[Any, ...]:
    """Return the members of a union, or the kind itself, without annotations."""
    if get_origin(kind) is Annotated:
        return parts_of(get_args(kind)[0])
    if get_origin(kind) not in (Union, UnionType):
        return (kind,)
    return tuple(each for part in get_args(kind) for each in parts_of(part))


def annotations_of(kind: object) -> Iterator[Any]:
    """Yield what `Annotated` adds to a type, and to the members of a union."""
    if get_origin(kind) is Annotated:
        inner, *own = get_args(kind)
        yield from own
        yield from annotations_of(inner)
    elif get_origin(kind) in (Union, UnionType):
        for part in get_args(kind):
            yield from annotations_of(part)


def kind_of(part: Any) -> str:
    """Describe the values of a type: `number`, `list of text`, `true, false`."""
    inner = get_args(part)
    if get_origin(part) is Literal:
        return ", ".join(dict.fromkeys(map(str, inner)))
    if get_origin(part) is list and get_origin(inner[0]) is Literal:
        return "list of these"
    if get_origin(part) is list:
        return f"list of {' or '.join(map(kind_of, parts_of(inner[0])))}"
    if get_origin(part) is dict or is_dataclass(part):
        return "mapping"
    return TYPE_NAMES.get(part) or str(getattr(part, "__name__", part))


def as_yaml(default: object) -> str:
    """Write a default as YAML does."""
    if default is None or isinstance(default, bool):
        return {None: "null", True: "true", False: "false"}[default]
    return str(default) if isinstance(default, str | int | float) else "its own defaults"


def meanings(settings: Any) -> dict[str, str]:
    """Return the meaning of each key of a class, from its docstring and those of the classes that it extends."""
    found: dict[str, str] = {}
    for kind in reversed(settings.__mro__):
        entries = re.split(r"\n(?=\w+: )", inspect.cleandoc(kind.__doc__ or ""))
        found |= {name: " ".join(text.split()) for name, _, text in (each.partition(":") for each in entries[1:])}
    return found


def default_of(field: Field[Any]) -> Any:
    """Return the value of a key that is not set; MISSING if it must be set."""
    return field.default if field.default_factory is MISSING else field.default_factory()


def value_of(settings: object, key: str) -> Any:
    """Return the value of a dotted key."""
    return reduce(getattr, key.split("."), settings)


def flat(settings: Any) -> dict[str, Any]:
    """Return every setting by its dotted key, also of the sections inside."""
    return {key.name: value_of(settings, key.name) for key in fields_of(type(settings))}
