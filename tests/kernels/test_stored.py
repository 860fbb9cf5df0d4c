"""Attention onto stored keys against one softmax over all keys that a query sees."""

import numpy as np
import pytest
import torch
from torch import Tensor

from radixtrain.attention import decoding_attention
from radixtrain.kernels.cpu_loops import EagerKernel, TorchCPUKernel
from radixtrain.kernels.merge_attention import merged_pieces
from radixtrain.kernels.stored import Readers, Shared, attention_to_own
from radixtrain.kernels.varlen_args import Scoring

CPU = torch.device("cpu")
ROWS, HEADS, GROUPS, DIM, COLUMNS = 4, 2, 2, 4, 5
READS = {"a slice": [0, 1, 2], "indices": [0, 1, 3], "one row": [2]}


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def expected(
    query: Tensor,
    own: tuple[Tensor, Tensor],
    mask: Tensor,
    shared: list[Shared],
    scoring: Scoring,
    sinks: Tensor | None,
) -> Tensor:
    """Query by query and head by head."""
    out = torch.empty_like(query)
    for row in range(len(query)):
        for head in range(query.shape[1]):
            of_head = head // GROUPS
            keys, values = [own[0][row, :, of_head]], [own[1][row, :, of_head]]
            hidden = [mask[row, 0, 0]]
            for each in shared:
                readers = torch.arange(len(query))[each.readers.rows].tolist()
                if row in readers:
                    keys.append(each.keys[:, of_head])
                    values.append(each.values[:, of_head])
                    hidden.append(torch.zeros(len(each.keys), dtype=mask.dtype))
            scores = scoring.of(torch.cat(keys) @ query[row, head]) + torch.cat(hidden)
            sink = scores.new_tensor([]) if sinks is None else sinks[head : head + 1]
            weights = torch.cat([scores, sink]).softmax(0)[: len(scores)]
            out[row, head] = weights @ torch.cat(values)
    return out


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("kernel", [EagerKernel(), TorchCPUKernel()], ids=["eager", "torch"])
def test_one_softmax(kernel: EagerKernel | TorchCPUKernel, has_sinks: bool, softcap: float | None) -> None:
    if softcap is not None and isinstance(kernel, TorchCPUKernel):
        pytest.skip("torch's kernel computes no soft-cap")
    query, scoring = drawn(ROWS, HEADS * GROUPS, DIM), Scoring(0.6, softcap)
    own = drawn(ROWS, COLUMNS, HEADS, DIM), drawn(ROWS, COLUMNS, HEADS, DIM) + 1
    mask = torch.zeros(ROWS, 1, 1, COLUMNS)
    mask[0, ..., :2], mask[2:, ..., -1] = -torch.inf, -torch.inf
    shared = [
        Shared(Readers.of(np.array(rows), CPU), drawn(length, HEADS, DIM), drawn(length, HEADS, DIM) - 1)
        for length, rows in enumerate(READS.values(), 2)
    ]
    sinks = drawn(HEADS * GROUPS) if has_sinks else None
    truth = expected(query, own, mask, shared, scoring, sinks)
    first = attention_to_own(query, *own, mask, kernel, scoring)
    merged, _ = merged_pieces(query, first, [each.call for each in shared], kernel, scoring, sinks)
    assert torch.allclose(merged, truth, atol=1e-13)
    chosen = decoding_attention(query, own, mask, shared, scale=0.6, softcap=softcap, sinks=sinks)
    assert torch.allclose(chosen, truth, atol=1e-13)
