"""Ranges and bounds against Python's own, and the errors for arrays that are not a ragged batch."""

import numpy as np
import pytest

from radixtrain.tree.arrays import (
    validated_batch,
)
from radixtrain.tree.plan import build_prefix_plan


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
