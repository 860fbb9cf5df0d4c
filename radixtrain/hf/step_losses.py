"""An optimizer step of a `StepCollator`, pass after pass: the order of the passes, and what is kept meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from radixtrain.collators.steps import Step
from radixtrain.errors import UserError
from radixtrain.hf.backbone import pretrained_model_of
from radixtrain.hf.head import has_plain_head
from radixtrain.hf.pass_cache import LayerRows, PassCache
from radixtrain.hf.predicting_rows import forward_rows
from radixtrain.hf.refusals import check_only_cross_entropy
from radixtrain.hf.third_party import is_hooked
from radixtrain.tree.radix_inputs import radix_of, with_radix


def step_losses(model: nn.Module, step: Step) -> Iterator[Tensor]:
    """Yield the terms of the mean loss of an optimizer step; the gradient of the step is the sum of theirs.

    model: prepared by `prepare_model`, on the device of the step.
    step: what a `StepCollator` returned, with `merge_labels`.

    The loss is the cross-entropy. It is averaged over no ranks: with several, give this the model inside the wrapper of
    DDP, and average each `.grad` after the last `backward`.

    Call `backward` on each term before the next one is drawn, once, and on one that is 0 too: a prefix that several
    micro-batches continue gets its gradient last, from all of them. Raises UserError for a prefix that is left out
    after they went backward, for a second `backward` and for a sum of terms; for a model that adds to the cross-entropy
    or replaces it, as `output_router_logits` does; and for hooks on a wrapper of the model, which is not called.

    >>> for loss in step_losses(model, step):  # doctest: +SKIP
    ...     loss.backward()
    >>> optimizer.step()  # doctest: +SKIP
    """
    _check_model(model)
    plain_head = has_plain_head(model)
    for loss in loss_sums(step, lambda batch: forward_rows(model, batch, plain_head).loss_sum()):
        yield loss / step.num_labels


def _check_model(model: nn.Module) -> None:
    try:
        base = pretrained_model_of(model)
    except TypeError:
        raise TypeError(
            f"step_losses takes a prepared model, got {type(model).__name__}: give it the model inside (such as "
            f"ddp.module), and average each .grad over the ranks after the last backward"
        ) from None
    if model is not base and is_hooked(model):
        raise UserError(
            f"step_losses calls the {type(base).__name__} inside of {type(model).__name__}, so hooks on that one would "
            f"not run: register them on get_base_model(), and put torch.autocast around step_losses"
        )
    check_only_cross_entropy(model)


def loss_sums(step: Step, loss_sum: Callable[[dict[str, Any]], Tensor]) -> Iterator[Tensor]:
    """Yield the losses of `step_losses` before the division. loss_sum: runs the model on a micro-batch."""
    kept: dict[int, LayerRows] = {}
    held: dict[int, Tensor] = {}

    def run(place: int) -> Tensor:
        batch = step.micro_batches[place]
        sources = radix_of(batch).sources
        if not sources and place not in kept:
            return loss_sum(batch)
        context = [(kept[source], start, end) for source, start, end in sources]
        cache = PassCache(kept.get(place), context)
        loss = loss_sum(with_radix(batch, cache=cache))
        if loss.requires_grad:
            loss.register_hook(cache.check_once)
        return loss

    for place, trains in step.passes:
        if trains:
            yield held.pop(place) if place in held else run(place)
            if place in kept:
                kept.pop(place).check_joined()
            continue
        kept[place] = LayerRows()
        if step.holds_graph:
            held[place] = run(place)
        else:
            with torch.no_grad():
                run(place)
            torch.clear_autocast_cache()  # before torch 2.11 it has weights cast in there, which have no gradient
