"""Logs of model calls: those of Chat Completions are read, and a refusal names any other that a row looks like."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from radixtrain.data.files.rows import Row
from radixtrain.data.rows.verdicts import tells
from radixtrain.errors import DataError

OF_CHATS = ("tools", "functions", "chat_template_kwargs")
ANTHROPIC = {"thinking", "redacted_thinking", "tool_use", "tool_result"}
RESPONSES = {"function_call", "function_call_output"}
"""The `type` of blocks and items that no other format has."""
OF_RUNS = {
    *("token_ids", "sampled_mask", "prompt_ids", "response_ids", "prompt_token_ids", "completion_token_ids"),
    *("prompt_ids_suffix", "output_token_logprobs", "rollout_logprobs", "rollout_log_probs"),
    *("node_id", "path_id", "messages_and_choices", "exchanges"),
}
"""What only stores of agents' runs call something."""
OF_RESPONSES = ("choices", "usage", "message", "logprobs")
CUT = ("length", "content_filter")
"""Why an answer ended before the model had ended it."""


def choices_of(row: Row) -> list[Row]:
    """Return a row of `prompt` and `completion` for each choice of a call of Chat Completions; or the row itself.

    Raises DataError for an answer that was cut off.
    """
    request, response = row.fields.get("request") or {}, row.fields.get("response")
    choices = response.get("choices") if isinstance(response, dict) else None
    prompt = request.get("messages") if isinstance(request, dict) and "input_ids" not in request else None
    if not prompt or not isinstance(choices, list) or not all(isinstance(each, dict) for each in choices or [None]):
        return [row]
    beside = {name: request[name] for name in OF_CHATS if request.get(name)}
    for reason in (each.get("finish_reason") for each in choices):
        if reason in CUT:
            fix = "leave it out, or set on_bad_row: skip"
            raise DataError(row.where, f"response.choices: finish_reason: {reason}: the answer was cut off; {fix}")
    for name, value in (item for each in (response, *choices) for item in each.items()):
        if name not in OF_RESPONSES and tells(name, value):
            reason = "nothing reads this, and it may say what is good to learn; keep the rows to imitate, without it"
            raise DataError(row.where, f"response: {name}: {repr(value)[:40]}: {reason}")
    answers = ({"prompt": prompt, "completion": [each.get("message")], **beside} for each in choices)
    others = {name: value for name, value in row.fields.items() if name not in ("request", "response")}
    return [row._replace(fields=answer, unmapped={**row.unmapped, **others}) for answer in answers]


def log_hint(fields: dict[str, Any]) -> str:
    """Return the end of an error about a row: which log it looks like, and its converter; empty if like none."""
    objects = [*_objects(fields)]
    types = {str(each.get("type")) for each in objects}
    given = fields.get("input")
    if any(OF_RUNS & each.keys() for each in objects):
        return "; this looks like an agent's run, which recipes/convert_rollouts.py converts into rows of tokens"
    if "contents" in fields:
        return (
            "; Gemini's contents are not read: write messages, with the role user or assistant and the text as content"
        )
    if types & ANTHROPIC or isinstance(fields.get("system"), list):
        return converter_of("Anthropic messages")
    if types & RESPONSES or ("output" in fields and types & {"message", "reasoning"}):
        return converter_of("OpenAI Responses")
    given = given.get("messages") if isinstance(given, dict) else given
    if "output" in fields and isinstance(given, list) and all(isinstance(each, dict) for each in given):
        return converter_of("Langfuse generations")
    is_call = "request" in fields and str(fields.get("response")).lstrip()[:1] in ("{", "[")
    return converter_of("model calls") if is_call else ""


def converter_of(calls: str) -> str:
    """Return the end of such an error. calls: of what, as in the heading of the page."""
    place = f"docs/data-formats.md#logs-of-{calls.lower().replace(' ', '-')}"
    return f"; this looks like a log of {calls}, for which {place} has a converter"


def _objects(value: object) -> Iterator[dict[str, Any]]:
    """Yield every object in a value."""
    remaining = [value]
    while remaining:
        value = remaining.pop()
        if isinstance(value, dict):
            yield value
            remaining.extend(value.values())
        elif isinstance(value, list):
            remaining.extend(value)
