"""Finds losses, gradients and weights that are not finite before they do harm, and names the rows they came from."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from radixtrain.checkpoints.tensors import part_of
from radixtrain.distributed import ranks
from radixtrain.errors import UserError

logger = logging.getLogger(__name__)
SHOWN = 8  # rows that a message names


class NonFinite(UserError):
    """A number of the run is infinite or not a number."""


class NonFiniteGuard:
    """How to treat a training step whose loss or gradient is not finite.

    on_nonfinite: raise ends the run. skip leaves the step out: neither weights nor optimizer nor schedule change.
    max_skipped: most steps of a run that are left out.
    num_skipped: steps left out so far. Every checkpoint keeps it, so that a resumed run continues the count.
    """

    def __init__(self, on_nonfinite: Literal["raise", "skip"], max_skipped: int):
        self.on_nonfinite, self.max_skipped = on_nonfinite, max_skipped
        self.num_skipped = 0

    def allows(self, module: nn.Module, loss: Tensor, grad_norm: Tensor, where: Sequence[str], step: int) -> bool:
        """Return whether the optimizer may step. This is the only wait for the device in a training step.

        module: whose weights the step would change.
        loss, grad_norm: (), of the step.
        where: `file:line` of its sequences.
        step: optimizer steps taken before.

        Raises NonFinite if it may not and `on_nonfinite` is raise, if too many were left out before, or if the weights
        are not finite, which no other step would cure.
        """
        if _are_finite(loss, grad_norm):
            return True
        found = f"loss {loss.item():.6g} and grad_norm {grad_norm.item():.6g} of step {step + 1} are not both finite"
        reason = self._why_to_stop(module)
        if reason:
            raise NonFinite(f"{found}; {reason}. {_rows_of_step(where)}")
        self.num_skipped += 1
        count = f"{self.num_skipped} of at most {self.max_skipped}"
        logger.warning("%s: the step is left out, %s. %s", found, count, _rows_of_step(where))
        return False

    def accepts(self, name: str, loss: Tensor, where: Sequence[str], is_fit: bool) -> bool:
        """Return whether the loss of an evaluated step counts in the mean.

        name: `eval_loss` or `test_loss`. loss: (). where: `file:line` of the sequences of the step.
        is_fit: whether it is a validation of a run that trains, which `on_nonfinite: skip` does not end.

        Raises NonFinite if it does not count, unless it is left out, with a warning.
        """
        if _are_finite(loss):
            return True
        found = f"{name} {loss.item():g} is not finite"
        if not (is_fit and self.on_nonfinite == "skip"):
            hint = "16 bits may overflow, so try model.dtype: float32"
            raise NonFinite(f"{found}; {hint}. {_rows_of_step(where)}")
        logger.warning("%s: these rows are left out of it. %s", found, _rows_of_step(where))
        return False

    def _why_to_stop(self, module: nn.Module) -> str:
        """Say why the run has to stop; empty if the step may be left out."""
        name = nonfinite_weight(module)
        if name is not None:
            return f"the weight {name} has not been finite since the step before; a lower model.learning_rate may help"
        if self.on_nonfinite == "raise":
            return "the weights were not changed"
        if self.num_skipped >= self.max_skipped:
            return f"{self.num_skipped} steps were left out before, as many as model.max_skipped_steps allows"
        return ""


def check_weights_finite(module: nn.Module, what: str) -> None:
    """Raise NonFinite that names the first weight of the module with a non-finite number, on whichever rank.

    what: how the message begins, for instance the key that names the weights.
    """
    name = nonfinite_weight(module)
    if name is not None:
        raise NonFinite(f"{what}: the weight {name} holds numbers that are not finite")


@torch.no_grad()
def nonfinite_weight(module: nn.Module) -> str | None:
    """Return the name of the first parameter with a non-finite number, on the first rank that has one.

    Waits for the device once.
    """
    return next(filter(None, ranks().gather(_nonfinite_here(module))), None)


def _nonfinite_here(module: nn.Module) -> str | None:
    held = {name: part_of(each) for name, each in module.named_parameters()}
    checked = {name: each for name, each in held.items() if each.is_floating_point() and each.numel()}
    extremes = [extreme.float() for each in checked.values() for extreme in _extremes(each)]
    by_device = {extreme.device for extreme in extremes}
    if len(by_device) > 1:  # parts of the model are on the host
        extremes = [extreme.cpu() for extreme in extremes]
    if not extremes:
        return None
    are_finite = torch.isfinite(torch.stack(extremes)).reshape(-1, 2).all(1).tolist()
    return next((name for name, is_finite in zip(checked, are_finite, strict=True) if not is_finite), None)


def _extremes(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest number, or NaN if there is one, without a copy such as a mask."""
    found = torch.aminmax(tensor.float() if tensor.element_size() == 1 else tensor)  # float8 has no comparison
    return found.min, found.max


def _are_finite(*values: Tensor) -> bool:
    return bool(torch.stack([torch.isfinite(value.detach()) for value in values]).all())


def _rows_of_step(where: Sequence[str]) -> str:
    if not where:
        return "The rows came from no file"
    more = f" and {len(where) - SHOWN} more" if len(where) > SHOWN else ""
    return f"Rows of this step: {', '.join(where[:SHOWN])}{more}"
