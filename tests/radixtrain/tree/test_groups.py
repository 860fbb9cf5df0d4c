"""Groups of sequences with a common beginning, against the tree that the tokens themselves spell."""

from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixtrain.tree.groups import DEPTHS, find_prefix_groups

RNG = np.random.default_rng(0)
TUTOR, JUDGE, EXAMPLE = (RNG.integers(0, 99, size) for size in (240, 100, 160))
LONG = np.zeros(2**16 + 50, dtype=np.int64)


def own(size: int = 40) -> np.ndarray:
    return RNG.integers(100, 10_000, size)


def begun(count: int, *parts: np.ndarray, size: int = 40) -> list[np.ndarray]:
    """Sequences of their own after the same beginning."""
    return [np.concatenate([*parts, own(size)]) for _ in range(count)]


def members(numbers: np.ndarray) -> list[list[int]]:
    """The sequences of each number that is not negative, in the order of the numbers."""
    return [np.flatnonzero(numbers == number).tolist() for number in sorted({*numbers.tolist()} - {-1})]


BEGINNINGS, SAME = [own(48) for _ in range(3)], np.concatenate([TUTOR, own()])
FOUND = {  # sequences -> the branches of each group, inner ones first
    "the example of the file": (
        [*begun(28, TUTOR), *begun(12, TUTOR, EXAMPLE), *begun(30, JUDGE)],
        [[[*range(28, 40)], [*range(28)]], [[*range(40, 70)]]],
    ),
    "an agent's turns": (
        [np.append(TUTOR[: 60 * turn], own()) for turn in (1, 2, 3, 4)] + begun(1),
        [[[2, 3], [1], [0]]],
    ),
    "what all share is no group": (begun(20, TUTOR), []),
    "a tenth": ([x for each in BEGINNINGS for x in begun(2, each, size=400)], [[[0, 1]], [[2, 3]], [[4, 5]]]),
    "less than a tenth": ([x for each in BEGINNINGS for x in begun(2, each, size=500)], []),
    "copies": ([SAME, SAME, own(), own()], []),
    "copies, and another": ([SAME, SAME, *begun(1, TUTOR), own()], [[[0, 1, 2]]]),
    "longer than is looked for": ([np.append(LONG, 1), np.append(LONG, 2), *begun(2, JUDGE)], [[[2, 3]]]),
    "none": ([], []),
    "an empty one": ([own(0), *begun(2, JUDGE)], [[[1, 2]]]),
}


@pytest.mark.parametrize(("sequences", "expected"), FOUND.values(), ids=FOUND)
def test_what_is_found(sequences: list[np.ndarray], expected: list[list[list[int]]]) -> None:
    groups = find_prefix_groups(sequences)
    branches = members(groups.branch_of)
    assert sorted(branches) == sorted(branch for group in expected for branch in group)
    assert [[each for each in branches if each in group] for group in expected] == expected, "inner ones first"
    assert sorted(members(groups.group_of)) == sorted(sorted(chain(*group)) for group in expected)
    assert len(groups) == len(expected)


def test_copies_are_a_group_if_asked_for() -> None:
    assert members(find_prefix_groups([SAME, SAME, own(), own()], copies=True).branch_of) == [[0, 1]]


def test_depths() -> None:
    assert DEPTHS[:33].tolist() == [*range(16, 513, 16), 544] and (np.diff(DEPTHS) > 0).all()
    assert (np.diff(DEPTHS)[32:] <= DEPTHS[32:-1] / 16).all() and DEPTHS[-1] == 2**16


def brute_force(sequences: list[list[int]], width: int) -> dict[tuple[int, ...], int]:
    """Sets of sequences with a common beginning of a multiple of `width` tokens, and the longest such beginning."""
    found: dict[tuple[int, ...], int] = {}
    for length in range(width, max(map(len, sequences)) + 1, width):
        starts = [tuple(ids[:length]) if len(ids) >= length else None for ids in sequences]
        for start in {each for each in starts if each is not None}:
            group = tuple(index for index, each in enumerate(starts) if each == start)
            if len(group) > 1:
                found[group] = length
    return found


def num_unique(sequences: list[np.ndarray]) -> int:
    return len({ids[: n + 1].tobytes() for ids in sequences for n in range(len(ids))})


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=0, max_size=5), min_size=2, max_size=12))
def test_against_the_tokens(blocks: list[list[int]]) -> None:
    """Each symbol stands for 16 tokens, so that a branch has a tenth of any sequence; one more token tells copies."""
    words = np.random.default_rng(1).integers(0, 9, (3, 16))
    sequences = [np.concatenate([*(words[x] for x in ids), [1000 + index]]) for index, ids in enumerate(blocks)]
    groups = find_prefix_groups(sequences)
    expected = brute_force([ids.tolist() for ids in sequences], 16)
    expected.pop(tuple(range(len(sequences))), None)
    by_depth = sorted(expected, key=expected.__getitem__)
    around = [[each for each in by_depth if index in each] for index in range(len(sequences))]
    for one, branch, group in zip(around, groups.branch_of, groups.group_of, strict=True):
        assert (branch >= 0, group >= 0) == (bool(one), bool(one))
        for other, other_branch, other_group in zip(around, groups.branch_of, groups.group_of, strict=True):
            if one and other:
                assert (branch == other_branch, group == other_group) == (one[-1] == other[-1], one[0] == other[0])
                assert branch < other_branch or one[-1] == other[-1] or not {*one[-1]} < {*other[-1]}
    for size in (1, 2, 3, 100):
        some = np.random.default_rng(2).permutation(len(sequences))[:size]
        found = groups.sorted(some)
        assert sorted(found.order.tolist()) == list(range(len(some)))
        assert found.num_unique_tokens == num_unique([sequences[index] for index in some])
