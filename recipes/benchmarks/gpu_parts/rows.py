"""The segment sum of a gather's backward pass beside a copy of as many bytes, and beside torch's embedding bags.

Shapes of Table 6 of the RadixMLP paper, in bfloat16 in place of its float16, with uniform indices. It counts each row
read once and each result written once. Embedding bags need no copy in float32 and take a sort that all layers share,
which is not timed: if they are faster here, they are worth taking for the keys of `path`.
"""

from functools import partial

import torch
from gpu_parts.run import Run, median_seconds
from torch.nn.functional import embedding_bag

from radixtrain.kernels.rows import sum_rows

__all__ = ["SUMS", "TINY_SUMS", "rows"]

Sum = tuple[int, int, int, torch.dtype]  # rows of the result, elements of a row, rows that are summed, dtype
SUMS: tuple[Sum, ...] = tuple(
    (*shape, dtype)
    for shape in ((16_000, 1024, 12_000), (16_000, 1024, 70_000), (100_000, 2048, 500_000))
    for dtype in (torch.float32, torch.bfloat16)
)
TINY_SUMS: tuple[Sum, ...] = ((10, 16, 20, torch.float32), (10, 16, 40, torch.bfloat16))


def rows(run: Run, shapes: tuple[Sum, ...]) -> None:
    """Time every shape."""
    for num_rows, width, num_terms, dtype in shapes:
        case = f"[{num_rows}, {width}] of {num_terms} {str(dtype).removeprefix('torch.')}"
        if not run.has_time(f"rows {case}"):
            return
        generator = torch.Generator(run.device).manual_seed(0)
        x = torch.randn(num_terms, width, dtype=dtype, device=run.device, generator=generator)
        indices = torch.randint(num_rows, (num_terms,), device=run.device, generator=generator)
        copy = _copy_seconds((num_terms + num_rows) * width * dtype.itemsize, run.device)
        took = median_seconds(partial(sum_rows, x, indices, num_rows), run.device)
        bags = median_seconds(partial(_in_bags, x, *_bags(indices, num_rows)), run.device)
        run.found("rows", case, microseconds=took * 1e6, share_of_copy=copy / took, embedding_bags=copy / bags)


def _bags(indices: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort the places of indices by the row that they name, and find where each row's places start."""
    rows, places = indices.sort(stable=True)
    return places, torch.searchsorted(rows, torch.arange(num_rows + 1, device=rows.device))


def _in_bags(x: torch.Tensor, places: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Compute `sum_rows`: each number of the result is added in order, in float32, and rounded once."""
    return embedding_bag(places, x, starts, mode="sum", include_last_offset=True)


def _copy_seconds(num_bytes: int, device: torch.device) -> float:
    """Time a copy that reads and writes this many bytes together."""
    source = torch.zeros(num_bytes // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return median_seconds(partial(target.copy_, source), device)
