"""recipes/convert_rollouts.py: the rows of each store, by hand from the projects' sources."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import convert_rollouts
import pytest

from radixtrain.data.chat import ChatEncoder
from radixtrain.data.files.sources import Row, read_rows
from radixtrain.errors import DataError
from tests.support.batches import byte_tokenizer

Run = dict[str, Any]


def row(ids: str, mask: str, *logprobs: float) -> Run:
    """ids, mask: a digit for each token. logprobs: of the sampled ones; none if the store has none."""
    bears, left = [*map(int, mask)], iter(logprobs)
    numbers = {"old_logprobs": [next(left) if each else 0.0 for each in bears]} if logprobs else {}
    return {"input_ids": [*map(int, ids)], "mask": bears, **numbers}


def node(parent: int | None, ids: str, mask: str, *logprobs: float, **more: Any) -> Run:
    own = row(ids, mask)
    return {"parent": parent, "token_ids": own["input_ids"], "mask": own["mask"], "logprobs": [*logprobs], **more}


def call(prompt: str, response: str, *logprobs: float) -> Run:
    ids = {"prompt_ids": [*map(int, prompt)], "response_ids": [*map(int, response)]}
    return {**ids, "logprobs": [*logprobs]}


UNUSED = [{"node": 3, "type": "compaction_attempt"}]
NODES = [node(None, "56", "00"), node(0, "78", "01", -0.5), node(1, "9", "0"), node(0, "4", "1", -2.5)]
NODES += [node(2, "3", "1", -1.5), node(1, "2", "1", -1.0, semantic_parents=UNUSED)]
CAPTURED = [
    {
        "node_id": name,
        "parent": parent,
        "tokens": {"ids": [token], "sampled_mask": [parent is not None], "logprobs": [-1.0 if parent else 0.0]},
        **more,
    }
    for name, parent, token, more in (("a", None, 5, {}), ("b", "a", 6, {}), ("c", "a", 7, {"remove_sample": True}))
]
STEPS = [
    call("56", "7", -1.0),
    call("5678", "93", -2.0, -3.0),
    call("567894", "2", -4.0),
]  # the last continues the first
TWO_PATHS = [row("56789", "00010", -0.5), row("56784", "00001", -2.5)]
PAIR = row("567", "001", -1.0)
MESSAGE = {"choices": [{"message": {"content": "a"}, "meta_info": {"output_token_logprobs": [[-1.0, 7, None]]}}]}
SAMPLE = {"tokens": [5, 6, 7, 8], "response_length": 3, "loss_mask": [1, 0, 1], "rollout_log_probs": [-1.0, 0.0, -2.0]}
DELTA = {"parent_trace_id": None, "trace_id": "a", "prompt_ids_suffix": [5, 6], "completion_token_ids": [7]}
USER, PLAIN = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
CHOICE = {"index": 0, "message": PLAIN}
RUNS: list[tuple[Run, list[Run]]] = [
    ({"nodes": NODES}, [row("564", "001", -2.5), row("567893", "000101", -0.5, -1.5)]),
    ({"nodes": CAPTURED}, [row("56", "01", -1.0)]),
    ({"steps": STEPS}, [row("567893", "001011", -1.0, -2.0, -3.0), row("5678942", "0000001", -4.0)]),
    ({"deltas": [DELTA, {**DELTA, "parent_trace_id": "a", "trace_id": "b"}]}, [row("567567", "001001")]),
    ({"nodes": [NODES[0], NODES[1], NODES[2], {**NODES[3], "parent": 1}]}, TWO_PATHS),
    ({"records": [{"request": {"input_ids": [5, 6]}, "response": MESSAGE}]}, [PAIR]),
    ({"samples": [SAMPLE, {**SAMPLE, "remove_sample": True}]}, [row("5678", "0101", -1.0, -2.0)]),
    ({"messages_and_choices": [USER, CHOICE]}, [{"prompt": [USER], "completion": [PLAIN], "tools": []}]),
]
REFUSED: list[tuple[Run, str]] = [
    ({"nodes": NODES, "stop_condition": "error"}, "this run stopped with an error"),
    ({**SAMPLE, "multimodal_inputs": {"image": 1}}, "only text is read, found images or other media"),
    ({"nodes": [NODES[0], {**NODES[1], "parent": 2}]}, "parent 2 is no earlier item"),
    ({"nodes": [NODES[0], {**NODES[1], "logprobs": None}, {**NODES[4], "parent": 1}]}, "logprobs: some items of this"),
    ({"steps": [call("", "")]}, "no prompt_ids: the run was not recorded for train"),
    ({"messages_and_choices": [USER, CHOICE, USER, PLAIN]}, "an assistant message that was not sampled follows one"),
]


def converted(run: Run, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{json.dumps(run)}\n"))
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    convert_rollouts.main()
    return sys.stdout.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(("run", "rows"), RUNS)
def test_the_rows_of_a_run(run: Run, rows: list[Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read, and the run itself is refused."""
    path = tmp_path / "rows.jsonl"
    path.write_text(converted(run, monkeypatch), encoding="utf-8")
    assert [each.fields for each in read_rows(path)] == rows
    encoder = ChatEncoder(byte_tokenizer("{% for m in messages %}{{ m.role }}: {{ m.content }}|{% endfor %}"))
    for each in rows:
        if "input_ids" in each:
            [sample] = encoder.encode(Row(each, "rows.jsonl:1"))
            assert [label != -100 for label in sample.labels[1:]] == [bool(bears) for bears in each["mask"][1:]]
    with pytest.raises(DataError, match=r"^runs\.jsonl:1: "):
        encoder.encode(Row(run, "runs.jsonl:1"))


@pytest.mark.parametrize(("run", "reason"), REFUSED)
def test_runs_that_are_refused(run: Run, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit) as raised:
        converted(run, monkeypatch)
    assert str(raised.value).startswith(f"line 1: {reason}")
