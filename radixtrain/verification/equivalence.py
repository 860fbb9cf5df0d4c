"""Compares radixtrain with ordinary Hugging Face on the same model and data: loss and every parameter's gradient.

Both arms are compared with the float64 truth of `radixtrain/verification/oracle.py`, in every precision that matters. A
close loss proves little (a wrong mask was measured to move it by 0.07 %), so gradients are compared by tensor.

In float64, which hardly rounds, the bar is a number: 1e-12. In lower precision it follows from the rounding of the
ordinary arm, measured on the same weights and sequences.
"""

from __future__ import annotations

import logging
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from radixtrain.attention import EVERYWHERE
from radixtrain.collators.radix import RadixCollator
from radixtrain.collators.steps import Step, StepCollator
from radixtrain.errors import UserError
from radixtrain.hf.backbone import pretrained_model_of
from radixtrain.hf.guards.batch import added_losses
from radixtrain.hf.guards.draws import without_dropout
from radixtrain.hf.share import check_takes_collated, options_of, restore_model, share_prefixes
from radixtrain.verification.oracle import (
    Arm,
    Features,
    Gradients,
    float64_throughout,
    float64_truth,
    gradients_of,
    ordinary_padded,
    radix_batch,
    same_buffers,
    weights_in,
)

logger = logging.getLogger(__name__)
AUTOCAST = {"bf16-mixed": torch.bfloat16}
SIXTEEN_BITS = ("bfloat16", "float16")
NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
FLOAT64_BAR = 1e-12  # relative L2 of a tensor; the worst of 1,500 generated tries was 1.2e-14
FLOAT64_FLOOR = 1e-15  # of the largest gradient: the rounding of tensors whose norm is a thousandth of it or less
# An ill-conditioned gradient has more rounding in float64 too. The ordinary arm's error is a sample of it, of which
# CONDITION times as much is allowed. Above AGREEMENT two ordinary ways to compute the gradient do not agree, and there
# is no verdict.
CONDITION, AGREEMENT = 100.0, 1e-9
# Below float64. Over many batches both arms have the same error, but a single batch has luck, most of all in a tensor
# of few elements: of 400 batches of a tiny model 1 in 20 had a tensor above twice its ordinary error, `expand` as often
# as `cascade`. So one comparison bounds the median of the ratios by 2 and a single tensor by 10. The test suite, over
# all its tries, is stricter: tests/claims/equivalence/test_rounding.py.
MEDIAN_FACTOR, TENSOR_FACTOR = 2.0, 10.0
# Shares of the largest gradient. In float64 a gradient below DEAD is zero except for the truth's own rounding. In lower
# precision one below DROWNED is smaller than the rounding of the others, in both arms.
DEAD, DROWNED = 1e-12, 1e-6


def verify_equivalence(
    model: nn.Module, features: Features, *, attention: str = "auto", kernel: str = "auto"
) -> EquivalenceReport:
    """Compare the loss and the gradients of a radix batch with those of the ordinary model.

    model: a `PreTrainedModel` or PEFT model, shared or not. It is unchanged afterwards, and has no gradients. While
        it computes in float64 it takes 24 bytes for each trained parameter and 8 for each frozen one.
    features: as a `RadixCollator` takes them, with labels; at least one token must bear loss.
    attention, kernel: as for `share_prefixes`. In a wider dtype than the model's own, `auto` takes the place of `tree`
        and of the fused kernels for CUDA, none of which takes float64.

    Meanwhile a fresh LoRA, which is zero and would leave half of its gradients zero, is filled at random, and dropout
    that `share_prefixes` allowed, a router loss and AdaLoRA's regularizer are off.
    Returns an `EquivalenceReport`, which prints as a table.
    Raises ValueError if nothing bears loss. Raises UserError as `share_prefixes` does, and if the ordinary gradient is
    not finite.

    >>> verify_equivalence(model, rows).passed
    True
    """
    batch = RadixCollator()(features)
    return verify_arms(
        model,
        features,
        ordinary=lambda: ordinary_padded(model, features),
        radix=lambda: radix_batch(model, batch),
        attention=attention,
        kernel=kernel,
    )


def verify_step(
    model: nn.Module,
    loss_sum: Callable[[dict[str, Any]], Tensor],
    features: Features,
    collator: StepCollator,
    *,
    attention: str = "auto",
    kernel: str = "auto",
    precision: str = "32-true",
) -> EquivalenceReport:
    """Compare loss and gradients of one optimizer step, with the micro-batches, merged predictions and loss of `fit`.

    The ordinary arm is the step that `dedup: false` would take; the truth is computed from the logits that Hugging
    Face's own model returns for each sequence.

    model: loaded, on its device. It is restored, without gradients.
    loss_sum: micro-batch -> summed loss of `model`, as `RadixModule.loss_sum`.
    features: the sequences of the step; see `SFTData.features_of_step`.
    collator: as in training.
    attention, kernel: as for `verify_equivalence`.
    precision: Lightning's name of it; a mixed one adds a comparison under autocast.
    """
    device = next(model.parameters()).device
    unique = replace(collator, dedup=True, merge_labels=True)(features)
    plain = replace(collator, dedup=False, merge_labels=True)(features)
    return verify_arms(
        model,
        features,
        ordinary=lambda: _terms(loss_sum, plain, device),
        radix=lambda: _terms(loss_sum, unique, device),
        attention=attention,
        kernel=kernel,
        autocast=AUTOCAST.get(precision),
    )


def _terms(loss_sum: Callable[[dict[str, Any]], Tensor], step: Step, device: torch.device) -> Iterator[Tensor]:
    """Yield the terms of the loss of a step, one for each micro-batch."""
    for batch in step.to(device).micro_batches:
        yield loss_sum(batch) / step.num_labels


def verify_arms(
    model: nn.Module,
    features: Features,
    ordinary: Arm,
    radix: Arm,
    *,
    attention: str = "auto",
    kernel: str = "auto",
    autocast: torch.dtype | None = None,
) -> EquivalenceReport:
    """Compare as `verify_equivalence` does, but with other ways to compute the two losses, such as a trainer's own.

    ordinary, radix: yield the terms of the loss, of the model as it came from Hugging Face and of the shared model.
    autocast: the dtype of mixed precision, which is then the last rung.
    """
    own = str(autocast or _own_dtype(model)).removeprefix("torch.")
    base = pretrained_model_of(model)
    before = options_of(model)
    allowed = before["allow_dropout"] if before else ()
    rungs = []
    with _restored_afterwards(model, before), without_dropout(model, allowed), _without_added_losses(model):
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise UserError("no parameter of the model requires a gradient, so there is nothing to compare")
        check_takes_collated(model)  # refuses before it computes
        share_prefixes(model, attention=attention, allow_dropout=allowed)
        logger.info("verify: %d sequences in float64, one at a time", len(features))
        truth = float64_truth(restore_model(model), features)
        _check_finite(truth)
        for name in dict.fromkeys(("float64", "float32", own)):
            logger.info("verify: %s", name)
            with _computing_in(name, restore_model(model), own, autocast):
                by_ordinary = gradients_of(model, ordinary)
                way = (attention, kernel) if name == own else _in_any_dtype(model, attention, kernel)
                share_prefixes(model, attention=way[0], kernel=way[1], allow_dropout=allowed)
                by_radix = gradients_of(model, radix)
            judged = not (_has_experts(base) and name in SIXTEEN_BITS)
            rungs.append(compare_gradients(name, truth, by_ordinary, by_radix, judged))
    return EquivalenceReport(tuple(rungs))


def _own_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype that the model trains in: of parameters in several dtypes, the 16-bit one."""
    dtypes = dict.fromkeys(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    return next((dtype for dtype in dtypes if dtype.itemsize == 2), next(iter(dtypes)))


def _in_any_dtype(model: nn.Module, attention: str, kernel: str) -> tuple[str, str]:
    """Return attention and kernel for a rung that is not the training's: no fused kernel of CUDA takes float64."""
    is_anywhere = kernel == "eager" or next(model.parameters()).device.type == "cpu"
    return attention if attention in EVERYWHERE else "auto", kernel if is_anywhere else "auto"


def _has_experts(base: PreTrainedModel) -> bool:
    config = base.config.get_text_config()
    return any((getattr(config, name, None) or 0) > 1 for name in NUM_EXPERTS)


def _computing_in(
    precision: str, model: nn.Module, own: str, autocast: torch.dtype | None
) -> AbstractContextManager[object]:
    """Make the context of a precision. own: the dtype of the training, in which the weights are not cast."""
    if precision == "float64":
        return float64_throughout(model)
    if precision != own:
        return weights_in(model, getattr(torch, precision))
    return torch.autocast(next(model.parameters()).device.type, autocast) if autocast else nullcontext()


@contextmanager
def _restored_afterwards(model: nn.Module, before: Mapping[str, Any] | None) -> Iterator[None]:
    """Restore buffers, hooks and each LoRA matrix B that is zero, as it starts, which is filled at random meanwhile.

    The global random state does not change.
    """
    fresh = [p for name, p in model.named_parameters() if "lora_B" in name and not p.any()]
    draw = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            for parameter in fresh:
                parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.02)
        with same_buffers(model):
            yield
    finally:
        with torch.no_grad():
            for parameter in fresh:
                parameter.zero_()
        restore_model(model)
        if before:
            share_prefixes(model, **before)


@contextmanager
def _without_added_losses(model: nn.Module) -> Iterator[None]:
    """Leave out a router loss and AdaLoRA's regularizer: they are not sums over tokens, so the truth has neither."""
    with ExitStack() as stack:
        for config, key, _ in added_losses(model):
            stack.callback(setattr, config, key, getattr(config, key))
            setattr(config, key, type(getattr(config, key))())
        yield


def _check_finite(truth: Gradients) -> None:
    for name, tensor in truth.tensors.items():
        if not tensor.isfinite().all():
            raise UserError(f"the ordinary model's gradient of {name} is not finite on these sequences: no verdict")


def compare_gradients(
    precision: str, truth: Gradients, ordinary: Gradients, radix: Gradients, judged: bool = True
) -> Rung:
    """Compare gradients in one precision. All three hold the same parameters; errors are computed in float64."""
    tensors = tuple(
        _tensor_error(name, exact, ordinary.tensors[name], radix.tensors[name]) for name, exact in truth.tensors.items()
    )
    losses = (torch.tensor(arm.loss, dtype=torch.float64) for arm in (truth, ordinary, radix))
    return Rung(precision, _tensor_error("the loss", *losses), tensors, judged)


def _tensor_error(name: str, truth: Tensor, ordinary: Tensor, radix: Tensor) -> TensorError:
    exact = truth.double()
    off, by_ordinary = ((x.double() - exact).abs().nan_to_num(inf, inf) for x in (radix, ordinary))
    place = tuple(int(index) for index in torch.unravel_index(off.argmax(), off.shape))
    values = radix[place].item(), ordinary[place].item(), exact[place].item()
    return TensorError(name, exact.norm().item(), by_ordinary.norm().item(), off.norm().item(), place, values)


@dataclass(frozen=True)
class TensorError:
    """One gradient, or the loss: how far both arms are from the truth, and the element where radix is furthest off.

    name: of the parameter.
    norm: L2 norm in truth.
    ordinary_difference, radix_difference: L2 norms of the differences from it; infinite if an element is not a number.
    place: index of the worst element.
    values: its value by radix, by the ordinary arm and in truth.
    """

    name: str
    norm: float
    ordinary_difference: float
    radix_difference: float
    place: tuple[int, ...] = ()
    values: tuple[float, float, float] = (0.0, 0.0, 0.0)

    @property
    def ordinary(self) -> float:
        """Return the relative error of the ordinary arm."""
        return _relative(self.ordinary_difference, self.norm)

    @property
    def radix(self) -> float:
        """Return the relative error of radix."""
        return _relative(self.radix_difference, self.norm)


@dataclass(frozen=True)
class Rung:
    """Loss and gradients of both arms against the truth in one precision, and the verdict.

    judged: False for a mixture of experts in 16 bits. Rounding moves a token whose two best experts are nearly tied to
        the other one, in either arm, so single tensors say nothing. What is not finite still fails, and so do gradients
        whose median error is `TENSOR_FACTOR` times the ordinary one.
    """

    precision: str
    loss: TensorError
    tensors: tuple[TensorError, ...]
    judged: bool = True

    @property
    def passed(self) -> bool:
        """Return whether the loss and every gradient are within their bars, and at least one gradient is alive."""
        return not self.reason

    @property
    def reason(self) -> str:
        """Say why it did not pass, in one line that names the parameter; empty if it did."""
        if not self.alive:
            return "no gradient is alive, so nothing was tested"
        if self.disagreeing:
            worst = max(self.disagreeing, key=lambda tensor: tensor.ordinary)
            _, padded, single = self.loss.values
            return (
                f"no verdict: two ordinary ways to compute the gradient, in a padded batch and with each sequence on "
                f"its own, disagree by {worst.ordinary:.1e} in {worst.name}; their losses are {padded:.9g} and "
                f"{single:.9g}. The gradient may be too ill-conditioned for float64, or the model computes something "
                f"else for a sequence next to padding or other sequences, or the padded batch does not have the "
                f"model's own loss"
            )
        if self.failed:
            return self._say_failed(self.failed[0])
        if not self.median_ratio <= (luck := MEDIAN_FACTOR if self.judged else TENSOR_FACTOR):
            return (
                f"the gradients are {self.median_ratio:.1f} times as far from the truth as the ordinary ones, in the "
                f"median tensor; up to {luck:.0f} times may be luck"
            )
        return ""

    def _say_failed(self, tensor: TensorError) -> str:
        radix, ordinary, exact = tensor.values
        others = f" ({len(self.failed) - 1} more tensors too)" if len(self.failed) > 1 else ""
        if self.is_dead(tensor):
            what, off, most = "should be zero and is off by", tensor.radix_difference, self.allowed(tensor)
        else:
            what, off, most = "is off by", tensor.radix, _relative(self.allowed(tensor), tensor.norm)
        return (
            f"{tensor.name} {what} {off:.1e}, at most {most:.1e} is rounding{others}; worst element "
            f"{list(tensor.place)}: radix {radix:.9g}, ordinary {ordinary:.9g}, truth {exact:.9g}"
        )

    @cached_property
    def alive(self) -> tuple[TensorError, ...]:
        """Return the gradients that can be compared in this precision."""
        return tuple(tensor for tensor in self.tensors if not self.is_dead(tensor))

    @cached_property
    def dead(self) -> tuple[TensorError, ...]:
        """Return the gradients that are truly zero, or drowned in rounding: radix's are only shown to be no larger."""
        return tuple(tensor for tensor in self.tensors if self.is_dead(tensor))

    def is_dead(self, tensor: TensorError) -> bool:
        return tensor.norm <= self._dead_norm  # written so that a NaN in the truth is alive, and fails

    def allowed(self, tensor: TensorError) -> float:
        """Return the largest L2 difference from the truth that radix may have in this tensor. It is finite."""
        if self.precision == "float64":
            exact = FLOAT64_BAR * tensor.norm + FLOAT64_FLOOR * self._largest
            most = max(exact, min(CONDITION * tensor.ordinary_difference, AGREEMENT * tensor.norm))
        else:
            errors = self.errors("ordinary")
            upper_quartile = errors[3 * (len(errors) - 1) // 4]
            typical = self._dead_norm if self.is_dead(tensor) else upper_quartile * tensor.norm
            most = TENSOR_FACTOR * max(tensor.ordinary_difference, typical)
        return min(most if self.judged else inf, sys.float_info.max)

    @cached_property
    def failed(self) -> tuple[TensorError, ...]:
        """Return what is further from the truth than allowed, or not finite, the furthest first."""
        compared = (self.loss, *self.tensors)
        above = [tensor for tensor in compared if not tensor.radix_difference <= self.allowed(tensor)]
        return tuple(sorted(above, key=lambda tensor: -_relative(tensor.radix_difference, self.allowed(tensor))))

    @property
    def disagreeing(self) -> tuple[TensorError, ...]:
        """Name gradients, in float64, on which two ordinary ways disagree: a padded batch and single sequences."""
        if self.precision != "float64":
            return ()
        floor = FLOAT64_FLOOR * self._largest
        return tuple(t for t in self.alive if not t.ordinary_difference <= AGREEMENT * t.norm + floor)

    @property
    def worst(self) -> TensorError:
        """Return the tensor with the largest relative error of radix among those alive; among all if none is alive."""
        return max(self.alive or self.tensors, key=lambda tensor: tensor.radix)

    def errors(self, arm: str) -> list[float]:
        """List relative errors of an arm in the gradients that are alive, the smallest first; a zero if none is.

        arm: `radix` or `ordinary`.
        """
        return sorted(getattr(tensor, arm) for tensor in self.alive) or [0.0]

    @property
    def median_ratio(self) -> float:
        """Return radix's error over the ordinary arm's, the median over the tensors alive; 1 in float64."""
        ratios = [_relative(tensor.radix_difference, tensor.ordinary_difference) for tensor in self.alive]
        return statistics.median(ratios) if ratios and self.precision != "float64" else 1.0

    @property
    def _largest(self) -> float:
        return max((tensor.norm for tensor in self.tensors), default=0.0)

    @property
    def _dead_norm(self) -> float:
        return (DEAD if self.precision == "float64" else DROWNED) * self._largest


@dataclass(frozen=True)
class EquivalenceReport:
    """What `verify_equivalence` measured. `str()` is a table to read.

    rungs: one for each precision: the losses, the errors of every gradient in both arms, and the verdict. That of a
        precision is `report["float64"]`.
    """

    rungs: tuple[Rung, ...]

    @property
    def passed(self) -> bool:
        """Return whether every rung passed."""
        return not self.reason

    @property
    def conclusive(self) -> bool:
        """Return whether no gradient is dead, so that every one was tested."""
        return not self.rungs[0].dead

    @property
    def reason(self) -> str:
        """Say why it did not pass, in one line that names the parameter; empty if it did."""
        return next(iter(_failures(self.rungs)), "")

    def __getitem__(self, precision: str) -> Rung:
        return next(rung for rung in self.rungs if rung.precision == precision)

    def __str__(self) -> str:
        lines = [
            f"{'':<34}   {'worst tensor':>17}   {'median tensor':>17}",
            f"{'precision':<10} {'loss':>11} {'by radix':>11}" + f"   {'radix':>8} {'ordinary':>8}" * 2,
        ]
        return "\n".join([*lines, *map(_line, self.rungs), *_verdict(self.rungs)])


def _line(rung: Rung) -> str:
    """Write the line of a rung in the table."""
    radix, ordinary, _ = rung.loss.values
    errors = [rung.errors(arm) for arm in ("radix", "ordinary")]
    worst, median = ([f"{of(each):>8.1e}" for each in errors] for of in (max, statistics.median))
    verdict = "not judged" if not rung.judged and rung.passed else "equal" if rung.passed else "NOT EQUAL"
    return f"{rung.precision:<10} {ordinary:>11.7f} {radix:>11.7f}   {' '.join(worst)}   {' '.join(median)}   {verdict}"


def _verdict(rungs: Sequence[Rung]) -> list[str]:
    """Write the lines below the table: what failed, what was not judged, what proves little."""
    lines = _failures(rungs)
    lines += [
        f"{rung.precision}: not judged: rounding to 16 bits moves tokens between experts, with radixtrain and without"
        for rung in rungs
        if not rung.judged and rung.passed
    ]
    dead = [tensor.name for tensor in rungs[0].dead]
    if dead:
        named = ", ".join(dead[:3]) + (f" and {len(dead) - 3} more" if len(dead) > 3 else "")
        lines.append(f"zero: {named}: the true gradient is zero on this data, and by radix too, which proves little")
    return lines


def _failures(rungs: Sequence[Rung]) -> list[str]:
    return [f"{rung.precision}: NOT EQUAL: {rung.reason}" for rung in rungs if not rung.passed]


def _relative(error: float, norm: float) -> float:
    """Divide; 0 / 0 is 0, and what is no number is infinite: `max` and `sorted` could overlook a NaN."""
    return error / norm if norm > 0 else (0.0 if error == 0 else inf)
