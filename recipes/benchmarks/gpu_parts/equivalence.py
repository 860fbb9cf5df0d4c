"""Are the kernels exact on this device? Every strategy with every kernel that runs here.

Gradients of a small Qwen3 in bfloat16 against a float64 run of the ordinary model, beside the error of the ordinary
bfloat16 model.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from gpu_parts.run import Run
from step import ModelShape, build_model, random_rows

from radixtrain import verify_equivalence
from radixtrain.attention import STRATEGIES, choose_attention
from radixtrain.kernels.varlen import KERNELS, KernelCall, varlen_refusal

__all__ = ["Way", "equivalence", "ways"]

Way = tuple[str, str]  # strategy, kernel
OF_THEIR_OWN = ("reference", "tree")  # strategies that take no kernel by name


def ways(run: Run, part: str, dtype: torch.dtype, head_dim: int) -> Iterator[Way]:
    """Every strategy with every kernel that takes such tensors here; the others are left out with the reason."""
    call = KernelCall(run.device, dtype, head_dim)
    refusals = {kernel: varlen_refusal(kernel, call) for kernel in KERNELS}
    for kernel, refusal in refusals.items():
        if refusal:
            run.leave_out(f"{part} with {kernel}", refusal)
            continue
        yield from ((strategy, kernel) for strategy in STRATEGIES if strategy not in OF_THEIR_OWN)
    for strategy in OF_THEIR_OWN:
        try:
            choose_attention(strategy, "auto", run.device, dtype, head_dim)
        except (ValueError, ImportError, RuntimeError) as error:
            run.leave_out(f"{part} with {strategy}", str(error).partition("; ")[0])
        else:
            yield strategy, "auto"


def equivalence(run: Run, shape: ModelShape, prompt_length: int) -> None:
    """Every way on one model and one nested batch."""
    model = build_model(shape, run.device, torch.bfloat16)
    features = random_rows(shape.vocab_size, prompt_length, prompt_length // 8, 10, "nested")
    for strategy, kernel in ways(run, "equivalence", torch.bfloat16, shape.head_dim):
        case = f"{strategy}, {kernel}"
        if not run.has_time(f"equivalence {case}"):
            return
        measures: dict[str, Any] = {"passed": False, "median_ratio": math.nan}
        try:
            rung = verify_equivalence(model, features, attention=strategy, kernel=kernel)["bfloat16"]
            measures = {"passed": rung.passed, "median_ratio": rung.median_ratio, "worst_error": rung.worst.radix}
            measures["ordinary_worst_error"] = rung.errors("ordinary")[-1]
        except Exception as error:  # a kernel that raises is a result too, and the others are still to be measured
            run.leave_out(f"equivalence {case}", error)
        run.found("equivalence", case, **measures)
