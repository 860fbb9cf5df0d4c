"""Agents' runs as other projects save them, one run per row -> plain rows, one for each sequence that a model saw.

| project | a row holds | a plain row for |
|---|---|---|
| verifiers, prime-rl | `token_ids`, `mask`, `logprobs` of one branch | itself |
| | `branches`, a list of those | each branch |
| | `nodes`, a trace: messages with their `parent` and the tokens they add | each path from a root to a leaf |
| | `traces`, an episode | each of those, of each trace that is trainable |
| SkyRL-capture | `nodes`, a graph of messages with `tokens` | each path from a root to a leaf |
| | `path_id`, `input_ids`, `loss_mask`: a token sample | itself |
| miles | `records`, a session: calls of the model | each path of calls that continue each other |
| | `samples`, a rollout: `tokens`, `response_length`, `loss_mask` | each sample, or itself |
| rLLM | `steps`, a trajectory: calls of the model | each path of calls that continue each other |
| | `deltas`, a trace graph of the gateway | each path from a root to a leaf |
| | `prompt_token_ids`, `completion_token_ids`: a call | itself |
| ART | `messages_and_choices`, `tools`, `additional_histories`: a trajectory | each history |
| rLLM, ART | `trajectories`, an episode or a group | each of those |
| Chat Completions | `request`, `response`: a call, as a proxy logs it | each choice |

The sequences of one run share most of their tokens, so they belong in one optimizer step. They come from one row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from radixtrain.collators.token_row import WEIGHT_NAMES
from radixtrain.data.formats import Row
from radixtrain.data.rows.columns import OF_CHATS
from radixtrain.data.rows.token_trees import Fields, Store, check_text, list_at, row_of, rows_of_tree, value_at
from radixtrain.data.sample import check_unweighted
from radixtrain.errors import DataError

Reader = Callable[[Fields, str], Iterator[Fields]]

NODE = Store("token_ids", "mask", advantages="advantages", parent="parent")
CAPTURED = Store("tokens.ids", "tokens.sampled_mask", logprobs="tokens.logprobs", parent="parent", id="node_id")
BRANCH = Store("token_ids", "mask", advantages="advantages")
STEP = Store("prompt_ids", completion="response_ids", advantages="advantage")
STEP_DELTA = STEP._replace(tokens="prompt_ids_suffix", parent="parent_step_id", id="id")
CALL = Store("prompt_token_ids", completion="completion_token_ids")
CALL_DELTA = CALL._replace(tokens="prompt_ids_suffix", parent="parent_trace_id", id="trace_id")
SAMPLED = "response.choices.0.meta_info.output_token_logprobs.*"  # SGLang's: log-probability, token, text
RECORD = Store("request.input_ids", completion=f"{SAMPLED}.1", logprobs=f"{SAMPLED}.0")
SAMPLE = Store("tokens", "loss_mask", logprobs="rollout_log_probs", tail="response_length")
SEQUENCES = {
    ("path_id", "trainable_count"): Store("input_ids", "loss_mask", logprobs="rollout_logprobs"),
    ("tokens", "response_length"): SAMPLE,
    ("prompt_ids", "response_ids"): STEP,
    ("prompt_token_ids", "completion_token_ids"): CALL,
    ("request.input_ids", "response", "status_code"): RECORD,
}
"""The columns that mark a row as one sequence of a store, and how it is read."""
CUT = ("length", "content_filter")
"""Why an answer ended before the model had ended it."""
PLAIN = frozenset({"input_ids", "messages", "prompt", "conversations", "text"})
"""A row with one of these is not a run."""


def plain_rows(row: Row) -> list[Row]:
    """Split an agent's run into its sequences, as rows of `input_ids` or `messages`; or return the row itself.

    Tokens become `input_ids`, `mask` (1 for a token that the model sampled) and, if the store has them, `old_logprobs`
    and `advantages`, one for each token, as a collator takes them. A sequence without a sampled token is left out if
    others have some, or if its store says that it trains nothing. A history of ART becomes `messages`; or `prompt` and
    `completion`, from its first choice on, because only choices were sampled. So does each choice of a logged call.

    Raises DataError that names what cannot be read: lists of different lengths, a parent that is not an earlier item,
    images, a run without tokens or one that stopped with an error, an assistant message after the first choice that is
    not a choice, exchanges, an answer that was cut off.
    """
    fields = _present(row.fields)
    reader = _reader_of(fields)
    return [row] if reader is None else [Row(plain, row.where) for plain in reader(fields, row.where)]


def _present(fields: Fields) -> Fields:
    return {key: value for key, value in fields.items() if value is not None}


def _reader_of(fields: Fields) -> Reader | None:
    for columns, store in SEQUENCES.items():
        is_store = all(value_at(fields, place) is not None for place in columns)
        if is_store and ("input_ids" not in fields or store.tokens == "input_ids"):
            return partial(_sequence, store)
    if fields.keys() & PLAIN:
        return None
    return next((reader for place, (hints, reader) in READERS.items() if _has(value_at(fields, place), hints)), None)


def _has(items: object, hints: tuple[str, ...]) -> bool:
    """Return whether there are items and the first has one of the columns: other data have lists of these names too."""
    first = items[0] if isinstance(items, list) and items else None
    return items is not None if not hints else (isinstance(first, dict) and any(name in first for name in hints))


def _sequence(store: Store, fields: Fields, where: str) -> Iterator[Fields]:
    plain = row_of(fields, store, where)
    if any(plain["mask"]):
        yield plain


def _branch(fields: Fields, where: str) -> Iterator[Fields]:
    """Read a flat branch, with the weights of its tokens."""
    if fields.get("parent") is not None:
        raise DataError(where, "parent: this is a node of a trace; the row has to be the whole trace")
    tokens = {name: value for name, value in fields.items() if name not in WEIGHT_NAMES}
    weights = {name: fields[name] for name in WEIGHT_NAMES if fields.get(name) is not None}
    mask = "sampled_mask" if "mask" not in fields and "sampled_mask" in fields else "mask"
    yield row_of(tokens, BRANCH._replace(mask=mask), where) | weights


def _branches(fields: Fields, where: str) -> Iterator[Fields]:
    check_unweighted(fields, where)
    found = [plain for branch in _objects(fields, "branches", where) for plain in _branch(branch, where)]
    sampled = [plain for plain in found if any(plain["mask"])]
    yield from sampled or found


def _nodes(fields: Fields, where: str) -> Iterator[Fields]:
    """Read a graph of messages."""
    _check_succeeded(fields, "nodes", where)
    if not _is_trainable(fields):
        raise DataError(where, "nodes: this trace is not trainable; leave it out")
    is_captured = any("node_id" in node for node in _objects(fields, "nodes", where))
    yield from _tree("nodes", CAPTURED if is_captured else NODE, fields, where)


def _steps(fields: Fields, where: str) -> Iterator[Fields]:
    is_delta = any(STEP_DELTA.tokens in step for step in _objects(fields, "steps", where))
    check_text(fields.get("message_nodes") or {}, where, "message_nodes: ")  # of a compact episode
    yield from _tree("steps", STEP_DELTA if is_delta else STEP, fields, where)


def _tree(name: str, store: Store, fields: Fields, where: str) -> Iterator[Fields]:
    check_unweighted(fields, where)
    yield from rows_of_tree(_objects(fields, name, where), store, name, where)


def _episode(fields: Fields, where: str) -> Iterator[Fields]:
    check_unweighted(fields, where)
    _check_succeeded(fields, "traces", where)
    traces = [trace for trace in _objects(fields, "traces", where) if _is_trainable(trace)]
    if not traces:
        raise DataError(where, "traces: none of them is trainable")
    for trace in traces:
        yield from _nodes(trace, where)


def _check_succeeded(fields: Fields, name: str, where: str) -> None:
    if fields.get("stop_condition") == "error" or fields.get("ok") is False:
        raise DataError(where, f"{name}: this run stopped with an error; leave it out, or set on_bad_row: skip")


def _is_trainable(trace: Fields) -> bool:
    agent = trace.get("agent")
    return trace.get("trainable", True) and not (isinstance(agent, dict) and agent.get("trainable") is False)


def _samples(fields: Fields, where: str) -> Iterator[Fields]:
    for number, sample in enumerate(_objects(fields, "samples", where)):
        plain = row_of(sample, SAMPLE, where, f"samples: sample {number}: ")
        if any(plain["mask"]):
            yield plain


def _trajectories(fields: Fields, where: str) -> Iterator[Fields]:
    check_unweighted(fields, where)
    for number, trajectory in enumerate(map(_present, _objects(fields, "trajectories", where))):
        reader = _reader_of(trajectory)
        if reader is None:
            found = ", ".join(trajectory)
            raise DataError(where, f"trajectories: trajectory {number}: no store has the columns {found}")
        yield from reader(trajectory, where)


def _trajectory(fields: Fields, where: str) -> Iterator[Fields]:
    """Read a trajectory of ART: the main history, and those of sub-agents or from before a compaction."""
    if fields.get("exchanges"):
        _exchanges(fields, where)
    for history in (fields, *_objects({"additional_histories": [], **fields}, "additional_histories", where)):
        check_unweighted(history, where)
        items = _objects(history, "messages_and_choices", where)
        is_choice = [isinstance(item.get("message"), dict) for item in items]
        messages = [item["message"] if sampled else item for item, sampled in zip(items, is_choice, strict=True)]
        first = is_choice.index(True) if any(is_choice) else 0
        if any(is_choice):
            _check_sampled(messages, is_choice, first, where)
        split = {"prompt": messages[:first], "completion": messages[first:]} if first else {"messages": messages}
        yield {**split, **({"tools": history["tools"]} if history.get("tools") else {})}


def _call(fields: Fields, where: str) -> Iterator[Fields]:
    """Read a request of Chat Completions, and the answers sampled for it."""
    check_unweighted(fields, where)
    prompt = list_at(fields, "request.messages", where)
    beside = {name: value for name in OF_CHATS if (value := value_at(fields, f"request.{name}"))}
    for choice in _objects(fields["response"], "choices", where):
        if choice.get("finish_reason") in CUT:
            reason = f"finish_reason: {choice['finish_reason']}: the answer was cut off"
            raise DataError(where, f"response.choices: {reason}; leave it out, or set on_bad_row: skip")
        yield {"prompt": prompt, "completion": [choice.get("message")], **beside}


def _exchanges(fields: Fields, where: str) -> Iterator[Fields]:
    raise DataError(where, "exchanges: recorded requests are not read; save messages_and_choices")


def _check_sampled(messages: list[Fields], is_choice: list[bool], first: int, where: str) -> None:
    """Refuse an assistant message after the first choice that is not a choice: it would be trained too."""
    for number in range(first, len(messages)):
        if messages[number].get("role") == "assistant" and not is_choice[number]:
            raise DataError(
                where,
                f"messages_and_choices: turn {number + 1} is an assistant message that was not sampled, after one "
                f"that was; leave the trajectory out, or make it a choice",
            )


def _objects(fields: Fields, name: str, where: str) -> list[Fields]:
    values = list_at(fields, name, where)
    if not all(isinstance(value, dict) for value in values):
        raise DataError(where, f"{name}: expected a list of objects, found {repr(values)[:60]}")
    return values


READERS: dict[str, tuple[tuple[str, ...], Reader]] = {
    "token_ids": ((), _branch),
    "branches": ((), _branches),
    "nodes": ((), _nodes),
    "traces": ((), _episode),
    "trajectories": ((), _trajectories),
    "messages_and_choices": ((), _trajectory),
    "exchanges": ((), _exchanges),
    "steps": (("prompt_ids", "prompt_ids_suffix", "chat_completions"), _steps),
    "deltas": (("prompt_ids_suffix",), partial(_tree, "deltas", CALL_DELTA)),
    "records": (("request",), partial(_tree, "records", RECORD)),
    "samples": (("response_length",), _samples),
    "response.choices": (("message",), _call),
}
"""A place that marks a row as a run; the columns of which its first item must have one; and how it is read."""
