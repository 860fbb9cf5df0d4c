"""A key that stands twice in a mapping of a YAML file is an error: YAML's loaders take the last one and say nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator

import yaml
from jsonargparse import ArgumentError, get_loader, set_loader

__all__ = ["refuse_repeated_keys"]

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
MERGE = "tag:yaml.org,2002:merge"  # `<<`: a mapping may merge several, and override what they hold

_load = get_loader("yaml")  # jsonargparse's own


def refuse_repeated_keys() -> None:
    """From here on every parser of jsonargparse raises ArgumentError for a key that is given twice.

    One that overrides what an anchor or an earlier file has is not given twice.
    """
    home = os.getcwd()  # while jsonargparse reads a file, it works in the folder of that

    def load(text: str, path: str | os.PathLike[str] = "") -> object:
        """As jsonargparse does. path: of the file; empty for a value of the command line or a file of one section."""
        loaded = _load(text)
        if isinstance(loaded, dict | list):
            for key, first, second in _repeated(yaml.compose(text, Loader=LOADER), set()):
                raise ArgumentError(None, _message(key, first, second, _shown(path, home)))
        return loaded

    set_loader("yaml", load, (yaml.YAMLError,))


def _repeated(node: yaml.Node | None, seen: set[int]) -> Iterator[tuple[str, int, int]]:
    """Each repeated key, with the lines of both, counted from 1. seen: nodes that were looked at, by identity."""
    if id(node) in seen or not isinstance(node, yaml.CollectionNode):
        return
    seen.add(id(node))
    lines: dict[tuple[str, str], int] = {}
    for part in node.value:
        key, value = part if isinstance(node, yaml.MappingNode) else (None, part)
        if isinstance(key, yaml.ScalarNode) and key.tag != MERGE:
            line = key.start_mark.line + 1
            if (key.tag, key.value) in lines:
                yield key.value, lines[key.tag, key.value], line
            lines[key.tag, key.value] = line
        yield from _repeated(value, seen)


def _shown(path: str | os.PathLike[str], home: str) -> str:
    """The path as it is typed in this folder, unless it lies elsewhere; empty if there is none."""
    full = os.path.abspath(path) if os.fspath(path) else ""
    return os.path.relpath(full, home) if full.startswith(os.path.join(home, "")) else full


def _message(key: str, first: int, second: int, name: str) -> str:
    if name:
        return f"{name}:{second}: the key {key} is given twice, first in {name}:{first}; leave one of them out"
    lines = f", in lines {first} and {second}" if first != second else ""
    return f"the key {key} is given twice in one section{lines}; leave one of them out"
