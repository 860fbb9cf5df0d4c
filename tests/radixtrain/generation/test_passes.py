"""What of a prompt the cache keeps: literal plans.

That every row sees its path once, whatever the cache holds, shows in the logits: `tests/claims/generation`.
"""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from radixtrain.generation import passes
from radixtrain.generation.cache import Match, RadixCache
from radixtrain.generation.passes import LaneRange, PromptPlan, Request, worth_keeping

CPU = torch.device("cpu")
LANES = LaneRange(first=1000, step=20, number=16)
Ids = list[int]
PROMPTS = [[1, 2, 3, 4, 5], [1, 2, 3, 6], [9]]  # the first two share [1 2 3]
SHARED = [3, 0]  # tokens that each prompt but the first shares with the one before it


@pytest.fixture(autouse=True)
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three (query, key) pairs are worth a product."""
    monkeypatch.setattr(passes, "PIECE_CELLS", 3)


def put(cache: RadixCache, ids: Ids) -> RadixCache:
    found = cache.match_prefix(ids)
    cache.insert(ids, np.append(found.slots, cache.reserve(len(ids) - len(found.slots))))
    return cache


def locked(cache: RadixCache, ids: Ids) -> Match:
    match = cache.match_prefix(ids)
    cache.lock(match.node)
    return match


def planned(
    prompts: Sequence[Ids] = PROMPTS,
    shared: Ids = SHARED,
    cache: RadixCache | None = None,
    longest_tail: int = 20,
) -> PromptPlan:
    """Of prompts that are sorted."""
    cache = RadixCache() if cache is None else cache
    kept = worth_keeping(np.array([0, *shared])).tolist()
    requests = [Request(n, n, np.array(ids), 4, kept=kept[n]) for n, ids in enumerate(prompts)]
    return PromptPlan.of(requests, [locked(cache, ids[:-1]) for ids in prompts], longest_tail)


class TestWhatIsKept:
    @pytest.mark.parametrize(
        ("lcp", "expected"),
        [
            ([0], [0]),
            ([0, 511, 0], [0, 0, 0]),
            ([0, 512, 0], [512, 512, 0]),
            ([0, *[100] * 6, 400], [100] * 8),  # eight read 100 tokens, two of them 300 more, which saves too few
            ([0, *[100] * 6, 700], [*[100] * 6, 700, 700]),
        ],
    )
    def test_rows_that_save_512_pairs_at_every_step(
        self, lcp: Ids, expected: Ids, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of a query and a key: all readers but one are saved them."""
        monkeypatch.undo()
        assert worth_keeping(np.array(lcp)).tolist() == expected

    @pytest.mark.parametrize(
        ("prompts", "shared", "kept", "tails"),
        [
            (PROMPTS, SHARED, [3, 3, 0], [2, 1, 1]),
            ([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 7]], [4, 1], [4, 4, 0], [1, 1, 2]),
            ([[1, 2, 3], [1, 2, 3, 4, 5, 6, 8], [1, 2, 3, 4, 5, 6, 9]], [3, 6], [3, 6, 6], [0, 1, 1]),  # ends inside
        ],
    )
    def test_literally(self, prompts: list[Ids], shared: Ids, kept: Ids, tails: Ids) -> None:
        plan = planned(prompts, shared)
        assert (plan.kept.tolist(), plan.tails.tolist()) == (kept, tails)

    def test_one_pair_less_is_computed_once_all_the_same(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(passes, "PIECE_CELLS", 4)
        plan = planned()
        assert (plan.kept.tolist(), plan.kept_rows.tolist(), plan.plan.num_rows) == ([0, 0, 0], [], 7)

    def test_what_is_cached(self) -> None:
        plan = planned(cache=put(RadixCache(), [1, 2, 3, 6, 7]))
        assert plan.cached.tolist() == [3, 3, 0] == plan.kept.tolist(), "the last token of a prompt is computed"
        assert plan.plan.num_rows == 4 and plan.kept_rows.tolist() == []
