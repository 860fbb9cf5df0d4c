"""Is it the same gradient on this device? Every strategy with every installed kernel, on a small Qwen3 in bfloat16.

The error of each gradient against a float64 run of the ordinary model, beside the error of the ordinary bfloat16 model.
"""

import math
from collections.abc import Iterator

import torch
from gpu_parts.run import Run

from radixtrain import RadixCollator, verify_equivalence
from radixtrain.attention import EVERYWHERE, choose_attention
from radixtrain.bench.cells import Cell, ModelShape, build_model, features_of_cell
from radixtrain.kernels.varlen import KERNELS, varlen_kernel

__all__ = ["PART", "equivalence", "takes_tree", "ways"]

PART = "equivalence"
MEASURES = ("median_ratio", "worst_error", "ordinary_worst_error")  # of all gradients, relative L2


def equivalence(run: Run, shape: ModelShape, prompt_length: int) -> None:
    """Every strategy and kernel on one model and one nested batch."""
    model = build_model(shape, run.device, torch.bfloat16, "sdpa")
    features = features_of_cell(Cell(shape, prompt_length, prompt_length // 8, 10, tree="nested"))
    for strategy, kernel in ways(run, PART, torch.bfloat16, shape.head_dim):
        case = f"{strategy}, {kernel}"
        if not run.has_time(f"{PART} {case}"):
            return
        collator = RadixCollator(tree_tiles=strategy == "tree")
        options = {"attention": strategy, "kernel": kernel, "collator": collator, "precisions": ["bfloat16"]}
        try:
            rung = verify_equivalence(model, features, **options)["bfloat16"]
        except Exception as error:  # a kernel that raises is a result too, and the others are still to be measured
            run.leave_out(f"{PART} {case}", error)
            run.found(PART, case, passed=False, **dict.fromkeys(MEASURES, math.nan))
            continue
        found = rung.median_ratio, rung.worst.radix, rung.worst_ordinary
        run.found(PART, case, passed=rung.passed, **dict(zip(MEASURES, found, strict=True)))


def ways(run: Run, part: str, dtype: torch.dtype, head_dim: int) -> Iterator[tuple[str, str]]:
    """Every strategy with every installed kernel; `reference` needs none, `tree` has its own."""
    kernels = _installed_kernels(run, part, dtype, head_dim)
    strategies = [strategy for strategy in EVERYWHERE if strategy != "reference"]
    yield from ((strategy, kernel) for kernel in kernels for strategy in strategies)
    yield "reference", "auto"
    if takes_tree(run, part, dtype, head_dim):
        yield "tree", "auto"


def takes_tree(run: Run, part: str, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether `tree` runs here; if not, it is left out with the reason."""
    try:
        choose_attention("tree", "auto", run.device, dtype, head_dim)
    except ValueError as error:
        run.leave_out(f"{part} with tree", _reason(error))
        return False
    return True


def _installed_kernels(run: Run, part: str, dtype: torch.dtype, head_dim: int) -> list[str]:
    """Those that take such tensors; the others are left out with the reason that an error would give."""
    found = []
    for kernel in KERNELS:
        try:
            choose_attention("path", kernel, run.device, dtype, head_dim)
            varlen_kernel(kernel, run.device)
        except (ValueError, ImportError, RuntimeError) as error:
            run.leave_out(f"{part} with {kernel}", _reason(error))
        else:
            found.append(kernel)
    return found


def _reason(error: Exception) -> str:
    """Without the advice for users."""
    return str(error).partition("; ")[0]
