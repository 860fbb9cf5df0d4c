import doctest

import torch
from torch import Tensor

from radixtrain.kernels import merge_identity
from radixtrain.kernels.merge_attention import merge_piece
from radixtrain.kernels.merge_identity import Attended, merge_attention

H, SIZES = 4, (3, 1, 5)


def scores_and_values(num_keys: int = sum(SIZES)) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    scores = 5 * torch.randn(2, 6, num_keys, generator=generator, dtype=torch.float64)
    return scores, torch.randn(2, num_keys, H, generator=generator, dtype=torch.float64)


def attended(scores: Tensor, values: Tensor) -> Attended:
    return scores.softmax(-1) @ values, scores.logsumexp(-1)


def parts() -> list[Attended]:
    scores, values = scores_and_values()
    return [attended(*each) for each in zip(scores.split(SIZES, 2), values.split(SIZES, 1), strict=True)]


def assert_exact(actual: Attended, expected: Attended) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-14, atol=1e-14)


def test_the_page_that_a_newcomer_runs() -> None:
    result = doctest.testmod(merge_identity)
    assert not result.failed and result.attempted > 10


def test_the_kernels_merge_is_this_one() -> None:
    one, two, _ = parts()
    out, lse = one[0].transpose(0, 1).clone(), one[1].clone()  # (U, N, H) and (N, U)
    merge_piece(out, lse, slice(None), two[0].transpose(0, 1), two[1])
    assert_exact((out.transpose(0, 1), lse), merge_attention(one, two))
