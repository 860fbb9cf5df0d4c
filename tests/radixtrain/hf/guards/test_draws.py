"""Turning off for a while what draws at random. What is refused is in `test_batch.py`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from radixtrain import share_prefixes
from radixtrain.errors import UserError
from radixtrain.hf.attention_interface import RadixCall
from radixtrain.hf.guards.draws import DROPOUTS, evaluating, without_dropout


def modes(model: Any) -> list[bool]:
    return [module.training for module in model.modules()]


def test_every_dropout_of_torch_is_known() -> None:
    assert {kind.__name__ for kind in DROPOUTS} == set(torch.nn.modules.dropout.__all__)


@pytest.mark.parametrize("off", [evaluating, lambda model: without_dropout(model, ["dropout"])])
def test_modes_come_back(tiny_qwen3: Callable[..., Any], off: Any) -> None:
    """After an error too."""
    model = tiny_qwen3().train()
    model.model.layers[0].eval()
    model.model.layers[1].mlp.dropout = nn.Dropout(0.5)
    before = modes(model)
    with pytest.raises(KeyError), off(model):
        assert not model.model.layers[1].mlp.dropout.training
        assert sum(modes(model)) == (0 if off is evaluating else sum(before) - 1)
        raise KeyError
    assert modes(model) == before


def test_what_another_thread_draws_is_named(tiny_qwen3: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """No module draws, so that nothing could be set to 0 or allowed by name."""
    model = share_prefixes(tiny_qwen3())
    given = {"input_ids": torch.tensor([[1, 2, 3, 4], [1, 2, 3, 5]])}
    model(**given)  # tried while nothing draws
    attend = RadixCall.attend

    def while_others_draw(call: RadixCall, *heads: Any, **scoring: Any) -> Any:
        torch.rand(1)
        return attend(call, *heads, **scoring)

    monkeypatch.setattr(RadixCall, "attend", while_others_draw)
    with pytest.raises(UserError, match=r"no number that a module holds.* give that thread a torch\.Generator"):
        model(**given)
