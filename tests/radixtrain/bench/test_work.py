"""The work of a step: what is shared, how both arms are cut, its arithmetic, and its loss in float64."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import tiny_model

from radixtrain.bench.cells import Cell, GivenBatch, ModelShape
from radixtrain.bench.flops import ordinary_flops, unique_flops
from radixtrain.bench.measure import Settings, measure
from radixtrain.bench.work import Arm, make_work, step_seconds, with_ordinary_batch_size, work_of
from radixtrain.errors import UserError
from radixtrain.hf.head import has_plain_head
from radixtrain.verification.oracle import float64_throughout

ORDINARY = Arm(plain_head=True)
CASCADE = Arm(attention="cascade", plain_head=True)
BAR = 1e-12


class TestCell:
    @pytest.mark.parametrize(
        ("changes", "num_unique", "depth"),
        [
            ({}, 40 + 8 * 6, 2),
            ({"tree": "nested"}, 20 + 2 * 20 + 8 * 6, 3),
            ({"tree": "nested", "num_sequences": 9}, 20 + 3 * 20 + 9 * 6, 3),
            ({"num_sequences": 1}, 46, 1),
            ({"prompt_length": 0}, 8 * 6, 1),
        ],
    )
    def test_what_is_shared(self, changes: dict[str, Any], num_unique: int, depth: int, flat: Cell) -> None:
        cell = replace(flat, **changes)
        work = make_work(cell)
        (plan,), (batch,) = work.plans, work.ordinary.micro_batches
        length = cell.prompt_length + 6
        assert (plan.num_tokens, plan.num_unique_tokens, plan.depth) == (cell.num_sequences * length, num_unique, depth)
        assert batch["input_ids"].shape == (cell.num_sequences, length)
        assert batch["attention_mask"].all()
        assert (work.ideal_speedup(cell.model.config()) == 1.0) == (depth == 1)
        assert work.num_labels == int(work.radix.micro_batches[0]["radix"].loss_weights.sum())
        assert all((feature["labels"] != -100).sum() == 6 for feature in work.features)

    def test_it_is_the_same_every_time(self, flat: Cell) -> None:
        first, second = make_work(flat).features, make_work(flat).features
        assert all(np.array_equal(a["input_ids"], b["input_ids"]) for a, b in zip(first, second, strict=True))

    def test_the_ideal_is_a_ratio_of_flops(self, flat: Cell) -> None:
        work, config = make_work(flat), flat.model.config()
        # a suffix of 6 has 5 predictors of its own and shares the last token of the prompt with all others
        ordinary = ordinary_flops(config, work.plans[0], num_labels=8 * 6)
        unique = unique_flops(config, work.plans[0], num_predictors=1 + 8 * 5)
        assert work.ideal_speedup(config) == ordinary.total / unique.total
        forward = make_work(replace(flat, mode="forward")).ordinary_teraflops(config)
        assert work.ordinary_teraflops(config) == pytest.approx(3 * forward)


class TestGivenRows:
    """Sequences of a user's own, which differ in length."""

    def test_how_both_arms_are_cut(self, shape: ModelShape, ragged_features: Any) -> None:
        work = work_of(GivenBatch(shape, "8 of train.jsonl", 8), ragged_features, batch_size=3, max_tokens=40)
        lengths = [[len(ragged_features[index]["input_ids"]) for index in members] for members in work.ordinary.members]
        assert lengths == [[27, 26, 26], [25, 25, 24], [24, 23]]
        assert [tuple(batch["input_ids"].shape) for batch in work.ordinary.micro_batches] == [(3, 27), (3, 25), (2, 24)]
        assert [*map(len, work.radix.members)] == [4, 4]
        assert sorted(index for members in work.radix.members for index in members) == list(range(8))
        assert (work.num_tokens, work.num_unique_tokens) == (4 * 41 + 2 * 18, 41 + 2 * 18)

    def test_the_arithmetic_counts_no_padding_and_every_micro_batch(
        self, shape: ModelShape, ragged_features: Any
    ) -> None:
        config, name = shape.config(), GivenBatch(shape, "8 of train.jsonl", 8)
        whole, cut, separate = (work_of(name, ragged_features, 3, size) for size in (None, 40, 1))
        assert cut.ordinary_teraflops(config) == pytest.approx(whole.ordinary_teraflops(config))
        assert cut.ideal_speedup(config) == pytest.approx(whole.ideal_speedup(config))
        assert separate.ideal_speedup(config) == 1.0

    def test_a_step_without_labels(self, shape: ModelShape) -> None:
        features = [{"input_ids": [1, 2], "labels": [-100, -100]}]
        with pytest.raises(UserError, match=r"2x32, 8 of train\.jsonl, step: no token bears loss"):
            work_of(GivenBatch(shape, "8 of train.jsonl", 8), features)


@pytest.mark.parametrize("keep_mask", [True, False])
def test_the_loss_in_several_micro_batches(
    keep_mask: bool, shape: ModelShape, model: Any, ragged_features: Any
) -> None:
    work = work_of(GivenBatch(shape, "8 of train.jsonl", 8), ragged_features, max_tokens=40)
    work = with_ordinary_batch_size(work, 3, keep_mask)
    assert work.ordinary.micro_batches[0]["attention_mask"].all() == (not keep_mask)
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
        truth = model(input_ids=work.ordinary.micro_batches[0]["input_ids"], labels=labels).loss.item()
        for arm in (Arm(plain_head=False), Arm(attention="cascade", plain_head=False)):
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
