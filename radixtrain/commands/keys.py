"""The keys of the command line as the sources write them: signatures and docstrings, read and not imported.

The parser of jsonargparse knows the same keys, but the imports that it needs take seconds, and a page of help cannot
wait for torch.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from radixtrain.commands import COMMANDS

PACKAGE = Path(__file__).resolve().parents[1]
WORDS = {"str": "text", "int": "integer", "float": "number", "bool": "true, false", "None": "null"}
GIVEN_BY_US = ("self", "model", "datamodule")  # arguments of a method of the trainer that are no keys
# Keys that another key fills in, and that cannot be set themselves.
LINKS = {
    "trainer.default_root_dir": "output_dir",
    "model.dedup": "dedup",
    "data.dedup": "dedup",
    "data.sp_size": "sp_size",
    "data.seed": "seed_everything",
    "data.model_name_or_path": "model.model_name_or_path",
    "data.predict_unlabelled": "model.scores",
    "data.predict_prompts": "model.generate",
}


class Key(NamedTuple):
    """name: with its section, such as `model.learning_rate`. kind: its values in words.

    default: as YAML writes it; empty for an option that has none; None if the key is required.
    """

    name: str
    kind: str
    default: str | None
    help: str


CONFIG = Key("config", "a YAML file", "", "a file with these keys; what comes later overrides it.")
# What Lightning's command line adds by itself.
SEED = Key("seed_everything", "integer", "42", "of the initial adapters, the order of the rows and `data.val_size`.")
CKPT = Key(
    "ckpt_path",
    "text, null",
    "null",
    "a checkpoint to go on from (fit), or to take weights of: `last`, `best`, `auto` (or a start), or a path.",
)
HELP = Key("help", "", "", "")
PRINT = Key("print_config", "", "", "print every key with its value, and run nothing.")


@cache
def keys_of(command: str) -> tuple[Key, ...]:
    """Every key of a command of the table but those of Lightning's trainer, in the order of the sources."""
    module = COMMANDS[command].module
    if module != "lightning":
        return (CONFIG, *_keys(PACKAGE / "commands" / f"{module}.py", command))
    own = _keys(PACKAGE / "training" / "trainer.py", f"Trainer.{command}")
    shared = () if any(key.name == "ckpt_path" for key in own) else (CKPT,)
    evaluation = PACKAGE / "training" / "answers" / "evaluate_generation.py"
    sections = [
        *_keys(evaluation, "EvaluateGeneration.__init__", "evaluate_generation."),
        *_keys(PACKAGE / "training" / "module.py", "RadixModule.__init__", "model."),
        *_keys(PACKAGE / "data" / "datamodule.py", "SFTData.__init__", "data."),
    ]
    top = _keys(PACKAGE / "commands" / "cli_args.py", "run_settings")
    return (CONFIG, *top, SEED, *shared, *own, PRINT, *(key for key in sections if key.name not in LINKS))


@cache
def trainer_keys() -> tuple[Key, ...]:
    """The keys of Lightning's trainer, from its source, but those that another one fills in."""
    return tuple(key for key in _keys(_trainer(), "Trainer.__init__", "trainer.") if key.name not in LINKS)


def _trainer() -> Path:
    found = find_spec("lightning")
    assert found is not None and found.origin is not None
    return Path(found.origin).parent / "pytorch" / "trainer" / "trainer.py"


def all_keys(command: str) -> tuple[Key, ...]:
    """Every key of a command, those of Lightning's trainer last."""
    return (*keys_of(command), *(trainer_keys() if COMMANDS[command].module == "lightning" else ()))


def known_keys(command: str) -> dict[str, Key]:
    """What may be typed, by its name: the keys, and arguments of Lightning's method that our pages do not explain."""
    lightnings = _keys(_trainer(), f"Trainer.{command}") if COMMANDS[command].module == "lightning" else []
    passed = [key for key in lightnings if "dataloaders" not in key.name]
    return {key.name: key for key in (HELP, PRINT, *passed, *all_keys(command))}


@cache
def _source(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _keys(path: Path, name: str, section: str = "") -> list[Key]:
    """The arguments of a function, or none if there is no such function: not every command has keys of its own."""
    found = _find(_source(path), name)
    if found is None:
        return []
    function, docstring = found
    meant = _documented(docstring)
    return [
        Key(f"{section}{each.arg}", _kind(each.annotation), default, meant.get(each.arg, ""))
        for each, default in _arguments(function)
        if each.arg not in GIVEN_BY_US
    ]


def _find(tree: ast.Module, name: str) -> tuple[ast.FunctionDef, str] | None:
    """A function and the docstring that describes its arguments: that of the class, if its `__init__` has none."""
    body, docstring = tree.body, ""
    for part in name.split("."):
        named = [node for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == part]
        if not named:
            return None
        docstring = ast.get_docstring(named[-1]) or docstring
        if isinstance(named[-1], ast.FunctionDef):
            return named[-1], docstring
        body = named[-1].body
    return None


def _arguments(function: ast.FunctionDef) -> Iterator[tuple[ast.arg, str | None]]:
    """The arguments with their defaults as YAML writes them."""
    positional = function.args.args
    without = [None] * (len(positional) - len(function.args.defaults))
    for argument, default in zip(positional, [*without, *function.args.defaults], strict=True):
        yield argument, None if default is None else _as_yaml(default)
    for argument, default in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True):
        yield argument, None if default is None else _as_yaml(default)


def _as_yaml(default: ast.expr) -> str:
    if not isinstance(default, ast.Constant):
        return "its own defaults" if isinstance(default, ast.Call) else ast.unparse(default)
    words = {None: "null", True: "true", False: "false"}
    if default.value is None or isinstance(default.value, bool):
        return words[default.value]
    return str(default.value)


def _kind(annotation: ast.expr | None) -> str:
    """The values in words: `number`, `list of text`, `true, false`."""
    if annotation is None:
        return ""
    text = re.sub(r"Literal\[([^]]*)\]", lambda found: found[1], ast.unparse(annotation))
    text = re.sub(r"dict\[.*?\]", "mapping", text)
    text = re.sub(r"list\[(\w+)\]", r"list of \1", text)
    for name, word in WORDS.items():
        text = re.sub(rf"\b{name}\b", word, text)
    return text.replace("'", "").replace(" | ", ", ")


def _documented(docstring: str) -> dict[str, str]:
    """The descriptions under `Args:`, each on one line."""
    if "Args:" not in docstring:
        return {}
    under = re.split(r"\n(?=\S)", docstring.partition("Args:\n")[2])[0]
    entries = re.split(r"\n    (?=\w+:)", "\n" + under)
    named = (entry.partition(":") for entry in entries if ":" in entry)
    return {name.strip(): " ".join(text.split()) for name, _, text in named}
