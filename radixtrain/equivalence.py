"""Radix against ordinary Hugging Face on the same model and data: loss and every parameter's gradient.

The oracle is independent: the unmodified model on each sequence alone, no padding, no packing, no plan. Loss closeness
alone proves little (a wrong mask moved it by 0.07 % where it was measured), so gradients are compared, per tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from radixtrain.collators.radix import RadixCollator, feature_arrays
from radixtrain.collators.targets import IGNORE_INDEX
from radixtrain.model import prepare_model, prepared_options, pretrained_model_of, restore_model

__all__ = ["EquivalenceReport", "TensorError", "verify_equivalence"]

Features = Sequence[Mapping[str, Any]]
# Relative L2 per tensor. Worst of 800 comparisons over generated tries, torch 2.13 on CPU: 4.4e-6 in float32, of the
# `reference`. In float64 Hugging Face's own float32 casts (norms, rotary embedding, loss) set the floor. A bias of q or
# k whose gradient is a millionth of the largest can exceed it by rounding alone (Phi, Starcoder2: 1.2e-5).
TOLERANCE = {torch.float32: 5e-6, torch.float64: 1e-6}
# A gradient this much smaller than the largest is rounding alone, as that of a query whose only key is itself.
DEAD = 1e-6


@dataclass(frozen=True)
class TensorError:
    """One parameter: L2 norm of the ordinary gradient, and L2 norm of the difference to the radix one."""

    name: str
    norm: float
    difference: float

    @property
    def error(self) -> float:
        """Relative; infinite where only one of the two is zero."""
        return self.difference / self.norm if self.norm else (float("inf") if self.difference else 0.0)


@dataclass(frozen=True)
class EquivalenceReport:
    """What `verify_equivalence` measured. `str()` is a short text with the worst tensors first."""

    ordinary_loss: float
    radix_loss: float
    gradients: tuple[TensorError, ...]
    tolerance: float

    @property
    def loss_error(self) -> float:
        """Relative difference of the losses."""
        return abs(self.radix_loss - self.ordinary_loss) / max(abs(self.ordinary_loss), 1e-30)

    @cached_property
    def dead(self) -> tuple[TensorError, ...]:
        """Gradients that are zero but for rounding, in both arms: they prove nothing, and fail nothing."""
        noise = DEAD * max(tensor.norm for tensor in self.gradients)
        return tuple(tensor for tensor in self.gradients if tensor.norm <= noise and tensor.difference <= noise)

    @property
    def worst(self) -> TensorError:
        """The largest relative error of a gradient that is alive; of any, where none is."""
        return max(self.alive or self.gradients, key=lambda tensor: tensor.error)

    @cached_property
    def alive(self) -> tuple[TensorError, ...]:
        """Gradients that are not dead."""
        return tuple(tensor for tensor in self.gradients if tensor not in self.dead)

    @property
    def passed(self) -> bool:
        """Loss and every gradient that is alive within the tolerance, and at least one is alive."""
        return bool(self.alive) and self.loss_error <= self.tolerance and self.worst.error <= self.tolerance

    @property
    def conclusive(self) -> bool:
        """No gradient is dead: what passed was all tested. A fresh LoRA (B = 0) leaves its A untested."""
        return not self.dead

    def __str__(self) -> str:
        verdict = "equal" if self.passed else "NOT EQUAL"
        lines = [
            f"{verdict} within {self.tolerance:.0e}: loss {self.ordinary_loss:.7f} and {self.radix_loss:.7f} "
            f"({self.loss_error:.1e})"
        ]
        lines += [
            f"  {tensor.error:.1e}  {tensor.name}"
            for tensor in sorted(self.alive, key=lambda tensor: -tensor.error)[:5]
        ]
        lines += [f"  dead     {tensor.name}: zero in both on this data, which proves nothing" for tensor in self.dead]
        return "\n".join(lines)


def verify_equivalence(
    model: nn.Module,
    features: Features,
    *,
    attention: str = "auto",
    kernel: str = "auto",
    collator: Callable[[Features], dict[str, Any]] | None = None,
    tolerance: float | None = None,
) -> EquivalenceReport:
    """Compare the loss and the gradients of a radix batch with those of the ordinary model on each sequence alone.

    model: a `PreTrainedModel` or PEFT model in float32 or float64. Comes back as it was, without
        gradients.
    features: as a `RadixCollator` takes them; together they must bear loss.
    attention, kernel: as for `prepare_model`.
    collator: default `RadixCollator()`.
    tolerance: relative, for the loss and for each tensor (L2); default 5e-6 in float32 and 1e-6 in float64.

    Raises ValueError for a 16-bit model, whose own rounding hides what this looks for, and where nothing bears loss.
    """
    dtype = pretrained_model_of(model).dtype
    if dtype not in TOLERANCE:
        raise ValueError(
            f"verify_equivalence needs float32 or float64 weights, got {dtype}; call model.float() on a copy"
        )
    before = prepared_options(model)
    allowed = before["allow_dropout"] if before else ()
    try:
        ordinary_loss, ordinary = _loss_and_gradients(restore_model(model), _ordinary_loss, features)
        prepare_model(model, attention=attention, kernel=kernel, allow_dropout=allowed)
        batch = (collator or RadixCollator())(features)
        radix_loss, radix = _loss_and_gradients(model, _radix_loss, batch)
    finally:
        restore_model(model)
        if before:
            prepare_model(model, **before)
    errors = tuple(_tensor_error(name, radix[name], gradient) for name, gradient in ordinary.items())
    return EquivalenceReport(ordinary_loss, radix_loss, errors, TOLERANCE[dtype] if tolerance is None else tolerance)


def _loss_and_gradients(
    model: nn.Module, loss_of: Callable[[nn.Module, Any], Tensor], data: Any
) -> tuple[float, dict[str, Tensor]]:
    """Loss, and the gradient of every trained parameter; one that was not reached counts as zero."""
    model.zero_grad(set_to_none=True)
    loss = loss_of(model, data)
    loss.backward()
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in trained.items()}
    model.zero_grad(set_to_none=True)
    return loss.item(), gradients


def _ordinary_loss(model: nn.Module, features: Features) -> Tensor:
    """Mean cross-entropy over the labelled tokens, one sequence a call."""
    device = next(model.parameters()).device
    total, count = torch.zeros((), device=device), 0
    for index, feature in enumerate(features):
        ids, labels, positions = (
            None if array is None else torch.tensor(array, device=device)[None]
            for array in feature_arrays(feature, index)
        )
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits[0, :-1]
        assert labels is not None
        targets = labels[0, 1:]
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        total = total + nn.functional.cross_entropy(wide, targets, reduction="sum", ignore_index=IGNORE_INDEX)
        count += int((targets != IGNORE_INDEX).sum())
    if not count:
        raise ValueError("no token of these features bears loss, so there is no gradient to compare")
    return total / count


def _radix_loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    device = next(model.parameters()).device
    return model(**{k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.items()}).loss


def _tensor_error(name: str, actual: Tensor, expected: Tensor) -> TensorError:
    difference = (actual.double() - expected.double()).norm().item()
    return TensorError(name, expected.double().norm().item(), difference)
