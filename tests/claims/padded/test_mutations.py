"""The tests of padded batches are tested: each mistake below makes the check of the families or of generation fail.

`assert_caught` runs the check that the families run, on a few batches chosen by hand.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from radixtrain.attention import tree_attention
from radixtrain.errors import UserError
from radixtrain.hf.padded import causes
from radixtrain.hf.padded.places import PaddedIds, Places
from radixtrain.hf.padded.spread_rows import SpreadRows
from radixtrain.kernels.rows import gather_rows
from radixtrain.tree.layout import TreeLayout
from tests.support import cases
from tests.support.batches import PaddedBatch, packed, pad
from tests.support.models import CORE, since
from tests.support.steps import Reads, assert_generates_the_same, in_float64

# Nested, one a prefix of another, two identical, one token, one without a shared prefix.
ROWS = [[1, 2, 3, 1, 1, 2, 2, 1], [1, 2, 3, 1, 4], [1, 2, 3, 1, 4], [1, 2, 3, 1], [1], [2, 2, 3, 1]]


pytestmark = pytest.mark.usefixtures("without_the_trial")


def batches(positions: str | None = None) -> Iterator[PaddedBatch]:
    """ROWS with padding on the left, on the right and on both sides; the last ones packed."""
    rng = np.random.default_rng(0)
    fill = rng.integers(0, 5, (len(ROWS), 10))
    room = [10 - len(row) for row in ROWS]
    for left in (room, [0] * len(ROWS), [most // 2 for most in room]):
        yield pad(rng, ROWS, left, fill, positions)
    if positions is None:
        yield packed(ROWS[:4])


def check(name: str = "Qwen3", positions: str | None = None, router: bool = False) -> None:
    """AssertionError, or the error of the model, unless a family's shared batches are the ordinary ones."""
    model = next(family for family in CORE if family.name == name).build()
    reads = [Reads(0, router=router, hidden_states=True), Reads(1, router=router, own_loss=True)]
    with in_float64(model, learned=name == "GPT-2") as pair:
        for batch in batches(positions):
            for each in [*reads, *([] if router else [Reads(2, logits_to_keep=3)])]:
                pair.check(batch, each)


def assert_caught(*args: Any, **options: Any) -> None:
    with pytest.raises((AssertionError, RuntimeError, UserError)):
        check(*args, **options)


UNTOUCHED = [*product(["Qwen3", "GPT-2"], [None, "mask", "offset"], [False]), ("Qwen3-MoE", None, True)]


@pytest.mark.parametrize(("name", "positions", "router"), cases(UNTOUCHED, [UNTOUCHED[0], UNTOUCHED[-1]]))
def test_without_a_mutation(name: str, positions: str | None, router: bool) -> None:
    check(name, positions, router)


# Rows at their places.


def row_before(x: Tensor, indices: Tensor) -> Tensor:
    """As if the row of padding were put in front of the unique ones."""
    return gather_rows(x, (indices - 1).clamp(min=0))


def test_a_wrong_row_at_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixtrain.hf.padded.spread_rows.gather_rows", row_before)
    assert_caught()


def test_memory_at_padding_that_nothing_was_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Places, "with_padding", lambda self, x: torch.cat([x, torch.full_like(x[:1], float("nan"))]))
    assert_caught()


def test_rows_that_all_start_in_the_first_column(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if padding stood on the right only."""
    places = PaddedIds.places

    def on_the_left(self: PaddedIds, row_of_token: Any, num_rows: int) -> Places:
        found, wrong = places(self, row_of_token, num_rows), np.full(self.attended.shape, num_rows)
        for row, kept in enumerate(self.attended):
            wrong[row, : kept.sum()] = found.rows[row, kept]
        return replace(found, rows=wrong)

    monkeypatch.setattr(PaddedIds, "places", on_the_left)
    assert_caught()


# The head.


def test_a_head_with_the_rows_of_the_batch_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one call leaves for its head is used in the next one."""
    seen: list[Tensor] = []
    made = SpreadRows.of

    def stale(table: Tensor, index: Tensor, *others: Any, **further: Any) -> SpreadRows:
        seen.append(index)
        same = (each for each in reversed(seen) if each.shape == index.shape and (each != index).any())
        return made(table, next(same, index).clip(max=len(table) - 1), *others, **further)

    monkeypatch.setattr(SpreadRows, "of", stale)
    assert_caught()


# Positions.


def test_positions_that_count_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotary embeddings see only distances, so it is sharing that shows it; learned positions give other numbers."""

    def columns(self: PaddedIds) -> Any:
        return np.broadcast_to(np.arange(self.attended.shape[1]), self.attended.shape)[self.attended]

    monkeypatch.setattr(PaddedIds, "attended_positions", property(columns))
    for name, positions in [("Qwen3", None), ("Qwen3", "mask"), ("GPT-2", "mask"), ("GPT-2", "offset")]:
        assert_caught(name, positions)


def test_positions_that_are_given_and_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PaddedIds, "attended_positions", property(lambda self: None))
    assert_caught("GPT-2", "offset")
    assert_caught("Qwen3", "jumps")


def test_learned_positions_that_do_not_count_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Left padding without position_ids counts from the padding in Hugging Face, and is not shared in GPT-2."""
    monkeypatch.setattr("radixtrain.hf.padded.sharing.why_padding_matters", lambda decoder: None)
    assert_caught("GPT-2")


def test_tokens_that_are_shared_by_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token of one branch stands for the one in its column, whatever came before."""
    places = PaddedIds.places

    def by_column(self: PaddedIds, row_of_token: Any, num_rows: int) -> Places:
        found = places(self, row_of_token, num_rows)
        same = self.input_ids[1:] == self.input_ids[:1]
        found.rows[1:] = np.where(same & self.attended[1:] & self.attended[:1], found.rows[:1], found.rows[1:])
        return found

    monkeypatch.setattr(PaddedIds, "places", by_column)
    assert_caught(positions="jumps")


# What a row sees.


def sibling_leak(layout: Any) -> Tensor:
    """Only causal over the unique tokens: every row sees the ones that stand before it."""
    return torch.full_like(layout.subtree_ends, layout.num_rows)


def forgotten_prompt(layout: Any) -> Tensor:
    """A row sees only what it does not share."""
    return layout.segment_starts[1:].clone()


@pytest.mark.parametrize("ends_of", [sibling_leak, forgotten_prompt], ids=lambda ends: ends.__name__)
def test_a_group_leak(monkeypatch: pytest.MonkeyPatch, ends_of: Callable[[Any], Tensor]) -> None:
    def mutated(query: Tensor, key: Tensor, value: Tensor, layout: Any, **options: Any) -> Tensor:
        wrong = TreeLayout(layout.host, layout.rows)
        wrong.subtree_ends = ends_of(layout)
        return tree_attention(query, key, value, wrong, **{**options, "attention": "reference"})

    monkeypatch.setattr("radixtrain.hf.attention_interface.tree_attention", mutated)
    assert_caught()


def test_packed_sequences_that_see_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PaddedIds, "cu_seqlens", property(lambda self: np.array([0, self.attended.sum()])))
    assert_caught()


def test_padding_that_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask is not read."""
    monkeypatch.setattr(causes, "_mask_plane", lambda mask: {})
    assert_caught()


# The router, and generation.

STOPPED_ANYWAY = since("5.4", "generate() passes cache_position, which stops sharing too")


def test_router_logits_counted_by_unique_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a mask their number does not fit. Without one only the loss shows it."""
    monkeypatch.setattr("radixtrain.hf.hooks._expand_router_logits", lambda *args: None)
    assert_caught("Qwen3-MoE", router=True)
    ids = torch.tensor([[1, 2, 3, 1], [1, 2, 3, 4], [1, 2, 2, 2]])
    kept = torch.ones_like(ids, dtype=torch.bool)
    batch = PaddedBatch({"input_ids": ids}, kept, torch.arange(4).expand(3, 4) == 0, kept.cumsum(1) - 1, "no mask")
    model = next(family for family in CORE if family.name == "Qwen3-MoE").build()
    with in_float64(model) as pair:
        pair.check(batch, Reads(0))
        with pytest.raises(AssertionError, match="is off by"):
            pair.check(batch, Reads(0, router=True))


@STOPPED_ANYWAY
def test_a_hook_that_engages_while_generating(monkeypatch: pytest.MonkeyPatch, tiny_qwen3: Callable[..., Any]) -> None:
    assert_generates_the_same(tiny_qwen3())
    monkeypatch.setattr("radixtrain.hf.padded.calls._why_cache", lambda *args: None)
    with pytest.raises((AssertionError, RuntimeError, UserError, AttributeError, TypeError)):
        assert_generates_the_same(tiny_qwen3())


@STOPPED_ANYWAY
def test_a_hook_that_does_not_know_generation_without_a_cache(
    monkeypatch: pytest.MonkeyPatch, tiny_qwen3: Callable[..., Any]
) -> None:
    monkeypatch.setattr("radixtrain.hf.padded.calls.is_generating", lambda: False)
    with pytest.raises(AssertionError, match="calls shared"):
        assert_generates_the_same(tiny_qwen3(), use_cache=False)
