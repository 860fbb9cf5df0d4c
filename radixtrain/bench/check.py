"""Before a step is timed: do both arms compute the same?

In a `step` the loss and the gradient of every parameter are compared, in a `forward` the loss and the last hidden state
of every token:

- float32: with the ordinary arm, at most `DIRECT_BAR` apart in relative L2;
- bfloat16: both arms with the ordinary model on the same weights in float32, one sequence at a time;
- `float64_truth`, and for a model with recurrent layers: both arms with the same in float64. The gradient of a decay is
  a sum of terms that cancel, so two float32 runs are 1e-4 apart in it.

The last two have the bars of `radixtrain verify`, which follow from the rounding of the ordinary arm.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from radixtrain.bench.arms import Arm, OrdinaryArm, RadixArm
from radixtrain.bench.work import Work
from radixtrain.errors import UserError
from radixtrain.hf.recurrent.mixers import mixers_of
from radixtrain.verification.equivalence import compare_gradients
from radixtrain.verification.oracle import Gradients, float64_throughout, gradients_of, ordinary_one_by_one, weights_in
from radixtrain.verification.report import EquivalenceReport, Rung

__all__ = ["check_arms"]

# Float32 against float32, in the middle between rounding and a mistake: two orders of summation are 1e-6 apart, on one
# processor more than on another, and a missing branch label 1e-2.
DIRECT_BAR = 1e-4
OUTPUT = "last_hidden_state"


def check_arms(
    model: PreTrainedModel, work: Work, ordinary: OrdinaryArm, radix: Sequence[RadixArm], float64_truth: bool
) -> dict[RadixArm, float]:
    """The worst error of each radix arm. Raises UserError that names the parameter if one is not the ordinary arm's."""
    expected = _answer(model, work, ordinary)
    truth = _truth(model, work, ordinary, float64_truth or bool(mixers_of(model))) or expected
    errors = {}
    for arm in radix:
        found = _answer(model, work, arm)
        precision = str(model.dtype).removeprefix("torch.")
        rung = compare_gradients(precision, truth, expected, found)
        reason = _apart(rung) if truth is expected else EquivalenceReport((rung,)).reason
        if reason:
            raise UserError(f"{work.cell}, {arm}: {reason}. Its times would compare different things")
        errors[arm] = rung.worst.radix
    return errors


def _apart(rung: Rung) -> str:
    """Why two float32 runs are not the same, with the name of the tensor; empty if they are."""
    worst = rung.worst
    if not worst.radix <= DIRECT_BAR:
        radix, ordinary, _ = worst.values
        return (
            f"{rung.precision}: NOT EQUAL: {worst.name} is {worst.radix:.1e} from the ordinary arm's, at most "
            f"{DIRECT_BAR:.0e} is rounding; worst element {list(worst.place)}: radix {radix:.9g}, ordinary "
            f"{ordinary:.9g}"
        )
    if not rung.loss_error <= DIRECT_BAR:
        return (
            f"{rung.precision}: NOT EQUAL: the loss is {rung.radix_loss:.9g}, the ordinary arm's {rung.truth_loss:.9g}"
        )
    return ""


def _truth(model: PreTrainedModel, work: Work, ordinary: OrdinaryArm, in_float64: bool) -> Gradients | None:
    """The answer of the ordinary model in a wider dtype; None for a float32 model without `in_float64`."""
    if not in_float64 and model.dtype == torch.float32:
        return None
    ordinary.prepare(model)
    with float64_throughout(model) if in_float64 else weights_in(model, torch.float32):
        if work.cell.mode == "forward":
            return _answer(model, work, ordinary)
        return _on_host(gradients_of(model, lambda: ordinary_one_by_one(model, work.features)))


def _answer(model: PreTrainedModel, work: Work, arm: Arm) -> Gradients:
    """Loss and gradients, or loss and hidden states, of an arm; on the host, which has room for two more of them."""
    arm.prepare(model)
    if work.cell.mode == "step":
        return _on_host(gradients_of(model, lambda: arm.loss_terms(model, work)))
    with torch.no_grad():
        loss = sum(term.item() for term in arm.loss_terms(model, work))
        return _on_host(Gradients(loss, {OUTPUT: arm.hidden_states(model, work)}))


def _on_host(answer: Gradients) -> Gradients:
    return Gradients(answer.loss, {name: tensor.cpu() for name, tensor in answer.tensors.items()})
