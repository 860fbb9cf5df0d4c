"""Runs as the stores of verifiers, SkyRL-capture, miles and rLLM write them: rows, gradients, and what is refused."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from padded_policy import BAR, Features, clipped_ratio, log_likelihood, worst_error
from rollout_stores import CALLS, LEAVES, STORES, VERIFIERS, Call, Fields, leaf, verifiers_rows

from radixtrain import RadixCollator
from radixtrain.data.datamodule import SFTData
from radixtrain.data.formats import read_rows
from radixtrain.data.rows.trajectories import plain_rows
from radixtrain.errors import DataError, UserError

N = -100
NAMES = ["verifiers", *STORES]


@pytest.fixture(params=NAMES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, list[list[Fields]]]:
    """A file of a store, and the rows of each of its lines."""
    rows = verifiers_rows() if request.param == "verifiers" else STORES[request.param][1]
    return written(tmp_path, *lines_of(request.param)), rows


def lines_of(name: str) -> list[Fields]:
    """Of a file of a store: to be changed."""
    if name == "verifiers":
        return [json.loads(line) for line in VERIFIERS.read_text(encoding="utf-8").splitlines()]
    return copy.deepcopy(STORES[name][0])


def written(folder: Path, *lines: Fields) -> Path:
    path = folder / "runs.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    return path


def read(path: Path) -> list[list[Fields]]:
    return [[plain.fields for plain in plain_rows(row)] for row in read_rows(path)]


def features_of(rows: list[list[Fields]]) -> Features:
    """For the padded loop, which knows neither masks nor entries that are not there."""
    return [
        {
            "input_ids": row["input_ids"],
            "labels": [token if bears else N for token, bears in zip(row["input_ids"], row["mask"], strict=True)],
            "loss_weights": [1.0] * len(row["input_ids"]),
            "old_logprobs": row["old_logprobs"],
            "advantages": row.get("advantages", [1.0] * len(row["input_ids"])),
        }
        for line in rows
        for row in line
    ]


def test_the_rows_of_a_store(store: Any) -> None:
    path, rows = store
    assert read(path) == rows


@pytest.mark.parametrize("shared_targets", ["every", "once"])
@pytest.mark.parametrize("max_tokens", [None, 24])
def test_the_gradient_is_that_of_the_rows(tiny_qwen3: Any, store: Any, shared_targets: str, max_tokens: Any) -> None:
    """Of a clipped policy ratio with the log-probabilities and advantages of the store, and of a log-likelihood."""
    path, rows = store
    features = [
        {"advantages": 1.0, "loss_weights": [1.0] * len(row["mask"]), **row} for line in read(path) for row in line
    ]
    model, options = tiny_qwen3(vocab_size=24), {"shared_targets": shared_targets, "max_tokens": max_tokens}
    for loss in (clipped_ratio, log_likelihood):
        once = shared_targets == "once"
        assert worst_error(model, features, loss, once, rows=features_of(rows), **options) <= BAR


def test_each_completion_of_a_tree_once(tmp_path: Path) -> None:
    """`once` trains what SkyRL-capture and miles train when they flatten the same tree themselves."""
    features = [row for line in read(written(tmp_path, *STORES["SkyRL-capture graph"][0])) for row in line]
    batch = RadixCollator(merge_labels=True, shared_targets="once")(features)
    found = zip(batch["shift_labels"][0].tolist(), batch["radix"].old_logprobs.tolist(), strict=True)
    own = [pair for call in CALLS for pair in zip(call.completion, call.logprobs, strict=True)]
    assert sorted(found) == sorted(own)
    every = RadixCollator(merge_labels=True)(features)
    assert every["radix"].loss_weights.sum() == len(own) + len(CALLS[0].completion), "two branches share the first call"
    assert len(batch["input_ids"][0]) == 26 and sum(len(row["input_ids"]) for row in features) == 39


def data_of(path: Path, shop: Path, **options: Any) -> SFTData:
    settings: dict[str, Any] = {"shuffle_dataset": False, "dataloader_num_workers": 0, **options}
    data = SFTData(train_file=str(path), model_name_or_path=str(shop / "model"), **settings)
    data.setup("fit")
    return data


@pytest.mark.parametrize("name", [name for name in STORES if name not in ("rLLM episode", "rLLM steps")])
def test_fit_reads_them(name: str, shop: Path, tmp_path: Path) -> None:
    lines, rows = STORES[name]
    path = written(tmp_path, *lines)
    labels = [
        (*row["input_ids"][: place + 1],)
        for line in rows
        for row in line
        for place, bears in enumerate(row["mask"])
        if bears
    ]
    for shared_targets, expected in (("every", len(labels)), ("once", len({*labels}))):
        [step] = data_of(path, shop, shared_targets=shared_targets).train_dataloader()
        assert step.num_labels == expected


@pytest.mark.parametrize("name", ["rLLM episode", "verifiers"])
def test_fit_refuses_advantages(name: str, shop: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"jsonl:1: advantages: the loss here is a cross-entropy, which has none"):
        data_of(written(tmp_path, *lines_of(name)), shop)


def test_a_row_that_its_store_does_not_train(tmp_path: Path) -> None:
    """All of its completions are in other token samples, or the sample was removed."""
    sample, masked = (lines_of(name)[0] for name in ("miles samples", "SkyRL-capture token-samples"))
    sample["remove_sample"] = True
    masked["loss_mask"] = [0] * len(masked["loss_mask"])
    rollout = {"samples": [sample, STORES["miles samples"][0][1]]}
    assert read(written(tmp_path, sample, masked, rollout)) == [[], [], STORES["miles samples"][1][1]]


def test_a_turn_that_may_not_have_arrived(tmp_path: Path) -> None:
    [graph] = lines_of("SkyRL-capture graph")
    graph["nodes"][5]["delivery_uncertain"] = True
    [found] = read(written(tmp_path, graph))
    _, first_and_next, first_and_retry, _ = LEAVES
    trained = [leaf(first_and_next, first_and_next[1:], False), leaf(first_and_retry, first_and_retry[1:], False)]
    assert found[2:] == trained


def test_a_call_continues_the_longest_call_that_it_repeats(tmp_path: Path) -> None:
    """The third call leaves out the last token of the second one, so it continues the first one."""
    first, second, third, fourth, empty = (
        Call(prompt, completion, logprobs, [], "")
        for prompt, completion, logprobs in (
            ([5, 6], [7], [-1.0]),
            ([5, 6, 7, 8], [9, 10], [-2.0, -3.0]),
            ([5, 6, 7, 8, 9, 11], [12], [-4.0]),
            ([5, 6, 7, 8, 9, 11, 12, 13], [14], [-5.0]),
            ([5, 6], [], []),
        )
    )
    steps = [
        {"prompt_ids": call.prompt, "response_ids": call.completion, "logprobs": call.logprobs}
        for call in (first, second, third, fourth, empty)
    ]
    [found] = read(written(tmp_path, {"steps": steps}))
    assert found == [leaf(calls, advantages=False) for calls in ([first, second], [first, third, fourth])]


def test_the_steps_of_a_newer_rllm_name_their_parents(tmp_path: Path) -> None:
    """`StepDelta`: as the gateway's deltas, with other names."""
    names = {"trace_id": "id", "parent_trace_id": "parent_step_id", "completion_token_ids": "response_ids"}
    [graph], rows = STORES["rLLM trace graph"]
    steps = [{names.get(name, name): value for name, value in delta.items()} for delta in graph["deltas"]]
    assert read(written(tmp_path, {"trajectories": [{"steps": steps}]})) == rows


ERRORS: list[tuple[str, Any, str]] = [
    ("SkyRL-capture graph", {"nodes.5.tokens.sampled_mask": [True]},
     "nodes: node 5: tokens.sampled_mask: expected 4 values, as many as tokens.ids, found 1"),
    ("SkyRL-capture graph", {"nodes.5.tokens.logprobs": [-1.0]},
     "nodes: node 5: tokens.logprobs: expected 2 values, as many as sampled tokens, or 4, as many as tokens.ids; "
     "found 1"),
    ("SkyRL-capture graph", {"nodes.8.tokens.logprobs": None},
     "nodes: node 8: logprobs: expected some, as others of its sequence have them"),
    ("SkyRL-capture graph", {"nodes.2.parent": "nd_9"},
     "nodes: node 2: parent: expected an earlier node or null, found 'nd_9'"),
    ("SkyRL-capture graph", {"nodes.2.node_id": "nd_1"},
     "nodes: node 2: node_id: expected a name that no earlier node has, found 'nd_1'"),
    ("SkyRL-capture graph", {"nodes.2.message.content": [{"type": "text"}, {"type": "image_url"}]},
     "nodes: node 2: only text is read, found text, image_url"),
    ("SkyRL-capture graph", {"nodes": [{"node_id": "nd_1", "message": {"role": "user", "content": "a"}}]},
     "nodes: none has tokens.ids: the run was not recorded for training; use its messages"),
    ("SkyRL-capture token-samples", {"loss_mask": [1]},
     "loss_mask: expected 5 values, as many as input_ids, found 1"),
    ("SkyRL-capture token-samples", {"input_ids": None, "messages": [{"author": "client"}]},
     "input_ids: expected tokens, found none: the run was not recorded for training; use its messages"),
    ("miles session", {"records.0.request.input_ids": None, "records.1.request.input_ids": None},
     "records: none has request.input_ids: the run was not recorded for training; use its messages"),
    ("miles session", {"records.1.response.choices": []},
     "records: record 1: response.choices.0.meta_info.output_token_logprobs.*.1: expected a list, found nothing"),
    ("miles session", {"records.1.request.messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
     "records: record 1: only text is read, found image_url"),
    ("miles rollout", {"samples.1.response_length": 15},
     "samples: sample 1: response_length: expected 0 to 14, the number of tokens, found 15"),
    ("miles rollout", {"samples.1.loss_mask": [1, 1]},
     "samples: sample 1: loss_mask: expected 9 values, as many as response_length, found 2"),
    ("miles rollout", {"samples.1.rollout_log_probs": [1, 1]},
     "samples: sample 1: rollout_log_probs: expected 5 values, as many as sampled tokens, or 9, as many as "
     "response_length; found 2"),
    ("miles samples", {"status": "aborted"},
     "status: expected completed or truncated, found aborted; leave it out, or set on_bad_row: skip"),
    ("miles samples", {"multimodal_train_inputs": {"pixel_values": [1]}}, "only text is read, found images"),
    ("rLLM episode", {"trajectories.0.steps.2.prompt_ids": []},
     "steps: step 2: prompt_ids: expected tokens, found none: the run was not recorded for training; use its messages"),
    ("rLLM episode", {"trajectories.0.steps.2.advantage": [1.0]},
     "steps: step 2: advantage: expected 3 values, as many as sampled tokens, or 14, as many as prompt_ids; found 1"),
    ("rLLM episode", {"trajectories.0.steps": [{"chat_completions": []}]},
     "steps: none has prompt_ids: the run was not recorded for training; use its messages"),
    ("rLLM episode", {"trajectories.0": {"name": "solver"}},
     "trajectories: trajectory 0: no store has the columns name"),
    ("rLLM trace graph", {"deltas.2.parent_trace_id": "x"},
     "deltas: delta 2: parent_trace_id: expected an earlier delta or null, found 'x'"),
    ("rLLM trace graph", {"deltas.1.prompt_ids_suffix": []},
     "deltas: delta 1: prompt_ids_suffix: expected tokens, found none: the run was not recorded for training; use its "
     "messages"),
    ("rLLM traces", {"prompt_token_ids": [], "prompt_delta_token_ids": [4]},
     "prompt_token_ids: expected tokens, found none: the run was not recorded for training; use its messages"),
    ("verifiers", {"ok": False}, "traces: this run stopped with an error; leave it out, or set on_bad_row: skip"),
    ("verifiers", {"traces.0.ok": False},
     "nodes: this run stopped with an error; leave it out, or set on_bad_row: skip"),
    ("verifiers", {"traces.0.agent.trainable": False}, "traces: none of them is trainable"),
    ("verifiers", {"traces.0.nodes.2.advantages": [1.0]},
     "nodes: node 2: advantages: expected 2 values, as many as sampled tokens, or 4, as many as token_ids; found 1"),
    ("verifiers", {"traces.0.nodes.2.loss_weights": {"ce": [1.0, 1.0]}},
     "loss_weights: only rows with input_ids or token_ids have them, one for each token"),
    ("verifiers", {"traces.0.nodes.7.logprobs": []},
     "nodes: node 7: logprobs: expected some, as others of its sequence have them"),
]  # fmt: skip


def changed(record: Any, place: str, value: Any) -> None:
    *path, last = place.split(".")
    for key in path:
        record = record[int(key)] if isinstance(record, list) else record[key]
    record[int(last) if isinstance(record, list) else last] = value


@pytest.mark.parametrize(("name", "changes", "message"), ERRORS)
def test_files_that_are_refused(name: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    good, bad = lines_of(name)[0], lines_of(name)[0]
    for place, value in changes.items():
        changed(bad, place, value)
    path = written(tmp_path, good, bad)
    with pytest.raises(DataError) as raised:
        read(path)
    assert str(raised.value) == f"{path}:2: {message}"


@pytest.mark.parametrize("name", ["SkyRL-capture graph", "miles session", "rLLM trace graph"])
def test_a_document_of_one_run_is_no_array_of_rows(name: str, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(STORES[name][0][0], indent=1), encoding="utf-8")
    with pytest.raises(UserError, match=r"run\.json: holds one row and not an array of rows; put it between \[ and \]"):
        read(path)


def test_the_episode_file_of_rllm(tmp_path: Path) -> None:
    """One document an episode, whose only array is that of its trajectories."""
    path = tmp_path / "episode_000000_task.json"
    path.write_text(json.dumps(STORES["rLLM episode"][0][0], indent=2), encoding="utf-8")
    assert read(path) == STORES["rLLM episode"][1]
