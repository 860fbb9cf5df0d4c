"""The pool of slots: which runs it takes, what it merges, and how it grows; then against a plain set."""

import numpy as np
import pytest

from radixtrain.generation.slots import SlotPool


def runs(pool: SlotPool) -> list[tuple[int, int]]:
    return list(zip(pool._starts.tolist(), pool._ends.tolist(), strict=True))


def pool_with_free_runs(*free: tuple[int, int], capacity: int = 20) -> SlotPool:
    pool = SlotPool()
    pool.allocate(capacity)
    for start, end in free:
        pool.release(np.arange(start, end))
    return pool


def test_the_shortest_run_that_is_long_enough_is_taken() -> None:
    pool = pool_with_free_runs((0, 6), (8, 11), (13, 17))
    assert pool.allocate(3).tolist() == [8, 9, 10]
    assert runs(pool) == [(0, 6), (13, 17)]
    assert pool.allocate(3).tolist() == [13, 14, 15]
    assert runs(pool) == [(0, 6), (16, 17)] and pool.num_free == 7


def test_several_runs_if_none_is_long_enough_as_few_as_possible() -> None:
    pool = pool_with_free_runs((0, 2), (4, 5), (8, 11), (13, 17))
    slots = pool.allocate(6)
    assert slots.dtype == np.int64 and slots.tolist() == [8, 9, 13, 14, 15, 16]
    assert runs(pool) == [(0, 2), (4, 5), (10, 11)] and pool.capacity == 20


def test_all_that_is_free_can_be_taken() -> None:
    pool = pool_with_free_runs((0, 2), (4, 5), (19, 20))
    assert pool.allocate(4).tolist() == [0, 1, 4, 19]
    assert runs(pool) == [] and pool.num_free == 0 and pool.capacity == 20


def test_contiguous_takes_one_run_and_grows_for_it() -> None:
    pool = pool_with_free_runs((0, 3), (5, 9), (18, 20))
    assert pool.allocate(4, contiguous=True).tolist() == [5, 6, 7, 8]
    assert pool.allocate(5, contiguous=True).tolist() == [18, 19, 20, 21, 22]
    assert pool.capacity == 40 and runs(pool) == [(0, 3), (23, 40)] and pool.num_free == 20


def test_growth_is_to_twice_the_capacity_or_to_what_is_needed() -> None:
    pool = SlotPool()
    assert pool.allocate(3).tolist() == [0, 1, 2] and pool.capacity == 3
    assert pool.allocate(1).tolist() == [3] and pool.capacity == 6
    assert len(pool.allocate(10)) == 10 and pool.capacity == 14
    assert pool.num_free == 0


@pytest.mark.parametrize("contiguous", [False, True])
def test_nothing(contiguous: bool) -> None:
    pool = SlotPool()
    assert pool.allocate(0, contiguous).dtype == np.int64
    pool.release(np.zeros(0, dtype=np.int64))
    assert pool.capacity == pool.num_free == 0


def test_released_runs_merge_with_their_neighbours() -> None:
    pool = pool_with_free_runs((0, 2), (4, 6), (9, 10))
    pool.release(np.array([3, 8, 2, 12]))
    assert runs(pool) == [(0, 6), (8, 10), (12, 13)] and pool.num_free == 9


@pytest.mark.parametrize(
    ("slots", "what"),
    [
        ([7, 4], "slot 4 is free already"),
        ([5, 7], "slot 5 is free already"),
        ([7, 8, 7], "slot 7 is released twice at once"),
        ([-1, 7], "slot -1 does not exist: there are 20"),
        ([7, 20], "slot 20 does not exist: there are 20"),
    ],
)
def test_wrong_slots_are_refused_and_none_is_taken(slots: list[int], what: str) -> None:
    pool = pool_with_free_runs((4, 6))
    with pytest.raises(ValueError, match=what):
        pool.release(np.array(slots))
    assert runs(pool) == [(4, 6)] and pool.num_free == 2


def test_a_negative_count_is_refused() -> None:
    with pytest.raises(ValueError, match="count must not be negative, got -1"):
        SlotPool().allocate(-1)


def test_random_operations_against_a_set() -> None:
    rng = np.random.default_rng(0)
    pool, owned = SlotPool(), set[int]()
    for _ in range(3000):
        if rng.random() < 0.5:
            count, contiguous = int(rng.integers(12)), bool(rng.random() < 0.3)
            before, fits = pool.capacity, any(end - start >= count for start, end in runs(pool)) or not count
            enough = count <= before - len(owned)
            slots = pool.allocate(count, contiguous)
            assert (np.diff(slots) > 0).all() and not owned & set(slots.tolist())
            assert not (fits or contiguous) or (np.diff(slots) == 1).all()
            assert pool.capacity == before if fits or (enough and not contiguous) else pool.capacity >= 2 * before
            owned |= set(slots.tolist())
        else:
            some = rng.permutation(sorted(owned))[: rng.integers(12)]
            pool.release(some.astype(np.int64))
            owned -= set(some.tolist())
        free = [slot for start, end in runs(pool) for slot in range(start, end)]
        assert sorted(owned | set(free)) == list(range(pool.capacity))
        assert len(free) == pool.num_free == pool.capacity - len(owned)
        assert all(first[1] < second[0] for first, second in zip(runs(pool), runs(pool)[1:], strict=False))
