"""Groups of sequences with a common beginning, against the tree that the tokens themselves spell."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from radixtrain.tree.groups import DEPTHS, find_prefix_groups

RNG = np.random.default_rng(0)
TUTOR, JUDGE, EXAMPLE = (RNG.integers(0, 99, size) for size in (240, 100, 160))


def own(size: int = 40) -> np.ndarray:
    return RNG.integers(100, 10_000, size)


def begun(count: int, *parts: np.ndarray, size: int = 40) -> list[np.ndarray]:
    """Sequences of their own after the same beginning."""
    return [np.concatenate([*parts, own(size)]) for _ in range(count)]


def members(groups, number: int) -> list[int]:
    """The sequences of a group and of those inside it."""
    inside = [number]
    for child in range(number + 1, len(groups.parent)):
        if groups.parent[child] in inside:
            inside.append(child)
    return sorted(np.isin(groups.group_of, inside).nonzero()[0].tolist())


def test_the_example_of_the_file():
    tutor, example, judge = begun(28, TUTOR), begun(12, TUTOR, EXAMPLE), begun(30, JUDGE)
    groups = find_prefix_groups([*tutor, *example, *judge])
    assert len(groups) == 3
    found = {tuple(members(groups, number)): int(groups.depth[number]) for number in (1, 2, 3)}
    assert found == {tuple(range(40)): 240, tuple(range(28, 40)): 400, tuple(range(40, 70)): 96}
    inner = groups.depth.tolist().index(400)
    assert groups.depth[groups.parent[inner]] == 240 and groups.depth[groups.parent[groups.parent[inner]]] == 0


def test_what_all_have_in_common_is_no_group():
    assert len(find_prefix_groups([])) == len(find_prefix_groups([own(0)])) == 0
    assert len(find_prefix_groups(begun(20, TUTOR))) == 0
    groups = find_prefix_groups([*begun(4, TUTOR, JUDGE), *begun(4, TUTOR, EXAMPLE)])
    assert len(groups) == 2 and groups.depth[0] == 240


def test_no_group_of_what_shares_too_little():
    beginnings = [own(48) for _ in range(3)]
    assert len(find_prefix_groups([ids for each in beginnings for ids in begun(5, each, size=400)])) == 3
    assert len(find_prefix_groups([ids for each in beginnings for ids in begun(5, each, size=500)])) == 0


def test_copies_are_a_group_only_if_asked_for():
    one, other = np.concatenate([TUTOR, own()]), np.concatenate([TUTOR, own()])
    assert len(find_prefix_groups([one, one, own(), own()])) == 0
    assert members(find_prefix_groups([one, one, own(), own()], copies=True), 1) == [0, 1]
    groups = find_prefix_groups([one, one, other, own()])
    assert len(groups) == 1 and members(groups, 1) == [0, 1, 2]


def test_depths():
    assert DEPTHS[:33].tolist() == [*range(16, 513, 16), 544] and (np.diff(DEPTHS) > 0).all()
    assert (np.diff(DEPTHS)[32:] <= DEPTHS[32:-1] / 16).all() and DEPTHS[-1] == 2**16


def test_a_beginning_longer_than_is_looked_for():
    long = np.zeros(2**16 + 50, dtype=np.int64)
    groups = find_prefix_groups([np.append(long, 1), np.append(long, 2), *begun(2, JUDGE)])
    assert groups.depth[groups.group_of].tolist() == [0, 0, 96, 96], "they look like copies"


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


def num_unique(sequences: list[np.ndarray], batch_size: int) -> int:
    """Distinct beginnings of all batches."""
    batches = [sequences[start : start + batch_size] for start in range(0, len(sequences), batch_size)]
    return sum(len({ids[: n + 1].tobytes() for ids in batch for n in range(len(ids))}) for batch in batches)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=0, max_size=5), min_size=2, max_size=12))
def test_against_the_tokens(blocks):
    """Each symbol stands for 16 tokens, so that a group has a tenth of any sequence; one more token tells copies."""
    words = np.random.default_rng(1).integers(0, 9, (3, 16))
    sequences = [
        np.concatenate([*(words[symbol] for symbol in ids), [1000 + index]]) for index, ids in enumerate(blocks)
    ]
    groups = find_prefix_groups(sequences)
    found = {tuple(members(groups, number)): int(groups.depth[number]) for number in range(1, len(groups.parent))}
    expected = brute_force([ids.tolist() for ids in sequences], 16)
    expected.pop(tuple(range(len(sequences))), None)
    assert found == expected
    assert (groups.parent[1:] < np.arange(1, len(groups.parent))).all()
    for size in (1, 2, 3, 100):
        order = np.random.default_rng(2).permutation(len(sequences))
        assert groups.num_unique_tokens(order, size) == num_unique([sequences[index] for index in order], size)
        whole = groups.sorted(order[:size])
        assert sorted(whole.order.tolist()) == list(range(len(order[:size])))
        assert whole.num_unique_tokens == num_unique([sequences[index] for index in order[:size]], size)
