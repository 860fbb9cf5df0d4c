"""Ranges and bounds against Python's own, and the errors for arrays that are not a ragged batch."""

from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixtrain.tree.arrays import (
    check_not_negative,
    concatenate_ranges,
    cumulative,
    lengths_of,
    read_only,
    validated_batch,
)
from radixtrain.tree.plan import build_prefix_plan


def int64(values):
    return np.array(values, dtype=np.int64)


def test_lengths_and_bounds_are_inverse():
    assert cumulative(int64([3, 0, 2])).tolist() == [0, 3, 3, 5]
    assert lengths_of(int64([0, 3, 3, 5])).tolist() == [3, 0, 2]
    assert (cumulative(int64([])).tolist(), lengths_of(int64([0])).tolist()) == ([0], [])


def test_ranges_literally():
    assert concatenate_ranges(int64([5, 0, 7]), int64([2, 3, 1])).tolist() == [5, 6, 0, 1, 2, 7]
    assert concatenate_ranges(int64([]), int64([])).tolist() == []


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9))))
def test_ranges_are_those_of_python(ranges):
    starts, lengths = ([pair[column] for pair in ranges] for column in (0, 1))
    found = concatenate_ranges(int64(starts), int64(lengths))
    assert found.tolist() == [number for start, length in ranges for number in range(start, start + length)]
    assert cumulative(int64(lengths)).tolist() == [0, *accumulate(lengths)]


def test_read_only():
    with pytest.raises(ValueError, match="read-only"):
        read_only(int64([1]))[0] = 2


def test_not_negative():
    check_not_negative("rows", int64([]))
    check_not_negative("rows", int64([0, 3]))
    with pytest.raises(ValueError, match=r"^rows must not be negative: rows\[1\] = -2$"):
        check_not_negative("rows", int64([0, -2, -3]))


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64, np.uint64, ">i4"])
def test_a_batch_comes_back_as_int64(dtype):
    given_arrays = (np.array(values, dtype=dtype) for values in ([7, 8, 9], [0, 1, 3], [0, 0, 1]))
    arrays = validated_batch(*given_arrays)
    assert [array.tolist() for array in arrays] == [[7, 8, 9], [0, 1, 3], [0, 0, 1]]
    assert {array.dtype for array in arrays} == {np.dtype(np.int64)}
    assert validated_batch([], [0], None)[2] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1.0, 2.0], [0, 2]), "input_ids must be integers, got float64 (first value np.float64(1.0))"),
        (([True, False], [0, 2]), "input_ids must be integers, got bool (first value np.True_)"),
        ((["a"], [0, 1]), "input_ids must be integers, got <U1 (first value np.str_('a'))"),
        (([[1, 2]], [0, 2]), "input_ids must have one dimension, got shape (1, 2)"),
        ((7, [0, 1]), "input_ids must have one dimension, got shape ()"),
        (([1, 2], [1, 2]), "cu_seqlens must start at 0, got [1]"),
        (([], []), "cu_seqlens must start at 0, got no entry"),
        (([1, 2], [0, 2, 1, 2]), "cu_seqlens must not fall: cu_seqlens[1] = 2, cu_seqlens[2] = 1"),
        (([1, 2], [0, 3]), "cu_seqlens must end at the number of tokens, 2, got 3"),
        (([1, 2], [0, 1]), "cu_seqlens must end at the number of tokens, 2, got 1"),
        (([1, 2], [0.0, 2.0]), "cu_seqlens must be integers, got float64 (first value np.float64(0.0))"),
        (([1, 2], [[0, 2]]), "cu_seqlens must have one dimension, got shape (1, 2)"),
        (([1, 2], [0, -1, 2]), "cu_seqlens must not be negative: cu_seqlens[1] = -1"),
        (([1, 2], [0, 2], [0]), "position_ids must have one entry per token, 2, got 1"),
        (([1, 2], [0, 2], [0.5, 1]), "position_ids must be integers, got float64 (first value np.float64(0.5))"),
        (([1, 2], [0, 2], [[0, 1]]), "position_ids must have one dimension, got shape (1, 2)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_errors(arguments, message):
    ids, cu_seqlens, *positions = arguments
    for takes in (validated_batch, build_prefix_plan):
        with pytest.raises(ValueError) as error:
            takes(ids, cu_seqlens, *(positions or [None]))
        assert str(error.value) == message


def test_an_id_beyond_int64_is_refused_and_not_wrapped():
    with pytest.raises(ValueError, match=r"^input_ids must fit into int64, got 9223372036854775808$"):
        build_prefix_plan(np.array([7, 2**63], dtype=np.uint64), [0, 2])
