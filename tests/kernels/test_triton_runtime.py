"""Tree attention and its rows by the Triton kernels, if they are asked for."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from radixtrain.attention import tree_attention
from radixtrain.kernels.cascade import bundled_pieces
from radixtrain.kernels.rows import gather_rows
from radixtrain.kernels.triton_runtime import by_triton, triton_missing
from radixtrain.testing import relative_error
from radixtrain.tree.plan import build_prefix_plan

pytest.importorskip("triton", reason="pip install triton runs it")

SEQUENCES = [[1, 1, 2, 2, 3], [1, 1, 2, 2, 4, 4], [1, 1, 2, 5], [1, 1, 2, 2], [2, 1, 1], [2, 3, 3], [2, 1, 1], [5]]
PLAN = build_prefix_plan(np.concatenate([np.array(s) for s in SEQUENCES]), np.cumsum([0, *map(len, SEQUENCES)]))


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Callable[[], dict[str, int]]:
    """How often each of the two kernels ran."""
    from radixtrain.kernels import merge_triton, rows_triton

    ran = {"merge": 0, "sum": 0}

    def counting(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            ran[name] += 1
            return run(*args, **options)

        return wrapped

    monkeypatch.setattr(merge_triton, "merge_rows_", counting("merge", merge_triton.merge_rows_))
    monkeypatch.setattr(rows_triton, "sum_rows", counting("sum", rows_triton.sum_rows))
    return lambda: ran


def with_gradients(attention: str, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(PLAN.num_rows, heads, 8) for heads in (4, 2, 2, 4)]
    *leaves, dout = (torch.randn(*shape, generator=generator).to(device, dtype) for shape in shapes)
    for x in leaves:
        x.requires_grad_()
    out = tree_attention(*leaves, PLAN, attention=attention, kernel="eager")
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("attention", ["cascade", "path", "expand"])
def test_attention(
    triton_device: torch.device, monkeypatch: pytest.MonkeyPatch, count: Any, attention: str, dtype: torch.dtype
) -> None:
    monkeypatch.setattr("radixtrain.tree.layout.bundled_pieces", partial(bundled_pieces, bundle=2))
    monkeypatch.delenv("RADIXTRAIN_TRITON", raising=False)
    expected = with_gradients(attention, triton_device, dtype)
    assert count() == {"merge": 0, "sum": 0}
    monkeypatch.setenv("RADIXTRAIN_TRITON", "1")
    actual = with_gradients(attention, triton_device, dtype)
    assert count()["sum" if attention != "cascade" else "merge"] > 0
    bar = 4 * torch.finfo(dtype).eps
    assert max(relative_error(x.double(), y.double()) for x, y in zip(actual, expected, strict=True)) <= bar


def test_sums_of_repeated_rows_are_the_same_bits(triton_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(5, 33, device=triton_device).bfloat16().requires_grad_()
    indices = torch.tensor([3, 3, 0, 3, 1, 0, 3, 3], device=triton_device)
    dout = torch.randn(8, 33, device=triton_device).bfloat16()
    grads = []
    for wanted in ("0", "1"):
        monkeypatch.setenv("RADIXTRAIN_TRITON", wanted)
        grads += torch.autograd.grad(gather_rows(x, indices), x, dout)
    assert torch.equal(*grads)


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
