"""A token changed in one branch leaves the logits of every other branch bit-equal, and so whatever is made of them.

The same operations run on the same shapes, so bits are equal on every processor unless something leaks.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from radixtrain import share_prefixes, sharing_report
from radixtrain.attention import EVERYWHERE
from tests.support.batches import padded
from tests.support.models import tiny_qwen3

SHARED = [7, 8, 9, 10]
OTHERS = [[1, 2, 3], [1, 2, 4, 5], [11]]
CHANGED = [20, 21, 22, 23]


def logits_of(model: Any, branch: list[int]) -> tuple[Tensor, Tensor]:
    """Of every token of the other branches, and of the branch beside them."""
    rows = [SHARED + tail for tail in [*OTHERS, branch]]
    with torch.no_grad():
        logits = model(**padded(rows, "right"), use_cache=False).logits
    *others, own = (each[: len(row)] for each, row in zip(logits, rows, strict=True))
    return torch.cat(others), own[len(SHARED) :]


@pytest.mark.parametrize("attention", EVERYWHERE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_isolation(attention: str, dtype: torch.dtype) -> None:
    model = share_prefixes(tiny_qwen3().to(dtype).eval(), attention=attention, min_ratio=0.0)
    before, own = logits_of(model, CHANGED)
    for place in range(len(CHANGED)):
        after, changed = logits_of(model, [*CHANGED[:place], 40, *CHANGED[place + 1 :]])
        assert torch.equal(before, after)
        assert not torch.equal(own[place:], changed[place:]), "what follows changes, or this would prove nothing"
    assert sharing_report(model).num_shared == 1 + len(CHANGED)
