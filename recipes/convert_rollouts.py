"""Convert agents' runs, as five projects save them, into rows of tokens or chats, one row per line.

python recipes/convert_rollouts.py < runs.jsonl > rows.jsonl

| project | a line holds | a row is written for |
|---|---|---|
| verifiers, prime-rl | `token_ids` and `mask`, or `sampled_mask`: a branch; or `branches` | each branch |
| | `nodes`: a trace; or `traces` with them: an episode | each path of `parent` |
| SkyRL-capture | `nodes` with `tokens`: the export `graph` | each path of `parent` |
| | `path_id`, `input_ids`, `loss_mask`: `token-samples` | itself |
| miles | `records`: a session | each path of calls |
| | `tokens`, `response_length`, `loss_mask`: a sample; or `samples` | each sample |
| rLLM | `steps`, or `trajectories` with them: an episode | each path of calls |
| | `deltas`: a trace graph of the gateway | each path of `parent_trace_id` |
| | `prompt_token_ids`, `completion_token_ids`: a call | itself |
| ART | `messages_and_choices`, or `trajectories` with them | each history, as a chat |

A row of tokens has `input_ids` and `mask` (1 for a token that the model sampled); log-probabilities and advantages are
left out. What several paths share has a `mask` of 1 in the first of their rows only. A call without a parent continues
the longest earlier call with whose tokens its prompt begins. Of a run's sequences those without a sampled token are
left out. Images, a run without tokens and one that ended in an error are refused: take them out first, as well as runs
that should not be imitated.
"""

import json
import sys
from typing import NamedTuple

MEDIA = ("multi_modal_data", "multimodal_inputs", "multimodal_train_inputs")
UNTRAINED = ("delivery_uncertain", "remove_sample")  # SkyRL-capture's and miles' marks of an item that is context only


class Store(NamedTuple):
    """Where an item keeps its tokens. A dot goes into an object or a list, and `*` over a list.

    tokens: all tokens; with `completion` those before the sampled ones. mask: true for a sampled token.
    tail: how many tokens at the end the mask is for. Without a mask all of these are sampled.
    parent: of the item that this one continues, its `id`, or without `id` its place in the list.
    """

    tokens: str
    mask: str = ""
    completion: str = ""
    tail: str = ""
    parent: str = ""
    id: str = ""


BRANCH = Store("token_ids", "mask")
NODE = BRANCH._replace(parent="parent")
CAPTURED = Store("tokens.ids", "tokens.sampled_mask", parent="parent", id="node_id")
CAPTURED_SAMPLE = Store("input_ids", "loss_mask")
SAMPLE = Store("tokens", "loss_mask", tail="response_length")
SAMPLED = "response.choices.0.meta_info.output_token_logprobs.*.1"  # SGLang's: log-probability, token, text
RECORD = Store("request.input_ids", completion=SAMPLED)
STEP = Store("prompt_ids", completion="response_ids")
STEP_DELTA = STEP._replace(tokens="prompt_ids_suffix", parent="parent_step_id", id="id")
CALL = Store("prompt_token_ids", completion="completion_token_ids")
CALL_DELTA = CALL._replace(tokens="prompt_ids_suffix", parent="parent_trace_id", id="trace_id")


def rows_of(run):
    """Return the rows of a run."""
    if run.get("ok") is False or run.get("stop_condition") == "error":
        raise ValueError("this run stopped with an error")
    if "traces" in run:
        traces = [trace for trace in run["traces"] if is_trainable(trace)]
        return [row for trace in traces for row in rows_of(trace)]
    if "trajectories" in run:
        return [row for trajectory in run["trajectories"] for row in rows_of(trajectory)]
    if "messages_and_choices" in run:
        return [chat_of(history) for history in (run, *(run.get("additional_histories") or []))]
    if "nodes" in run:
        return paths(run["nodes"], CAPTURED if "node_id" in run["nodes"][0] else NODE) if is_trainable(run) else []
    if "steps" in run:
        return paths(run["steps"], STEP_DELTA if "prompt_ids_suffix" in run["steps"][0] else STEP)
    if "deltas" in run:
        return paths(run["deltas"], CALL_DELTA)
    if "records" in run:
        return paths(run["records"], RECORD)
    items = run.get("branches") or run.get("samples") or [run]
    return [row for row in (joined([piece_of(item, store_of(item))]) for item in items) if any(row["mask"])]


def store_of(item):
    """Return the store that an item which is a whole sequence is from."""
    if "token_ids" in item:
        return BRANCH if "mask" in item else BRANCH._replace(mask="sampled_mask")
    for store in (SAMPLE, CAPTURED_SAMPLE, STEP, CALL, RECORD):
        if value_at(item, store.tokens) is not None:
            return store
    raise ValueError(f"no store has the columns {', '.join(item)}")


def is_trainable(trace):
    return trace.get("trainable", True) and (trace.get("agent") or {}).get("trainable", True)


def chat_of(history):
    """Return a history of ART, of which only choices were sampled: the chat before the first one is the prompt."""
    items = history["messages_and_choices"]
    sampled = ["message" in item for item in items]
    messages = [item.get("message", item) for item in items]
    first = sampled.index(True) if any(sampled) else 0
    others = [each for each, is_choice in zip(messages[first:], sampled[first:], strict=True) if not is_choice]
    if any(sampled) and any(each["role"] == "assistant" for each in others):
        raise ValueError("an assistant message that was not sampled follows one that was")
    chat = {"prompt": messages[:first], "completion": messages[first:]} if first else {"messages": messages}
    return {**chat, "tools": history.get("tools") or []}


def paths(items, store):
    """Return the row of each path from a root to a leaf that has a sampled token."""
    pieces = [piece_of(item, store) for item in items]
    parents = named_parents(items, store) if store.parent else [parent_of(pieces, place) for place in range(len(items))]
    links = [link for item in items for link in item.get("semantic_parents") or []]  # a summary that was not used
    accepted = {link["node"] for link in links if link.get("type") == "compaction"}
    lost = {
        place
        for place, item in enumerate(items)
        if any(link.get("type") == "compaction_attempt" for link in item.get("semantic_parents") or [])
    }
    leaves = [place for place in range(len(items)) if place not in {*parents, *(lost - accepted)}]
    rows, trained = [], set()
    for leaf in leaves:
        path = [leaf]
        while (parent := parents[path[0]]) is not None:
            path.insert(0, parent)
        own = [pieces[place] for place in path] if store.parent else added(pieces, path)
        rows.append(joined([without_loss(x) if at in trained else x for at, x in zip(path, own, strict=True)]))
        trained.update(path)
    return [row for row in rows if any(row["mask"])]


def without_loss(piece):
    """Return what an earlier row trains, as context."""
    return {**piece, "mask": [0] * len(piece["mask"])}


def named_parents(items, store):
    ids = [item[store.id] if store.id else place for place, item in enumerate(items)]
    parents = [item.get(store.parent) for item in items]
    for place, parent in enumerate(parents):
        if parent is not None and parent not in ids[:place]:
            raise ValueError(f"{store.parent} {parent!r} is no earlier item")
    return [None if parent is None else ids.index(parent) for parent in parents]


def parent_of(calls, place):
    """Return the place of the longest earlier call with whose tokens the prompt of a call begins; None if none is."""
    prompt = calls[place]["input_ids"][: calls[place]["mask"].count(0)]
    earlier = [n for n in range(place) if prompt[: len(calls[n]["mask"])] == calls[n]["input_ids"]]
    return max(earlier, key=lambda n: len(calls[n]["mask"]), default=None)


def added(calls, path):
    """Return what each call of a path adds to the one before it."""
    starts = [0, *(len(calls[place]["mask"]) for place in path[:-1])]
    return [
        {name: column[start:] for name, column in calls[place].items()}
        for place, start in zip(path, starts, strict=True)
    ]


def piece_of(item, store):
    """Return the columns of what an item adds."""
    if any(item.get(name) for name in MEDIA) or any(kind != "text" for kind in kinds_of_parts(item)):
        raise ValueError("only text is read, found images or other media")
    if item.get("status", "completed") not in ("completed", "truncated"):  # of miles
        raise ValueError(f"status {item['status']}: this sample failed")
    tokens, is_message = value_at(item, store.tokens), store.parent and not store.completion
    if not tokens and not is_message and item.get(store.parent) is None:
        raise ValueError(f"no {store.tokens}: the run was not recorded for training; use its messages")
    tokens = tokens or []
    if store.completion:
        completion = value_at(item, store.completion)
        mask = [0] * len(tokens) + [1] * len(completion)
        tokens = tokens + completion
    else:
        count = value_at(item, store.tail) if store.tail else len(tokens)
        own = value_at(item, store.mask) or ([1] * count if store.tail else [])
        if len(own) != count or not 0 <= count <= len(tokens):
            raise ValueError(f"{store.mask}: expected {count} values for {len(tokens)} tokens, found {len(own)}")
        mask = [0] * (len(tokens) - count) + [int(value) for value in own]
    piece = {"input_ids": tokens, "mask": mask}
    return without_loss(piece) if any(item.get(name) for name in UNTRAINED) else piece


def joined(pieces):
    """Return the row of the pieces."""
    return {name: [value for piece in pieces for value in piece[name]] for name in ("input_ids", "mask")}


def value_at(item, place):
    """Return what is at a place, see `Store`; None if nothing is."""
    key, _, rest = place.partition(".")
    if key == "*":
        return [value_at(each, rest) for each in item] if isinstance(item, list) else None
    if isinstance(item, list):
        value = item[int(key)] if key.isdigit() and int(key) < len(item) else None
    else:
        value = item.get(key) if isinstance(item, dict) else None
    return value_at(value, rest) if rest else value


def kinds_of_parts(value):
    """Yield the type of each part of every content that is a list."""
    if isinstance(value, dict):
        content = value.get("content")
        yield from (part.get("type", "text") for part in (content if isinstance(content, list) else []))
        yield from (kind for each in value.values() for kind in kinds_of_parts(each))
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        yield from (kind for each in value for kind in kinds_of_parts(each))


def main():
    for number, line in enumerate(sys.stdin, start=1):
        try:
            rows = rows_of({name: value for name, value in json.loads(line).items() if value is not None})
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise SystemExit(f"line {number}: {error}") from None
        for row in rows:
            print(json.dumps(row))


if __name__ == "__main__":
    main()
