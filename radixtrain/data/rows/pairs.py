"""Rows of a question and its answer in two columns, and Alpaca's, as conversations."""

from __future__ import annotations

from typing import Any, NamedTuple

from radixtrain.errors import DataError

__all__ = ["Pair", "find_pair", "pair_messages"]

Fields = dict[str, Any]

QUESTIONS = ("user", "instruction", "question", "query", "problem")
PAIRS = (
    ("user", "assistant"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("question", "answer"),
    ("question", "response"),
    ("query", "response"),
    ("query", "answer"),
    ("problem", "solution"),
    ("prompt", "response"),
    ("prompt", "answer"),
    ("input", "output"),
)
CONTEXTS = ("context", "passage", "document", "article", "choices", "options", "input")


class Pair(NamedTuple):
    """The columns of a question and its answer. answer: None in rows without one. context: Alpaca's `input`."""

    question: str
    answer: str | None
    context: str | None = None

    @property
    def columns(self) -> set[str]:
        return {name for name in self if name is not None}


def find_pair(fields: Fields, answered: bool, where: str) -> Pair | None:
    """The columns of a question and an answer, if their names say it; None if there are none.

    answered: whether a row needs an answer.

    Raises DataError if there are several, or another column that a question may need to be answered.
    """
    pairs = [Pair(*names) for names in PAIRS if fields.keys() >= {*names}]
    if "instruction" in fields:  # Alpaca: there `input` belongs to the question
        pairs = [pair for pair in pairs if pair.question != "input"]
    if not pairs and not answered:
        pairs = [Pair(name, None) for name in QUESTIONS if name in fields]
    if not pairs:
        return None
    if len(pairs) > 1:
        found = " and ".join(" + ".join(pair.columns) for pair in pairs)
        raise DataError(where, f"the columns can be read as {found}; {_choice(pairs[0])}")
    [pair] = pairs
    if pair.question == "instruction" and "input" in fields:
        pair = pair._replace(context="input")
    _check_context(fields, pair, where)
    return pair


def pair_messages(fields: Fields, pair: Pair, where: str) -> list[Fields]:
    """The pair as messages, not checked yet: an earlier `history`, the question, a context below it, the answer."""
    question = _text(fields, pair.question, where)
    if pair.context is not None and (context := _text(fields, pair.context, where)).strip():
        question = f"{question}\n{context}"
    messages = [*_history(fields, where), {"role": "user", "content": question}]
    if pair.answer is None:
        return messages
    answer = _text(fields, pair.answer, where)
    if not answer.strip():
        raise DataError(where, f"{pair.answer}: the answer is empty: nothing is learned from it but to stop")
    return [*messages, {"role": "assistant", "content": answer}]


def _check_context(fields: Fields, pair: Pair, where: str) -> None:
    """Raises DataError if a column that is not read may hold what the question is about."""
    others = [name for name in CONTEXTS if name not in pair.columns and _holds_text(fields.get(name))]
    if others:
        name, answer = others[0], pair.answer or "answer"
        choice = f"{{instruction: {pair.question}, input: {name}, output: {answer}}}"
        raise DataError(
            where,
            f"{name} beside {pair.question} and {answer}: to put it after the question, write data.columns: {choice}; "
            f"to leave it out, {_choice(pair)}",
        )


def _history(fields: Fields, where: str) -> list[Fields]:
    """Alpaca's earlier turns: `[[question, answer], ...]`."""
    turns = fields.get("history") or []
    if not isinstance(turns, list) or not all(isinstance(turn, list) and len(turn) == 2 for turn in turns):
        raise DataError(where, f"history: expected a list of [question, answer], found {repr(turns)[:60]}")
    roles = ("user", "assistant")
    return [{"role": role, "content": text} for turn in turns for role, text in zip(roles, turn, strict=True)]


def _text(fields: Fields, name: str, where: str) -> str:
    value = fields[name]
    if not isinstance(value, str):
        raise DataError(where, f"{name}: expected text, found {repr(value)[:60]}")
    return value


def _holds_text(value: Any) -> bool:
    return bool(value.strip() if isinstance(value, str) else value)


def _choice(pair: Pair) -> str:
    answer = f", assistant: {pair.answer}" if pair.answer else ""
    return f"write data.columns: {{user: {pair.question}{answer}}}"
