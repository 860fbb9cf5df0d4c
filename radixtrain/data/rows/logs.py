"""Logs of model calls that cannot be read: a refusal names the log that a row looks like."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

ANTHROPIC = {"thinking", "redacted_thinking", "tool_use", "tool_result"}
RESPONSES = {"function_call", "function_call_output"}
"""The `type` of blocks and items that no other format has."""


def log_hint(fields: dict[str, Any]) -> str:
    """Return the end of an error about a row: which log it looks like, and its converter; empty if like none."""
    types = {*_types(fields)}
    given = fields.get("input")
    if types & ANTHROPIC or isinstance(fields.get("system"), list):
        return converter_of("Anthropic messages")
    if types & RESPONSES or ("output" in fields and types & {"message", "reasoning"}):
        return converter_of("OpenAI Responses")
    if "output" in fields and isinstance(given.get("messages") if isinstance(given, dict) else given, list):
        return converter_of("Langfuse generations")
    is_call = "request" in fields and str(fields.get("response")).lstrip()[:1] in ("{", "[")
    return converter_of("model calls") if is_call else ""


def converter_of(calls: str) -> str:
    """Return the end of such an error. calls: of what, as in the heading of the page."""
    place = f"docs/data-formats.md#logs-of-{calls.lower().replace(' ', '-')}"
    return f"; this looks like a log of {calls}, for which {place} has a converter"


def _types(value: object) -> Iterator[str]:
    """Yield the `type` of every object in a value."""
    remaining = [value]
    while remaining:
        value = remaining.pop()
        if isinstance(value, dict):
            yield str(value.get("type"))
            remaining.extend(value.values())
        elif isinstance(value, list):
            remaining.extend(value)
