"""What both arms compute, against Hugging Face."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import tiny_model

from radixtrain.bench.arms import OrdinaryArm, RadixArm, step_seconds
from radixtrain.bench.cells import Cell, GivenBatch, ModelShape, build_model
from radixtrain.bench.measure import Settings, measure
from radixtrain.bench.work import make_work, with_ordinary_batch_size, work_of
from radixtrain.hf.head import has_plain_head
from radixtrain.testing import relative_error
from radixtrain.verification.oracle import float64_throughout

SHAPE = ModelShape(num_hidden_layers=2, hidden_size=32, head_dim=8, vocab_size=97)
FLAT = Cell(SHAPE, prompt_length=40, suffix_length=6, num_sequences=8)
NESTED = replace(FLAT, tree="nested")
RAGGED = GivenBatch(SHAPE, "8 of train.jsonl", 8)
ORDINARY = OrdinaryArm(plain_head=True)
BAR = 1e-12
CASCADE = RadixArm(attention="cascade", plain_head=True)


def model_of(dtype: torch.dtype = torch.float32) -> Any:
    return build_model(SHAPE, torch.device("cpu"), dtype, "sdpa")


def test_both_arms_have_the_loss_of_hugging_face() -> None:
    model, work = model_of(), make_work(NESTED)
    labels = torch.tensor(np.stack([feature["labels"] for feature in work.features]))
    with float64_throughout(model):
        truth = model(input_ids=work.ordinary[0].tensors["input_ids"], labels=labels).loss
        for arm in (ORDINARY, CASCADE):
            arm.prepare(model)
            (term,) = arm.loss_terms(model, work)
            assert term.item() == pytest.approx(truth.item(), rel=BAR)


@pytest.mark.parametrize("keep_mask", [True, False])
def test_they_have_it_in_several_micro_batches(keep_mask: bool, ragged_features: Any) -> None:
    model, features = model_of(), ragged_features
    work = with_ordinary_batch_size(work_of(RAGGED, features, max_tokens=40), 3, keep_mask)
    labels = [torch.tensor(feature["labels"]) for feature in features]
    ids = [torch.tensor(feature["input_ids"]) for feature in features]
    assert work.ordinary[0].tensors["attention_mask"].all() == (not keep_mask)
    with float64_throughout(model):
        total = sum(
            model(input_ids=i[None], labels=y[None]).loss * (y[1:] >= 0).sum() for i, y in zip(ids, labels, strict=True)
        )
        for arm in (ORDINARY, CASCADE):
            arm.prepare(model)
            assert sum(arm.loss_terms(model, work)).item() == pytest.approx(total.item() / work.num_labels, rel=BAR)


def test_hidden_states_come_in_the_order_of_the_sequences(ragged_features: Any) -> None:
    model, features = model_of(), ragged_features
    work = work_of(RAGGED, features, 3, 40)
    rows = [torch.tensor(feature["input_ids"])[None] for feature in features]
    with float64_throughout(model):
        one_by_one = torch.cat([model.model(ids).last_hidden_state[0] for ids in rows])
        for arm in (ORDINARY, replace(CASCADE, attention="path")):
            arm.prepare(model)
            assert relative_error(arm.hidden_states(model, work), one_by_one) <= BAR


def test_a_head_that_is_more_than_one_matrix_is_computed_as_a_whole() -> None:
    """Granite divides its logits; the fused loss of its matrix would be another loss, in both arms alike."""
    model, work = tiny_model("GraniteForCausalLM", vocab_size=97, logits_scaling=3.0), make_work(FLAT)
    assert not has_plain_head(model)
    labels = torch.tensor(np.stack([feature["labels"] for feature in work.features]))
    with float64_throughout(model):
        truth = model(input_ids=work.ordinary[0].tensors["input_ids"], labels=labels).loss.item()
        for arm in (OrdinaryArm(plain_head=False), RadixArm(attention="cascade", plain_head=False)):
            arm.prepare(model)
            (term,) = arm.loss_terms(model, work)
            assert term.item() == pytest.approx(truth, rel=BAR)
            (fused,) = replace(arm, plain_head=True).loss_terms(model, work)
            assert fused.item() != pytest.approx(truth, rel=1e-3), "this model would not show it"
    (result,) = measure(model, work, Settings(("cascade",), repeats=1))
    assert result.measured_speedup


def test_every_step_starts_without_gradients() -> None:
    model, work = model_of(), make_work(FLAT)
    seconds = step_seconds(model, {arm: (arm, work) for arm in (ORDINARY, CASCADE)}, 2)
    assert [len(turns) for turns in seconds.values()] == [2, 2] and min(map(min, seconds.values())) > 0
    once = [x.grad.clone() for x in model.parameters()]
    step_seconds(model, {CASCADE: (CASCADE, work)}, 1)
    assert all(torch.equal(x.grad, grad) for x, grad in zip(model.parameters(), once, strict=True))
