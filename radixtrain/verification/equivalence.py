"""Compares radixtrain with ordinary Hugging Face on the same model and data: loss and every parameter's gradient.

Both arms are compared with the float64 truth of `radixtrain/verification/oracle.py`, in every precision that matters. A
close loss proves little (a wrong mask was measured to move it by 0.07 %), so gradients are compared by tensor.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

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
from radixtrain.verification.report import EquivalenceReport, Rung, TensorError

logger = logging.getLogger(__name__)
AUTOCAST = {"bf16-mixed": torch.bfloat16}
SIXTEEN_BITS = ("bfloat16", "float16")
NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def verify_equivalence(
    model: nn.Module,
    features: Features,
    *,
    attention: str = "auto",
    kernel: str = "auto",
    collator: Callable[[Features], dict[str, Any]] | None = None,
    precisions: Sequence[str] | None = None,
) -> EquivalenceReport:
    """Compare the loss and the gradients of a radix batch with those of the ordinary model.

    model: a `PreTrainedModel` or PEFT model, shared or not. It is unchanged afterwards, and has no gradients. While
        it computes in float64 it takes 24 bytes for each trained parameter and 8 for each frozen one.
    features: as a `RadixCollator` takes them; at least one token must bear loss.
    attention, kernel: as for `share_prefixes`. A kernel that takes only 16-bit tensors is used only on 16-bit rungs.
    collator: default `RadixCollator()`, which takes no features without labels; see its `loss_on_all`.
    precisions: of `float64`, `float32` and the model's own dtype; default all of them.

    Meanwhile dropout that `share_prefixes` allowed, a router loss and AdaLoRA's regularizer are off.
    Returns an `EquivalenceReport`, which prints as a table.
    Raises ValueError if nothing bears loss. Raises UserError as `share_prefixes` does, and if the ordinary gradient is
    not finite.

    >>> verify_equivalence(model, rows).passed
    True
    """
    batch = (collator or RadixCollator())(features)
    return verify_arms(
        model,
        features,
        ordinary=lambda: ordinary_padded(model, features),
        radix=lambda: radix_batch(model, batch),
        attention=attention,
        kernel=kernel,
        precisions=precisions,
    )


def verify_arms(
    model: nn.Module,
    features: Features,
    ordinary: Arm,
    radix: Arm,
    *,
    attention: str = "auto",
    kernel: str = "auto",
    precisions: Sequence[str] | None = None,
    autocast: torch.dtype | None = None,
) -> EquivalenceReport:
    """Compare as `verify_equivalence` does, but with other ways to compute the two losses, such as a trainer's own.

    ordinary, radix: yield the terms of the loss, of the model as it came from Hugging Face and of the shared model.
    autocast: the dtype of mixed precision, which is then the last rung.
    """
    own = str(autocast or _own_dtype(model)).removeprefix("torch.")
    wanted = _precisions(precisions, own)
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
        for name in wanted:
            logger.info("verify: %s", name)
            with _computing_in(name, restore_model(model), own, autocast):
                by_ordinary = gradients_of(model, ordinary)
                share_prefixes(model, attention=attention, kernel=_kernel_of(name, kernel), allow_dropout=allowed)
                by_radix = gradients_of(model, radix)
            judged = not (_has_experts(base) and name in SIXTEEN_BITS)
            rungs.append(compare_gradients(name, truth, by_ordinary, by_radix, judged))
    return EquivalenceReport(tuple(rungs))


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

    model: loaded, on its device. It is restored, without gradients. A fresh LoRA, which is zero and would
        leave half of its gradients zero, is filled at random during the comparison.
    loss_sum: micro-batch -> summed loss of `model`, as `RadixModule.loss_sum`.
    features: the sequences of the step; see `SFTData.features_of_step`.
    collator: as in training.
    attention, kernel: as for `share_prefixes`.
    precision: Lightning's name of it; a mixed one adds a comparison under autocast.
    """
    device = next(model.parameters()).device
    unique = replace(collator, dedup=True, merge_labels=True)(features)
    plain = replace(collator, dedup=False, merge_labels=True)(features)
    with _filled_adapters(model):
        return verify_arms(
            model,
            features,
            lambda: _terms(loss_sum, plain, device),
            lambda: _terms(loss_sum, unique, device),
            attention=attention,
            kernel=kernel,
            autocast=AUTOCAST.get(precision),
        )


def _own_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype that the model trains in: of parameters in several dtypes, the 16-bit one."""
    dtypes = dict.fromkeys(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    return next((dtype for dtype in dtypes if dtype.itemsize == 2), next(iter(dtypes)))


def _precisions(wanted: Sequence[str] | None, own: str) -> Sequence[str]:
    """Return the wanted precisions, or all. own: the dtype of the training."""
    known = tuple(dict.fromkeys(("float64", "float32", own)))
    for precision in wanted or ():
        if precision not in known:
            raise UserError(f"precisions must be among {', '.join(known)} for this model, got {precision!r}")
    return wanted or known


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


def _kernel_of(precision: str, kernel: str) -> str:
    """Choose the kernel: flash-attn takes only 16 bits, so wider rungs test the same tree on another kernel."""
    return "auto" if kernel.startswith("flash") and precision in ("float64", "float32") else kernel


@contextmanager
def _restored_afterwards(model: nn.Module, before: Mapping[str, Any] | None) -> Iterator[None]:
    try:
        with same_buffers(model):
            yield
    finally:
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


def _tensor_error(name: str, truth: Tensor, ordinary: Tensor, radix: Tensor) -> TensorError:
    exact = truth.double()
    off, by_ordinary = ((x.double() - exact).abs().nan_to_num(inf, inf) for x in (radix, ordinary))
    place = tuple(int(index) for index in torch.unravel_index(off.argmax(), off.shape))
    values = radix[place].item(), ordinary[place].item(), exact[place].item()
    return TensorError(name, exact.norm().item(), by_ordinary.norm().item(), off.norm().item(), place, values)


@contextmanager
def _filled_adapters(model: nn.Module) -> Iterator[None]:
    """Fill each LoRA matrix B that is zero, as it starts, at random. The global random state does not change."""
    fresh = [p for name, p in model.named_parameters() if "lora_B" in name and not p.any()]
    draw = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            for parameter in fresh:
                parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.02)
        yield
    finally:
        with torch.no_grad():
            for parameter in fresh:
                parameter.zero_()


def _terms(loss_sum: Callable[[dict[str, Any]], Tensor], step: Step, device: torch.device) -> Iterator[Tensor]:
    """Yield the terms of the loss of a step, one for each micro-batch."""
    for batch in step.to(device).micro_batches:
        yield loss_sum(batch) / step.num_labels
