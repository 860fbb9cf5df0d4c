"""The oracle ladder: one loss and its gradients, computed in three ways.

    truth      the unmodified model in float64, one sequence at a time: no padding, no packing, no plan
    ordinary   the unmodified model in the precision of the training, on the padded batch that a trainer would make
    radix      the shared model in that precision, on a batch of unique tokens

Ordinary differs from truth only by rounding, so it says how far radix may be from the truth. Hugging Face computes
norms, rotary embeddings, router weights and losses in float32 whatever the dtype of the model is. Then a float64 model
agrees with itself to 1e-7 only, so `float64_throughout` turns these casts into casts to float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.nn.utils.rnn import pad_sequence
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from radixtrain.collators.features import token_rows
from radixtrain.collators.token_row import IGNORE_INDEX, TokenRow
from radixtrain.hf.backbone import model_inside
from radixtrain.hf.quantized import plain_weights

Features = Sequence[Mapping[str, Any]]
Arm = Callable[[], Iterable[Tensor]]
"""A way to compute one loss: its terms, each of which is differentiated before the next one is computed."""


@dataclass(frozen=True)
class Gradients:
    """A loss, and the gradient of every trained parameter by name; zero if the loss does not depend on it."""

    loss: float
    tensors: dict[str, Tensor]


def gradients_of(model: nn.Module, arm: Arm) -> Gradients:
    """Run an arm forward and backward. The model has no gradients afterwards; what it had before is lost."""
    model.zero_grad(set_to_none=True)
    loss = 0.0
    try:
        for term in arm():
            torch.autograd.backward(term)
            loss += term.item()
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        tensors = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in trained.items()}
    finally:
        model.zero_grad(set_to_none=True)
    return Gradients(loss, tensors)


def float64_truth(model: nn.Module, features: Features) -> Gradients:
    """Compute the truth: `ordinary_one_by_one` in float64. `model` must not be shared; its weights are restored."""
    with float64_throughout(model):
        return gradients_of(model, lambda: ordinary_one_by_one(model, features))


def ordinary_one_by_one(model: nn.Module, features: Features) -> Iterator[Tensor]:
    """Yield the terms of the mean cross-entropy over labelled tokens, one call per sequence.

    A token's cross-entropy is multiplied by its loss weight, if given; the divisor is the number of labelled tokens.
    Raises ValueError without labels.

    Written from the definition of the loss. The only code of radixtrain that it uses reads the features.
    """
    return _ordinary(model, features, one_by_one=True)


def ordinary_padded(model: nn.Module, features: Features) -> Iterator[Tensor]:
    """Yield the loss of one call on the right-padded batch of an ordinary collator."""
    return _ordinary(model, features, one_by_one=False)


def _ordinary(model: nn.Module, features: Features, one_by_one: bool) -> Iterator[Tensor]:
    """Yield the terms of the loss, one for each call. one_by_one: whether each sequence has a call of its own."""
    device = next(model.parameters()).device
    sequences = token_rows(features, loss_on_all=True)  # the tested collator checks for unlabelled ones
    count = sum(each.num_labels for each in sequences)
    if not count:
        raise ValueError("no token of these features bears loss, so there is no gradient to compare")
    for batch in [[each] for each in sequences if each.num_labels] if one_by_one else [sequences]:
        padded = partial(_padded, batch, device)
        inputs = {"input_ids": padded(lambda row: row.input_ids)}
        if not one_by_one or batch[0].position_ids is not None:  # or Hugging Face reads a jump as another document
            inputs["attention_mask"] = padded(lambda row: np.ones_like(row.input_ids))
            inputs["position_ids"] = padded(lambda row: _given(row.position_ids, np.arange(len(row.input_ids))))
        labels = padded(lambda row: row.labels, IGNORE_INDEX)
        weights = padded(lambda row: _given(row.loss_weights, np.ones(len(row.labels))))
        yield _cross_entropy(model(**inputs, use_cache=False).logits, labels, weights) / count


def _padded(
    batch: Sequence[TokenRow], device: torch.device, column: Callable[[TokenRow], np.ndarray], fill: int = 0
) -> Tensor:
    """Return a column of some sequences, (B, L), filled up on the right."""
    return pad_sequence([torch.tensor(column(row)) for row in batch], True, fill).to(device)


def _given(column: np.ndarray | None, default: np.ndarray) -> np.ndarray:
    return default if column is None else column


def radix_batch(model: nn.Module, batch: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the loss that a shared model returns."""
    device = next(model.parameters()).device
    yield model(**{name: x.to(device) for name, x in batch.items()}).loss


@contextmanager
def same_buffers(model: nn.Module) -> Iterator[None]:
    """Restore the buffers of a model afterwards; a forward pass may replace some, as rotary embeddings do."""
    buffers = [(module, name, buffer) for module in model.modules() for name, buffer in module._buffers.items()]
    try:
        yield
    finally:
        for module, name, buffer in buffers:
            module._buffers[name] = buffer


@contextmanager
def weights_in(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Cast parameters and floating-point buffers to another dtype for a while, in place; then restore them bit for bit.

    A wider dtype loses nothing. The `nn.Parameter` objects stay the same, so an optimizer that holds them does not
    notice. Flash attention, which takes only 16 bits, is `sdpa` meanwhile, and 4-bit weights are dequantized.
    """
    base = model_inside(model)
    attention = base.config._attn_implementation or ""
    with plain_weights(model):
        if "flash" in attention:
            base.set_attn_implementation("sdpa")
        originals = [(x, x.data) for x in (*model.parameters(), *model.buffers()) if x.is_floating_point()]
        try:
            for tensor, data in originals:
                tensor.grad, tensor.data = None, data.to(dtype)
            with same_buffers(model):
                yield
        finally:
            for tensor, data in originals:
                tensor.grad, tensor.data = None, data
            if "flash" in attention:
                base.set_attn_implementation(attention)


@contextmanager
def float64_throughout(model: nn.Module) -> Iterator[None]:
    """Compute in float64: the weights, and what the model casts to float32."""
    with _plain_experts(model_inside(model)), weights_in(model, torch.float64), float64_arithmetic():
        yield


@contextmanager
def float64_arithmetic() -> Iterator[None]:
    """Make float64 this thread's default dtype, and turn casts to float32 into casts to float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        # Activation checkpointing recomputes in the backward pass, which must run in the thread that has the mode.
        with _LiftCasts(), torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _plain_experts(base: PreTrainedModel) -> Iterator[None]:
    """Run mixtures of experts as a loop of matrix products: torch's grouped one takes no float64."""
    parts = [part for part in base.modules() if isinstance(part, PreTrainedModel)]
    if not any(part._can_set_experts_implementation() for part in parts):
        yield
        return
    before = [(part.config, part.config._experts_implementation) for part in parts]
    base.set_experts_implementation("eager")
    try:
        yield
    finally:
        for config, implementation in before:  # outermost first, since each sets those of its parts too
            config._experts_implementation = implementation


class _LiftCasts(TorchFunctionMode):
    """Passes float64 to torch functions wherever a caller passes the dtype float32."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.backward:
            func, kwargs = torch.autograd.backward, dict(kwargs or {})
            kwargs["grad_tensors"] = kwargs.pop("gradient", None)
        if func is torch.autograd.backward:
            return self._backward(*args, **(kwargs or {}))
        if func is torch.Tensor.view:  # which takes bits for another dtype, and casts none
            return func(*args, **(kwargs or {}))
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        return func(*args, **{k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()})

    def _backward(
        self,
        tensors: Tensor | Sequence[Tensor],
        grad_tensors: Tensor | Sequence[Tensor | None] | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        """Run both `backward` functions under the mode, which torch's own suspend: checkpointing would lose it."""
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        grad_tensors = [grad_tensors] if isinstance(grad_tensors, Tensor) else grad_tensors
        given = grad_tensors or [None] * len(tensors)
        gradients = [torch.ones_like(x) if g is None else g for x, g in zip(tensors, given, strict=True)]
        keep = create_graph if retain_graph is None else retain_graph
        with self:
            _engine_run_backward(
                tuple(tensors),
                tuple(gradients),
                keep,
                create_graph,
                tuple(inputs or ()),
                allow_unreachable=True,
                accumulate_grad=True,
            )


def _cross_entropy(logits_BLV: Tensor, labels_BL: Tensor, weights_BL: Tensor) -> Tensor:
    """Sum the weighted cross-entropy over labelled tokens, each predicted from the one before. In float32 or wider."""
    wide = logits_BLV.to(torch.promote_types(logits_BLV.dtype, torch.float32))
    rows, targets = wide[:, :-1].flatten(0, 1), labels_BL[:, 1:].flatten()
    each = nn.functional.cross_entropy(rows, targets, reduction="none", ignore_index=IGNORE_INDEX)
    return (weights_BL[:, 1:].flatten().to(wide.dtype) * each).sum()
