"""Does a step have the same bits when it runs again? Gradients of four runs, as torch is and with fixed orders."""

import torch
from gpu_parts.equivalence import ways
from gpu_parts.run import Run
from gpu_parts.steps import prepare
from step import Arm, ModelShape, Work, build_model, random_rows, work_of
from torch import Tensor

from radixtrain.testing import relative_error

__all__ = ["repeat"]

RUNS = 4


def repeat(run: Run, shape: ModelShape, prompt: int) -> None:
    """Every way, with and without `torch.use_deterministic_algorithms`, on a nested batch."""
    model = build_model(shape, run.device, torch.bfloat16)
    work = work_of("nested", random_rows(shape.vocab_size, prompt, prompt // 8, 16, "nested")).to(run.device)
    for strategy, kernel in list(ways(run, "repeat", torch.bfloat16, shape.head_dim)):
        for fixed in (False, True):
            case = f"{strategy}, {kernel}, {'deterministic' if fixed else 'as torch is'}"
            if not run.has_time(f"repeat {case}"):
                return
            torch.use_deterministic_algorithms(fixed)
            try:
                first, *others = _gradients(model, Arm(attention=strategy, kernel=kernel, plain_head=True), work)
                worst = max(relative_error(*pair) for other in others for pair in zip(other, first, strict=True))
                run.found("repeat", case, same_bits=int(worst == 0), worst_error=worst)
            except Exception as error:  # a kernel's that has no fixed order, say
                run.leave_out(f"repeat {case}", error)
            finally:
                torch.use_deterministic_algorithms(False)


def _gradients(model: torch.nn.Module, arm: Arm, work: Work) -> list[list[Tensor]]:
    found = []
    for _ in range(RUNS):
        prepare(model, arm)
        arm.run_step(model, work)  # type: ignore[arg-type]
        found.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
    return found
