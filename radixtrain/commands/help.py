"""`<command> --help`: our own keys on a page, without an import that takes seconds; one key in full on request."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence

from radixtrain.commands import COMMANDS
from radixtrain.commands.keys import Key, all_keys, keys_of, known_keys
from radixtrain.errors import did_you_mean

# Keys of Lightning's trainer that most runs need, with what they are without a value; `--help trainer` shows the rest.
TRAINER = {
    "trainer.max_epochs": "3",
    "trainer.max_steps": "-1",
    "trainer.precision": "32-true",
    "trainer.val_check_interval": "1.0",
    "trainer.logger": "",
}
SECTIONS = ("model", "data", "evaluate_generation")
WIDEST = 120
INDENT = 42  # of the explanations


def topic_of(arguments: Sequence[str]) -> str | None:
    """What `--help` (or `-h`) asks for: "" for the page, "all" for every key, or the key or section that follows it.

    arguments: those after the command. None without `--help`.
    """
    if "--help_all" in arguments:
        return "all"
    place = next((index for index, word in enumerate(arguments) if word in ("--help", "-h")), None)
    if place is None:
        return None
    after = arguments[place + 1 : place + 2]
    return after[0] if after and not after[0].startswith("-") else ""


def help_text(command: str, topic: str = "") -> str:
    """The page of a command; with a topic, keys in full: those of a section such as `data`, or one by its name."""
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
    """Name, default and the first sentence, on one line."""
    default = "required" if key.default is None else "" if key.default == "null" else key.default
    sentence = key.help.partition(". ")[0].removesuffix(".") if not key.help.endswith("...") else key.help
    room = max(20, width - INDENT - 1)
    return f"{f'  --{key.name} {default}'.rstrip():<{INDENT}} {textwrap.shorten(sentence, room, placeholder=' ...')}"


def _in_full(command: str, topic: str, width: int) -> str:
    """Every key whose section or last part is the topic; of a topic that is none, the nearest ones."""
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
