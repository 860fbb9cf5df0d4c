"""The tests are tested: every mistake below was made in some other system, and each makes the suite fail.

The float64 rung, whose bar is a number, sees each; the float32 rung sees each that is larger than rounding.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from radixtrain import RadixCollator, restore_model, verify_equivalence
from radixtrain.hf import attention_interface
from radixtrain.kernels import merge_attention
from radixtrain.kernels.cpu_loops import TorchCPUKernel
from radixtrain.kernels.merge_attention import Route, route_forward
from radixtrain.tree.radix_inputs import with_radix
from radixtrain.verification.equivalence import EquivalenceReport, verify_arms
from radixtrain.verification.oracle import ordinary_padded, radix_batch
from tests.claims.mistakes import assert_caught, forgotten_prompt, one_level, plant, plant_ends, returning, sibling_leak
from tests.support.models import tiny_qwen3

# Nested three deep, labels on shared tokens, several labels at branches, one sequence a prefix of another.
ROWS = [([7, 8, 9, 1, 2], 1), ([7, 8, 9, 3], 2), ([7, 8, 5, 6], 1), ([7, 8, 5, 6, 4, 4], 2), ([30, 31, 32], 0)]
FEATURES = [{"input_ids": ids, "labels": [-100] * start + ids[start:]} for ids, start in ROWS]

pytestmark = pytest.mark.usefixtures("without_the_trial")


def verdict(model: Any, **options: Any) -> EquivalenceReport:
    return verify_equivalence(model, FEATURES, **options)


@pytest.mark.parametrize("attention", ["cascade", "path", "expand", "reference"])
def test_without_a_mutation(attention: str) -> None:
    report = verdict(tiny_qwen3(), attention=attention)
    assert report.passed and report.conclusive, str(report)


def drop_a_branch_label(batch: dict[str, Any]) -> dict[str, Any]:
    """The first token of one completion bears no loss: so it is if each shared row has one label."""
    rows = batch["radix"].place_rows
    first_of_branch = int((rows == np.bincount(rows[rows >= 0]).argmax()).argmax())
    for name in ("labels", "shift_labels"):
        batch[name].view(-1)[first_of_branch + (name == "labels")] = -100
    return batch


def count_a_shared_label_once(batch: dict[str, Any]) -> dict[str, Any]:
    """A mean over unique tokens: a label that two sequences share weighs as much as one that is not shared."""
    pairs = torch.stack([batch["radix"].prediction_rows, batch["shift_labels"].flatten()])
    distinct = pairs.unique(dim=1).contiguous()
    assert distinct.shape[1] < pairs.shape[1]
    labels = {"labels": distinct[1:], "shift_labels": distinct[1:]}
    return with_radix({**batch, **labels}, prediction_rows=distinct[0], place_rows=distinct[:1].numpy())


def move_a_position_by_one(batch: dict[str, Any]) -> dict[str, Any]:
    batch["position_ids"][0, batch["radix"].layout.inverse_indices[3]] += 1
    return batch


def count_rows_as_positions(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "position_ids": torch.arange(batch["radix"].layout.num_rows)[None]}


def predict_from_the_row_before(batch: dict[str, Any]) -> dict[str, Any]:
    """The packed neighbour in place of the parent: right inside a segment, wrong at every branch."""
    rows = batch["radix"].predictor_indices[batch["radix"].prediction_rows]
    moved = torch.where(rows.bincount()[rows] > 1, rows + 1, rows).clamp(max=batch["radix"].layout.num_rows - 1)
    places = torch.arange(len(moved))
    place_rows = places.view(batch["labels"].shape).numpy()
    return with_radix(batch, predictor_indices=moved, prediction_rows=places, place_rows=place_rows)


def take_a_sibling_for_the_same(batch: dict[str, Any]) -> dict[str, Any]:
    """Sharing by position, not by history: a token of one branch stands for the one at its place in another."""
    batch["input_ids"].view(-1)[batch["radix"].layout.inverse_indices[5 + 4 + 2]] = (
        9  # in the place of the third row's 5
    )
    return batch


MUTATED_BATCHES = [
    drop_a_branch_label,
    count_a_shared_label_once,
    move_a_position_by_one,
    count_rows_as_positions,
    predict_from_the_row_before,
    take_a_sibling_for_the_same,
]


@pytest.mark.parametrize("mutate", MUTATED_BATCHES, ids=lambda mutate: mutate.__name__)
def test_a_mutated_batch(mutate: Callable[..., Any]) -> None:
    model, batch = tiny_qwen3(), mutate(RadixCollator()(FEATURES))
    ordinary, radix = (lambda: ordinary_padded(model, FEATURES)), (lambda: radix_batch(model, batch))
    assert_caught(verify_arms(model, FEATURES, ordinary, radix))


@pytest.mark.parametrize("ends_of", [sibling_leak, forgotten_prompt, one_level], ids=lambda ends: ends.__name__)
def test_a_wrong_mask(monkeypatch: pytest.MonkeyPatch, ends_of: Any) -> None:
    plant_ends(monkeypatch, ends_of)
    assert_caught(verdict(tiny_qwen3()))


def test_stock_sdpa_on_a_radix_batch() -> None:
    """A silent failure: a model that is not shared reads jumps of positions as packed documents."""
    model = tiny_qwen3()
    batch = RadixCollator()(FEATURES)

    def stock() -> Iterator[Tensor]:
        ids = batch["input_ids"].flatten()[: batch["radix"].layout.num_rows][None]
        hidden = restore_model(model).model(ids, position_ids=batch["position_ids"]).last_hidden_state
        rows = batch["radix"].predictor_indices[batch["radix"].prediction_rows]
        logits = model.lm_head(hidden[0, rows])
        yield torch.nn.functional.cross_entropy(logits, batch["shift_labels"].flatten())

    report = verify_arms(model, FEATURES, lambda: ordinary_padded(model, FEATURES), stock)
    assert report["float64"].loss.radix < 0.02, "the loss hardly shows it"
    assert_caught(report)


def test_top_left_causal(monkeypatch: pytest.MonkeyPatch) -> None:
    """`is_causal` of sdpa for fewer queries than keys: the new rows of a path see only its beginning."""
    plant(monkeypatch, TorchCPUKernel, "_options", returning({"is_causal": True}))
    assert_caught(verdict(tiny_qwen3(), attention="path"))


def lse_of_the_first(real: Any, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Any, lse: Any, route: Route) -> Any:
    """The pieces have the log-sum-exp of the first and not of all."""
    return real(dout, q, k, v, *route_forward(q, k, v, None, route._replace(pieces=route.pieces[:1])), route)


def last_copy(real: Any, x: Tensor, indices: Tensor, num_rows: int) -> Tensor:
    """The gradient of rows that are read more than once is written and not added."""
    return x.new_zeros(num_rows, *x.shape[1:]).index_copy_(0, indices.long(), x)


OF_THE_BACKWARD_PASS = {
    "the log-sum-exp of a piece": ("cascade", "_backward_in_pieces", lse_of_the_first),
    "written and not added, path": ("path", "sum_rows", last_copy),
    "written and not added, expand": ("expand", "sum_rows", last_copy),
}


@pytest.mark.parametrize("name", OF_THE_BACKWARD_PASS)
def test_a_backward_pass_after_a_right_forward_pass(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    attention, function, mistake = OF_THE_BACKWARD_PASS[name]
    plant(monkeypatch, merge_attention, function, mistake)
    report = verdict(tiny_qwen3(), attention=attention)
    assert report["float32"].loss not in report["float32"].failed, "the loss does not show it"
    assert_caught(report)


def test_a_hundred_millionth_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """Below the rounding of float32, so only the float64 rung can see it."""
    too_much = lambda real, *args, **options: real(*args, **options) * (1 + 1e-8)  # noqa: E731
    plant(monkeypatch, attention_interface, "tree_attention", too_much)
    report = verdict(tiny_qwen3())
    assert not report["float64"].passed
    assert report["float32"].passed


def test_dead_attention() -> None:
    """Equal because all gradients are zero, as in a published proof: that proves nothing, and the report says so."""
    model = tiny_qwen3()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
    report = verdict(model)
    assert report.passed
    assert not report.conclusive
    assert "zero: model.layers.0.self_attn.q_proj.weight" in str(report)
