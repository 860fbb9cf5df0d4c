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
    validated_batch,
)
from radixtrain.tree.plan import build_prefix_plan


def int64(values):
    return np.array(values, dtype=np.int64)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9))))
def test_ranges_are_those_of_python(ranges):
    starts, lengths = ([pair[column] for pair in ranges] for column in (0, 1))
    found = concatenate_ranges(int64(starts), int64(lengths))
    assert found.tolist() == [number for start, length in ranges for number in range(start, start + length)]
    assert cumulative(int64(lengths)).tolist() == [0, *accumulate(lengths)]
    assert lengths_of(cumulative(int64(lengths))).tolist() == lengths


def test_not_negative():
    check_not_negative("rows", int64([]))
    check_not_negative("rows", int64([0, 3]))
    with pytest.raises(ValueError, match=r"^rows must not be negative: rows\[1\] = -2$"):
        check_not_negative("rows", int64([0, -2, -3]))


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
