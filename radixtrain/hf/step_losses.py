"""The loss of an optimizer step of a `StepCollator`, micro-batch after micro-batch."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from radixtrain.collators.steps import Step
from radixtrain.errors import UserError
from radixtrain.hf.backbone import pretrained_model_of
from radixtrain.hf.head import has_plain_head
from radixtrain.hf.predicting_rows import forward_rows
from radixtrain.hf.refusals import check_only_cross_entropy
from radixtrain.hf.third_party import is_hooked


def step_losses(model: nn.Module, step: Step) -> Iterator[Tensor]:
    """Yield the terms of the mean loss of an optimizer step; the gradient of the step is the sum of theirs.

    model: of `share_prefixes`, on the device of the step.
    step: what a `StepCollator` returned, with `merge_labels`.

    The loss is the cross-entropy. It is averaged over no ranks: with several, give this the model inside the wrapper of
    DDP, and average each `.grad` after the last `backward`.

    Call `backward` on each term before the next one is drawn, which frees its activations.
    Raises UserError for a model that adds to the cross-entropy or replaces it, as `output_router_logits` does, and for
    hooks on a wrapper of the model, which is not called.

    >>> for loss in step_losses(share_prefixes(model), StepCollator(max_tokens=4096)(rows)):
    ...     loss.backward()
    """
    _check_model(model)
    plain_head = has_plain_head(model)
    for batch in step.micro_batches:
        yield forward_rows(model, batch, plain_head).loss_sum() / step.num_labels


def _check_model(model: nn.Module) -> None:
    try:
        base = pretrained_model_of(model)
    except TypeError:
        raise TypeError(
            f"step_losses takes a shared model, got {type(model).__name__}: give it the model inside (such as "
            f"ddp.module), and average each .grad over the ranks after the last backward"
        ) from None
    if model is not base and is_hooked(model):
        raise UserError(
            f"step_losses calls the {type(base).__name__} inside of {type(model).__name__}, so hooks on that one would "
            f"not run: register them on get_base_model(), and put torch.autocast around step_losses"
        )
    check_only_cross_entropy(model)
