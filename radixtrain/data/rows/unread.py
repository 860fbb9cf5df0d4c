"""Columns and keys of messages that nothing reads: most are only counted, and those that may tell how to learn are not.

`tells` judges a name and its value. In a turn, a list or some thinking is a part that would not be learned.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from radixtrain.data.rows.messages import THOUGHTS, Message, thought
from radixtrain.data.rows.verdicts import COUNTS, PREFERENCE, THINKING, tells, words_of
from radixtrain.errors import DataError

PROSE = 4  # words of a text that somebody has written for a reader
OF_TURN = {"role", "content", "tool_calls", "weight", *THOUGHTS}


def check_turns(messages: list[Message], words: frozenset[str], where: str, answered: bool = True) -> set[str]:
    """Return the keys of messages that hold something and that neither we nor the template read, as `messages.KEY`.

    messages: as `check_messages` returns them. words: of the template, which reads no other keys.
    answered: False if nothing is learned.

    Raises DataError for a key that holds a part of a turn or may tell whether it is learned.
    """
    found, told = set[str](), dict[str, str]()
    for number, message in enumerate(messages, start=1):
        bears_loss = message["role"] == "assistant" and message.get("weight") != 0
        for key, value in message.items():
            if key in OF_TURN or key in words or value in ("", [], {}):
                continue
            found.add(f"messages.{key}")
            if answered and (reason := _reason(key, value, bears_loss)):
                what = f"turn {number} (role {message['role']!r}): {key}: {_shown(value)} {reason}"
                told.setdefault(key, f"{what}data.columns: {{{in_yaml(f'messages.{key}')}: null}} leaves it out")
    if told:
        raise DataError(where, "; ".join(told.values()))
    return found


def _reason(key: str, value: object, bears_loss: bool) -> str:
    """Say what is wrong with an unread key of a message, and how to read it; empty if it tells nothing."""
    words = words_of(key)
    is_prose = isinstance(value, str) and len(value.split()) >= PROSE and not words & COUNTS
    if not isinstance(value, list) and not (bears_loss and (is_prose or tells(key, value, of_turn=True))):
        return ""
    if isinstance(value, int | float):
        return f"is not read; data.columns: {{messages.weight: messages.{key}}} reads it (0: no loss on the turn), "
    if words & THINKING and isinstance(thought(value), str):
        return f"is not learned; data.columns: {{messages.reasoning_content: messages.{key}}} reads it as thinking, "
    return "is not read, so it would be lost; "


def check_unread(unread: Mapping[str, Any], where: str) -> None:
    """Raise DataError for columns that may tell whether, or how, to learn from their row.

    unread: columns that nothing reads and that do not repeat a part of the conversation.
    """
    told = {name: value for name, value in unread.items() if tells(name, value)}
    if not told:
        return
    columns = f"data.columns: {{{', '.join(f'{in_yaml(name)}: null' for name in told)}}}"
    if data := preference_data(told):
        raise DataError(where, f"{data}; to learn from the other columns only, write {columns}")
    shown = ", ".join(f"{name}: {_shown(value)}" for name, value in told.items())
    reason = "nothing reads this, and it may say what is good to learn, or hold another answer"
    mask = ", or name it mask if it has 1 for each token to learn" if "mask" in words_of(shown) else ""
    raise DataError(where, f"{shown}: {reason}; keep the rows to imitate, and write {columns}{mask}")


def preference_data(fields: Mapping[str, Any]) -> str:
    """Name the columns that hold answers of which one is preferred, and what learns from them; empty if none does."""
    named = " and ".join(name for name in fields if words_of(name) & PREFERENCE)
    learner = "preference data, which a trainer such as TRL's DPOTrainer learns from"
    shares = "share_prefixes (docs/any-trainer.md) shares their prompts"
    return f"{named}: {learner}: {shares}" if named else ""


def in_yaml(name: str) -> str:
    """Write a name as a key of YAML."""
    return name if re.fullmatch(r"[^\W\d][\w.-]*", name) else json.dumps(name, ensure_ascii=False)


def _shown(value: object) -> str:
    return repr(value)[:40]
