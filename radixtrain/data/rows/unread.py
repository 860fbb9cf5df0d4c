"""What nothing reads of a row: columns and keys that may tell how to learn, and logs of model calls.

Most are only counted; those of which `tells` says that they may tell how to learn are refused. A text, an id, a count
or a time tells nothing. A truth value, a number as verdicts have (at most 1, or a fraction), a message or a name such
as `rejected` may mark what must not be imitated. Of logs those of Chat Completions are read, and a refusal names any
other that a row looks like.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from radixtrain.data.files.rows import Row
from radixtrain.errors import DataError

WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")  # of a name: `isGood`, `is_good`, `LOSS_MASK`


def words_of(name: str) -> set[str]:
    """Split a name into its words, in lower case."""
    return {word.lower() for word in WORD.findall(name)}


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


def tells(name: str, value: object, inside: bool = False, of_turn: bool = False) -> bool:
    """Return whether an unread value may tell how, or whether, to learn from its row or its turn.

    inside: it is in an object, such as `metadata`, where only a name can tell.
    of_turn: it stands in a turn, where objects and truth values tell whatever they are called.
    """
    words, text = words_of(name), re.sub(r"[\W_]", "", str(value)).lower()
    is_verdict = bool(words & VERDICTS)
    inside = inside and not of_turn
    if isinstance(value, Mapping):
        is_told = is_message(value) or (is_verdict and not inside)
        return is_told or any(tells(str(key), each, True, of_turn) for key, each in value.items())
    if isinstance(value, list | tuple):
        return any(
            (not inside and isinstance(each, int | float)) or tells(name, each, inside, of_turn) for each in value
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


def is_message(value: object) -> bool:
    """Return whether a value is a message, in the style of OpenAI or ShareGPT."""
    return isinstance(value, Mapping) and ({"role", "content"} <= value.keys() or {"from", "value"} <= value.keys())


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
    shown = ", ".join(f"{name}: {repr(value)[:40]}" for name, value in told.items())
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


# Logs of calls, and stores of runs

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
