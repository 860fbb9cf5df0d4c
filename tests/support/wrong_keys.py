"""Tree attention whose keys are wrong: a mistake that a comparison has to find."""

from typing import Any

import pytest
from torch import Tensor

import radixtrain.hf.attention_interface

__all__ = ["with_wrong_keys"]


def with_wrong_keys(patch: pytest.MonkeyPatch, by: float = 1e-3, forward: bool = False, above: int = 0) -> None:
    """Keys, or only their gradients, are off by this factor, in batches of more rows than `above`."""
    attend = radixtrain.hf.attention_interface.tree_attention

    def broken(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
        wrong = key * (1 + by) if forward else key + by * (key - key.detach())
        return attend(query, wrong if len(key) > above else key, value, *args, **options)

    patch.setattr(radixtrain.hf.attention_interface, "tree_attention", broken)
