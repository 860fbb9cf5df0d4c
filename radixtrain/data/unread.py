"""What nothing reads of a row or a turn: it is listed, or refused if it may tell how to learn.

A text, an id, a count or a time tells nothing. A truth value, a number as verdicts have (at most 1, or a fraction), a
message or a name such as `rejected` may mark what must not be imitated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

WORD_OF_NAME = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")  # of a name: `isGood`, `is_good`, `LOSS_MASK`
IDEOGRAPH = r"\u2e80-\u9fff\uac00-\ud7af"  # each of which counts as a word
WORD_OF_TEXT = re.compile(rf"[{IDEOGRAPH}]|[^\s{IDEOGRAPH}]+")
PROSE = 4  # words of a text that somebody has written for a reader


def words_of(name: str) -> set[str]:
    """Split a name into its words, in lower case."""
    return {word.lower() for word in WORD_OF_NAME.findall(name)}


COUNTS = words_of(
    "id ids uuid idx index num n nr no number count counts total len length size token tokens word words char "
    "chars turn turns round rounds step steps year month day date time timestamp created updated seed version "
    "epoch page line row position offset start end level difficulty category topic cluster temperature top "
    "penalty cost price duration seconds latency language lang views unnamed column fold attempt trial "
    "hash md sha url key"
)
VERDICTS = words_of(
    "label labels verdict rating ratings rated score scores reward rewards rank ranks ranking grade stars vote "
    "votes upvotes downvotes likes dislikes feedback preference preferences preferred dispreferred chosen "
    "rejected reject accepted accept winner loser better worse best worst good bad correct incorrect wrong "
    "correctness pass passed fail failed success successful resolved unresolved solved desirable undesirable "
    "helpful helpfulness kto judgment judgement judge thumbs valid invalid advantage advantages loss mask masked "
    "weight skip ignore exclude drop train trainable negative negatives neg"
)
PREFERENCE = words_of("chosen rejected preferred dispreferred")
RATED = words_of("quality points evaluation")  # with a number; a text is only a description
ABOUT = words_of("model effort mode type budget style generator")  # `reward_model` says how a row was made
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
AS_TRAINED = {"train", "training", "trainable", "loss", "loss_mask", "loss_weight", "weight", "used_in_training"}
"""Names whose 1 or true asks for what is done anyway."""
TO_TRAIN = {"1", "10", "true", "yes", "on"}
NO_VERDICTS = {"parallel_tool_calls", "stream", "language_score"}


def may_affect_learning(name: str, value: object, inside: bool = False, of_turn: bool = False) -> bool:
    """Return whether an unread value may tell how, or whether, to learn from its row or its turn.

    inside: it is in an object, such as `metadata`, where only a name can tell.
    of_turn: it stands in a turn, where objects and truth values tell whatever they are called.
    """
    words, text = words_of(name), re.sub(r"[\W_]", "", str(value)).lower()
    is_verdict = bool(words & VERDICTS)
    inside = inside and not of_turn
    if isinstance(value, Mapping):
        is_found = is_message(value) or (is_verdict and not inside)
        return is_found or any(may_affect_learning(str(key), each, True, of_turn) for key, each in value.items())
    if isinstance(value, list | tuple):
        return any(
            (not inside and isinstance(each, int | float)) or may_affect_learning(name, each, inside, of_turn)
            for each in value
        )
    if (
        not isinstance(value, str | int | float)
        or name in NO_VERDICTS
        or (name.lower() in AS_TRAINED and text in TO_TRAIN)
    ):
        return False
    if isinstance(value, str):
        if text in BAD and (is_verdict or not (inside or words & COUNTS)):
            return True
        is_thinking = bool(words & THINKING) and text not in SWITCHES
        return bool(text) and not words & ABOUT and (is_thinking or (is_verdict and not inside))
    if is_verdict or (of_turn and isinstance(value, bool)):
        return True
    return not (inside or words & COUNTS or (value > 1 and value % 1 == 0 and not words & RATED))


def is_prose(name: str, value: object) -> bool:
    """Return whether a value is a text for a reader, and its name does not say that it is an id, a count or a time."""
    return isinstance(value, str) and len(WORD_OF_TEXT.findall(value)) >= PROSE and not words_of(name) & COUNTS


def is_message(value: object) -> bool:
    """Return whether a value is a message, in the style of OpenAI or ShareGPT."""
    return isinstance(value, Mapping) and ({"role", "content"} <= value.keys() or {"from", "value"} <= value.keys())


def reason_of(refused: Mapping[str, Any]) -> str:
    """Say what is wrong with columns that may tell whether, or how, to learn from their row, and how to read it."""
    columns = f"data.columns: {{{', '.join(f'{in_yaml(name)}: null' for name in refused)}}}"
    if data := preference_data(refused):
        return f"{data}; to learn from the other columns only, write {columns}"
    shown = ", ".join(f"{name}: {repr(value)[:40]}" for name, value in refused.items())
    reason = "nothing reads this, and it may say what is good to learn, or hold another answer"
    mask = ", or name it mask if it has 1 for each token to learn" if "mask" in words_of(shown) else ""
    return f"{shown}: {reason}; keep the rows to imitate, and write {columns}{mask}"


def preference_data(fields: Mapping[str, Any]) -> str:
    """Name the columns that hold answers of which one is preferred, and what learns from them; empty if none does."""
    named = " and ".join(name for name in fields if words_of(name) & PREFERENCE)
    learner = "preference data, for a trainer such as TRL's DPOTrainer, with share_prefixes (docs/dpo-grpo.md)"
    return f"{named}: {learner}" if named else ""


def in_yaml(name: str) -> str:
    """Write a name as a key of YAML."""
    return name if re.fullmatch(r"[^\W\d][\w.-]*", name) else json.dumps(name, ensure_ascii=False)
