"""R predictor rows, P predictions, V vocabulary, D hidden."""

import pytest
import torch

from radixtrain.kernels.loss_chunks import chunks_of, rows_per_chunk


@pytest.mark.parametrize(
    ("num_rows", "vocab_size", "hidden_size", "expected"),
    [
        *((4096, 151_936, 1024, 256), (4096, 151_936, 4096, 256), (383, 151_936, 1024, 384), (384, 151_936, 1024, 192)),
        *((1000, 4096, 256, 128), (1000, 32_000, 640, 176), (63, 4096, 256, 63), (9, 4096, 256, 9), (0, 4096, 256, 1)),
        *((10_000, 256, 64, 2000), (300, 2**40, 1, 160)),
    ],
)
def test_rows_of_a_chunk(num_rows: int, vocab_size: int, hidden_size: int, expected: int) -> None:
    """128 to 256, evenly cut, and more of a small vocabulary; never more than half as many again."""
    assert rows_per_chunk(num_rows, vocab_size, hidden_size, torch.device("cpu")) == expected


def test_chunks_literally() -> None:
    """Five rows, two a chunk: predictions of rows 4, 0, 1, 0 and 3, in the order of their rows within a chunk."""
    labels, rows, weights = torch.tensor([7, 8, 9, 6, 5]), torch.tensor([4, 0, 1, 0, 3]), torch.arange(1.0, 6.0)
    tensors = ("places", "labels", "local_rows", "loss_weights")
    found = [
        (chunk.rows, *(getattr(chunk, name).tolist() for name in tensors))
        for chunk in chunks_of(2, 5, labels, rows, weights)
    ]
    assert found == [
        (slice(0, 2), [1, 3, 2], [8, 6, 9], [0, 0, 1], [2.0, 4.0, 3.0]),
        (slice(2, 4), [4], [5], [1], [5.0]),
        (slice(4, 5), [0], [7], [0], [1.0]),
    ]
