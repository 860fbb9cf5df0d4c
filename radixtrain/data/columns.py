"""The meaning of the columns of a row: one of four forms, whatever the format is called."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from radixtrain.data.files.rows import OF_TOKENS, Row, parsed
from radixtrain.data.messages import EMPTY, LOGS, check_messages, read_tools, with_system
from radixtrain.data.unread import may_affect_learning, preference_data, reason_of
from radixtrain.errors import DataError

Fields = dict[str, Any]
Check = Callable[..., list[Fields]]

ROW_KINDS = "messages, prompt + completion, instruction + output, question + answer, conversations, text or input_ids"
CHATS = ("messages", "conversations", "conversation", "dialog", "dialogue")
SYSTEM = ("system", "system_prompt")
OF_CHATS = ("tools", "functions", "chat_template_kwargs")
MEDIA = ("image", "images", "audio", "audios", "video", "videos")
LABELS = ("label", "labels", "category", "class", "target", "intent", "sentiment", "answer", "output", "response")
BESIDE_TEXT = (*LABELS, "prompt", "completion", "summary", "solution", "reply")
OF_TOKENIZERS = ("token_type_ids", "special_tokens_mask", "length")
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
QUESTIONS = ("user", "instruction", "question", "query", "problem")
CONTEXTS = ("context", "passage", "document", "article", "choices", "options", "history", "input")


def standard_row(row: Row, answered: bool = True) -> Row:
    """Convert the row to one of four forms. Its `unread` are the columns that nothing reads.

    - `input_ids`, with the masks, labels and weights beside it;
    - `messages`, checked, with `tools` and `chat_template_kwargs` if the row has them. Read from a chat column in the
      style of OpenAI or ShareGPT, from Alpaca's columns, or from a question and its answer, and a system column;
    - `prompt` and `completion`, both text or both checked messages;
    - `text`.

    row: columns that are null count as absent.
    answered: False for rows that need no answer; then `prompt` may be without a `completion`.

    Raises DataError if no format has these columns, if two pairs of them are a question and its answer, if a column
    may tell how to learn or be a part of the prompt, and if the messages are wrong.
    """
    left = {name: value for name, value in row.fields.items() if value is not None}
    standard = _take(left, answered, row.where, partial(check_messages, where=row.where, keys=row.keys))
    if standard is None:
        raise DataError(row.where, _unknown(row.fields))
    unread = {name: value for name, value in {**row.unread, **left}.items() if value not in (None, "", [], {})}
    if not turns_of(standard) and "input_ids" not in standard:
        _refuse_system(left, "prompt" in standard, row.where)
    if answered:
        _check_unread(unread, standard, row.where)
    return Row(standard, row.where, unread)


def turns_of(fields: Fields) -> list[Fields]:
    """Return the whole conversation of a row from `standard_row`; empty if it is not one."""
    parts = (fields.get(name) for name in ("messages", "prompt", "completion"))
    return [message for part in parts if isinstance(part, list) for message in part]


def _take(fields: Fields, answered: bool, where: str, check: Check) -> Fields | None:
    """Take the columns that are read out of the fields, and return them in one form; None if no format has them."""
    if "input_ids" in fields:
        for name in OF_TOKENIZERS:
            fields.pop(name, None)
        return {name: fields.pop(name) for name in ("input_ids", *OF_TOKENS) if name in fields}
    for name in MEDIA:
        if fields.get(name):
            leave = f"to leave it out, write data.columns: {{{name}: null}}"
            raise DataError(where, f"{name}: only text is read; {leave}; for images use share_prefixes in a trainer")
    for name in CHATS:
        if name in fields and _is_chat(name, fields[name]):
            return _chat(fields, check(fields.pop(name), field=name), where)
    if {"prompt", "completion"} <= fields.keys():
        return _prompt_and_completion(fields, where, check)
    if messages := _pair(fields, answered, where):
        return _chat(fields, check(messages), where)
    if "text" in fields:
        return {"text": fields.pop("text")}
    if "prompt" not in fields or answered:
        return None
    prompt = fields.pop("prompt")
    if not isinstance(prompt, list):
        return {"prompt": prompt}
    return _chat(fields, check(prompt, field="prompt"), where)


def _is_chat(name: str, value: object) -> bool:
    """Return whether a column holds a conversation: by its name, or by another common name and its value."""
    if name in ("messages", "conversations"):
        return True
    if isinstance(value, str):
        return value.lstrip().startswith("[{")
    return isinstance(value, list) and all(isinstance(turn, dict) for turn in value)


def _chat(fields: Fields, messages: list[Fields], where: str) -> Fields:
    """Return the conversation with the columns that chats may carry."""
    standard: Fields = {name: fields.pop(name) for name in OF_CHATS if name in fields}
    # What OpenAI had before tools, and GLM's form.
    others = {"functions": standard.pop("functions", None), "tools of the system turn": messages[0].pop("tools", None)}
    for name, value in others.items():
        if tools := value and read_tools(value, where):
            if (given := read_tools(standard.get("tools"), where)) and given != tools:
                raise DataError(where, f"tools and {name} differ; remove one of them")
            standard["tools"] = tools
    if isinstance(kwargs := standard.get("chat_template_kwargs"), str):  # as CSV has to
        kwargs = parsed(kwargs or "{}", "chat_template_kwargs", where)
        standard["chat_template_kwargs"] = kwargs or {}  # null, of a column that was dumped to text
    standard["messages"] = with_system(messages, _system(fields, where), where)
    return standard


def _system(fields: Fields, where: str) -> str:
    found = {name: _cell_text(fields, name, where) for name in SYSTEM if name in fields}
    if len({*found.values()}) > 1:
        raise DataError(where, f"{' and '.join(found)} differ: write data.columns with system: {SYSTEM[0]}")
    return "".join([fields.pop(name) for name in found][:1])


def _refuse_system(fields: Fields, is_pair: bool, where: str) -> None:
    if (system := _system(fields, where)).strip():
        chat = "for a chat, write data.columns: {user: prompt, assistant: completion}; " if is_pair else ""
        found = f"system: {system[:40]!r} beside plain text, which has no system turn"
        raise DataError(where, f"{found}; {chat}to leave it out, write data.columns: {{system: null}}")


def _prompt_and_completion(fields: Fields, where: str, check: Check) -> Fields:
    prompt, completion = fields.pop("prompt"), fields.pop("completion")
    if isinstance(prompt, str) != isinstance(completion, str):
        raise DataError(where, "prompt and completion: expected both as text or both as lists of messages")
    if isinstance(prompt, str):
        if not completion.strip():
            raise DataError(where, f"completion: it {EMPTY}")
        return {"prompt": prompt, "completion": completion}
    standard = _chat(fields, check(prompt, field="prompt"), where)
    completion = check(completion, field="completion")
    return {"prompt": standard.pop("messages"), "completion": completion, **standard}


def _pair(fields: Fields, answered: bool, where: str) -> list[Fields]:
    """Make messages of a question and its answer, unchecked; none if no columns have the names of such a pair.

    answered: whether a row needs an answer.

    Raises DataError if there are several pairs, or another column that a question may need to be answered.
    """
    pairs: list[tuple[str, ...]] = [pair for pair in PAIRS if fields.keys() >= {*pair}]
    if "instruction" in fields:  # Alpaca: there `input` belongs to the question
        pairs = [pair for pair in pairs if pair[0] != "input"]
    if not pairs and not answered:
        pairs = [(name,) for name in QUESTIONS if name in fields]
    if not pairs:
        return []
    names = pairs[0]
    choice = ", ".join(f"{role}: {name}" for role, name in zip(("user", "assistant"), names, strict=False))
    if len(pairs) > 1:
        found = " and ".join(map(" + ".join, pairs))
        raise DataError(where, f"the columns can be read as {found}; write data.columns: {{{choice}}}")
    read = (*names, "input") if names[0] == "instruction" else names
    for name in CONTEXTS:
        if name not in read and fields.get(name):
            pair = f"{{instruction: {names[0]}, input: {name}, output: {names[-1]}}}"
            put = f"to put it after the question, as text, write data.columns: {pair}"
            leave = f"to leave it out, write data.columns: {{{choice}}}"
            raise DataError(where, f"{name} beside {' and '.join(names)}: {put}; {leave}")
    texts = {name: _cell_text(fields, name, where) for name in read if name in fields}
    for name in texts:
        fields.pop(name)
    question, answer = texts[names[0]], [texts[name] for name in names[1:]]
    if answer and not answer[0].strip():
        raise DataError(where, f"{names[1]}: the answer {EMPTY}")
    if len(read) > len(names) and texts.get("input", "").strip():
        question = f"{question}\n{texts['input']}"
    turns = zip(("user", "assistant"), (question, *answer), strict=False)
    return [{"role": role, "content": text} for role, text in turns]


def _cell_text(fields: Fields, name: str, where: str) -> str:
    value = fields[name]
    if not isinstance(value, str):
        raise DataError(where, f"{name}: expected text, found {repr(value)[:60]}")
    return value


def _check_unread(unread: Fields, standard: Fields, where: str) -> None:
    """Raise DataError if a column may say what is good to learn, or be the answer to a text or to the last question."""
    turns = turns_of(standard) or [{"content": text} for text in standard.values()]
    is_open = "text" in standard or turns[-1].get("role") in ("user", "tool")
    new = {name: value for name, value in unread.items() if not _is_said(value, turns, name in LABELS)}
    beside = BESIDE_TEXT if is_open else ()
    refused = {name: value for name, value in new.items() if name in beside or may_affect_learning(name, value)}
    if refused:
        answer = (
            f"; to answer with it, write {{user: text, assistant: {next(iter(refused))}}}" if "text" in standard else ""
        )
        raise DataError(where, f"{reason_of(refused)}{answer}")


def _is_said(value: object, turns: list[Fields], is_class: bool) -> bool:
    """Return whether turns hold this text, or these messages, too; or the number of a class."""
    said = [str(turn.get("content", "")).strip() for turn in turns]
    if isinstance(value, str) or (is_class and type(value) is int):
        return str(value).strip() in said
    messages = value if isinstance(value, list) else [None]
    return all(
        isinstance(each, dict) and str(each.get("content", each.get("value"))).strip() in said for each in messages
    )


def _unknown(fields: Fields) -> str:
    named = (f"{name} (null)" if value is None else str(name) for name, value in fields.items())
    expected = f"expected {ROW_KINDS}, or their names in data.columns, such as {{user: QUESTION, assistant: ANSWER}}"
    hint = LOGS
    if data := preference_data(fields):
        hint = f"; {data}"
    return f"no format has the columns {', '.join(named) or '(none)'}; {expected}{hint}"
