"""How fast are the kernels that move rows? Gather and segment sum, beside a copy of as many bytes.

Shapes are those of Table 6 of the RadixMLP paper, with bfloat16 in place of its float16, and indices are uniform.
Gather counts a row read and one written for each index, a segment sum each row read once and each result written once.
"""

from collections.abc import Callable
from typing import Any

import torch
from gpu_parts.run import Run, seconds_of
from torch import Tensor

from radixtrain.kernels.rows import sum_rows
from radixtrain.kernels.triton_door import experimental

__all__ = ["GATHERS", "PART", "TINY_GATHERS", "rows"]

PART = "rows"
Shape = tuple[int, int, int, torch.dtype]  # rows of the source, elements of a row, rows of the result, dtype
GATHERS: tuple[Shape, ...] = (
    (100, 128, 200, torch.float32),
    (16_000, 1024, 12_000, torch.float32),
    (16_000, 1024, 12_000, torch.bfloat16),
    (16_000, 1024, 70_000, torch.float32),
    (16_000, 1024, 70_000, torch.bfloat16),
    (100_000, 2048, 500_000, torch.float32),
    (100_000, 2048, 500_000, torch.bfloat16),
)
TINY_GATHERS: tuple[Shape, ...] = ((10, 16, 20, torch.float32), (10, 16, 40, torch.bfloat16))


def rows(run: Run, shapes: tuple[Shape, ...]) -> None:
    """Gather and segment sum, each beside a copy of as many bytes."""
    triton_rows = _rows_in_triton(run)
    for num_rows, width, num_indices, dtype in shapes:
        case = f"[{num_rows}, {width}] x {num_indices} {str(dtype).removeprefix('torch.')}"
        if not run.has_time(f"{PART} {case}"):
            return
        try:
            _gather_and_sum(run, case, num_rows, width, num_indices, dtype, triton_rows)
        except RuntimeError as error:  # most likely out of memory
            run.leave_out(f"{PART} {case}", error)


def _rows_in_triton(run: Run) -> Any:
    """The module of the Triton kernels, or None if they cannot run."""
    if run.device.type != "cuda":
        return run.leave_out(f"{PART} in Triton", "they need CUDA")
    try:
        return experimental("rows_triton")
    except ImportError as error:
        return run.leave_out(f"{PART} in Triton", f"not importable: {error}")


def _gather_and_sum(
    run: Run, case: str, num_rows: int, width: int, num_indices: int, dtype: torch.dtype, triton_rows: Any
) -> None:
    generator = torch.Generator(run.device).manual_seed(0)
    options: dict[str, Any] = {"device": run.device, "generator": generator}
    x_UD = torch.randn(num_rows, width, dtype=dtype, **options)
    x_TD = torch.randn(num_indices, width, dtype=dtype, **options)
    indices = torch.randint(num_rows, (num_indices,), **options)
    gathers: dict[str, Callable[[], Tensor]] = {"torch index_select": lambda: x_UD.index_select(0, indices)}
    sums: dict[str, Callable[[], Tensor]] = {
        "torch index_add_": lambda: torch.zeros_like(x_UD).index_add_(0, indices, x_TD),
        "sorted index_put_ in float32": lambda: sum_rows(x_TD, indices, num_rows),
    }
    if triton_rows is not None:
        sums["Triton in float32"] = lambda: triton_rows.sum_rows(x_TD, indices, num_rows)
    row_bytes = width * dtype.itemsize
    beside_a_copy(run, f"gather {case}", gathers, 2 * num_indices * row_bytes)
    beside_a_copy(run, f"segment sum {case}", sums, (num_indices + num_rows) * row_bytes)


def beside_a_copy(run: Run, case: str, arms: dict[str, Callable[[], Tensor]], num_bytes: int) -> None:
    """num_bytes: read and written by each arm; a copy reads half of them and writes half."""
    source = torch.zeros(num_bytes // 2, dtype=torch.uint8, device=run.device)
    target = torch.empty_like(source)
    copy = seconds_of(lambda: target.copy_(source), run.device)
    expected = next(iter(arms.values()))()
    for name, arm in arms.items():
        try:
            difference = float((arm().float() - expected.float()).norm() / expected.float().norm())
            took = seconds_of(arm, run.device)
        except Exception as error:  # a compiler's, say
            run.leave_out(f"{PART} {case}, {name}", error)
            continue
        rates = {"gigabytes_per_second": num_bytes / took / 1e9, "share_of_copy": copy / took}
        run.found(PART, f"{case}, {name}", microseconds=took * 1e6, **rates, difference_to_torch=difference)
