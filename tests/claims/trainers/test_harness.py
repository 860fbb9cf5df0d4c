"""The harness sees what is wrong: a model that shares with a fault, or that does not share, fails the comparison.

And in float32 a shared run is as far from an ordinary one as another ordinary one is.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from same_step import assert_within_noise
from tiers import FULL
from torch import Tensor, nn
from trainer_harness import Build, Run, compare, differences_of, run

from radixtrain import share_prefixes
from radixtrain.errors import UserError
from radixtrain.hf.backbone import backbone_of, with_rows

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


@pytest.mark.parametrize("name", ["SFT", "DPO", "KTO", "Reward"])
def test_in_float32(name, model, scorer, trl_trainer, preferences, prompts):
    """Every logged number and the gradients of three steps, against runs with `sdpa` and with `eager` attention."""
    rows = {"SFT": prompts, "KTO": prompts.add_column("label", [True, False] * (len(prompts) // 2))}

    def build(share: Any) -> Any:
        models = [scorer(0)] if name == "Reward" else [model(0)] if name == "SFT" else [model(0), model(1)]
        return trl_trainer(name, *map(share, models), rows=rows.get(name, preferences))

    def eager(model: Any) -> Any:
        model.set_attn_implementation("eager")
        return model

    ordinary, again, shared = (
        run(build, share, evaluate=True, dtype=torch.float32) for share in (lambda model: model, eager, share_prefixes)
    )
    for values in (partial(numbers_in_units_of, ordinary), lambda run: torch.cat(run.gradients)):
        assert_within_noise(*map(values, (shared, ordinary, again)), name)


def numbers_in_units_of(ordinary: Run, found: Run) -> list[float]:
    """All that was logged, each number divided by that of an ordinary run if it is above 1.

    Without accuracies: rounding decides where two tokens are nearly as likely.
    """
    pairs = zip(found.entries, ordinary.entries, strict=True)
    return [entry[n] / max(1.0, abs(unit[n])) for entry, unit in pairs for n in unit if "accurac" not in n]


def test_a_missing_or_different_number_is_found():
    def entry(**numbers: float) -> Run:
        return Run([numbers], [])

    with pytest.raises(AssertionError, match="only one of the runs"):
        differences_of(entry(loss=1.0), entry(loss=1.0, kl=0.0))
    for one, other in ((1.0, 1.00000001), (0.0, 1e-9), (1.0, float("nan")), (float("inf"), 1.0)):
        with pytest.raises(AssertionError, match="loss, entry 0"):
            differences_of(entry(loss=one), entry(loss=other))
