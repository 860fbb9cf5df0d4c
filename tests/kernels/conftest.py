"""Fresh memory is NaN in these tests (as in fla's): a kernel that reads what nothing wrote cannot pass by luck."""

import os
from collections.abc import Callable
from functools import wraps

import pytest
import torch
from tiers import FULL
from torch import Tensor


def poisoned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(make)
    def make_poisoned(*args, **kwargs) -> Tensor:
        fresh = make(*args, **kwargs)
        with torch.no_grad():
            return fresh.fill_(float("nan")) if fresh.is_floating_point() else fresh

    return make_poisoned


@pytest.fixture(autouse=True)
def poison_fresh_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))


@pytest.fixture
def triton_device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The device that runs Triton's kernels: CUDA, or the CPU under Triton's interpreter, with its bfloat16 corrected.

    The interpreter keeps bfloat16 as uint16. Casting to it (in 3.9 too) drops bits, while the hardware rounds to the
    nearest, and a product of matrices takes the bits for whole numbers.
    """
    if torch.cuda.is_available() and not os.environ.get("TRITON_INTERPRET"):
        return torch.device("cuda")
    from triton import language as tl
    from triton.runtime import interpreter

    if not isinstance(tl.sum, interpreter.InterpretedFunction):
        pytest.skip("Triton was imported before TRITON_INTERPRET was set: TRITON_INTERPRET=1 python -m pytest runs it")
    convert, dot = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot

    def convert_as_hardware(data, source, target, rounding):
        if {source, target} != {tl.float32, tl.bfloat16}:
            return convert(data, source, target, rounding)
        bits, kept = (torch.int32, torch.uint16) if source == tl.float32 else (torch.uint16, torch.int32)
        values = torch.tensor(data.view(f"u{data.itemsize}")).view(bits).view(as_torch[source])
        return values.to(as_torch[target]).view(kept).numpy().view(f"u{kept.itemsize}")

    def dot_as_hardware(builder, a, b, *rest):
        wide = (builder.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return dot(builder, *wide, *rest)

    as_torch = {tl.float32: torch.float32, tl.bfloat16: torch.bfloat16}
    monkeypatch.setattr(interpreter, "_convert_float", convert_as_hardware)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot_as_hardware)
    return torch.device("cpu")


@pytest.fixture(params=["torch", pytest.param("triton", marks=FULL)])
def by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What adds up rows and merges pieces: torch, or the Triton kernels that RADIXTRAIN_TRITON=1 asks for."""
    if request.param == "triton":
        pytest.importorskip("triton", reason="pip install triton runs it")
        request.getfixturevalue("triton_device")
        monkeypatch.setenv("RADIXTRAIN_TRITON", "1")
    return request.param
