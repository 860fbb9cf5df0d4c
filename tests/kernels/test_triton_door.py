"""When Triton kernels run; that they compute the same is in `experimental/`."""

import pytest
import torch

from radixtrain.kernels.triton_door import by_triton, experimental

pytest.importorskip("triton", reason="pip install triton runs it")


@pytest.mark.parametrize(
    ("asked", "interpreter", "device", "expected"),
    [("1", "1", "cpu", True), ("1", "0", "cpu", False), ("0", "1", "cpu", False), ("1", "1", "meta", True)],
)
def test_only_if_asked_for(
    monkeypatch: pytest.MonkeyPatch, asked: str, interpreter: str, device: str, expected: bool
) -> None:
    monkeypatch.setenv("RADIXTRAIN_TRITON", asked)
    monkeypatch.setenv("TRITON_INTERPRET", interpreter)
    assert by_triton(torch.empty(1, device=device)) is expected


def test_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = experimental("triton_runtime").triton_missing
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert missing(torch.device("cpu")) is None
    monkeypatch.delenv("TRITON_INTERPRET")
    assert missing(torch.device("cuda")) is None
    assert missing(torch.device("cpu")) == (
        "Triton needs CUDA, the tensors are on cpu (TRITON_INTERPRET=1 runs it there, slowly)"
    )
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert missing(torch.device("cuda")) == "Triton is not installed (pip install triton)"
