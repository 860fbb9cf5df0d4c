"""YAML as people write it, checked before it is built: what is too deep, too large or given twice is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from radixtrain.errors import UsageError
from radixtrain.text_files import read_text

PACKAGES = ("radixtrain", "lightning", "torch", "transformers")
MOST_CHARACTERS = 1 << 20
MOST_DEPTH = 50
MOST_DIGITS = 300
BASE: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Loader(BASE):
    """YAML as people write it: 1e-5 is a number, for which YAML 1.1 wants a point, and a date stays a text."""


TAG = "tag:yaml.org,2002:"
DIGITS, EXPONENT = r"\d[\d_]*", r"[eE][-+]?\d+"
NUMBER = (
    rf"[-+]?({DIGITS}\.[\d_]*({EXPONENT})?|{DIGITS}{EXPONENT}|\.{DIGITS}({EXPONENT})?|\.(inf|Inf|INF))|\.(nan|NaN|NAN)"
)
Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if tag not in (f"{TAG}float", f"{TAG}timestamp")]
    for first, known in BASE.yaml_implicit_resolvers.items()
}
Loader.add_implicit_resolver(f"{TAG}float", re.compile(rf"^({NUMBER})$"), list("-+0123456789."))


def load_yaml(text: str) -> Any:
    """Load YAML text. Raises yaml.YAMLError, also for `!!int abc`."""
    try:
        return yaml.load(text, Loader)  # noqa: S506  # a safe loader
    except (ValueError, LookupError, TypeError) as error:
        raise yaml.YAMLError(str(error)) from None


class _Collection:
    """A list or a mapping that is not closed yet. lines: of its keys, by tag and text."""

    def __init__(self, is_mapping: bool):
        self.is_mapping, self.at_key = is_mapping, is_mapping
        self.lines: dict[tuple[str, str], int] = {}


def read_yaml(path: str) -> Any:
    """Load a settings file. Raises UsageError as `parse_yaml`, and OSError if it cannot be read, or is a device."""
    try:
        return parse_yaml(read_text(Path(path).expanduser()), path)
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: a settings file must be UTF-8 text: {error}") from None


def parse_yaml(text: str, name: str) -> Any:
    """Load settings text. Raises UsageError, with the line, for text that is not YAML, or that `check_yaml` refuses."""
    try:
        check_yaml(text, name)
        return load_yaml(text)
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or error
        line = f":{mark.line + 1}" if mark else ""
        raise UsageError(f"{name}{line}: not YAML: {' '.join(str(problem).split())}") from None


def check_yaml(text: str, name: str = "") -> None:
    """Raise UsageError for more than settings ever are, and for a key given twice, of which loaders take the last.

    Raises it also for anchors, aliases and `<<`, by which a few lines may hold more than fits into the memory.

    name: of the file.

    Raises also yaml.YAMLError.
    """
    if len(text) > MOST_CHARACTERS:
        raise UsageError(f"{name or 'a value'} has {len(text):,} characters, settings at most {MOST_CHARACTERS:,}")
    try:
        loader = Loader(text)
    except UnicodeEncodeError:  # the command line had bytes that are not UTF-8
        raise UsageError(f"{name or 'a value'} is not UTF-8 text: {text!a}") from None
    open_: list[_Collection] = [_Collection(is_mapping=False)]
    while loader.check_event():
        event, inner = loader.get_event(), open_[-1]
        if isinstance(event, yaml.CollectionEndEvent):
            open_.pop()
        if not isinstance(event, yaml.NodeEvent):
            continue
        line = event.start_mark.line + 1
        where = f"{name}:{line}: " if name else ""
        is_plain = isinstance(event, yaml.ScalarEvent) and not event.style
        if event.anchor is not None or (is_plain and event.value == "<<"):
            raise UsageError(f"{where}`&`, `*` and `<<` are not read: write the value out, or a text in quotes")
        if is_plain and re.search(rf"^[-+.]?\w*\d{{{MOST_DIGITS}}}", event.value):
            raise UsageError(f"{where}a number of {len(event.value):,} digits; as a text, write it in quotes")
        if inner.at_key and isinstance(event, yaml.ScalarEvent):
            key = (loader.resolve(yaml.ScalarNode, event.value, event.implicit), event.value)
            if key in inner.lines:
                raise UsageError(_twice(event.value, inner.lines[key], line, name))
            inner.lines[key] = line
        inner.at_key = inner.is_mapping and not inner.at_key
        if isinstance(event, yaml.CollectionStartEvent):
            open_.append(_Collection(isinstance(event, yaml.MappingStartEvent)))
            if len(open_) > MOST_DEPTH:
                raise UsageError(f"{where}more than {MOST_DEPTH} lists or sections inside of one another")


def _twice(key: str, first: int, second: int, name: str) -> str:
    if name:
        return f"{name}:{second}: the key {key} is given twice, first in {name}:{first}; leave one of them out"
    lines = f", in lines {first} and {second}" if first != second else ""
    return f"the key {key} is given twice in one section{lines}; leave one of them out"
