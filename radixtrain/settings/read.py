"""A command line and its YAML files -> the settings of a command, checked by their types in one call."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import yaml

from radixtrain.errors import UsageError, did_you_mean
from radixtrain.settings.commands import OF_COMMAND
from radixtrain.settings.fields import Key, check_limits, fields_of, kind_of, parts_of
from radixtrain.settings.synonyms import suggestion
from radixtrain.text_files import read_text

PRINT = "print_config"  # prints the settings and runs nothing
MOST_BYTES = 1 << 20  # of a settings file
MOST_SHOWN = 80  # characters of a value in a message
EXPECTED = {int: "an integer", float: "a number", bool: "true or false", str: "text", NoneType: "null"}
PEFT = "model.use_peft"
ADAPTERS = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "use_dora", "use_rslora")
SECRET = re.compile(
    r"((api|access|private|secret)_?keys?|secrets?|passwords?|passwd|passphrase|credentials?"
    r"|(^|access_?|api_?|auth_?|bearer_?|hf_?|hub_?|refresh_?|wandb_?)tokens?)$"
)


def read(command: str, words: Sequence[str], defaults: Mapping[str, Any] | None = None) -> Any:
    """Return the settings of a command, an instance of its class in `settings/commands.py`.

    words: the command line after the command. A file of `--config` counts where it stands; the last value wins.
    defaults: dotted keys with values that replace those of the class.

    Raises UsageError, naming the keys, for unknown ones and values of a wrong type; UserError for values of the right
    type that no run can use.
    """
    kind = OF_COMMAND[command]
    keys = {key.name: key for key in fields_of(kind) if not key.filled_by}
    given, typed = dict(defaults or {}), set[str]()
    for name, value in _pairs(words, keys):
        given |= _of_file(value, keys) if name == "config" else {name: value}
        typed.add(name)
    values = {name: _loaded(value) for name, value in given.items()}
    _check_names(command, kind, values)
    _check_lora(given, typed, keys)
    return _checked(command, kind, keys, given, values)


def as_tree(settings: Any) -> dict[str, Any]:
    """Return every key with its value, as a settings file has them, but not those that another key fills in."""
    tree = asdict(settings)
    for section, _, name in (key.name.rpartition(".") for key in fields_of(type(settings)) if key.filled_by):
        del tree[section][name]
    return tree


def print_settings(settings: object) -> None:
    """Print every key with its value, as a settings file has them."""
    print(yaml.safe_dump(as_tree(settings), sort_keys=False, allow_unicode=True), end="")  # noqa: T201


def shortened(value: object) -> str:
    """Shorten a value for a message."""
    text = "null" if value is None else "an empty text" if value == "" else str(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]} ..."


def _pairs(words: Sequence[str], keys: Mapping[str, Key]) -> Iterator[tuple[str, str]]:
    """Yield each key of a command line with its text: `true` for a switch that no value follows."""
    waiting = deque(words)
    while waiting:
        word = waiting.popleft()
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--"):
            raise UsageError(f"{word} is not a key: write --key value, and --config FILE for a YAML file")
        if word == f"--{PRINT}":
            continue
        if not equals and waiting and not waiting[0].startswith("--"):
            value = waiting.popleft()
        elif not equals and (name == "config" or (name in keys and keys[name].type is not bool)):
            raise UsageError(f"{name} needs a value: --{name} VALUE")
        elif not equals:
            value = "true"
        yield name, value


# YAML


class Loader(yaml.SafeLoader):
    """YAML as people write it: 1e-5 is a number, for which YAML 1.1 wants a point, and a date stays a text.

    A key given twice is refused. So are anchors, by which a few lines may hold more than fits into the memory.
    """

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if event.anchor is not None:
            raise _refused("`&` and `*` are not read: write the value out, or a text in quotes", event)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            text = key.tag, str(key.value)
            if text in lines:
                raise _refused(f"the key {key.value} is given twice, first in line {lines[text]}; leave one out", key)
            lines[text] = key.start_mark.line + 1
        return super().construct_mapping(node, deep)


def _refused(problem: str, place: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=place.start_mark)


TAG = "tag:yaml.org,2002:"
NUMBER = r"^[-+]?(\d[\d_]*\.?[\d_]*|\.\d+)[eE][-+]?\d+$|^[-+]\.\d+$"  # such as 1e-5, beside those of YAML 1.1
KINDS = {None, *(f"{TAG}{kind}" for kind in ("null", "bool", "int", "float", "str", "seq", "map"))}  # those of JSON
Loader.yaml_constructors = {tag: make for tag, make in yaml.SafeLoader.yaml_constructors.items() if tag in KINDS}
Loader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in known if tag in KINDS]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
Loader.add_implicit_resolver(f"{TAG}float", re.compile(NUMBER), list("-+0123456789."))


def read_yaml(path: str) -> Any:
    """Load a settings file. Raises UsageError, with the line, if it cannot be read, or is not YAML of settings."""
    try:
        return yaml.load(read_text(Path(path).expanduser(), MOST_BYTES), Loader)  # noqa: S506  # a safe loader
    except FileNotFoundError:
        raise UsageError(f"no such file: {path}") from None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        syntax = "" if type(error) is yaml.MarkedYAMLError else "not YAML: "
        raise UsageError(f"{path}{line}: {syntax}{error.problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: not UTF-8, or `!!int abc`
        raise UsageError(f"{path}: not YAML of settings: {' '.join(str(error).split())}") from None


def _loaded(value: Any) -> Any:
    """Parse a text as YAML; return it unchanged if it cannot be parsed.

    Also if that is a text too: YAML takes comments, line breaks and quotes out of it.
    """
    if isinstance(value, str):
        with suppress(yaml.YAMLError, ValueError, RecursionError):
            loaded = yaml.load(value, Loader)  # noqa: S506  # a safe loader
            is_null = value.strip().lower() in ("null", "~")
            return value if isinstance(loaded, str) or (loaded is None and not is_null) else loaded
    return value


def _of_file(path: str, keys: Mapping[str, Key]) -> dict[str, Any]:
    """Return the keys of a settings file, dotted, with their values."""
    tree = read_yaml(path)
    if not isinstance(tree, dict) or not tree:
        got = shortened(tree) if tree else "an empty file"
        raise UsageError(f"{path}: expected keys with their values, such as `output_dir: runs/a`; got {got}")
    return dict(_leaves("", tree, keys))


def _leaves(section: str, tree: Mapping[Any, Any], keys: Mapping[str, Key]) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        name = f"{section}{key}"
        if isinstance(value, dict) and value and name not in keys:
            yield from _leaves(f"{name}.", value, keys)
        else:
            yield name, value


# Keys


def _check_names(command: str, kind: Any, values: Mapping[str, Any]) -> None:
    """Raise UsageError for keys that there are not, and for those that look like a secret, also inside of a value."""
    if secrets := [secret for name, value in values.items() for secret in _secrets(name, value)]:
        raise UsageError(
            f"{', '.join(secrets)}: a run saves its settings, so they hold no secrets; set it in the environment, such "
            f"as WANDB_API_KEY or HF_TOKEN"
        )
    known = {key.name: key.filled_by for key in fields_of(kind)}
    sections = {name.partition(".")[0] for name in known if "." in name}
    for section in sections & values.keys():
        raise UsageError(f"{section} is a section: expected keys with their values; got {shortened(values[section])}")
    if unknown := [name for name in values if name not in known or known[name]]:
        raise UsageError("; ".join(f"no key {name}{suggestion(command, name, known)}" for name in unknown))


def _secrets(name: str, value: Any) -> Iterator[str]:
    """Yield the names that look like those of secrets. Columns of the user's files may have any name."""
    if SECRET.search(name.rpartition(".")[2].replace("-", "_").lower()):
        yield name
    elif isinstance(value, list):
        for each in value:
            yield from _secrets(name, each)
    elif isinstance(value, dict) and not name.endswith("columns"):
        for key, each in value.items():
            yield from _secrets(f"{name}.{key}", each)


def _check_lora(given: Mapping[str, Any], typed: set[str], keys: Mapping[str, Key]) -> None:
    """Raise UsageError for adapters that are described but not trained.

    A file that says `use_peft: false` may have their defaults: a run saves every key with its value.
    """
    if PEFT in typed or str(given.get(PEFT)).lower() == "true":
        return
    for name in (name for name in given if name.removeprefix("model.") in ADAPTERS):
        is_saved = name not in typed and PEFT in given and str(given[name]).lower() == keys[name].default
        if not is_saved:
            raise UsageError(
                f"{name} is set without {PEFT}, so all weights would be trained: add --{PEFT} true for adapters, or "
                f"leave {name} out"
            )


# Values


def _checked(command: str, kind: Any, keys: Mapping[str, Key], given: Mapping[str, Any], values: dict[str, Any]) -> Any:
    """Make the settings. given: values as they were written. values: the same, with texts parsed as YAML."""
    try:
        from pydantic import ValidationError
    except ImportError:  # only `doctor` runs without it, and says so
        return kind(**values)
    try:
        return _instantiate(kind, values)
    except ValidationError as error:  # a text that YAML reads as a number, such as a folder named 2026
        values = values | {name: given[name] for name in _refused_keys(error, keys) if isinstance(given.get(name), str)}
    try:
        return _instantiate(kind, values)
    except ValidationError as error:
        sentences = [
            _sentence(command, keys[name], name in given, given.get(name)) for name in _refused_keys(error, keys)
        ]
        if sentences:
            raise UsageError("; ".join(sentences)) from None
        for name, value in values.items():
            check_limits(name, keys[name].type, value)
        first = error.errors()[0]
        if first["type"] == "value_error":
            raise first["ctx"]["error"] from None
        raise UsageError("a value is no UTF-8 text") from None


def _instantiate(kind: Any, values: Mapping[str, Any]) -> Any:
    """Make settings of values by their dotted keys, in strict mode, in which only JSON has sections."""
    from pydantic import TypeAdapter  # here, since --help needs no imports that take time

    tree: dict[str, Any] = {}
    for key in fields_of(kind):
        section, _, name = key.name.rpartition(".")
        inside, source = tree.setdefault(section, {}) if section else tree, key.filled_by or key.name
        if source in values:
            inside[name] = values[source]
    return TypeAdapter(kind).validate_json(json.dumps(tree), strict=True)


def _refused_keys(error: Any, keys: Mapping[str, Key]) -> list[str]:
    """List the keys whose values have a wrong type, or are missing."""
    places = [each["loc"] for each in error.errors() if each["type"] != "value_error"]
    names = [name for loc in places for name in (*loc[:1], ".".join(map(str, loc[:2]))) if name in keys]
    return list(dict.fromkeys(names))


def _sentence(command: str, key: Key, is_given: bool, value: Any) -> str:
    """Write the message for a value that does not fit: what was expected, what came, and the nearest word."""
    if not is_given:
        return f"{key.name} is missing: write --{key.name} VALUE, or the key in the file of --config"
    parts = [part for part in parts_of(key.type) if not _is_list_of_words(part)]
    choices = list(dict.fromkeys(str(word) for part in parts if get_origin(part) is Literal for word in get_args(part)))
    others = [EXPECTED.get(part, kind_of(part)) for part in parts if get_origin(part) is not Literal]
    if choices and set(others) <= {"null"}:
        expected = f"one of {', '.join(choices)}"
    else:
        expected = " or ".join(dict.fromkeys([*others, *choices]))
    is_plain = all(part in EXPECTED or get_origin(part) is Literal for part in parts)
    meant = did_you_mean(str(value), choices, cutoff=0.7) if choices else ""
    unset = f"; the default is {key.default}" if value is None and key.default else ""
    more = "" if is_plain else f" (`radixtrain {command} --help {key.name}` says more)"
    return f"{key.name} must be {expected}; got {shortened(value)}{meant}{unset}{more}"


def _is_list_of_words(part: object) -> bool:
    return get_origin(part) is list and get_origin(get_args(part)[0]) is Literal
