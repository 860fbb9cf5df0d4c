"""A call is cut into rectangles once, because every layer asks for the same."""

from dataclasses import fields, replace

import pytest
import torch

from radixtrain.kernels.ragged import Ragged

BOUNDS = torch.tensor([0, 3, 5], dtype=torch.int32)


def test_cut_once_for_each_window() -> None:
    ragged = Ragged(BOUNDS, BOUNDS, 3, 3, causal=True)
    whole = ragged.rectangles()
    assert ragged.rectangles() is whole
    assert ragged.rectangles(window=2) is not whole
    assert ragged.rectangles(window=2) is ragged.rectangles(window=2)


def test_a_changed_copy_is_cut_anew() -> None:
    ragged = Ragged(BOUNDS, BOUNDS, 3, 3, causal=True)
    assert ragged.rectangles().parts[0].mask is not None
    assert replace(ragged, causal=False).rectangles().parts[0].mask is None


def test_the_cuts_are_no_argument() -> None:
    given = [field.name for field in fields(Ragged) if field.init]
    assert given == ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "causal", "bounds", "masks"]
    with pytest.raises(TypeError):
        Ragged(BOUNDS, BOUNDS, 3, 3, True, None, None, {})
