"""A conversation's messages, checked before a chat template sees them: Qwen3's template renders mistakes as nothing."""

from __future__ import annotations

from typing import Any

from radixtrain.errors import DataError

__all__ = ["check_messages", "from_sharegpt"]

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES = {"system": "system", "human": "user", "gpt": "assistant"}


def check_messages(messages: Any, where: str, field: str = "messages") -> list[Message]:
    """The messages with their text parts joined and their null keys gone, ready for a chat template.

    messages: a list of `{"role", "content", ...}`. Further keys (`reasoning_content`, `name` ...) pass through.
    where: file and line, for the error.
    field: the column they came from, for the error.

    Raises DataError for no list, an empty list, an unknown role, content that is no text, tool calls of the wrong kind.
    """
    if not isinstance(messages, list) or not messages:
        expected = "expected a non-empty list of {role, content}"
        raise DataError(where, f"{field}: {expected}, found {_describe(messages)}")
    return [_check_message(message, f"{field}: turn {n}", where) for n, message in enumerate(messages, start=1)]


def from_sharegpt(conversations: Any, where: str) -> list[Message]:
    """ShareGPT's `[{"from": "human", "value": ...}]` as messages, not checked yet: give them to `check_messages`.

    Raises DataError for no list of `{from, value}`, and for a speaker other than human, gpt and system.
    """
    if not isinstance(conversations, list) or not conversations:
        expected = "expected a non-empty list of {from, value}"
        raise DataError(where, f"conversations: {expected}, found {_describe(conversations)}")
    return [_from_sharegpt_turn(turn, f"conversations: turn {n}", where) for n, turn in enumerate(conversations, 1)]


def _from_sharegpt_turn(turn: Any, name: str, where: str) -> Message:
    if not isinstance(turn, dict) or not {"from", "value"} <= turn.keys():
        raise DataError(where, f"{name}: expected the keys from and value, found {_describe(turn)}")
    if turn["from"] not in SHAREGPT_ROLES:
        known = ", ".join(SHAREGPT_ROLES)
        raise DataError(where, f"{name}: unknown speaker {turn['from']!r}; expected one of {known}, or use messages")
    return {"role": SHAREGPT_ROLES[turn["from"]], "content": turn["value"]}


def _check_message(message: Any, name: str, where: str) -> Message:
    if not isinstance(message, dict):
        raise DataError(where, f"{name}: expected {{role, content}}, found {_describe(message)}")
    if "role" not in message and "from" in message:
        raise DataError(where, f"{name}: has the keys from/value; name the column conversations, or use role/content")
    role = message.get("role")
    if role not in ROLES:
        raise DataError(where, f"{name}: unknown role {role!r}; expected one of {', '.join(ROLES)}")
    name = f"{name} (role {role!r})"
    # Columnar files fill the keys that a turn does not have with nulls, and templates print some of them as "None".
    checked = {key: value for key, value in message.items() if value is not None}
    if _check_tool_calls(checked, role, name, where) and message.get("content") is None:
        return checked
    return checked | {"content": _text(message.get("content"), name, where)}


def _check_tool_calls(message: Message, role: str, name: str, where: str) -> bool:
    calls = message.get("tool_calls")
    if not calls:
        return False
    if role != "assistant":
        raise DataError(where, f"{name}: has tool_calls; only an assistant turn calls tools")
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise DataError(where, f"{name}: tool_calls: expected a list of objects, found {_describe(calls)}")
    return True


def _text(content: Any, name: str, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        hint = "" if content is not None else "; only an assistant turn with tool_calls may go without"
        raise DataError(where, f"{name}: content: expected text, found {_describe(content)}{hint}")
    return "".join(_part_text(part, name, where) for part in content)


def _part_text(part: Any, name: str, where: str) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("text"), str) or part.get("type", "text") != "text":
        kind = part.get("type", part) if isinstance(part, dict) else part
        raise DataError(where, f"{name}: content: expected parts {{type: text, text}}, found {kind!r}")
    return part["text"]


def _describe(value: Any) -> str:
    if isinstance(value, dict):
        return f"an object with the keys {', '.join(map(str, value)) or '(none)'}"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return "null" if value is None else repr(value)[:60]
