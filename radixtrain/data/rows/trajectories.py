"""Agents' runs as other projects save them, one run a row -> plain rows, one for each sequence that a model saw.

| project | a row holds | a plain row for |
|---|---|---|
| verifiers, prime-rl | `token_ids`, `mask`, `logprobs` of one branch | itself |
| | `branches`, a list of those | each branch |
| | `nodes`, a trace: messages with their `parent` and the tokens they add | each path from a root to a leaf |
| | `traces`, an episode | each of those, of each trace that is `trainable` |
| ART | `messages_and_choices`, `tools`, `additional_histories`: a trajectory | each history |
| | `trajectories`, a group | each of those |

The branches of one run share most of their tokens, so they belong in one optimizer step. They come from one row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from radixtrain.data.formats import Row
from radixtrain.data.sample import check_unweighted
from radixtrain.errors import DataError

Fields = dict[str, Any]
RIDERS = ("loss_weights", "weights", "advantages")  # of a branch, as the collators read them


def plain_rows(row: Row) -> list[Row]:
    """The sequences of an agent's run, as rows that any reader of `input_ids` or `messages` takes; or the row itself.

    A branch becomes `input_ids`, `mask` (1 for a token that the model sampled) and, if it has them, `old_logprobs`, as
    a collator takes them. A branch without a sampled token is left out if others have some. A history of ART becomes
    `messages`; or `prompt` and `completion`, from its first choice on, because only choices were sampled.

    Raises DataError that names what cannot be read: lists of different lengths, a parent that is not an earlier node,
    images, a trace without tokens or one that stopped with an error, an assistant message after the first choice that
    is not a choice, exchanges.
    """
    fields = {key: value for key, value in row.fields.items() if value is not None}
    reader = next((READERS[key] for key in READERS if key in fields), None)
    if reader is None or fields.keys() & PLAIN:
        return [row]
    return [Row(plain, row.where) for plain in reader(fields, row.where)]


def _branch(fields: Fields, where: str) -> Iterator[Fields]:
    """A flat branch. Its log-probabilities are those of all tokens, or of the sampled ones only."""
    ids = _list(fields, "token_ids", where)
    name = "sampled_mask" if "mask" not in fields and "sampled_mask" in fields else "mask"
    mask = _list(fields, name, where, len(ids))
    for place, value in enumerate(mask):
        if value not in (0, 1):
            raise DataError(where, f"{name}: expected true or false, found {value!r} at position {place}")
    plain: Fields = {"input_ids": ids, "mask": [int(value) for value in mask]}
    if fields.get("logprobs"):
        plain["old_logprobs"] = _spread(_list(fields, "logprobs", where), plain["mask"], where)
    yield plain | {name: fields[name] for name in RIDERS if fields.get(name) is not None}


def _branches(fields: Fields, where: str) -> Iterator[Fields]:
    check_unweighted(fields, where)
    found = [plain for branch in _objects(fields, "branches", where) for plain in _branch(branch, where)]
    sampled = [plain for plain in found if any(plain["mask"])]
    yield from sampled or found


def _trace(fields: Fields, where: str) -> Iterator[Fields]:
    """A graph of messages, each with the tokens that it adds to the sequence."""
    nodes = _objects(fields, "nodes", where)
    for part in (fields, *nodes):
        check_unweighted(part, where)
    if fields.get("stop_condition") == "error":
        raise DataError(where, "nodes: this run stopped with an error; leave it out, or set on_bad_row: skip")
    for number, node in enumerate(nodes):
        _check_node(node, number, where)
    if not any(node.get("token_ids") for node in nodes):
        raise DataError(where, "nodes: none has token_ids: the run was not recorded for training; use its messages")
    inner = {node.get("parent") for node in nodes}
    paths = [_path(nodes, leaf) for leaf in range(len(nodes)) if leaf not in inner]
    yield from _branches({"branches": [_joined(path) for path in paths]}, where)


def _episode(fields: Fields, where: str) -> Iterator[Fields]:
    check_unweighted(fields, where)
    traces = [trace for trace in _objects(fields, "traces", where) if trace.get("trainable", True)]
    if not traces:
        raise DataError(where, "traces: none of them is trainable")
    for trace in traces:
        yield from _trace(trace, where)


def _trajectory(fields: Fields, where: str) -> Iterator[Fields]:
    """ART's: the main history, and those of sub-agents or from before a compaction."""
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


def _group(fields: Fields, where: str) -> Iterator[Fields]:
    check_unweighted(fields, where)
    for trajectory in _objects(fields, "trajectories", where):
        reader = _exchanges if trajectory.get("exchanges") else _trajectory
        yield from reader({key: value for key, value in trajectory.items() if value is not None}, where)


def _exchanges(fields: Fields, where: str) -> Iterator[Fields]:
    raise DataError(where, "exchanges: recorded requests are not read; save messages_and_choices")


def _check_sampled(messages: list[Fields], is_choice: list[bool], first: int, where: str) -> None:
    """Refuse an assistant message after the first choice that is no choice: it would be trained too."""
    for number in range(first, len(messages)):
        if messages[number].get("role") == "assistant" and not is_choice[number]:
            raise DataError(
                where,
                f"messages_and_choices: turn {number + 1} is an assistant message that was not sampled, after one "
                f"that was; leave the trajectory out, or make it a choice",
            )


def _check_node(node: Fields, number: int, where: str) -> None:
    parent = node.get("parent")
    if parent is not None and (type(parent) is not int or not 0 <= parent < number):
        raise DataError(where, f"nodes: node {number}: parent: expected an earlier node or null, found {parent!r}")
    num_tokens, num_masked = (len(node.get(name) or ()) for name in ("token_ids", "mask"))
    if num_tokens != num_masked:
        raise DataError(where, f"nodes: node {number}: has {num_tokens} token_ids and {num_masked} values of mask")
    message = node.get("message")
    content = message.get("content") if isinstance(message, dict) else None
    parts = content if isinstance(content, list) else []
    kinds = [part.get("type", "text") for part in parts if isinstance(part, dict)]
    if any(kind != "text" for kind in kinds) or node.get("multi_modal_data"):
        raise DataError(where, f"nodes: node {number}: only text is read, found {', '.join(map(str, kinds))}")


def _path(nodes: list[Fields], leaf: int) -> list[Fields]:
    """From the root to a leaf."""
    path = [nodes[leaf]]
    while path[-1].get("parent") is not None:
        path.append(nodes[path[-1]["parent"]])
    return path[::-1]


def _joined(path: list[Fields]) -> Fields:
    """The columns of the nodes one after the other. Nodes that were not sampled have no log-probabilities."""
    return {name: [x for node in path for x in node.get(name) or []] for name in ("token_ids", "mask", "logprobs")}


def _spread(logprobs: list[Any], mask: list[int], where: str) -> list[Any]:
    """One for each token, 0.0 for those that were not sampled."""
    if len(logprobs) == len(mask):
        return logprobs
    if len(logprobs) != sum(mask):
        expected = f"{sum(mask)} values, as many as sampled tokens, or {len(mask)}, as many as token_ids"
        raise DataError(where, f"logprobs: expected {expected}; found {len(logprobs)}")
    remaining = iter(logprobs)
    return [next(remaining) if sampled else 0.0 for sampled in mask]


def _list(fields: Fields, name: str, where: str, length: int | None = None) -> list[Any]:
    values = fields.get(name)
    if not isinstance(values, list):
        raise DataError(where, f"{name}: expected a list, found {'nothing' if values is None else repr(values)[:40]}")
    if length is not None and len(values) != length:
        raise DataError(where, f"{name}: expected {length} values, as many as token_ids, found {len(values)}")
    return values


def _objects(fields: Fields, name: str, where: str) -> list[Fields]:
    values = _list(fields, name, where)
    if not all(isinstance(value, dict) for value in values):
        raise DataError(where, f"{name}: expected a list of objects, found {repr(values)[:60]}")
    return values


PLAIN = frozenset({"input_ids", "messages", "prompt", "conversations", "text"})
"""A row with one of these is no run."""
READERS: dict[str, Callable[[Fields, str], Iterator[Fields]]] = {
    "token_ids": _branch,
    "branches": _branches,
    "nodes": _trace,
    "traces": _episode,
    "trajectories": _group,
    "messages_and_choices": _trajectory,
    "exchanges": _exchanges,
}
