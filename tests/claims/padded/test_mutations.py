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

from radixtrain.hf import hooks
from radixtrain.hf.padded import calls, causes, sharing, spread_rows
from radixtrain.hf.padded.places import PaddedIds, Places
from radixtrain.hf.padded.spread_rows import SpreadRows
from tests.claims.mistakes import SEEN, forgotten_prompt, plant, plant_ends, returning, sibling_leak
from tests.support import cases
from tests.support.batches import PaddedBatch, packed, pad
from tests.support.models import CORE, since, tiny_qwen3
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


def built(name: str) -> Any:
    return next(family for family in CORE if family.name == name).build()


def check(name: str = "Qwen3", positions: str | None = None, router: bool = False) -> None:
    """AssertionError, or the error of the model, unless a family's shared batches are the ordinary ones."""
    reads = [Reads(0, router=router, hidden_states=True), Reads(1, router=router, own_loss=True)]
    with in_float64(built(name), learned=name == "GPT-2") as pair:
        for batch in batches(positions):
            for each in [*reads, *([] if router else [Reads(2, logits_to_keep=3)])]:
                pair.check(batch, each)


def assert_caught(*args: Any, **options: Any) -> None:
    with pytest.raises(SEEN):
        check(*args, **options)


UNTOUCHED = [*product(["Qwen3", "GPT-2"], [None, "mask", "offset"], [False]), ("Qwen3-MoE", None, True)]


@pytest.mark.parametrize(("name", "positions", "router"), cases(UNTOUCHED, [UNTOUCHED[0], UNTOUCHED[-1]]))
def test_without_a_mutation(name: str, positions: str | None, router: bool) -> None:
    check(name, positions, router)


# Mistakes. Each changes what the real function returns.


def on_the_left(real: Any, self: PaddedIds, row_of_token: Any, num_rows: int) -> Places:
    """As if padding stood on the right only."""
    found, wrong = real(self, row_of_token, num_rows), np.full(self.attended.shape, num_rows)
    for row, attended in enumerate(self.attended):
        wrong[row, : attended.sum()] = found.rows[row, attended]
    return replace(found, rows=wrong)


def by_column(real: Any, self: PaddedIds, row_of_token: Any, num_rows: int) -> Places:
    """A token of one branch stands for the one in its column, whatever came before."""
    found = real(self, row_of_token, num_rows)
    same = self.input_ids[1:] == self.input_ids[:1]
    found.rows[1:] = np.where(same & self.attended[1:] & self.attended[:1], found.rows[:1], found.rows[1:])
    return found


def rows_of_the_batch_before() -> Callable[..., SpreadRows]:
    """What one call leaves for its head is used in the next one."""
    seen: list[Any] = []

    def stale(real: Any, table: Tensor, index: Any, *others: Any, **further: Any) -> SpreadRows:
        seen.append(index)
        same = (each for each in reversed(seen) if each.shape == index.shape and (each != index).any())
        return real(table, next(same, index).clip(max=len(table) - 1), *others, **further)

    return stale


def columns(real: Any, self: PaddedIds) -> Any:
    """Rotary embeddings see only distances, so it is sharing that shows it; learned positions give other numbers."""
    return np.broadcast_to(np.arange(self.attended.shape[1]), self.attended.shape)[self.attended]


ROTARY, LEARNED = ("Qwen3", None), ("GPT-2", None)
# What is replaced, by what, and the families and positions that have to show it.
MISTAKES: dict[str, tuple[Any, str, Callable[..., Any], list[tuple[str, str | None]]]] = {
    "the row before, at each place": (
        *(spread_rows, "gather_rows"),
        lambda real, x, indices: real(x, (indices - 1).clamp(min=0)),  # as if padding were put before the unique rows
        [ROTARY],
    ),
    "memory at padding that nothing was written to": (
        *(Places, "with_padding"),
        lambda real, self, x: torch.cat([x, torch.full_like(x[:1], float("nan"))]),
        [ROTARY],
    ),
    "rows that all start in the first column": (PaddedIds, "places", on_the_left, [ROTARY]),
    "a head with the rows of the batch before": (SpreadRows, "of", rows_of_the_batch_before(), [ROTARY]),
    "positions that count padding": (
        *(PaddedIds, "attended_positions", columns),
        [ROTARY, ("Qwen3", "mask"), ("GPT-2", "mask"), ("GPT-2", "offset")],
    ),
    "positions that are given and not used": (
        *(PaddedIds, "attended_positions", returning(None)),
        [("GPT-2", "offset"), ("Qwen3", "jumps")],
    ),
    # Left padding without position_ids counts from the padding in Hugging Face, and is not shared in GPT-2.
    "learned positions that do not count padding": (sharing, "why_padding_matters", returning(None), [LEARNED]),
    "tokens that are shared by place": (PaddedIds, "places", by_column, [("Qwen3", "jumps")]),
    "packed sequences that see each other": (
        *(PaddedIds, "cu_seqlens"),
        lambda real, self: np.array([0, self.attended.sum()]),
        [ROTARY],
    ),
    "padding that is seen": (causes, "_mask_plane", returning({}), [ROTARY]),  # the mask is not read
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_seen(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    *planted, shown_by = MISTAKES[name]
    plant(monkeypatch, *planted)
    for family, positions in shown_by:
        assert_caught(family, positions)


@pytest.mark.parametrize("ends_of", [sibling_leak, forgotten_prompt], ids=lambda ends: ends.__name__)
def test_a_group_leak(monkeypatch: pytest.MonkeyPatch, ends_of: Any) -> None:
    plant_ends(monkeypatch, ends_of)
    assert_caught()


# The router, and generation.

STOPPED_ANYWAY = since("5.4", "generate() passes cache_position, which stops sharing too")


def test_router_logits_counted_by_unique_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a mask, where their number fits, and only the loss shows it."""
    plant(monkeypatch, hooks, "_expand_router_logits", returning(None))
    ids = torch.tensor([[1, 2, 3, 1], [1, 2, 3, 4], [1, 2, 2, 2]])
    kept = torch.ones_like(ids, dtype=torch.bool)
    batch = PaddedBatch({"input_ids": ids}, kept, torch.arange(4).expand(3, 4) == 0, kept.cumsum(1) - 1, "no mask")
    with in_float64(built("Qwen3-MoE")) as pair:
        pair.check(batch, Reads(0))
        with pytest.raises(AssertionError, match="is off by"):
            pair.check(batch, Reads(0, router=True))


@STOPPED_ANYWAY
@pytest.mark.parametrize(("name", "use_cache"), [("_why_cache", True), ("is_generating", False)])
def test_hooks_that_engage_while_generating(monkeypatch: pytest.MonkeyPatch, name: str, use_cache: bool) -> None:
    assert_generates_the_same(tiny_qwen3(), use_cache=use_cache)
    plant(monkeypatch, calls, name, returning(None))
    with pytest.raises((*SEEN, AttributeError, TypeError), match=None if use_cache else "calls shared"):
        assert_generates_the_same(tiny_qwen3(), use_cache=use_cache)
