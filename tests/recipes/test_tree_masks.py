"""The intervals of cudnn.flex_attention against the tree mask; its kernels need a GPU."""

import sys

import numpy as np
import pytest
import torch
from gpu_parts.tree_masks import cudnn_flex, endpoints
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import NESTED, plan_of
from tiers import FULL, tries

from radixtrain.errors import UserError
from radixtrain.kernels.reference import tree_mask
from radixtrain.testing import ragged_batches

pytestmark = FULL


@settings(max_examples=tries(300, 10_000), deadline=None)
@given(sequences=ragged_batches(min_length=0), pad_to_multiple_of=st.sampled_from([None, 8]))
def test_endpoints(sequences: list[list[int]], pad_to_multiple_of: int | None) -> None:
    """None falls, so an interval that is not needed is empty."""
    plan = plan_of([*sequences, [3] * 4], pad_to_multiple_of=pad_to_multiple_of)
    found, keys = endpoints(plan), np.arange(plan.num_rows)
    assert len(found) % 2 == 1 and (np.diff(found, axis=0) >= 0).all()
    seen = keys < found[0][:, None]
    for start, end in zip(found[1::2], found[2::2], strict=True):
        seen |= (start[:, None] <= keys) & (keys < end[:, None])
    assert np.array_equal(seen, tree_mask(torch.from_numpy(plan.row_subtree_ends.copy())).numpy())


def test_three_of_one_prompt() -> None:
    assert endpoints(plan_of([[*range(20), *[30 + n] * 4] for n in range(5)])).shape == (3, 40)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cudnn", None)
    q = torch.zeros(plan_of(NESTED).num_rows, 2, 16)
    with pytest.raises(UserError, match=r"cannot be imported .* pip install 'nvidia-cudnn-frontend>=1\.29'"):
        cudnn_flex(q, q, q, plan_of(NESTED), 0.3)
