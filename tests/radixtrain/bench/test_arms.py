"""What both arms compute, against Hugging Face in float64."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import tiny_model

from radixtrain.bench.arms import OrdinaryArm, RadixArm, step_seconds
from radixtrain.bench.cells import Cell, GivenBatch, ModelShape
from radixtrain.bench.measure import Settings, measure
from radixtrain.bench.work import make_work, with_ordinary_batch_size, work_of
from radixtrain.hf.head import has_plain_head
from radixtrain.verification.oracle import float64_throughout

ORDINARY = OrdinaryArm(plain_head=True)
CASCADE = RadixArm(attention="cascade", plain_head=True)
BAR = 1e-12


@pytest.mark.parametrize("keep_mask", [True, False])
def test_the_loss_in_several_micro_batches(
    keep_mask: bool, shape: ModelShape, model: Any, ragged_features: Any
) -> None:
    work = work_of(GivenBatch(shape, "8 of train.jsonl", 8), ragged_features, max_tokens=40)
    work = with_ordinary_batch_size(work, 3, keep_mask)
    assert work.ordinary[0].tensors["attention_mask"].all() == (not keep_mask)
    labels = [torch.tensor(feature["labels"]) for feature in ragged_features]
    ids = [torch.tensor(feature["input_ids"])[None] for feature in ragged_features]
    with float64_throughout(model):
        total = sum(
            model(input_ids=i, labels=y[None]).loss * (y[1:] >= 0).sum() for i, y in zip(ids, labels, strict=True)
        )
        for arm in (ORDINARY, CASCADE, replace(CASCADE, attention="path")):
            arm.prepare(model)
            assert sum(arm.loss_terms(model, work)).item() == pytest.approx(total.item() / work.num_labels, rel=BAR)


def test_a_head_that_is_more_than_one_matrix_is_computed_as_a_whole(flat: Cell) -> None:
    """Granite divides its logits; the fused loss of its matrix would be another loss, in both arms alike."""
    model, work = tiny_model("GraniteForCausalLM", vocab_size=97, logits_scaling=3.0), make_work(flat)
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


def test_every_step_starts_without_gradients(model: Any, flat: Cell) -> None:
    work = make_work(flat)
    seconds = step_seconds(model, {arm: (arm, work) for arm in (ORDINARY, CASCADE)}, 2)
    assert [len(turns) for turns in seconds.values()] == [2, 2] and min(map(min, seconds.values())) > 0
    once = [x.grad.clone() for x in model.parameters()]
    step_seconds(model, {CASCADE: (CASCADE, work)}, 1)
    assert all(torch.equal(x.grad, grad) for x, grad in zip(model.parameters(), once, strict=True))
