"""Columns and keys of messages that nothing reads: most are only counted, and those that may tell how to learn are not.

A text, an id, a count or a time tells nothing. A truth value, a number as verdicts have (at most 1, or a fraction), a
message or a name such as `rejected` may mark what must not be imitated, and in a turn a list or some thinking is a part
that would not be learned.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from radixtrain.data.rows.messages import THOUGHTS, Message
from radixtrain.errors import DataError

WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")  # of a name: `isGood`, `is_good`, `LOSS_MASK`


def words_of(name: str) -> set[str]:
    """Split a name into its words, in lower case."""
    return {word.lower() for word in WORD.findall(name)}


COUNTS = words_of(
    "id ids uuid idx index num n nr no number count counts total len length size token tokens word words char "
    "chars turn turns round rounds step steps year month day date time timestamp created updated seed version "
    "epoch page line row position offset start end level difficulty category topic cluster temperature top "
    "penalty cost price duration seconds latency language lang views unnamed column fold attempt trial"
)
VERDICTS = words_of(
    "label labels verdict rating ratings rated score scores reward rewards rank ranks ranking grade stars vote "
    "votes upvotes downvotes likes dislikes feedback preference preferences preferred dispreferred chosen "
    "rejected reject accepted accept winner loser better worse best worst good bad correct incorrect wrong "
    "correctness pass passed fail failed success successful resolved unresolved solved desirable undesirable "
    "helpful helpfulness kto judgment judgement judge thumbs valid invalid advantage advantages loss mask masked "
    "weight skip ignore exclude drop train trainable"
)
PREFERENCE = words_of("chosen rejected preferred dispreferred")
THINKING = words_of(
    "think thinking thought thoughts reasoning rationale cot analysis scratchpad monologue reflection deliberation "
    "introspection"
)
BAD = words_of(
    "true false yes no bad wrong incorrect fail failed failure reject rejected undesirable dislike disliked "
    "thumbsdown downvote downvoted worse loser unresolved"
)
BAD |= {"0", "1", "00", "10"}  # of a table, which has `1.0` as text
SWITCHES = {"on", "off"}  # `reasoning: "on"` says how a row was made
AS_TRAINED = {"train", "training", "trainable", "loss", "loss_mask", "loss_weight", "weight"}
"""Names whose 1 or true asks for what is done anyway."""
NO_VERDICTS = {"parallel_tool_calls", "stream", "language_score"}
PROSE = 4  # words of a text that somebody has written for a reader
OF_TURN = {"role", "content", "tool_calls", "weight", *THOUGHTS}


def tells(name: str, value: object, inside: bool = False) -> bool:
    """Return whether an unread value may tell how, or whether, to learn from its row or its turn.

    inside: it is in an object, such as `metadata`, where only a name can tell.
    """
    words = words_of(name)
    is_verdict = bool(words & VERDICTS)
    if isinstance(value, Mapping):
        is_told = is_message(value) or (is_verdict and not inside)
        return is_told or any(tells(str(key), each, inside=True) for key, each in value.items())
    if isinstance(value, list | tuple):
        return any((not inside and isinstance(each, int | float)) or tells(name, each, inside) for each in value)
    if isinstance(value, str):
        text = re.sub(r"[\W_]", "", value).lower()
        is_told = text in BAD and (is_verdict or not (inside or words & COUNTS))
        return is_told or bool(text and text not in SWITCHES and (words & THINKING or (is_verdict and not inside)))
    if not isinstance(value, int | float) or name in NO_VERDICTS or (name.lower() in AS_TRAINED and value == 1):
        return False
    return is_verdict or not (inside or words & COUNTS or (value > 1 and value % 1 == 0))


def is_message(value: object) -> bool:
    """Return whether a value is a message, in the style of OpenAI or ShareGPT."""
    return isinstance(value, Mapping) and ({"role", "content"} <= value.keys() or {"from", "value"} <= value.keys())


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
    if not isinstance(value, list) and not (bears_loss and (is_prose or tells(key, value))):
        return ""
    if isinstance(value, int | float):
        return f"is not read; data.columns: {{messages.weight: messages.{key}}} reads it (0: no loss on the turn), "
    if words & THINKING and isinstance(value, str | list):
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
