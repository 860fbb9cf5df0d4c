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


def row(ids: str, mask: str) -> Run:
    """A digit for each token."""
    return {"input_ids": [*map(int, ids)], "mask": [*map(int, mask)]}


def node(parent: int | None, ids: str, mask: str, **more: Any) -> Run:
    return {"parent": parent, "token_ids": [*map(int, ids)], "mask": [*map(int, mask)], **more}


def call(prompt: str, response: str) -> Run:
    return {"prompt_ids": [*map(int, prompt)], "response_ids": [*map(int, response)]}


def captured(name: str, parent: str | None, token: int, **more: Any) -> Run:
    return {"node_id": name, "parent": parent, "tokens": {"ids": [token], "sampled_mask": [bool(parent)]}, **more}


UNUSED = [{"node": 3, "type": "compaction_attempt"}]
NODES = [node(None, "56", "00"), node(0, "78", "01"), node(1, "9", "0"), node(0, "4", "1"), node(2, "3", "1")]
NODES += [node(1, "2", "1", semantic_parents=UNUSED)]
CAPTURED = [captured("a", None, 5), captured("b", "a", 6), captured("c", "a", 7, remove_sample=True)]
STEPS = [call("56", "7"), call("5678", "93"), call("567894", "2")]  # the last continues the first
MESSAGE = {"choices": [{"message": {"content": "a"}, "meta_info": {"output_token_logprobs": [[-1.0, 7, None]]}}]}
SAMPLE = {"tokens": [5, 6, 7, 8], "response_length": 3, "loss_mask": [1, 0, 1]}
DELTA = {"parent_trace_id": None, "trace_id": "a", "prompt_ids_suffix": [5, 6], "completion_token_ids": [7]}
USER, PLAIN = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
CHOICE = {"index": 0, "message": PLAIN}
RUNS: list[tuple[Run, list[Run] | str]] = [
    ({"nodes": NODES}, [row("564", "001"), row("567893", "000101")]),
    ({"nodes": CAPTURED}, [row("56", "01")]),
    ({"steps": STEPS}, [row("567893", "001011"), row("5678942", "0000001")]),
    ({"deltas": [DELTA, {**DELTA, "parent_trace_id": "a", "trace_id": "b"}]}, [row("567567", "001001")]),
    ({"nodes": [*NODES[:3], node(1, "4", "1")]}, [row("56789", "00010"), row("56784", "00001")]),
    ({"records": [{"request": {"input_ids": [5, 6]}, "response": MESSAGE}]}, [row("567", "001")]),
    ({"samples": [SAMPLE, {**SAMPLE, "remove_sample": True}]}, [row("5678", "0101")]),
    ({"messages_and_choices": [USER, CHOICE]}, [{"prompt": [USER], "completion": [PLAIN], "tools": []}]),
    ({"nodes": NODES, "stop_condition": "error"}, "this run stopped with an error"),
    ({**SAMPLE, "multimodal_inputs": {"image": 1}}, "only text is read, found images or other media"),
    ({"nodes": [NODES[0], node(2, "7", "1")]}, "parent 2 is no earlier item"),
    ({"steps": [call("", "")]}, "no prompt_ids: the run was not recorded for train"),
    ({"messages_and_choices": [USER, CHOICE, USER, PLAIN]}, "an assistant message that was not sampled follows one"),
]


@pytest.mark.parametrize(("run", "expected"), RUNS)
def test_what_a_run_becomes(
    run: Run, expected: list[Run] | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Its rows, which `fit` reads where the run itself is refused, or the reason why there are none."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(run)))
    if isinstance(expected, str):
        with pytest.raises(SystemExit, match=f"^line 1: {expected}"):
            convert_rollouts.main()
        return
    convert_rollouts.main()
    path = tmp_path / "rows.jsonl"
    path.write_text(capsys.readouterr().out, encoding="utf-8")
    assert [each.fields for each in read_rows(path)] == expected
    encoder = ChatEncoder(byte_tokenizer("{% for m in messages %}{{ m.role }}: {{ m.content }}|{% endfor %}"))
    for each in expected:
        [sample] = encoder.encode(Row(each, "rows.jsonl:1"))
        assert "mask" not in each or [int(label != -100) for label in sample.labels[1:]] == each["mask"][1:]
    with pytest.raises(DataError, match=r"^runs\.jsonl:1: "):
        encoder.encode(Row(run, "runs.jsonl:1"))
