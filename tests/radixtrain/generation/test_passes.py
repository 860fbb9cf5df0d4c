"""What a pass of generation computes, stores and sees: literal plans, then any prompts on any cache."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from radixtrain.generation import passes
from radixtrain.generation.cache import Match, Node, RadixCache
from radixtrain.generation.passes import (
    LaneRange,
    Pass,
    PromptPlan,
    SharedRows,
    decoding_pass,
    shared_runs,
    worth_keeping,
)
from radixtrain.generation.requests import Request
from radixtrain.kernels.pieces import Piece
from radixtrain.testing import ragged_batches

CPU = torch.device("cpu")
LANES = LaneRange(first=1000, step=20, number=16)
Ids = list[int]


def put(cache: RadixCache, *prompts: Ids) -> RadixCache:
    for ids in prompts:
        found = cache.match_prefix(ids)
        cache.insert(ids, np.append(found.slots, cache.reserve(len(ids) - len(found.slots))))
    return cache


def of(cache: RadixCache, ids: Ids) -> Match:
    match = cache.match_prefix(ids)
    cache.lock(match.node)
    return match


def lcp_of(prompts: Sequence[Ids]) -> np.ndarray:
    """Tokens that each of the sorted prompts shares with the one before it."""
    pairs = zip([[], *prompts], prompts, strict=False)
    return np.array(
        [
            next((n for n, ab in enumerate(zip(*pair, strict=False)) if ab[0] != ab[1]), min(map(len, pair)))
            for pair in pairs
        ]
    )


def requests(*prompts: Ids) -> list[Request]:
    kept = worth_keeping(lcp_of(prompts)).tolist()
    return [Request(n, np.array(ids), 4, np.zeros(0), rank=n, kept=kept[n]) for n, ids in enumerate(prompts)]


def planned(
    prompts: Sequence[Ids], cache: RadixCache | None = None, longest_tail: int = 20, limits: Sequence[int] | None = None
) -> PromptPlan:
    """Of prompts that are sorted. limits: leading tokens of each that may be matched; by default all but the last."""
    cache = RadixCache() if cache is None else cache
    matches = [of(cache, ids[:limit]) for ids, limit in zip(prompts, limits or [-1] * len(prompts), strict=True)]
    return PromptPlan.of(requests(*prompts), matches, longest_tail)


def pass_of(plan: PromptPlan, first_lane: int = 0, predicting: list[np.ndarray] | None = None) -> Pass:
    """The kept rows get the slots from 500 on."""
    return plan.pass_of(500 + np.arange(len(plan.kept_rows)), LANES, first_lane, predicting, CPU)


def stored(each: Pass) -> Counter[tuple[int, int]]:
    """Counts (row, slot)."""
    rows = each.layout.written_rows
    assert rows is not None
    return Counter(zip(rows.tolist(), each.layout.slots.tolist(), strict=True))


@pytest.fixture
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three (query, key) pairs are worth a product."""
    monkeypatch.setattr(passes, "PIECE_CELLS", 3)


class TestLaneRange:
    def test_slots(self) -> None:
        assert LaneRange(10, 4, 3).slots(0, 2).tolist() == [10, 11]
        assert LaneRange(10, 4, 3).slots(2, 4).tolist() == [18, 19, 20, 21]
        assert LaneRange(10, 4, 3).slots(1, 0).tolist() == []

    def test_several_lanes_some_of_them_empty(self) -> None:
        lanes = LaneRange(10, 4, 3)
        assert lanes.slots_of(np.array([2, 0, 1]), np.array([1, 0, 3])).tolist() == [18, 14, 15, 16]
        assert lanes.slots_of(np.array([0]), np.array([0])).tolist() == []


class TestSharedRuns:
    def nodes(self) -> tuple[Node, ...]:
        """Root -> [1 2] -> [3 4] -> [5], and [6] below [1 2]; [7] below the root."""
        cache = put(RadixCache(), [1, 2, 3, 4, 5], [1, 2, 6], [7], [1, 2, 3, 4])
        prefixes = ([], [1, 2], [1, 2, 3, 4], [1, 2, 3, 4, 5], [1, 2, 6], [7])
        return tuple(cache.match_prefix(ids).node for ids in prefixes)

    def runs(self, *nodes: Node) -> list[tuple[Ids, Ids]]:
        return [(places, slots.tolist()) for places, slots in shared_runs(nodes)]

    def test_nothing_is_cached(self) -> None:
        root, *_ = self.nodes()
        assert self.runs(root, root) == [] == self.runs()

    def test_nodes_with_the_same_readers_are_one_run_from_the_root(self) -> None:
        _, two, four, five, *_ = self.nodes()
        whole = [*two.slots, *four.slots, *five.slots]
        assert self.runs(five) == [([0], whole)] and self.runs(five, five) == [([0, 1], whole)]

    def test_nodes_with_different_readers_are_several(self) -> None:
        _, two, four, five, six, seven = self.nodes()
        found = self.runs(six, five, seven, four)
        assert sorted(found) == sorted(
            [
                ([0], six.slots.tolist()),
                ([0, 1, 3], two.slots.tolist()),
                ([1], five.slots.tolist()),
                ([1, 3], four.slots.tolist()),
                ([2], seven.slots.tolist()),
            ]
        )

    def test_one_that_reads_nothing_is_in_no_run(self) -> None:
        root, two, *_ = self.nodes()
        assert self.runs(root, two, root) == [([1], two.slots.tolist())]


class TestWhatIsKept:
    """Three prompts, the first two with [1 2 3] in common."""

    PROMPTS = ([1, 2, 3, 4, 5], [1, 2, 3, 6], [9])

    def test_rows_that_are_worth_a_product(self, cheap: None) -> None:
        plan = planned(self.PROMPTS)
        assert (plan.kept.tolist(), plan.tails.tolist()) == ([3, 3, 0], [2, 1, 1])
        assert plan.ids[plan.kept_rows].tolist() == [1, 2, 3]

    def test_one_pair_less_is_not(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(passes, "PIECE_CELLS", 4)
        plan = planned(self.PROMPTS)
        assert (plan.kept.tolist(), plan.tails.tolist()) == ([0, 0, 0], [5, 4, 1])
        assert plan.kept_rows.tolist() == [] and plan.plan.num_rows == 7, "they are computed once all the same"

    def test_what_is_above_rows_that_are_worth_it_is_kept_too(self, cheap: None) -> None:
        """[1] saves two pairs, [1 2 3 4] for two of the three four."""
        plan = planned([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 7]])
        assert plan.kept.tolist() == [4, 4, 0]

    def test_a_prompt_that_ends_inside_of_kept_rows(self, cheap: None) -> None:
        plan = planned([[1, 2, 3], [1, 2, 3, 4, 5, 6, 8], [1, 2, 3, 4, 5, 6, 9]])
        assert plan.kept.tolist() == [3, 6, 6] and plan.tails.tolist() == [0, 1, 1]

    def test_longest_tail(self) -> None:
        """What a lane has no room for."""
        plan = planned(self.PROMPTS, longest_tail=2)
        assert (plan.kept.tolist(), plan.tails.tolist()) == ([3, 2, 0], [2, 2, 1])

    def test_what_is_cached_is_kept(self) -> None:
        cache = put(RadixCache(), [1, 2, 3, 6, 7])
        plan = planned(self.PROMPTS, cache)
        assert plan.cached.tolist() == [3, 3, 0] == plan.kept.tolist(), "the last token of a prompt is computed"
        assert plan.plan.num_rows == 4 and plan.kept_rows.tolist() == []

    @pytest.mark.parametrize(("lcp", "expected"), [([0, 511, 0], [0, 0, 0]), ([0, 512, 0], [512, 512, 0]), ([0], [0])])
    def test_worth_keeping(self, lcp: Ids, expected: Ids) -> None:
        """512 pairs of a query and a key, saved at every step."""
        assert worth_keeping(np.array(lcp)).tolist() == expected

    def test_worth_keeping_counts_all_readers(self) -> None:
        """Eight read 100 tokens, which saves 700 pairs; two of them 300 more, which saves too few."""
        assert worth_keeping(np.array([0, *[100] * 6, 400])).tolist() == [100] * 8
        assert worth_keeping(np.array([0, *[100] * 6, 700])).tolist() == [*[100] * 6, 700, 700]

    def test_what_a_later_prompt_begins_with(self) -> None:
        """It may come in another pass: what is kept was decided for all."""
        request = Request(0, np.arange(100), 4, np.zeros(0), kept=64)
        plan = PromptPlan.of([request], [of(RadixCache(), [])], 100)
        assert (plan.kept.tolist(), plan.tails.tolist()) == ([64], [36])


class TestPassOfPrompts:
    PROMPTS = ([1, 2, 3, 4, 5], [1, 2, 3, 6], [9])

    def test_literally(self, cheap: None) -> None:
        each = pass_of(planned(self.PROMPTS), first_lane=2)
        assert each.input_ids.tolist() == [1, 2, 3, 4, 5, 6, 9]
        assert each.position_ids.tolist() == [0, 1, 2, 3, 4, 3, 0]
        assert each.predictor_indices.tolist() == [4, 5, 6]
        assert stored(each) == Counter([(0, 500), (1, 501), (2, 502), (3, 1040), (4, 1041), (5, 1060), (6, 1080)])
        assert (each.layout.num_rows, each.layout.max_seqlen, each.layout.shared) == (7, 5, ())
        assert each.layout.lanes is None and each.layout.prompts is not None

    def test_shared_rows_that_are_not_kept_go_to_every_lane(self) -> None:
        each = pass_of(planned(self.PROMPTS))
        first = [(row, 1000 + row) for row in range(5)]
        second = [(0, 1020), (1, 1021), (2, 1022), (5, 1023)]
        assert stored(each) == Counter([*first, *second, (6, 1040)])

    def test_kept_by_one_and_not_by_the_other(self) -> None:
        """A longer prompt has no room for its beginning, which then is also in the lane of the shorter one."""
        each = pass_of(planned(self.PROMPTS, longest_tail=4))
        first = [(0, 500), (1, 1000), (2, 1001), (3, 1002), (4, 1003)]
        second = [(0, 1020), (1, 1021), (2, 1022), (5, 1023)]
        assert stored(each) == Counter([*first, *second, (6, 1040)])

    def test_continued(self) -> None:
        """Positions count from the beginning of the prompt, and lanes from the first token that is not kept."""
        cache = put(RadixCache(), [1, 2, 3, 6, 7])
        slots = cache.match_prefix([1, 2, 3]).slots.tolist()
        each = pass_of(planned(self.PROMPTS, cache))
        assert (each.input_ids.tolist(), each.position_ids.tolist()) == ([4, 5, 6, 9], [3, 4, 3, 0])
        assert stored(each) == Counter([(0, 1000), (1, 1001), (2, 1020), (3, 1040)])
        assert [seen_from_cache(each.layout.shared, row) for row in range(4)] == [slots, slots, slots, []]
        assert each.layout.max_seqlen == 5

    def test_logits_that_are_asked_for(self) -> None:
        """Places count from the beginning of the prompt, and what is cached has no logits."""
        cache = put(RadixCache(), [1, 2, 3])
        plan = planned(self.PROMPTS[:2], cache, limits=[2, 3])
        each = pass_of(plan, predicting=[np.array([2, 4]), np.array([3])])
        assert each.input_ids[each.predictor_indices].tolist() == [3, 5, 6]

    def test_rows_that_continue_different_nodes_never_merge(self) -> None:
        """Both compute 5, one after [1 2] from the cache, the other after its own 2: two rows in two places."""
        cache = put(RadixCache(), [1, 2])
        plan = planned([[1, 2, 5, 6], [1, 2, 5, 7]], cache, limits=[1, 2])
        each = pass_of(plan)
        assert each.input_ids.tolist() == [2, 5, 6, 5, 7] and each.position_ids.tolist() == [1, 2, 3, 2, 3]

    def test_kept_path(self, cheap: None) -> None:
        cache = put(RadixCache(), [1, 2])
        plan = planned([[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 7]], cache)
        slots = cache.match_prefix([1, 2]).slots.tolist()
        assert plan.kept_rows.tolist() == [0, 1, 2]
        for place in range(2):
            assert plan.kept_path(place, np.array([500, 501, 502])).tolist() == [*slots, 500, 501, 502]


def tokens_in_slots(cache: RadixCache) -> dict[int, tuple[int, ...]]:
    """What each slot of the cache holds: the tokens down to its own."""
    found: dict[int, tuple[int, ...]] = {}
    stack: list[tuple[Node, tuple[int, ...]]] = [(cache.root, ())]
    while stack:
        node, above = stack.pop()
        for slot, token in zip(node.slots.tolist(), node.tokens.tolist(), strict=True):
            above = (*above, token)
            found[slot] = above
        stack += [(child, above) for child in node.children.values()]
    return found


def seen_from_cache(shared: Sequence[Piece], row: int) -> Ids:
    """By the bounds of each call: a piece may have several rectangles."""
    found, rows = [], np.arange(5000)
    for each in shared:
        queries, keys = rows[each.q_rows], rows[each.k_rows]
        assert each.ragged.bounds is not None
        found += [
            slot for q0, q1, k0, k1 in each.ragged.bounds if row in queries[q0:q1] for slot in keys[k0:k1].tolist()
        ]
    return found


@example([[1, 2, 3, 0, 0]], [[1, 2, 3, 0, 1], [1, 2, 3, 1], [1, 2, 3, 2]], 20, 512, [4, 1, 3])
@settings(max_examples=80, deadline=None)
@given(
    ragged_batches(max_sequences=4),
    ragged_batches(),
    st.integers(1, 12),
    st.sampled_from([1, 2, 4, 512]),
    st.lists(st.integers(0, 9), min_size=8, max_size=8),
)
def test_every_row_sees_its_path_once_and_is_stored_where_it_is_read(
    cached: list[Ids], prompts: list[Ids], longest_tail: int, cells: int, limits: Ids
) -> None:
    """Whatever the cache holds, and however much of each prompt may be taken from it.

    The example: [1 2 3] is read by the first and the last prompt, and the one between them computes it itself. It saw
    these rows twice.
    """
    cache = put(RadixCache(), *cached)
    prompts = sorted(prompts)
    limits = [min(limit, len(ids) - 1) for limit, ids in zip(limits, prompts, strict=False)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passes, "PIECE_CELLS", cells)
        plan = planned(prompts, cache, longest_tail, limits)
    each, held = pass_of(plan), tokens_in_slots(cache)
    inverse, cu_seqlens = plan.plan.inverse_indices, plan.plan.cu_seqlens
    kept_slots = dict(zip(plan.kept_rows.tolist(), range(500, 600), strict=False))
    writes = stored(each)
    assert set(writes.values()) <= {1} and len({slot for _, slot in writes}) == len(writes), "no slot is written twice"
    in_place = Counter[tuple[int, int]]()
    ends = each.layout.prompts.row_subtree_ends.tolist() if each.layout.prompts else []
    for place, ids in enumerate(prompts):
        cached_length, kept = int(plan.cached[place]), int(plan.kept[place])
        assert cached_length <= kept <= len(ids) and len(ids) - kept <= longest_tail
        rows = inverse[cu_seqlens[place] : cu_seqlens[place + 1]].tolist()
        assert len(rows) == len(ids) - cached_length
        for depth, row in enumerate(rows, start=cached_length):
            assert (each.input_ids[row], each.position_ids[row]) == (ids[depth], depth)
            slot = kept_slots[row] if depth < kept else 1000 + 20 * place + depth - kept
            assert writes[row, slot] == 1
            in_place[row, slot] = 1
            assert [above for above in range(row + 1) if ends[above] > row] == rows[: depth - cached_length + 1]
            from_cache = seen_from_cache(each.layout.shared, row)
            assert sorted(held[slot] for slot in from_cache) == [tuple(ids[: n + 1]) for n in range(cached_length)]
        assert each.predictor_indices[place] == rows[-1]
        assert [held.get(slot, ()) for slot in plan.kept_path(place, np.array([*kept_slots.values()], dtype=int))][
            :cached_length
        ] == [tuple(ids[: n + 1]) for n in range(cached_length)]
    assert in_place == writes, "nothing else is written"


def test_windows_of_a_pass_of_prompts(cheap: None) -> None:
    """Through the cache, the kept rows and the lanes of each prompt; a run of new rows stands in one of them."""
    cache = put(RadixCache(), [1, 2])
    one, two = cache.match_prefix([1, 2]).slots.tolist()
    each = pass_of(planned([[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 7, 8]], cache))
    assert each.input_ids.tolist() == [3, 4, 5, 6, 7, 8]
    paths = each.layout.paths
    assert paths.cu_seqlens.tolist() == [0, 4, 6]
    assert paths.slots_of(0).tolist() == [one, two, 500, 501, 502, 1000]
    assert paths.slots_of(1).tolist() == [one, two, 500, 501, 502, 1020, 1021]
    assert paths.within(2)[0].tolist() == [two, 500, 501, 502, 1000, 502, 1020, 1021]


class TestSharedRows:
    """Sequences in lanes 0 to 3: the second and the last read [1 2 3], the third [1 2], the first nothing."""

    def active(self, *ranks: int) -> tuple[list[Request], list[Ids]]:
        cache = put(RadixCache(), [1, 2, 3], [1, 2, 4])
        prompts = ([9], [1, 2, 3, 5], [1, 2, 8], [1, 2, 3, 6])
        found = [
            Request(n, np.array(ids), 1, np.zeros(0), rank)
            for n, (ids, rank) in enumerate(zip(prompts, ranks, strict=True))
        ]
        for request, ids in zip(found, ([], [1, 2, 3], [1, 2], [1, 2, 3]), strict=True):
            request.hold(cache, cache.match_prefix(ids).node)
        return found, [request.path.tolist() for request in found]

    def test_in_sorted_order(self) -> None:
        active, paths = self.active(3, 0, 2, 1)
        shared = SharedRows.of(active, CPU)
        assert shared.order is not None and shared.inverse is not None
        assert (shared.order.tolist(), shared.inverse.tolist()) == ([1, 3, 2, 0], [3, 0, 2, 1])
        assert [seen_from_cache(shared.pieces, place) for place in (3, 0, 2, 1)] == paths
        assert all(isinstance(piece.q_rows, slice) for piece in shared.pieces), "neighbours, so nothing is gathered"

    def test_in_lanes_that_are_sorted(self) -> None:
        active, paths = self.active(0, 1, 2, 3)
        shared = SharedRows.of(active, CPU)
        assert shared.order is None and shared.inverse is None
        assert [sorted(seen_from_cache(shared.pieces, place)) for place in range(4)] == [sorted(path) for path in paths]

    def test_nothing_is_read(self) -> None:
        active, _ = self.active(3, 0, 2, 1)
        assert SharedRows.of(active[:1], CPU).pieces == ()


def test_decoding_literally() -> None:
    cache = put(RadixCache(), [1, 2, 3])
    active = requests([1, 2, 3, 4], [9])
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
