"""Runs of agents, as their projects save them, to the sequences that the model saw."""

import json
from typing import Any

import pytest

from radixtrain.data.formats import Row
from radixtrain.data.rows.columns import standard_row
from radixtrain.data.rows.trajectories import plain_rows
from radixtrain.errors import DataError

WHERE = "runs.jsonl:3"
BRANCH = {"token_ids": [5, 6, 7], "mask": [False, True, True], "logprobs": [0.0, -0.5, -1.5]}
NODES = [
    {"parent": None, "token_ids": [5, 6], "mask": [False, False], "logprobs": []},
    {"parent": 0, "token_ids": [7, 8], "mask": [False, True], "logprobs": [-0.5], "sampled": True},
    {"parent": 1, "token_ids": [9], "mask": [False]},
    {"parent": 2, "token_ids": [10], "mask": [True], "logprobs": [-1.5]},
    {"parent": 0, "token_ids": [11], "mask": [True], "logprobs": [-2.5], "message": {"content": [{"type": "text"}]}},
    {"parent": 1, "token_ids": [12, 13], "mask": [False, False]},
    {"parent": None, "token_ids": [14], "mask": [False], "message": {"role": "user", "content": "a"}},
]
SEQUENCES = [
    {"input_ids": [5, 6, 7, 8, 9, 10], "mask": [0, 0, 0, 1, 0, 1], "old_logprobs": [0.0, 0.0, 0.0, -0.5, 0.0, -1.5]},
    {"input_ids": [5, 6, 11], "mask": [0, 0, 1], "old_logprobs": [0.0, 0.0, -2.5]},
    {"input_ids": [5, 6, 7, 8, 12, 13], "mask": [0, 0, 0, 1, 0, 0], "old_logprobs": [0.0, 0.0, 0.0, -0.5, 0.0, 0.0]},
]
NO_RUNS = [
    {"unknown": 1},
    {"question": "1 + 1?", "answer": "2", "steps": ["one", "two"]},
    {"question": "1 + 1?", "answer": "2", "steps": [{"text": "one"}]},
    {"question": "1 + 1?", "answer": "2", "samples": ["2", "3"], "records": [1]},
    {"input_ids": [5, 6], "labels": [-100, 6], "prompt_ids": [5], "response_ids": [6]},
    {"request": "a", "response": "b"},
]
USER, PLAIN = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
CHOICE = {"finish_reason": "stop", "index": 0, "logprobs": None, "message": PLAIN}


def plain(fields: dict[str, Any]) -> list[dict[str, Any]]:
    rows = plain_rows(Row(fields, WHERE))
    assert {row.where for row in rows} == {WHERE}
    return [row.fields for row in rows]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"text": "a", "nodes": NODES}, [{"text": "a", "nodes": NODES}]),
        *((fields, [fields]) for fields in NO_RUNS),
        (BRANCH, [{"input_ids": [5, 6, 7], "mask": [0, 1, 1], "old_logprobs": [0.0, -0.5, -1.5]}]),
        ({**BRANCH, "logprobs": [-0.5, -1.5]}, plain(BRANCH)),
        ({"token_ids": [5, 6], "sampled_mask": [0, 1]}, [{"input_ids": [5, 6], "mask": [0, 1]}]),
        ({"branches": [BRANCH, {"token_ids": [5], "mask": [0]}], "text": None}, plain(BRANCH)),
        ({"branches": [{"token_ids": [5], "mask": [0]}]}, [{"input_ids": [5], "mask": [0]}]),
        ({"nodes": NODES, "stop_condition": "done", "tools": []}, SEQUENCES),
        ({"traces": [{"nodes": NODES[:2]}, {"nodes": NODES, "trainable": False}]}, [
            {"input_ids": [5, 6, 7, 8], "mask": [0, 0, 0, 1], "old_logprobs": [0.0, 0.0, 0.0, -0.5]}]),
        ({"messages_and_choices": [USER, PLAIN], "reward": 1.0}, [{"messages": [USER, PLAIN]}]),
        ({"messages_and_choices": [USER, PLAIN, USER, CHOICE, USER, CHOICE], "tools": [{"name": "f"}]}, [
            {"prompt": [USER, PLAIN, USER], "completion": [PLAIN, USER, PLAIN], "tools": [{"name": "f"}]}]),
        ({"trajectories": [{"messages_and_choices": [USER, CHOICE], "tools": None, "additional_histories": [
            {"messages_and_choices": [USER, USER, CHOICE], "tools": None}]}]}, [
            {"prompt": [USER], "completion": [PLAIN]}, {"prompt": [USER, USER], "completion": [PLAIN]}]),
        ({"trajectories": []}, []),
        ({"request": {"messages": [USER], "tools": [{"name": "f"}], "chat_template_kwargs": {"x": 1}, "n": 2}, "id": 1,
          "response": {"choices": [CHOICE, {**CHOICE, "message": USER}]}, "status_code": 200}, [
            {"prompt": [USER], "completion": [said], "tools": [{"name": "f"}], "chat_template_kwargs": {"x": 1}}
            for said in (PLAIN, USER)]),
        ({"request": {"input_ids": [5, 6]}, "response": {"choices": [{"message": PLAIN, "meta_info": {
            "output_token_logprobs": [[-0.5, 7, None]]}}]}, "status_code": 200}, [
            {"input_ids": [5, 6, 7], "mask": [0, 0, 1], "old_logprobs": [0.0, 0.0, -0.5]}]),
        ({"token_ids": [5, 6], "mask": [0, 1], "weights": [1, -2.0], "advantages": 0.5}, [
            {"input_ids": [5, 6], "mask": [0, 1], "weights": [1, -2.0], "advantages": [0.0, 0.5]}]),
        ({"tokens": [5, 6, 7], "response_length": 2, "loss_mask": None, "rollout_log_probs": None}, [
            {"input_ids": [5, 6, 7], "mask": [0, 1, 1]}]),
    ],
)  # fmt: skip
def test_the_sequences_of_a_run(fields: dict[str, Any], expected: list[dict[str, Any]]) -> None:
    before = json.dumps(fields)
    assert plain(fields) == expected if expected else not plain_rows(Row(fields, WHERE))
    assert json.dumps(fields) == before


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"token_ids": [5, 6]}, "mask: expected a list, found nothing"),
        ({"token_ids": 5, "mask": [1]}, "token_ids: expected a list, found 5"),
        ({**BRANCH, "mask": [0, 1]}, "mask: expected 3 values, as many as token_ids, found 2"),
        ({**BRANCH, "mask": [0, 1, 2]}, "mask: expected true or false, found 2 at position 2"),
        (
            {**BRANCH, "logprobs": [-1.0]},
            "logprobs: expected 2 values, as many as sampled tokens, or 3, as many as token_ids; found 1",
        ),
        ({"branches": [[5]]}, "branches: expected a list of objects, found [[5]]"),
        ({"nodes": [{**NODES[0], "parent": 0}]}, "nodes: node 0: parent: expected an earlier node or null, found 0"),
        (
            {"nodes": [NODES[0], {**NODES[1], "parent": "0"}]},
            "nodes: node 1: parent: expected an earlier node or null, found '0'",
        ),
        (
            {"nodes": [{"parent": None}]},
            "nodes: none has token_ids: the run was not recorded for training; use its messages",
        ),
        (
            {"nodes": [{**NODES[0], "message": {"content": [{"type": "text"}, {"type": "image_url"}]}}]},
            "nodes: node 0: only text is read, found text, image_url",
        ),
        (
            {"nodes": NODES, "stop_condition": "error"},
            "nodes: this run stopped with an error; leave it out, or set on_bad_row: skip",
        ),
        (
            {"nodes": [{"token_ids": [1, 2], "mask": [0, 0, 1]}, {"parent": 0, "token_ids": [3, 4], "mask": [1]}]},
            "nodes: node 0: mask: expected 2 values, as many as token_ids, found 3",  # their sums agree
        ),
        ({"traces": [{"nodes": NODES, "trainable": False}]}, "traces: none of them is trainable"),
        ({"nodes": NODES, "trainable": False}, "nodes: this trace is not trainable; leave it out"),
        ({**BRANCH, "parent": 0}, "parent: this is a node of a trace; the row has to be the whole trace"),
        (
            {"messages_and_choices": [USER, CHOICE, USER, PLAIN]},
            "messages_and_choices: turn 4 is an assistant message that was not sampled, after one that was; leave the "
            "trajectory out, or make it a choice",
        ),
        (
            {"request": {"messages": [USER]}, "response": {"choices": [{**CHOICE, "finish_reason": "length"}]}},
            "response.choices: finish_reason: length: the answer was cut off; leave it out, or set on_bad_row: skip",
        ),
        ({"response": {"choices": [CHOICE]}}, "request.messages: expected a list, found nothing"),
        ({"exchanges": {}}, "exchanges: recorded requests are not read; save messages_and_choices"),
    ],
)  # fmt: skip
def test_runs_that_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as raised:
        plain_rows(Row(fields, WHERE))
    assert str(raised.value) == f"{WHERE}: {message}"


@pytest.mark.parametrize(
    "fields",
    [
        {"text": "a", "loss_weights": [1]},
        {"messages": [{"role": "user", "content": "a"}], "weights": [1, 2]},
        {"text": "a", "advantages": [1]},
        {"text": "a", "loss_weights": 2.0},
        {"messages_and_choices": [], "loss_weights": [1]},
        {"response": {"choices": [CHOICE]}, "loss_weights": [1]},
        {"trajectories": [], "advantages": [1]},
        {"branches": [], "weights": [1]},
        {"nodes": [], "loss_weights": [1]},
        {"nodes": [{"token_ids": [1], "weights": [1]}]},
        {"traces": [{"nodes": [], "loss_weights": [1]}]},
        {"traces": [], "loss_weights": [1]},
    ],
)
def test_weights_of_a_row_without_tokens_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="only rows with input_ids or token_ids have them, one for each token"):
        for row in plain_rows(Row(fields, WHERE)):
            standard_row(row)
