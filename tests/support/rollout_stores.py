"""One run of an agent as each store of rollouts writes it, and the rows that its project would train on.

Five calls of a model: a turn, the next one, a retry of that one, a sub-agent, and a turn after a compaction. Records of
SkyRL-capture, miles and rLLM are written by hand from the projects' sources, with the names of their keys; the traces
of verifiers were written by its own classes, see `VERIFIERS`.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["CALLS", "LEAVES", "STORES", "VERIFIERS", "Fields", "leaf", "verifiers_rows"]

Fields = dict[str, Any]
GOLDEN = Path(__file__).resolve().parents[1] / "golden"
VERIFIERS = GOLDEN / "verifiers_0_4_0_traces.jsonl"
"""Two episodes of `Episode.to_record`, verifiers 0.4.0. Their turns were committed by `prepare_turn(...).commit`."""


class Call(NamedTuple):
    """A call of the model. Its floats are exact in float32."""

    prompt: list[int]
    completion: list[int]
    logprobs: list[float]
    advantage: list[float]
    lineage: str


FIRST = Call([3, 4, 5, 1, 2], [6, 7], [-0.5, -1.25], [0.5, 0.5], "s#0")
NEXT = Call([*FIRST.prompt, 6, 7, 8, 9, 1, 2], [10, 11, 12], [-0.25, -2.0, -3.5], [0.5, 0.75, 1.0], "s#0")
RETRY = Call(NEXT.prompt, [13, 10], [-1.5, -0.125], [-1.0, -1.0], "s#0")
HELPER = Call([14, 15, 1, 2], [16], [-0.75], [2.0], "s#1")
COMPACTED = Call([3, 4, 17, 1, 2], [18, 19], [-4.0, -0.5], [-0.25, 1.5], "s#2")
CALLS = [FIRST, HELPER, NEXT, RETRY, COMPACTED]
LEAVES = [[HELPER], [FIRST, NEXT], [FIRST, RETRY], [COMPACTED]]


def leaf(calls: list[Call], trained: list[Call] | None = None, advantages: bool = True) -> Fields:
    """The row of a path of calls, in which the completions of `trained` are labelled; of all, if None."""
    last = calls[-1]
    ids = [*last.prompt, *last.completion]
    row: Fields = {"input_ids": ids, "mask": [0] * len(ids), "old_logprobs": [0.0] * len(ids)}
    if advantages:
        row["advantages"] = [0.0] * len(ids)
    for call in calls:
        span = slice(len(call.prompt), len(call.prompt) + len(call.completion))
        row["mask"][span] = [int(trained is None or call in trained)] * len(call.completion)
        row["old_logprobs"][span] = call.logprobs
        if advantages:
            row["advantages"][span] = call.advantage
    return row


def _node(number: int, parent: int | None, ids: list[int], call: Call | None = None) -> Fields:
    """A node of SkyRL-capture's graph (export/formats.py: graph_records). With a call, the end of it was sampled."""
    sampled = len(ids) - len(call.completion) if call else len(ids)
    return {
        "node_id": f"nd_{number}",
        "parent": None if parent is None else f"nd_{parent}",
        "children": [],
        "role": "assistant" if call else "user",
        "author": "model" if call else "client",
        "message": {"role": "assistant" if call else "user", "content": "text"},
        "message_hash": "0",
        "context_hash": "0",
        "tokens": {
            "ids": ids,
            "sampled_start": sampled if call else None,
            "sampled_mask": [place >= sampled for place in range(len(ids))],
            "logprobs": [0.0] * sampled + (call.logprobs if call else []),
            "routed_experts": None,
        },
    }


HEADER = {"schema_version": 4, "trajectory_id": "tr_1", "project": "p", "labels": [], "annotations": {"reward": 0.5}}
GRAPH = {
    **HEADER,
    "nodes": [
        _node(1, None, [3, 4]),
        _node(2, None, [14, 15]),
        _node(3, 1, [5]),
        _node(4, 1, [17]),
        _node(5, 2, [1, 2, 16], HELPER),
        _node(6, 3, [1, 2, 6, 7], FIRST),
        _node(7, 4, [1, 2, 18, 19], COMPACTED),
        _node(8, 6, [8, 9]),
        _node(9, 8, [1, 2, 10, 11, 12], NEXT),
        _node(10, 8, [1, 2, 13, 10], RETRY),
    ],
}


def _token_sample(number: int, row: Fields) -> Fields:
    """export/formats.py: token_sample_records."""
    return {
        "schema_version": 4,
        "path_id": f"tr_1-p{number:04d}",
        "trajectory_id": "tr_1",
        "node_ids": [],
        "abandoned": False,
        "labels": [],
        "annotations": {"reward": 0.5},
        "model": "m",
        "tools": None,
        "trainable_count": sum(row["mask"]),
        "input_ids": row["input_ids"],
        "node_spans": [],
        "loss_mask": row["mask"],
        "rollout_logprobs": row["old_logprobs"],
        "rollout_expert_indices": None,
        "stop_reason": "stop",
        "tokenizer": "t",
    }


def _sample(row: Fields) -> Fields:
    """miles' `Sample.to_dict` (utils/types.py). The response begins with the first sampled token."""
    start = row["old_logprobs"].index(next(number for number in row["old_logprobs"] if number))
    return {
        "group_index": 0,
        "index": 0,
        "prompt": [{"role": "user", "content": "text"}],
        "tokens": row["input_ids"],
        "multimodal_inputs": None,
        "multimodal_train_inputs": None,
        "response": "text",
        "response_length": len(row["input_ids"]) - start,
        "label": None,
        "reward": 1.0,
        "loss_mask": row["mask"][start:],
        "weight_versions": ["1"],
        "rollout_log_probs": row["old_logprobs"][start:],
        "remove_sample": False,
        "status": "completed",
        "metadata": {"leaf": {"node_id": 0, "parent": None, "path_node_ids": [0], "response_id": "r"}},
    }


def _record(call: Call) -> Fields:
    """miles' `SessionRecord` (rollout/session/types.py); the response is SGLang's."""
    logprobs = [[number, token, None] for number, token in zip(call.logprobs, call.completion, strict=True)]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "text"},
        "finish_reason": "stop",
        "meta_info": {"output_token_logprobs": logprobs, "completion_tokens": len(logprobs)},
    }
    return {
        "timestamp": 1.0,
        "request_timestamp": 0.5,
        "method": "POST",
        "path": "/v1/chat/completions",
        "request": {"messages": [{"role": "user", "content": "text"}], "input_ids": call.prompt},
        "response": {"id": "r", "choices": [choice]},
        "status_code": 200,
    }


def _step(call: Call) -> Fields:
    """rLLM's `Step.to_dict` (agents/agent.py)."""
    return {
        "prompt_ids": call.prompt,
        "response_ids": call.completion,
        "logprobs": call.logprobs,
        "chat_completions": [{"role": "user", "content": "text"}],
        "model_response": "text",
        "metadata": {"lineage_id": call.lineage},
        "reward": 0.0,
        "done": False,
        "advantage": call.advantage if len({*call.advantage}) > 1 else call.advantage[0],
    }


def _delta(call: Call, name: str, parent: tuple[str, Call] | None = None) -> Fields:
    """A `TraceDelta` of rLLM's gateway (rllm_model_gateway/models.py)."""
    start = len(parent[1].prompt) + len(parent[1].completion) if parent else 0
    return {
        "trace_id": name,
        "session_id": "s",
        "parent_trace_id": parent[0] if parent else None,
        "lineage_id": call.lineage,
        "model": "m",
        "messages_suffix": [{"role": "user", "content": "text"}],
        "prompt_ids_suffix": call.prompt[start:],
        "response_message": {"role": "assistant", "content": "text"},
        "completion_token_ids": call.completion,
        "logprobs": call.logprobs,
        "finish_reason": "stop",
    }


def _trace(call: Call) -> Fields:
    """A `TraceRecord` of the same gateway, as its client gets it."""
    return {
        "trace_id": "t",
        "session_id": "s",
        "messages": [{"role": "user", "content": "text"}],
        "prompt_token_ids": call.prompt,
        "response_message": {"role": "assistant", "content": "text"},
        "completion_token_ids": call.completion,
        "logprobs": call.logprobs,
        "lineage_id": call.lineage,
    }


ALL = [leaf(calls) for calls in LEAVES]
PLAIN = [leaf(calls, advantages=False) for calls in LEAVES]
ONCE = [
    leaf(calls, trained, advantages=False) for calls, trained in zip(LEAVES, (None, None, [RETRY], None), strict=True)
]
STORES: dict[str, tuple[list[Fields], list[list[Fields]]]] = {
    "SkyRL-capture graph": ([GRAPH], [[PLAIN[0], PLAIN[3], PLAIN[1], PLAIN[2]]]),
    "SkyRL-capture token-samples": ([_token_sample(n, row) for n, row in enumerate(ONCE)], [[row] for row in ONCE]),
    "miles session": (
        [{"session_id": "s", "records": [_record(FIRST), _record(NEXT)], "metadata": {"max_trim_tokens": 1}}],
        [[PLAIN[1]]],
    ),
    "miles session records": ([_record(call) for call in CALLS], [[leaf([call], advantages=False)] for call in CALLS]),
    "miles rollout": ([{"rollout_id": 0, "samples": [_sample(row) for row in ONCE]}], [ONCE]),
    "miles samples": ([_sample(row) for row in ONCE], [[row] for row in ONCE]),
    "rLLM episode": ([{"id": "0:0", "trajectories": [{"name": "solver", "steps": [_step(c) for c in CALLS]}]}], [ALL]),
    "rLLM steps": ([_step(call) for call in CALLS], [[leaf([call])] for call in CALLS]),
    "rLLM trace graph": (
        [
            {
                "format": "compact",
                "version": 1,
                "deltas": [
                    _delta(FIRST, "a"),
                    _delta(HELPER, "b"),
                    _delta(NEXT, "c", ("a", FIRST)),
                    _delta(RETRY, "d", ("a", FIRST)),
                    _delta(COMPACTED, "e"),
                ],
            }
        ],
        [PLAIN],
    ),
    "rLLM traces": ([_trace(call) for call in CALLS], [[leaf([call], advantages=False)] for call in CALLS]),
}
"""The lines of a file of each store, and the plain rows of each line."""


def verifiers_rows() -> list[list[Fields]]:
    """The rows of each line of `VERIFIERS`, as the package's own `Branch` gave them when the file was written."""
    branches = json.loads((GOLDEN / "verifiers_0_4_0_branches.json").read_text(encoding="utf-8"))
    return [
        [
            {
                "input_ids": branch["token_ids"],
                "mask": [int(sampled) for sampled in branch["sampled_mask"]],
                "old_logprobs": branch["logprobs"],
                "advantages": branch["advantages"],
            }
            for branch in line
        ]
        for line in branches
    ]
