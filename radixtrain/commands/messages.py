"""What jsonargparse says of a wrong key or value, in one line that names the key and the nearest one that exists."""

from __future__ import annotations

import re
from difflib import get_close_matches

from radixtrain.commands.keys import Key, keys_of
from radixtrain.commands.typed import shortened
from radixtrain.errors import did_you_mean

# What a key takes by name: short names, and classes of Lightning without a dotted path.
LOGGERS = "wandb trackio swanlab tensorboard csv none WandbLogger TensorBoardLogger CSVLogger MLFlowLogger CometLogger"
CLASSES = {
    "trainer.logger": tuple(LOGGERS.split()),
    "trainer.callbacks": ("EarlyStopping", "ModelCheckpoint", "LearningRateMonitor", "Timer"),
}

# Types of Python in words.
KINDS = {"int": "an integer", "float": "a number", "bool": "true or false", "str": "text", "NoneType": "null"}

HELP = " (`radixtrain {} --help {}` says more)"

# A key inside of the value of another one, with one of a few words.
NESTED = r'Parser key "([^"]+)": .*? Parser key "([^"]+)": (Expected a \S+Literal\[.*?\]\. Got value: \S+)'


def usage_message(text: str, command: str) -> str:
    """The message for people. text: jsonargparse's. A message of a kind that is not known stays, on one line."""
    line = " ".join(text.split())
    if denied := re.search(r"Importing '([^']+)' is not allowed", line):
        return (
            f"class_path {denied[1]!r} is not imported: a configuration may name only classes of radixtrain, "
            f"lightning, torch and transformers. For other classes, call radixtrain from your own script"
        )
    if inside := re.match(NESTED, line):
        return _wrong_value(f"{inside[1]}.{inside[2]}", inside[3], command)
    wrong = re.match(r'Parser key "([^"]+)": (.*)', line)
    if wrong is None:
        return line
    if option := re.search(r"Option '([^']+)' is not accepted", wrong[2]):
        return f"no key {option[1]} in {wrong[1]} (`radixtrain {command} --help {wrong[1]}` lists the keys)"
    return _wrong_value(wrong[1], wrong[2], command) or _wrong_kind(wrong[1], wrong[2], command) or line


def _wrong_value(key: str, text: str, command: str) -> str:
    """Of a key whose values are a fixed set, plain kinds or classes of Lightning; nothing for any other."""
    got = re.search(r"(?:Got value|Given value): (\S+)$", text)
    if got is None:
        kinds = _kinds(text) if re.search(r"(?:Got value|Given value):$", text) else ""
        return f"{key} must be {kinds}; got an empty text" if kinds else ""
    if text.startswith("Expected a <class 'bool'>"):
        return f"{key} must be true or false; got {got[1]}"
    if key in CLASSES and re.fullmatch(r"\w+", got[1]):
        return f"{key}: no {got[1]!r}{_class_meant(got[1], CLASSES[key])}"
    choices = _literals(text)
    if not choices:
        return f"{key} must be {kinds}; got {got[1]}" if (kinds := _kinds(text)) else ""
    return f"{key} must be one of {', '.join(choices)}; got {got[1]}{did_you_mean(got[1], choices)}"


def _wrong_kind(key: str, text: str, command: str) -> str:
    """For a value that fits none of several types, of which jsonargparse says at length why; else nothing."""
    if "Does not validate against any of the Union" not in text:
        return ""
    if nested := re.search(r"NestedArg\(key='([^']+)'", text):
        return f"no key {nested[1]} in {key}, which is no section{HELP.format(command, key)}"
    if lacking := re.search(r"class_path '[\w.]*?(\w+)': the following arguments are required: ([\w, ]+?) - ", text):
        return f"{key}: {lacking[1]} needs {lacking[2]}, under its init_args"
    classes = re.findall(r"Expected a dot import path string: (\w+)", text)
    if key in CLASSES and classes:
        return f"{key}: no {classes[-1]!r}{_class_meant(classes[-1], CLASSES[key])}"
    kind = _key(key, command).kind
    expected = f" must be {kind.replace(', ', ' or ')}" if kind else ": no such value"
    return f"{key}{expected}; got {shortened(text.rpartition('Given value: ')[2])}{HELP.format(command, key)}"


def _key(name: str, command: str) -> Key:
    """The key of the sources, or one of which nothing is known."""
    return next((key for key in keys_of(command) if key.name == name), Key(name, "", None, ""))


def _kinds(text: str) -> str:
    """What a key takes, in words, if its type is made of plain ones; otherwise nothing."""
    expected = re.match(r"(?:Expected a |Does not .*?Subtypes: \[)((?:<class '[^']+'>(?:, )?)+)(?:\.|\])", text)
    kinds = re.findall(r"<class '([^']+)'>", expected[1]) if expected else []
    return " or ".join(KINDS[kind] for kind in kinds) if set(kinds) <= KINDS.keys() else ""


def _class_meant(name: str, classes: tuple[str, ...]) -> str:
    """`wandb` is near to WandbLogger, and so is `WandbLoger`."""
    meant = {spelling: each for each in reversed(classes) for spelling in _spellings(each)}
    close = get_close_matches(name.lower(), meant, n=1, cutoff=0.5)
    if close:
        return f", did you mean {meant[close[0]]}?"
    return f"; there are {', '.join(classes)}, and others by their class_path"


def _spellings(name: str) -> tuple[str, str]:
    return name.lower(), name.lower().removesuffix("logger")


def _literals(text: str) -> tuple[str, ...]:
    """The words of every `Literal` in jsonargparse's message."""
    sets = re.findall(r"Literal\[([^]]*)\]", text.partition("Errors:")[0])
    return tuple(dict.fromkeys(word for words in sets for word in re.findall(r"'([^']*)'", words)))
