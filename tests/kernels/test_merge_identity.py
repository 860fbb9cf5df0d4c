import doctest

import torch

from radixtrain.kernels import merge_identity
from radixtrain.kernels.merge_attention import merge_piece
from radixtrain.kernels.merge_identity import merge_attention


def test_the_page_that_a_newcomer_runs() -> None:
    result = doctest.testmod(merge_identity)
    assert not result.failed and result.attempted > 10


def test_the_kernels_merge_is_this_one() -> None:
    draw = torch.Generator().manual_seed(0)
    outs, lses = (torch.randn(2, *shape, generator=draw, dtype=torch.float64) for shape in ((2, 6, 4), (2, 6)))
    out, lse = outs[0].transpose(0, 1).clone(), lses[0].clone()  # (U, N, H) and (N, U)
    merge_piece(out, lse, slice(None), outs[1].transpose(0, 1), lses[1])
    expected = merge_attention(*zip(outs, lses, strict=True))
    torch.testing.assert_close((out.transpose(0, 1), lse), expected, rtol=1e-14, atol=1e-14)
