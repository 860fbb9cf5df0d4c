"""Fresh memory is NaN in these tests (as in fla's): a kernel that reads what nothing wrote cannot pass by luck."""

from collections.abc import Callable
from functools import wraps

import pytest
import torch
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
