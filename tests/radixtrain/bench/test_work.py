"""The work of a step: what is shared, how both arms are cut, and its arithmetic."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from radixtrain.bench.cells import Cell, GivenBatch, ModelShape
from radixtrain.bench.flops import ordinary_flops, unique_flops
from radixtrain.bench.work import UNTIMED_TOKENS, make_work, with_choices, work_of
from radixtrain.errors import UserError
from radixtrain.tree.cost_model import Rates, StepCost

SHAPE = ModelShape(num_hidden_layers=2, hidden_size=32, head_dim=8, vocab_size=97)
FLAT = Cell(SHAPE, prompt_length=40, suffix_length=6, num_sequences=8)
NESTED = replace(FLAT, tree="nested")
RAGGED = GivenBatch(SHAPE, "8 of train.jsonl", 8)


class TestWork:
    def test_a_flat_tree_shares_the_prompt(self) -> None:
        (plan,) = make_work(FLAT).plans
        assert (plan.num_tokens, plan.num_unique_tokens, plan.depth) == (8 * 46, 40 + 8 * 6, 2)

    def test_a_nested_tree_has_three_levels(self) -> None:
        (plan,) = make_work(NESTED).plans
        assert (plan.num_tokens, plan.num_unique_tokens, plan.depth) == (8 * 46, 20 + 2 * 20 + 8 * 6, 3)
        assert make_work(replace(NESTED, num_sequences=9)).num_unique_tokens("cascade") == 20 + 3 * 20 + 9 * 6

    @pytest.mark.parametrize("cell", [replace(FLAT, num_sequences=1), replace(FLAT, prompt_length=0)])
    def test_nothing_to_share(self, cell: Cell) -> None:
        work = make_work(cell)
        assert work.num_tokens == work.num_unique_tokens("cascade")
        assert work.ideal_speedup(SHAPE.config()) == 1.0

    @pytest.mark.parametrize("cell", [FLAT, NESTED])
    def test_the_loss_is_on_the_suffixes(self, cell: Cell) -> None:
        work = make_work(cell)
        assert work.num_labels == int(work.radix[0].tensors["radix_loss_weights"].sum()) == 8 * 6
        assert all((feature["labels"] != -100).sum() == 6 for feature in work.features)

    def test_the_ordinary_batch_has_no_padding(self) -> None:
        (batch,) = make_work(NESTED).ordinary
        assert batch.tensors["input_ids"].shape == (8, 46) and batch.tensors["attention_mask"].all()

    def test_a_cell_is_the_same_every_time(self) -> None:
        first, second = make_work(NESTED), make_work(NESTED)
        assert all(
            np.array_equal(a["input_ids"], b["input_ids"]) for a, b in zip(first.features, second.features, strict=True)
        )

    def test_the_ideal_is_a_ratio_of_flops(self) -> None:
        work = make_work(FLAT)
        # a suffix of 6 has 5 predictors of its own and shares the last token of the prompt with all others
        ordinary = ordinary_flops(SHAPE.config(), work.plans[0], num_labels=8 * 6)
        unique = unique_flops(SHAPE.config(), work.plans[0], num_predictors=1 + 8 * 5)
        assert work.ideal_speedup(SHAPE.config()) == ordinary.total / unique.total

    def test_a_step_is_three_forward_passes(self) -> None:
        forward = make_work(replace(FLAT, mode="forward")).ordinary_teraflops(SHAPE.config())
        assert make_work(FLAT).ordinary_teraflops(SHAPE.config()) == pytest.approx(3 * forward)

    def test_an_ordinary_arm_that_is_not_timed_is_cut_small(self) -> None:
        cell = replace(FLAT, prompt_length=UNTIMED_TOKENS // 2 - 6)
        batches = make_work(cell, is_ordinary_timed=False).ordinary
        assert [batch.tensors["input_ids"].shape for batch in batches] == 4 * [(2, UNTIMED_TOKENS // 2)]


class TestGivenRows:
    """Sequences of a user's own, which differ in length."""

    def test_ordinary_micro_batches_are_sorted_by_length(self, ragged_features: Any) -> None:
        features = ragged_features
        work = work_of(RAGGED, features, batch_size=3)
        lengths = [[len(features[index]["input_ids"]) for index in batch.members] for batch in work.ordinary]
        assert lengths == [[27, 26, 26], [25, 25, 24], [24, 23]]
        assert [tuple(batch.tensors["input_ids"].shape) for batch in work.ordinary] == [(3, 27), (3, 25), (2, 24)]

    def test_radix_micro_batches_keep_the_budget(self, ragged_features: Any) -> None:
        work = work_of(RAGGED, ragged_features, max_tokens=40)
        assert [len(batch.members) for batch in work.radix] == [4, 4]
        assert sorted(index for batch in work.radix for index in batch.members) == list(range(8))
        assert (work.num_tokens, work.num_unique_tokens("cascade")) == (4 * 41 + 2 * 18, 41 + 2 * 18)

    def test_the_arithmetic_counts_no_padding_and_every_micro_batch(self, ragged_features: Any) -> None:
        features = ragged_features
        whole, cut = (work_of(RAGGED, features, max_tokens=size) for size in (None, 40))
        assert work_of(RAGGED, features, batch_size=3).ordinary_teraflops(SHAPE.config()) == pytest.approx(
            whole.ordinary_teraflops(SHAPE.config())
        )
        assert whole.ideal_speedup(SHAPE.config()) == pytest.approx(cut.ideal_speedup(SHAPE.config()))
        separate = work_of(RAGGED, features, max_tokens=1)
        assert separate.ideal_speedup(SHAPE.config()) == 1.0

    def test_a_step_without_labels(self) -> None:
        features = [{"input_ids": [1, 2], "labels": [-100, -100]}]
        with pytest.raises(UserError, match=r"2x32, 8 of train\.jsonl, step: no token bears loss"):
            work_of(RAGGED, features)


def test_the_batches_of_auto_are_those_that_a_calibration_chose() -> None:
    work = make_work(FLAT)
    assert work.radix_batches("auto") is work.radix_batches("path") is work.radix
    rates = Rates(call=1.0, rectangle=0.0, pair=0.0, element=0.0, flop=0.0)
    cost = StepCost(rates=rates, on_host=True, num_heads=4, num_key_value_heads=2, head_dim=8, row_flops=0.0)
    chosen = with_choices(work, replace(cost, strategies=("expand",)))
    assert chosen.choices == "expand/1" and work.choices == ""
    assert chosen.radix_batches("auto") is chosen.auto is not None
    assert chosen.radix_batches("path") is chosen.radix
    assert chosen.to("cpu").choices == "expand/1" and work.to("cpu").auto is None
