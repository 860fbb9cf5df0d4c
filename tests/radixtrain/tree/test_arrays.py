"""The errors for what is not a ragged batch: every one that `build_prefix_plan` raises."""

import numpy as np
import pytest

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
        ((np.array([7, 2**63], np.uint64), [0, 2]), "input_ids must fit into int64, got 9223372036854775808"),
        (([3, -1], [0, 2]), "input_ids must not be negative: input_ids[1] = -1"),
        (([3, -(2**63)], [0, 2], [0, 1]), f"input_ids must not be negative: input_ids[1] = {-(2**63)}"),
        (([2**40, -1], [0, 2], [0, 0]), "input_ids must not be negative: input_ids[1] = -1"),
        (([2**40, 1], [0, 2], [0, -3]), "position_ids must not be negative: position_ids[1] = -3"),
        (([1, 2], [0, 2], [0, -3]), "position_ids must not be negative: position_ids[1] = -3"),
        (([1], [0, 1], {"min_shared_tokens": 0}), "min_shared_tokens must be at least 1, got 0"),
        (([1], [0, 1], {"pad_to_multiple_of": 0}), "pad_to_multiple_of must be at least 1, got 0"),
        (([1], [0, 1], {"pad_to_multiple_of": -8}), "pad_to_multiple_of must be at least 1, got -8"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_errors(arguments, message):
    options = arguments[-1] if isinstance(arguments[-1], dict) else {}
    with pytest.raises(ValueError) as error:
        build_prefix_plan(*arguments[: 3 - bool(options)], **options)
    assert str(error.value) == message
