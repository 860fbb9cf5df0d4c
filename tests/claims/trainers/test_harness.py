"""The harness sees what is wrong: a model that shares with a fault, or that does not share, fails the comparison.

And a rank that dies is told at once.
"""

import gc
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn

from radixtrain import share_prefixes
from radixtrain.errors import UserError
from radixtrain.hf.backbone import backbone_of, with_rows
from tests.support import FULL
from tests.support.processes import on_ranks
from tests.support.trainers import Build, Run, compare, differences_of

pytestmark = FULL


@pytest.fixture
def build(model, trl_trainer, prompts) -> Build:
    """An SFTTrainer, the cheapest."""
    return lambda share: trl_trainer("SFT", share(model()), rows=prompts, max_steps=1)


def with_fault(fault: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
    """`share_prefixes`, and then this change of the hidden states (B, L, D) that the backbone returns."""

    def hook(backbone: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        return with_rows(output, fault(output[0]))

    def share(model: Any) -> Any:
        share_prefixes(model)
        backbone_of(model).register_forward_hook(hook, with_kwargs=True)
        return model

    return share


def scaled_gradient(hidden: Tensor) -> Tensor:
    """The values are right; the gradient is too large by a hundred-millionth."""
    return hidden + (hidden - hidden.detach()) * 1e-8


def lost_gradient(hidden: Tensor) -> Tensor:
    """The values are right; the last row of the batch gets no gradient."""
    kept = hidden.clone()
    kept[-1] = kept[-1].detach()
    return kept


FAULTS = {
    "the hidden states of the next place": (lambda hidden: hidden.roll(-1, 1), "loss, entry 0"),
    "a rounding of float32": (lambda hidden: hidden * (1 + 1e-7), "entropy|loss"),
    "a gradient too large": (scaled_gradient, "grad_norm, entry 0"),
    "a gradient lost": (lost_gradient, "grad_norm, entry 0"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(build, name):
    fault, message = FAULTS[name]
    with pytest.raises(AssertionError, match=message):
        compare(build, share=with_fault(fault))


def test_a_model_that_does_not_share_is_found(build):
    with pytest.raises(AssertionError, match="calls=0"):
        compare(build, share=lambda model: share_prefixes(model, min_ratio=1000))
    with pytest.raises(UserError, match="call share_prefixes"):
        compare(build, share=lambda model: model)


def test_a_missing_or_different_number_is_found():
    def entry(**numbers: float) -> Run:
        return Run([numbers], [])

    with pytest.raises(AssertionError, match="only one of the runs"):
        differences_of(entry(loss=1.0), entry(loss=1.0, kl=0.0))
    for one, other in ((1.0, 1.00000001), (0.0, 1e-9), (1.0, float("nan")), (float("inf"), 1.0)):
        with pytest.raises(AssertionError, match="loss, entry 0"):
            differences_of(entry(loss=one), entry(loss=other))


def test_a_rank_that_dies_is_told_at_once():
    """The others wait for it to join their group, as long as torch has them wait: half an hour."""
    with pytest.raises(AssertionError, match=r"rank 1 \(exit code 3\): ended without an answer"):
        on_ranks(2, lambda rank: os._exit(3) if rank else dist.new_group([0, 1]), seconds=60)


def test_ranks_collect_nothing_that_tests_left():
    """A store whose thread a fork does not have ends the process that frees it."""
    left: list[Any] = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    left.append(left)
    gc.disable()
    try:
        del left
        assert on_ranks(2, lambda rank: gc.collect() >= 0) == [True, True]
    finally:
        gc.enable()
