"""A conversation's messages, checked before a chat template sees them: Qwen3's template renders mistakes as nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from radixtrain.data.files.rows import parsed
from radixtrain.data.unread import COUNTS, THINKING, in_yaml, is_prose, may_affect_learning, words_of
from radixtrain.errors import DataError

Message = dict[str, Any]

SYSTEM_ROLES = ("system", "developer")
ROLES = (*SYSTEM_ROLES, "user", "assistant", "tool")
SPEAKERS = {
    **{role: role for role in ROLES},
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "bard", "bing", "bot", "model", "function_call", "tool_call"), "assistant"),
    **dict.fromkeys(("function", "observation", "function_response", "tool_response", "ipython"), "tool"),
}
OF_CALLS = ("type", "id", "index", "function", "name", "arguments", "parsed_arguments", "strict")
CALLS = ("function_call", "tool_call")  # speakers whose text is the JSON of a call
TEXT_PARTS = ("text", "input_text", "output_text")
MEDIA = re.compile("image|audio|video")
NO_MEDIA = "; only text is read: for images use share_prefixes in a trainer, or remove the part, or the row"
LOGS = "; docs/data-formats.md#logs-of-model-calls says how to convert a log of model calls"
EMPTY = "is empty: nothing is learned from it but to stop; leave the row out (data.on_bad_row: skip)"
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
OF_TURN = {"role", "content", "tool_calls", "weight", *THOUGHTS}


def check_messages(
    messages: object, where: str, field: str = "messages", keys: Mapping[str, str | None] = MappingProxyType({})
) -> list[Message]:
    """Check the messages and return them as `{"role", "content", ...}`, ready for a chat template.

    messages: a list of `{role, content}`, or of ShareGPT's `{from, value}`, or the JSON of such a list. Further keys
        (`reasoning_content`, `name` ...) pass through; null keys go. The parts of a content are joined. A function's
        result has the role tool, and the arguments of tool calls are objects. An assistant's `weight: 0` stays.
    where: file and line, for the error.
    field: the column they came from, for the error.
    keys: of messages, theirs to ours; None leaves one out.

    Raises DataError for anything but a list, an empty list, an unknown role, content that is not text, an empty
    answer, tool calls of the wrong kind, a weight other than 0 and 1.
    """
    expected = "expected a non-empty list of {role, content}"
    if isinstance(messages, str):
        messages = _parse(messages, field, expected, where)
    if not isinstance(messages, list) or not messages:
        raise DataError(where, f"{field}: {expected}, found {repr(messages)[:60]}")
    turns = [_renamed(message, keys, f"{field}: turn {n}", where) for n, message in enumerate(messages, start=1)]
    return [_check_message(message, f"{field}: turn {n}", where) for n, message in enumerate(turns, start=1)]


def _renamed(message: Any, keys: Mapping[str, str | None], name: str, where: str) -> Any:
    """Return a message under our names, without nulls: columnar files fill the keys that a turn does not have."""
    if not isinstance(message, dict):
        return message
    found: Message = {}
    for theirs, value in message.items():
        key = keys.get(theirs, theirs)
        if key in found and value is not None and value != found[key]:
            raise DataError(where, f"{name}: two keys are {key} by data.columns, and they differ; remove one of them")
        if key is not None and value is not None:
            found[key] = value
    return found


def with_system(messages: list[Message], system: str, where: str) -> list[Message]:
    """Put a system turn with this text before the messages, unless it is empty or they begin with it already.

    Raises DataError if they begin with another system turn.
    """
    if not system.strip():
        return messages
    if messages[0]["role"] not in SYSTEM_ROLES:
        return [{"role": "system", "content": system}, *messages]
    if messages[0]["content"].strip() != system.strip():
        raise DataError(where, "system: differs from the system turn that the conversation begins with; remove one")
    return messages


def _parse(text: str, name: str, expected: str, where: str) -> Any:
    if text.lstrip()[:1] not in ("[", "{"):
        raise DataError(where, f"{name}: {expected}, found {text[:60]!r}")
    return parsed(text, name, where, "; write the list with json.dumps")


def _check_message(message: object, name: str, where: str) -> Message:
    if not isinstance(message, dict):
        raise DataError(where, f"{name}: expected {{role, content}}, found {repr(message)[:60]}")
    given = dict(message)
    speaker = given.pop("from", None) if "role" not in given else given.pop("role")
    if not isinstance(speaker, str) or speaker not in SPEAKERS:
        known = f"expected one of {', '.join(ROLES)}, or ShareGPT's human, gpt ..."
        raise DataError(where, f"{name}: unknown role {speaker!r}; {known}")
    content, value = given.pop("content", None), given.pop("value", None)
    if content and value and content != value:
        raise DataError(where, f"{name}: has content and value, which differ; remove one of them")
    content = value if not content and value is not None else content
    role = SPEAKERS[speaker]
    name = f"{name} (role {speaker!r})"
    if speaker in CALLS:
        given["tool_calls"], content = _calls_of(content, name, where), None
    return _checked({"role": role, "content": content, **given}, name, where)


def _checked(message: Message, name: str, where: str) -> Message:
    is_assistant = message["role"] == "assistant"
    if "function_call" in message and message.get("tool_calls"):
        raise DataError(where, f"{name}: has tool_calls and function_call; remove one of them")
    if "function_call" in message:  # what OpenAI had before tool_calls
        message["tool_calls"] = [message.pop("function_call")]
    if not message.get("tool_calls"):
        message.pop("tool_calls", None)
    elif not is_assistant:
        raise DataError(where, f"{name}: has tool_calls; only an assistant turn calls tools")
    else:
        message["tool_calls"] = read_calls(message["tool_calls"], name, where)
    _check_weight(message, name, where)
    for key in THOUGHTS:  # templates leave out a list of parts, or fail on it
        if key in message:
            message[key] = thought(message[key])
        if not isinstance(message.get(key, ""), str):
            raise DataError(where, f"{name}: {key}: expected text, found {repr(message[key])[:60]}")
    if "tool_calls" in message and message["content"] is None:
        del message["content"]
        return message
    message["content"] = _text(message["content"], name, where)
    if is_assistant and _is_empty(message):
        raise DataError(where, f"{name}: the answer {EMPTY}, or give the turn weight: 0")
    return message


def thought(value: object) -> object:
    """Join the texts of a list of parts, such as OpenRouter's and Anthropic's; other values come back as they are."""
    parts = [part if isinstance(part, dict) else {} for part in value] if isinstance(value, list) else []
    texts = [text for part in parts if isinstance(text := part.get("text", part.get("thinking")), str)]
    return "".join(texts) if parts and len(texts) == len(parts) else value


def _calls_of(content: object, name: str, where: str) -> list[Any]:
    """Return the calls of a turn of ShareGPT's function_call, whose text is their JSON."""
    calls = _parse(content, name, "expected the JSON of a call", where) if isinstance(content, str) else content
    return calls if isinstance(calls, list) else [calls]


def _check_weight(message: Message, name: str, where: str) -> None:
    """Leave `weight` only on a turn without loss."""
    is_assistant = message["role"] == "assistant"
    weight = message.pop("weight", int(is_assistant))
    if weight not in (0, 1):
        raise DataError(where, f"{name}: weight: expected 0 (no loss on the turn) or 1, found {repr(weight)[:40]}")
    if weight > is_assistant:
        raise DataError(where, f"{name}: weight: 1 requests loss on the turn; only assistant turns bear loss")
    if weight < is_assistant:
        message["weight"] = 0


def _is_empty(message: Message) -> bool:
    has_text = any(message.get(name, "").strip() for name in ("content", *THOUGHTS))
    return not has_text and "tool_calls" not in message and message.get("weight") != 0


def _text(content: object, name: str, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        only = "only an assistant turn with tool_calls may go without"
        raise DataError(where, f"{name}: content: expected text, found {repr(content)[:60]}; {only}")
    return "".join(_part_text(part, name, where) for part in content)


def _part_text(part: Any, name: str, where: str) -> str:
    kind = part.get("type") or "text" if isinstance(part, dict) else None
    if kind not in TEXT_PARTS or not isinstance(part.get("text"), str):
        found = kind if kind and kind not in TEXT_PARTS else part
        hint = NO_MEDIA if MEDIA.search(str(found)) else LOGS
        reason = f"only parts {{type: text, text}} are read, found {repr(found)[:60]}{hint}"
        raise DataError(where, f"{name}: content: {reason}")
    for key, value in part.items():
        if key not in ("type", "text") and value not in ("", [], {}) and may_affect_learning(key, value, of_turn=True):
            raise DataError(where, f"{name}: content: {key}: {value!r} of a part is not read; remove it, or the part")
    text: str = part["text"]
    return text


def read_calls(calls: object, name: str, where: str) -> list[Message]:
    """Return the calls as templates expect them, with arguments as objects: text would be rendered literally.

    calls: a list of `{"type": "function", "function": {"name", "arguments"}}`, or of `{"name", "arguments"}`; arguments
        are an object, or its JSON as text. All come back in the first form, which every template reads.
    name: the turn, for errors.

    Raises DataError for another value, a call without a name, arguments that are not the JSON of an object.
    """
    if not isinstance(calls, list) or not calls or not all(isinstance(call, dict) for call in calls):
        raise DataError(where, f"{name}: tool_calls: expected a list of objects, found {repr(calls)[:60]}")
    return [_read_call(call, f"{name}: tool_calls: call {number}", where) for number, call in enumerate(calls, start=1)]


def read_tools(tools: object, where: str) -> list[Message]:
    """Read the function descriptions of a row: a list, or its JSON as text. Raises DataError for anything else.

    Anthropic's are refused too: every template would write them unchanged, and no model is served with that.
    """
    if isinstance(tools, str):
        tools = parsed(tools, "tools", where)
    if tools is None:  # a column that was dumped to text
        return []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(where, f"tools: expected a list of function descriptions, found {repr(tools)[:60]}")
    if any("input_schema" in tool for tool in tools):
        raise DataError(where, f"tools: expected parameters, found input_schema{LOGS}")
    return tools


def _read_call(call: Message, name: str, where: str) -> Message:
    given = {key: value for key, value in call.items() if value is not None}  # columnar files fill up with nulls
    if "function" not in given:  # {name, arguments}, and maybe an id
        function = {key: given.pop(key) for key in ("name", "arguments") if key in given}
        given = {"type": "function", **given, "function": function}
    function = given["function"]
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise DataError(where, f"{name}: expected the name of a function, found {repr(call)[:60]}")
    name = f"{name} of the tool {function['name']!r}"
    for key, value in (given | function).items():
        if key not in OF_CALLS and value not in ("", [], {}, None) and not words_of(key) & COUNTS:
            reason = "of a call is not read; remove it, or name it arguments"
            raise DataError(where, f"{name}: {key}: {repr(value)[:40]} {reason}")
    return given | {"function": function | {"arguments": _arguments(function.get("arguments"), name, where)}}


def _arguments(arguments: object, name: str, where: str) -> Message:
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, str):
        arguments = parsed(arguments, f"{name}: arguments", where)
    if not isinstance(arguments, dict):
        raise DataError(where, f"{name}: arguments: expected an object, found {repr(arguments)[:60]}")
    return arguments


def check_turns(messages: list[Message], words: frozenset[str], where: str, answered: bool = True) -> Message:
    """Return the keys of messages that hold something and that neither we nor the template read, as `messages.KEY`.

    messages: as `check_messages` returns them. words: of the template, which reads no other keys.
    answered: False if nothing is learned.

    Raises DataError for a key that may hold a part of a turn or tell whether it is learned.
    """
    unread, errors = dict[str, Any](), dict[str, str]()
    for number, message in enumerate(messages, start=1):
        bears_loss = message["role"] == "assistant" and message.get("weight") != 0
        for key, value in message.items():
            if key in OF_TURN or key in words or value in ("", [], {}):
                continue
            unread[f"messages.{key}"] = value
            if answered and (reason := _unread_reason(key, value, bears_loss)):
                what = f"turn {number} (role {message['role']!r}): {key}: {repr(value)[:40]} {reason}"
                errors.setdefault(key, f"{what}data.columns: {{{in_yaml(f'messages.{key}')}: null}} leaves it out")
    if errors:
        raise DataError(where, "; ".join(errors.values()))
    return unread


def _unread_reason(key: str, value: object, bears_loss: bool) -> str:
    """Say what is wrong with an unread key of a message, and how to read it; empty if it may be ignored."""
    may_matter = is_prose(key, value) or may_affect_learning(key, value, of_turn=True)
    if not isinstance(value, list) and not (bears_loss and may_matter):
        return ""
    if isinstance(value, int | float):
        return f"is not read; data.columns: {{messages.weight: messages.{key}}} reads it (0: no loss on the turn), "
    if words_of(key) & THINKING and isinstance(thought(value), str):
        return f"is not learned; data.columns: {{messages.reasoning_content: messages.{key}}} reads it as thinking, "
    return "is not read, so it would be lost; "
