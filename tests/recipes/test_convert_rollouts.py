"""recipes/convert_rollouts.py: the rows of each store, by hand from the projects' sources; and that `fit` names it."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import convert_rollouts
import pytest
from byte_tokenizer import byte_tokenizer

from radixtrain.data.chat import ChatEncoder
from radixtrain.data.files.sources import Row, read_rows
from radixtrain.errors import DataError

NODES = [
    {"parent": None, "token_ids": [5, 6], "mask": [False, False], "logprobs": []},
    {"parent": 0, "token_ids": [7, 8], "mask": [False, True], "logprobs": [-0.5], "advantages": 2.0},
    {"parent": 1, "token_ids": [9], "mask": [False]},
    {"parent": 2, "token_ids": [10], "mask": [True], "logprobs": [-1.5]},
    {"parent": 0, "token_ids": [11], "mask": [True], "logprobs": [-2.5], "message": {"content": [{"type": "text"}]}},
    {"parent": 1, "token_ids": [12], "mask": [True], "logprobs": [-1.0],
     "semantic_parents": [{"node": 3, "type": "compaction_attempt"}]},
    {"parent": None, "message": {"role": "user", "content": "a"}},
]  # fmt: skip
PATHS = [
    {"input_ids": [5, 6, 7, 8, 9, 10], "mask": [0, 0, 0, 1, 0, 1], "old_logprobs": [0.0, 0.0, 0.0, -0.5, 0.0, -1.5],
     "advantages": [0.0, 0.0, 0.0, 2.0, 0.0, 0.0]},
    {"input_ids": [5, 6, 11], "mask": [0, 0, 1], "old_logprobs": [0.0, 0.0, -2.5]},
]  # fmt: skip
CAPTURED = [
    {"node_id": "a", "parent": None, "tokens": {"ids": [5], "sampled_mask": [False], "logprobs": [0.0]}},
    {"node_id": "b", "parent": "a", "tokens": {"ids": [6], "sampled_mask": [True], "logprobs": [-1.0]}},
    {"node_id": "c", "parent": "a", "tokens": {"ids": [7], "sampled_mask": [True], "logprobs": [-2.0]},
     "delivery_uncertain": True},
]  # fmt: skip
FIRST = {"prompt_ids": [5, 6], "response_ids": [7], "logprobs": [-1.0]}
NEXT = {"prompt_ids": [5, 6, 7, 8], "response_ids": [9, 10], "logprobs": [-2.0, -3.0]}
CUT = {"prompt_ids": [5, 6, 7, 8, 9, 11], "response_ids": [12], "logprobs": [-4.0]}  # continues FIRST, not NEXT
CALLS = [
    {"input_ids": [5, 6, 7, 8, 9, 10], "mask": [0, 0, 1, 0, 1, 1], "old_logprobs": [0.0, 0.0, -1.0, 0.0, -2.0, -3.0]},
    {"input_ids": [5, 6, 7, 8, 9, 11, 12], "mask": [0, 0, 1, 0, 0, 0, 1],
     "old_logprobs": [0.0, 0.0, -1.0, 0.0, 0.0, 0.0, -4.0]},
]  # fmt: skip
PAIR = [{"input_ids": [5, 6, 7], "mask": [0, 0, 1], "old_logprobs": [0.0, 0.0, -1.0]}]
TRACE = {"trace_id": "a", "parent_trace_id": None, "prompt_ids_suffix": [5, 6], "completion_token_ids": [7]}
LEAF = {"trace_id": "b", "parent_trace_id": "a", "prompt_ids_suffix": [8], "completion_token_ids": [9]}
RECORD = {
    "request": {"messages": [{"role": "user", "content": "text"}], "input_ids": [5, 6]},
    "response": {"choices": [{"message": {"content": "a"}, "meta_info": {"output_token_logprobs": [[-1.0, 7, None]]}}]},
}
SAMPLE = {"prompt": "text", "response": "text", "tokens": [5, 6, 7, 8], "response_length": 3, "loss_mask": [1, 0, 1],
          "rollout_log_probs": [-1.0, 0.0, -2.0], "status": "completed"}  # fmt: skip
SAMPLED = [{"input_ids": [5, 6, 7, 8], "mask": [0, 1, 0, 1], "old_logprobs": [0.0, -1.0, 0.0, -2.0]}]
USER, PLAIN = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
CHOICE = {"finish_reason": "stop", "index": 0, "message": PLAIN}
RUNS: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
    ({"nodes": NODES, "stop_condition": "done"}, [PATHS[0], PATHS[1]]),
    ({"traces": [{"nodes": NODES[:2]}, {"nodes": NODES, "trainable": False}]}, [
        {name: column[:4] for name, column in PATHS[0].items()}]),
    ({"token_ids": [5, 6, 7], "mask": [0, 1, 1], "logprobs": [-0.5, -1.5], "advantages": [0.0, 1.0, 1.0]}, [
        {"input_ids": [5, 6, 7], "mask": [0, 1, 1], "old_logprobs": [0.0, -0.5, -1.5], "advantages": [0.0, 1.0, 1.0]}]),
    ({"branches": [{"token_ids": [5, 6], "sampled_mask": [0, 1]}, {"token_ids": [5], "mask": [0]}]}, [
        {"input_ids": [5, 6], "mask": [0, 1]}]),
    ({"nodes": CAPTURED}, [{"input_ids": [5, 6], "mask": [0, 1], "old_logprobs": [0.0, -1.0]}]),
    ({"path_id": "p", "input_ids": [5, 6], "loss_mask": [0, 1], "rollout_logprobs": [0.0, -1.0]}, [
        {"input_ids": [5, 6], "mask": [0, 1], "old_logprobs": [0.0, -1.0]}]),
    ({"steps": [FIRST, NEXT, CUT]}, CALLS),
    ({"trajectories": [{"name": "solver", "steps": [FIRST]}]}, PAIR),
    (FIRST, PAIR),
    ({"deltas": [TRACE, LEAF]}, [{"input_ids": [5, 6, 7, 8, 9], "mask": [0, 0, 1, 0, 1]}]),
    ({"messages": [USER], "prompt_token_ids": [5, 6], "completion_token_ids": [7], "logprobs": [-1.0]}, PAIR),
    ({"records": [RECORD]}, PAIR),
    (RECORD, PAIR),
    (SAMPLE, SAMPLED),
    ({"samples": [SAMPLE, {**SAMPLE, "remove_sample": True}]}, SAMPLED),
    ({"messages_and_choices": [USER, CHOICE], "reward": 1.0, "additional_histories": [
        {"messages_and_choices": [USER, PLAIN], "tools": [{"name": "f"}]}]}, [
        {"prompt": [USER], "completion": [PLAIN], "tools": []}, {"messages": [USER, PLAIN], "tools": [{"name": "f"}]}]),
]  # fmt: skip
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"nodes": NODES, "stop_condition": "error"}, "this run stopped with an error"),
    ({"token_ids": [5, 6], "mask": [1]}, "mask: expected 2 values for 2 tokens, found 1"),
    ({**SAMPLE, "status": "aborted"}, "status aborted: this sample failed"),
    ({**SAMPLE, "multimodal_inputs": {"image": 1}}, "only text is read, found images or other media"),
    ({"nodes": [{**NODES[0], "message": {"content": [{"type": "image_url"}]}}]}, "only text is read, found images"),
    ({"nodes": [NODES[0], {**NODES[1], "parent": 2}]}, "parent 2 is no earlier item"),
    ({"nodes": [NODES[0], {**NODES[1], "logprobs": None}, {**NODES[3], "parent": 1}]}, "logprobs: some items of this"),
    ({"steps": [FIRST, {"prompt_ids": [], "response_ids": []}]}, "no prompt_ids: the run was not recorded for train"),
    ({"messages_and_choices": [USER, CHOICE, USER, PLAIN]}, "an assistant message that was not sampled follows one"),
    ({"deltas": [{**TRACE, "logprobs": [-1.0, -2.0]}]}, "expected 1 or 3 numbers, found 2"),
]


def converted(run: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{json.dumps(run)}\n"))
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    convert_rollouts.main()
    return sys.stdout.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(("run", "rows"), RUNS)
def test_the_rows_of_a_run(
    run: dict[str, Any], rows: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are read, but for advantages, and the run itself is refused by the name of the converter."""
    path = tmp_path / "rows.jsonl"
    path.write_text(converted(run, monkeypatch), encoding="utf-8")
    assert [row.fields for row in read_rows(path)] == rows
    encoder = ChatEncoder(byte_tokenizer("{% for m in messages %}{{ m.role }}: {{ m.content }}|{% endfor %}"))
    for row in rows:
        if "input_ids" in row:
            [sample] = encoder.encode(Row({k: v for k, v in row.items() if k != "advantages"}, "rows.jsonl:1"))
            assert [label != -100 for label in sample.labels[1:]] == [bool(bears) for bears in row["mask"][1:]]
    with pytest.raises(DataError, match=r"^runs\.jsonl:1: "):
        encoder.encode(Row(run, "runs.jsonl:1"))


@pytest.mark.parametrize(("run", "reason"), REFUSED)
def test_runs_that_are_refused(run: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit) as raised:
        converted(run, monkeypatch)
    assert str(raised.value).startswith(f"line 1: {reason}")
