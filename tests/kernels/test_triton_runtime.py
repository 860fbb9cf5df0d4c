"""When Triton kernels run; that they compute the same is in the tests of rows and pieces."""

import pytest
import torch
from tiers import FULL

from radixtrain.kernels.rows import gather_rows
from radixtrain.kernels.triton_runtime import by_triton, triton_missing

pytest.importorskip("triton", reason="pip install triton runs it")


@FULL
def test_sums_of_repeated_rows_are_the_same_bits(triton_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from radixtrain.kernels import rows_triton

    ran, run = [], rows_triton.sum_rows
    monkeypatch.setattr(rows_triton, "sum_rows", lambda *given: ran.append(1) or run(*given))
    x = torch.randn(5, 33, device=triton_device).bfloat16().requires_grad_()
    indices = torch.tensor([3, 3, 0, 3, 1, 0, 3, 3], device=triton_device)
    dout = torch.randn(8, 33, device=triton_device).bfloat16()
    grads = []
    for wanted in ("0", "1"):
        monkeypatch.setenv("RADIXTRAIN_TRITON", wanted)
        grads += torch.autograd.grad(gather_rows(x, indices), x, dout)
    assert torch.equal(*grads) and len(ran) == 1


@pytest.mark.parametrize(
    ("asked", "interpreter", "device", "expected"),
    [("1", "1", "cpu", True), ("1", "0", "cpu", False), ("0", "1", "cpu", False), ("1", "1", "meta", True)],
)
def test_only_where_asked_for(
    monkeypatch: pytest.MonkeyPatch, asked: str, interpreter: str, device: str, expected: bool
) -> None:
    monkeypatch.setenv("RADIXTRAIN_TRITON", asked)
    monkeypatch.setenv("TRITON_INTERPRET", interpreter)
    assert by_triton(torch.empty(1, device=device)) is expected


def test_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert triton_missing(torch.device("cpu")) is None
    monkeypatch.delenv("TRITON_INTERPRET")
    assert triton_missing(torch.device("cuda")) is None
    assert triton_missing(torch.device("cpu")) == (
        "Triton needs CUDA, the tensors are on cpu (TRITON_INTERPRET=1 runs it there, slowly)"
    )
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert triton_missing(torch.device("cuda")) == "Triton is not installed (pip install triton)"
