"""When DDP exchanges gradients, and of which weights. That they are those of one process: `test_gradients.py`."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import lightning as L
import pytest
import torch
from forked_ranks import on_ranks
from lightning.pytorch.strategies import DDPStrategy
from quiet_trainer import trainer_on
from tiers import FULL
from torch import Tensor, nn
from torch.utils.data import DataLoader

from radixtrain.distributed import ranks
from radixtrain.training.devices.gradient_sync import backward, rebuild_ddp

pytestmark = FULL


class Experts(L.LightningModule):
    """Four weights, of which a micro-batch reaches those that it names."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.weights = nn.ParameterList([torch.full((2,), float(place + 1)) for place in range(4)])
        self.found: list[list[float] | None] = []

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.5, weight_decay=0.5)

    def training_step(self, batches: list[list[int]], index: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        for place, batch in enumerate(batches):
            loss = sum((each + 1.0) * self.weights[each].square().sum() for each in batch) * ranks().size
            backward(self, loss, is_last=place == len(batches) - 1)
        self.found.append([None if each.grad is None else each.grad.tolist() for each in self.weights])
        optimizer.step()


def trained(steps: list[list[list[int]]], size: int, **options: bool) -> tuple[Any, list[list[float]]]:
    """The gradients of each step, and the weights after the last.

    options: of `DistributedDataParallel`; by default as `check_devices` sets them.
    """
    module = Experts()
    strategy = DDPStrategy(**{"gradient_as_bucket_view": True, **options}) if size > 1 else None
    trainer_on(size, strategy).fit(module, DataLoader(steps, batch_size=None))
    return module.found, [each.tolist() for each in module.weights]


@pytest.mark.parametrize("option", ["gradient_as_bucket_view", "find_unused_parameters"])
@pytest.mark.parametrize("is_set", [True, False])
def test_weights_that_some_ranks_do_not_reach(option: str, is_set: bool) -> None:
    """In the last micro-batch, in none of one rank, and in none of any: that gradient stays None, as AdamW needs it."""
    shares = [[[[0], [1]], [[1]], [[3, 0]]], [[[0, 2], [0]], [[1]], [[2]]]]
    answers = on_ranks(2, lambda rank: trained(shares[rank], 2, **{option: is_set}))
    gradients, weights = trained([first + second for first, second in zip(*shares, strict=True)], 1)
    assert [[each is None for each in step] for step in gradients] == [
        [False, False, False, True],
        [True, False, True, True],
        [False, True, False, False],
    ]
    assert answers == [(gradients, weights)] * 2


class WithoutOne(Experts):
    """A weight has a gradient and no optimizer, which would set it to None before each step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.weights[1:], lr=0.5, weight_decay=0.5)


def test_a_weight_that_the_optimizer_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "Experts", WithoutOne)
    expected = trained([[[0, 1, 2, 3]], [[0, 1]]], 1)
    assert [each is None for each in expected[0][1]] == [False, False, True, True]
    answers = on_ranks(2, lambda rank: trained([[[0, 1], [2, 3]][rank : rank + 1], [[rank]]], 2))
    assert answers == [expected] * 2


def test_gradients_are_exchanged_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def count(rank: int) -> list[bool]:
        exchanged: list[bool] = []
        run = Experts.manual_backward

        def noting(module: Any, loss: Tensor) -> None:
            exchanged.append(module.trainer.strategy.model.require_backward_grad_sync)
            run(module, loss)

        monkeypatch.setattr(Experts, "manual_backward", noting)
        trained([[[0, 1, 2, 3]] * 3, [[0, 1, 2, 3]] * 2], 2)
        return exchanged

    assert on_ranks(2, count) == [[False, False, True, False, True]] * 2


def test_gradients_are_held_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each micro-batch adds to those in DDP's buckets, also after steps that have not reached a weight."""

    def places(rank: int) -> list[set[tuple[int, int]]]:
        found: list[set[tuple[int, int]]] = []
        run = Experts.manual_backward

        def noting(module: Any, loss: Tensor) -> None:
            run(module, loss)
            held = [each.grad for each in module.weights if each.grad is not None]
            found.append({(each.data_ptr(), each.untyped_storage().nbytes()) for each in held})

        monkeypatch.setattr(Experts, "manual_backward", noting)
        trained([[[0, 1, 2, 3]]] * 2 + [[[0], [1, 2], [3, 0]], [[0, 1]], [[2, 3], [0]]], 2)
        return found[2:]  # DDP lays out its buckets in the second step

    for found in on_ranks(2, places):
        assert len(found) == 6 and len(set.union(*found)) == 4
        assert {size for _, size in set.union(*found)} == {4 * 2 * 4}, "views of one bucket"


class Retyped(Experts):
    """Its weights have had another type for a moment, as in a comparison in float64, on rank 0 only."""

    def on_train_start(self) -> None:
        for each in self.weights if ranks().is_first else ():
            each.data = each.data.double()
            each.data = each.data.float()
        rebuild_ddp(self.trainer.strategy)


def test_types_that_changed_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trained([[[0, 1], [2, 3]]] * 2, 1)
    monkeypatch.setattr(sys.modules[__name__], "Experts", Retyped)
    answers = on_ranks(2, lambda rank: trained([[[[0, 1]], [[2, 3]]][rank]] * 2, 2), timeout=timedelta(seconds=20))
    assert [weights for _, weights in answers] == [expected[1]] * 2
