"""What a pass of generation computes and stores: literal plans.

That every row sees its path once, whatever the cache holds, shows in the logits: `tests/claims/generation`.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from radixtrain.generation import passes
from radixtrain.generation.cache import Match, RadixCache
from radixtrain.generation.passes import LaneRange, Pass, PromptPlan, Request, SharedRows, decoding_pass, worth_keeping

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


def pass_of(plan: PromptPlan, first_lane: int = 0) -> Pass:
    """The kept rows get the slots from 500 on."""
    return plan.pass_of(500 + np.arange(len(plan.kept_rows)), LANES, first_lane, None, CPU)


def stored(each: Pass) -> Counter[tuple[int, int]]:
    """Counts (row, slot)."""
    rows = each.layout.written_rows
    assert rows is not None
    return Counter(zip(rows.tolist(), each.layout.slots.tolist(), strict=True))


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


class TestPassOfPrompts:
    def test_literally(self) -> None:
        each = pass_of(planned(), first_lane=2)
        assert each.input_ids.tolist() == [1, 2, 3, 4, 5, 6, 9]
        assert each.position_ids.tolist() == [0, 1, 2, 3, 4, 3, 0]
        assert each.predictor_indices is not None and each.predictor_indices.tolist() == [4, 5, 6]
        assert stored(each) == Counter([(0, 500), (1, 501), (2, 502), (3, 1040), (4, 1041), (5, 1060), (6, 1080)])
        assert (each.layout.num_rows, each.layout.max_seqlen, each.layout.shared) == (7, 5, ())
        assert each.layout.lanes is None and each.layout.prompts is not None

    def test_shared_rows_that_are_not_kept_go_to_every_lane(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.undo()
        first = [(row, 1000 + row) for row in range(5)]
        second = [(0, 1020), (1, 1021), (2, 1022), (5, 1023)]
        assert stored(pass_of(planned())) == Counter([*first, *second, (6, 1040)])

    def test_continued(self) -> None:
        """Positions count from the beginning of the prompt, and lanes from the first token that is not kept."""
        each = pass_of(planned(cache=put(RadixCache(), [1, 2, 3, 6, 7])))
        assert (each.input_ids.tolist(), each.position_ids.tolist()) == ([4, 5, 6, 9], [3, 4, 3, 0])
        assert stored(each) == Counter([(0, 1000), (1, 1001), (2, 1020), (3, 1040)])
        assert each.layout.max_seqlen == 5


def test_decoding_literally() -> None:
    cache = put(RadixCache(), [1, 2, 3])
    active = [Request(n, n, np.array(ids), 4) for n, ids in enumerate([[1, 2, 3, 4], [9]])]
    active[0].hold(cache, cache.match_prefix([1, 2, 3]).node)
    tokens, mask = torch.tensor([5, 6]), torch.zeros(2, 3)
    each = decoding_pass(active, tokens, np.array([6, 3]), np.array([3, 3]), LANES, mask, SharedRows((), None, None))
    assert each.input_ids is tokens
    assert (each.position_ids.tolist(), each.predictor_indices) == ([5, 2], None)
    layout = each.layout
    assert layout.written_rows is None and layout.slots.tolist() == [1002, 1022]
    assert (layout.num_rows, layout.max_seqlen, layout.prompts) == (2, 6, None)
    assert layout.lanes is not None and (layout.lanes.first, layout.lanes.step) == (1000, 20)
    assert layout.paths.slots_of(0).tolist() == [*active[0].path.tolist(), 1000, 1001, 1002]
    assert layout.paths.slots_of(1).tolist() == [1020, 1021, 1022]
    assert layout.paths.within(2)[0].tolist() == [1001, 1002, 1021, 1022]
