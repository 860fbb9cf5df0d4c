"""The meaning of the columns of a row: one of four forms, whatever the format is called."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from radixtrain.data.files.rows import OF_TOKENS, Row, explain, parse
from radixtrain.data.rows.messages import EMPTY, PAIRS, check_messages, with_system
from radixtrain.data.rows.unread import (
    OF_CHATS,
    check_unread,
    in_yaml,
    is_message,
    log_hint,
    preference_data,
    tells,
)
from radixtrain.errors import DataError

Fields = dict[str, Any]
StandardFields = tuple[Fields, set[str]]  # the standard columns, and the columns of the row that they were read from

ROW_KINDS = "messages, prompt + completion, instruction + output, question + answer, conversations, text or input_ids"
CHATS = ("messages", "conversations", "conversation", "dialog", "dialogue")
SYSTEM = ("system", "system_prompt")
MEDIA = ("image", "images", "audio", "audios", "video", "videos")
LABELS = ("label", "labels", "category", "class", "target", "intent", "sentiment", "answer", "output", "response")
BESIDE_TEXT = (*LABELS, "prompt", "completion", "summary", "solution", "reply")
OF_TOKENIZERS = ("token_type_ids", "special_tokens_mask", "length")
QUESTIONS = ("user", "instruction", "question", "query", "problem")
IDS = re.compile(r"(^|[_-])(id|uuid|key|hash|url|date|time|timestamp|source|split|lang|language)$", re.IGNORECASE)
CONTEXTS = ("context", "passage", "document", "article", "choices", "options", "input")


def standard_row(row: Row, answered: bool = True) -> Row:
    """Convert the row to one of four forms. Its `unused` are the columns that nothing reads.

    - `input_ids`, with the masks, labels and weights beside it;
    - `messages`, checked, with `tools` and `chat_template_kwargs` if the row has them. Read from a chat column in the
      style of OpenAI or ShareGPT, from Alpaca's columns, or from a question and its answer, and a system column;
    - `prompt` and `completion`, both text or both checked messages;
    - `text`.

    row: columns that are null count as absent.
    answered: False for rows that need no answer; then `prompt` may be without a `completion`.

    Raises DataError if no format has these columns, if two formats have, if a column that was meant to be learned or
    read would be lost, and if the messages are wrong.
    """
    fields = {name: _with_keys(name, value, row.keys) for name, value in row.fields.items() if value is not None}
    try:
        read = _read(fields, answered, row.where)
        standard, used = read or ({}, {*fields})
        unused = [name for name, value in fields.items() if name not in used and value not in ("", [], {})]
        if answered and read:
            _check_answer(standard, unused, row.where)
            said = turns_of(standard) or [{"content": text} for text in standard.values()]
            unread = {**row.unmapped, **{name: fields[name] for name in unused}}.items()
            check_unread(
                {name: value for name, value in unread if not _is_part(value, said, name in LABELS)}, row.where
            )
    except DataError as error:
        raise DataError(row.where, f"{error.reason}{log_hint(fields)}") from None
    if read is None:
        raise DataError(row.where, _unknown(row.fields))
    return Row(standard, row.where, (*row.unused, *unused))


def _with_keys(name: str, value: Any, keys: Mapping[str, str | None]) -> Any:
    """Rename keys of messages, or leave them out; a value that is no list of messages comes back as it is."""
    if not keys or name not in (*CHATS, "prompt", "completion"):
        return value
    turns = value
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            turns = parse(value)
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        return value
    named = ([(keys.get(key, key), each) for key, each in turn.items()] for turn in turns)
    return [{key: each for key, each in turn if key is not None} for turn in named]


def turns_of(fields: Fields) -> list[Fields]:
    """Return the whole conversation of a row from `standard_row`; empty if it is not one."""
    parts = (fields.get(name) for name in ("messages", "prompt", "completion"))
    return [message for part in parts if isinstance(part, list) for message in part]


def _read(fields: Fields, answered: bool, where: str) -> StandardFields | None:
    if "input_ids" in fields:
        read = ("input_ids", *OF_TOKENS)
        return {name: fields[name] for name in fields if name in read}, {*read, *OF_TOKENIZERS}
    _check_media(fields, where)
    chats = [name for name in CHATS if name in fields and _is_chat(name, fields[name])]
    if len(chats) > 1:
        raise DataError(where, f"{' and '.join(chats)} beside each other: write data.columns: {{messages: {chats[0]}}}")
    if chats:
        return _chat(fields, chats[0], where)
    if {"prompt", "completion"} <= fields.keys():
        return _prompt_and_completion(fields, where)
    if pair := find_pair(fields, answered, where):
        return _pair(fields, pair, where)
    if "text" in fields:
        return _text(fields, where)
    if "prompt" in fields and not answered:
        return _prompt(fields, where)
    return None


def _is_chat(name: str, value: object) -> bool:
    """Return whether a column holds a conversation: by its name, or by another common name and its value."""
    if name in ("messages", "conversations"):
        return True
    if isinstance(value, str):
        return value.lstrip().startswith("[{")
    return isinstance(value, list) and all(isinstance(turn, dict) for turn in value)


def _chat(fields: Fields, name: str, where: str) -> StandardFields:
    messages = check_messages(fields[name], where, name)
    for beside in ("prompt", "completion"):
        if beside in fields and not _is_part(fields[beside], messages):
            pair = " or {prompt: prompt, completion: completion}" if {"prompt", "completion"} <= fields.keys() else ""
            choices = f"{{messages: {name}}}{pair}"
            raise DataError(where, f"{beside} beside {name}, and it is not part of it: write data.columns: {choices}")
    return _with_columns(messages, {name}, fields, where)


def _check_answer(standard: Fields, unused: list[str], where: str) -> None:
    """Refuse a chat that ends with a question if the answer may be in a column beside it."""
    messages = standard.get("messages") or [{"role": "assistant"}]
    beside = [name for name in unused if name in BESIDE_TEXT]
    if messages[-1]["role"] in ("user", "tool") and beside:
        raise DataError(
            where,
            f"the conversation ends with a question, and {beside[0]} beside it would not be learned; add it as an "
            f"assistant turn, or leave it out: write data.columns: {{{beside[0]}: null}}",
        )


def _pair(fields: Fields, pair: Pair, where: str) -> StandardFields:
    text = fields.get("text")  # Alpaca's file has the whole row as text, too
    if text and not (isinstance(text, str) and str(fields[pair.answer or pair.question]) in text):
        columns = f"{{user: {pair.question}, assistant: {pair.answer}}} or {{text: text}}"
        raise DataError(where, f"text beside {pair.question}, and it is not that: write data.columns: {columns}")
    messages = check_messages(pair_messages(fields, pair, where), where, pair.answer or pair.question)
    return _with_columns(messages, pair.columns | {"history"}, fields, where)


def _with_columns(messages: list[Fields], used: set[str], fields: Fields, where: str) -> StandardFields:
    """Return the conversation with the columns that chats may carry."""
    standard: Fields = {name: fields[name] for name in OF_CHATS if name in fields}
    of_system = [message.pop("tools") for message in messages[:1] if isinstance(message.get("tools"), list)]
    if of_system and not standard.keys() & {"tools", "functions"}:  # GLM's form
        standard["tools"] = of_system[0]
    if functions := standard.pop("functions", None):  # what OpenAI had before tools
        standard.setdefault("tools", functions)
    if isinstance(kwargs := standard.get("chat_template_kwargs"), str):  # as CSV has to
        standard["chat_template_kwargs"] = _parsed(kwargs or "{}", where)
    standard["messages"] = with_system(messages, _system(fields, where), where)
    return standard, used | {*OF_CHATS, *SYSTEM}


def _parsed(kwargs: str, where: str) -> Any:
    try:
        return parse(kwargs) or {}  # null, of a column that was dumped to text
    except (ValueError, RecursionError) as error:
        raise DataError(where, f"chat_template_kwargs: {explain(error)}") from None


def _system(fields: Fields, where: str) -> str:
    found = [name for name in SYSTEM if name in fields]
    texts = [fields[name] for name in found]
    if not all(isinstance(text, str) for text in texts):
        raise DataError(where, f"{found[0]}: expected text, found {repr(texts[0])[:60]}")
    if len(set(texts)) > 1:
        raise DataError(where, f"{' and '.join(found)} differ: write data.columns with system: {found[0]}")
    return texts[0] if texts else ""


def _prompt_and_completion(fields: Fields, where: str) -> StandardFields:
    names = ("prompt", "completion")
    kinds = {type(fields[name]) for name in names}
    if kinds == {str}:
        _refuse_system(fields, where)
        if not fields["completion"].strip():
            raise DataError(where, f"completion: it {EMPTY}")
        return {name: fields[name] for name in names}, {*names}
    if str in kinds:
        raise DataError(where, "prompt and completion: expected both as text or both as lists of messages")
    prompt = check_messages(fields["prompt"], where, "prompt")
    standard, used = _with_columns(prompt, {*names}, fields, where)
    completion = check_messages(fields["completion"], where, "completion")
    return {"prompt": standard.pop("messages"), "completion": completion, **standard}, used


def _prompt(fields: Fields, where: str) -> StandardFields:
    if not isinstance(fields["prompt"], list):
        _refuse_system(fields, where)
        return {"prompt": fields["prompt"]}, {"prompt"}
    return _with_columns(check_messages(fields["prompt"], where, "prompt"), {"prompt"}, fields, where)


def _text(fields: Fields, where: str) -> StandardFields:
    for name in BESIDE_TEXT:
        if name in fields:
            answer = f"to answer with it, write data.columns: {{user: text, assistant: {name}}}; "
            if not isinstance(fields[name], str):
                answer = "to answer with it, write it as text; "
            only = f"to learn only the text, write data.columns: {{text: text, {name}: null}}"
            raise DataError(where, f"{name} beside text would not be learned; {answer}{only}")
    _refuse_system(fields, where)
    return {"text": fields["text"]}, {"text"}


def _refuse_system(fields: Fields, where: str) -> None:
    if (system := _system(fields, where)).strip():
        columns = "{user: prompt, assistant: completion}"
        found = f"system: {system[:40]!r} beside plain text, which has no system turn"
        raise DataError(where, f"{found}; for a chat, write data.columns: {columns}; to leave it out, {{system: null}}")


def _check_media(fields: Fields, where: str) -> None:
    for name in MEDIA:
        if fields.get(name):
            instead = "for images use RadixCollator(images=...) or share_prefixes in a trainer of your own"
            leave = f"to leave it out, write data.columns: {{{name}: null}}"
            raise DataError(where, f"{name}: only text is read; {leave}; {instead}")


def _is_part(value: object, messages: list[Fields], is_class: bool = False) -> bool:
    """Return whether the conversation holds this text, or these messages, too; or the number of a class."""
    contents = [str(message.get("content", "")).strip() for message in messages]
    if isinstance(value, str) or (is_class and type(value) is int):
        return str(value).strip() in ("", *contents)
    turns = value if isinstance(value, list) else [None]
    return all(
        isinstance(turn, dict) and str(turn.get("content", turn.get("value"))).strip() in contents for turn in turns
    )


def _unknown(fields: Fields) -> str:
    named = (f"{name} (null)" if value is None else str(name) for name, value in fields.items())
    read = f"no format has the columns {', '.join(named) or '(none)'}"
    found = f"{read}; expected {ROW_KINDS}"
    if preferences := preference_data(fields):
        return f"{preferences}{_imitating(fields)}"
    if hint := log_hint(fields):
        return f"{found}{hint}"
    if chats := [name for name, value in fields.items() if _holds_messages(value)]:
        return f"{found}; {chats[0]} holds messages: write data.columns: {{messages: {chats[0]}}}"
    texts = [name for name, value in fields.items() if isinstance(value, str) and not _is_id(name, value)]
    is_clear = len(texts) == 2 and all(fields[name].strip() and name not in (*SYSTEM, *OF_CHATS) for name in texts)
    question, answer = map(in_yaml, texts) if is_clear else ("QUESTION", "ANSWER")
    theirs = "" if is_clear else ", with the names of two columns for QUESTION and ANSWER"
    return f"{found}, or data.columns: {{user: {question}, assistant: {answer}}}{theirs}"


def _imitating(fields: Fields) -> str:
    """Return how to imitate the chosen answers, for an error; empty if the columns do not say which these are."""
    chosen, prompt = fields.get("chosen"), fields.get("prompt")
    if not isinstance(chosen, str | list):
        return ""
    question = next((name for name in ("prompt", *QUESTIONS) if name in fields), "")
    columns = f"user: {question}, assistant: chosen" if question else "text: chosen"
    if isinstance(chosen, list) and (not isinstance(prompt, list) or prompt[:1] == chosen[:1]):
        columns = "messages: chosen"
    elif question == "prompt":
        columns = "prompt: prompt, completion: chosen"
    told = [f", {in_yaml(name)}: null" for name, value in fields.items() if name not in columns and tells(name, value)]
    return f"; to imitate the chosen answers, write data.columns: {{{columns}{''.join(told)}}}"


def _holds_messages(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(map(is_message, value))


def _is_id(name: str, value: str) -> bool:
    """Return whether a text identifies the row, not describes it: by its name, or as a word with a digit."""
    return bool(IDS.search(name)) or (" " not in value.strip() and any(map(str.isdigit, value)))


class Pair(NamedTuple):
    """The columns of a question and its answer. answer: None in rows without one. context: Alpaca's `input`."""

    question: str
    answer: str | None
    context: str | None = None

    @property
    def columns(self) -> set[str]:
        return {name for name in self if name is not None}


def find_pair(fields: Fields, answered: bool, where: str) -> Pair | None:
    """Find the columns of a question and an answer by their names; None if there are none.

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
        found = " and ".join(" + ".join(filter(None, pair)) for pair in pairs)
        raise DataError(where, f"the columns can be read as {found}; {_choice(pairs[0])}")
    [pair] = pairs
    if pair.question == "instruction" and "input" in fields:
        pair = pair._replace(context="input")
    for name in (pair.question, pair.answer):
        _cell_text(fields, name or pair.question, where)
    _check_context(fields, pair, where)
    return pair


def pair_messages(fields: Fields, pair: Pair, where: str) -> list[Fields]:
    """Make messages of the pair, unchecked: an earlier `history`, the question, a context below it, the answer."""
    question = _cell_text(fields, pair.question, where)
    if pair.context is not None and (context := _cell_text(fields, pair.context, where)).strip():
        question = f"{question}\n{context}"
    messages = [*_history(fields, where), {"role": "user", "content": question}]
    if pair.answer is None:
        return messages
    answer = _cell_text(fields, pair.answer, where)
    if not answer.strip():
        raise DataError(where, f"{pair.answer}: the answer {EMPTY}")
    return [*messages, {"role": "assistant", "content": answer}]


def _check_context(fields: Fields, pair: Pair, where: str) -> None:
    """Raise DataError if a column that is not read may hold what the question is about."""
    others = [name for name in CONTEXTS if name not in pair.columns and _holds_text(fields.get(name))]
    if others:
        name, answer = others[0], pair.answer or "answer"
        choice = f"{{instruction: {pair.question}, input: {name}, output: {answer}}}"
        put = (
            f"write data.columns: {choice}" if isinstance(fields[name], str) else f"make it a text named {CONTEXTS[-1]}"
        )
        put = f"to put it after the question, {put}"
        raise DataError(where, f"{name} beside {pair.question} and {answer}: {put}; to leave it out, {_choice(pair)}")


def _history(fields: Fields, where: str) -> list[Fields]:
    """Return Alpaca's earlier turns: `[[question, answer], ...]`."""
    turns = fields.get("history") or []
    if not isinstance(turns, list) or not all(isinstance(turn, list) and len(turn) == 2 for turn in turns):
        raise DataError(where, f"history: expected a list of [question, answer], found {repr(turns)[:60]}")
    roles = ("user", "assistant")
    return [{"role": role, "content": text} for turn in turns for role, text in zip(roles, turn, strict=True)]


def _cell_text(fields: Fields, name: str, where: str) -> str:
    value = fields[name]
    if not isinstance(value, str):
        raise DataError(where, f"{name}: expected text, found {repr(value)[:60]}")
    return value


def _holds_text(value: object) -> bool:
    return bool(value.strip() if isinstance(value, str) else value)


def _choice(pair: Pair) -> str:
    answer = f", assistant: {pair.answer}" if pair.answer else ""
    return f"write data.columns: {{user: {pair.question}{answer}}}"
