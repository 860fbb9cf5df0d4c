"""The head of a language model: whether it is one matrix product, and the rows from which the loss is computed.

The fused loss (`linear_cross_entropy`) multiplies hidden rows by the matrix of the output embeddings. Many heads do
more: a dense layer and a norm before it (BERT, ModernBERT), a scale or a soft-cap after it (Granite, Cohere, Gemma 2),
an adapter on it. Configurations name this in too many ways to list them, so `has_plain_head` measures it, once, when a
model is loaded. Then the loss is computed from

    hidden_rows    (R, D)  the rows that predict, for the fused loss, if the head is plain
    logits_rows    (R, V)  the logits of these rows, by the model's own head, if it is not

For a radix batch the backbone returns only the rows that predict. For an ordinary padded batch they are selected before
the head, so that both compute the same rows of logits.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from threading import RLock, get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from radixtrain.errors import UserError, first_line
from radixtrain.hf.backbone import Parts, parts_of
from radixtrain.hf.guards.code import is_hooked
from radixtrain.hf.guards.draws import evaluating
from radixtrain.hf.guards.rules import padding_idx_of_positions
from radixtrain.tree.radix_inputs import radix_of

logger = logging.getLogger(__name__)

ORDINARY_KEYS = ("input_ids", "attention_mask", "position_ids")
NUM_TOKENS = 8
LARGE = 1000.0  # a row of order one shows a bias, one of this order a soft-cap
_REPLACING = RLock()  # for one thread at a time
SAME_ROW = 1e-2  # relative L2: rounding of 16 bits stays below it, the influence of another row does not


def has_plain_head(model: nn.Module) -> bool:
    """Return whether the logits are `linear(last_hidden_state, weight, bias)` of the output embeddings, and only that.

    model: a `PreTrainedModel` for causal language modelling, or one wrapped by PEFT. It is not changed.

    The model computes logits from three random rows in place of what its backbone returns, in evaluation mode and
    without gradients. Its layers do not run, so this takes as long as three rows of the head, on any device. A head is
    plain if its logits are the product bit for bit, if no parameter lies outside of it and the backbone (a bias that is
    zero now would not stay zero), and if neither it nor the model has a hook: a fused head calls neither. The
    log says which head it is, and why.

    Raises UserError if the model computes no logits from `input_ids` only, or if its logits are not computed row by row
    from its backbone's `last_hidden_state`.
    """
    parts = parts_of(model)
    reason = _why_not_plain(parts)
    if reason is None:
        logger.debug("the head of %s is one matrix product: head and loss are fused", parts.name)
    else:
        logger.info("the head of %s %s: its own head is used, which holds [P, vocab] logits", parts.name, reason)
    return reason is None


def hidden_rows(parts: Parts, batch: Mapping[str, Any]) -> Tensor:
    """Return the hidden rows that predict, (R, D).

    parts: of the model, see `parts_of`.
    batch: for a shared model, what a `RadixCollator` returns, without labels and shift_labels; for any other model,
        `input_ids`, `attention_mask`, `position_ids` and `radix` of a `PaddedCollator`.
    """
    if not is_padded(batch):
        return parts.backbone(**batch).last_hidden_state[0]
    hidden = parts.backbone(**_ordinary_inputs(parts.decoder, batch)).last_hidden_state
    return hidden.flatten(0, 1).index_select(0, radix_of(batch).predictor_indices)


def logits_rows(parts: Parts, batch: Mapping[str, Any]) -> Tensor:
    """Return the logits, (R, V), of the rows that predict, by the model's own head. Arguments: as `hidden_rows`."""
    base: Any = parts.base
    if not is_padded(batch):
        return base(**batch).logits[0]
    return logits_of(parts, hidden_rows(parts, batch))[0]


def is_padded(batch: Mapping[str, Any]) -> bool:
    """Return whether it is a batch of a `PaddedCollator`, and not of a `RadixCollator`."""
    return radix_of(batch).layout is None


def _ordinary_inputs(decoder: PreTrainedModel, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an ordinary batch for a model.

    RoBERTa and its relatives count positions from `padding_idx + 1` if none are given. The collator counts from 0, so
    these models do not get its positions.
    """
    given = {name: batch[name] for name in ORDINARY_KEYS}
    if padding_idx_of_positions(decoder) is not None:
        positions = given["position_ids"]
        counted = torch.arange(positions.shape[1], device=positions.device).expand_as(positions)
        if torch.equal(positions, counted):  # waits for the device, in ordinary batches of these models
            del given["position_ids"]
    return {**given, "use_cache": False}


def _why_not_plain(parts: Parts) -> str | None:
    """Say why the loss needs the model's own head; None if the head is one matrix product."""
    head = parts.head
    rows, logits = _logits_of_random_rows(parts)
    if any(is_hooked(module) for module in (parts.base, head)):
        return "has hooks, or the model has"
    if type(head) is not nn.Linear:
        return f"is not a plain nn.Linear ({type(head).__module__}.{type(head).__qualname__})"
    beyond = _parameters_beyond(parts)
    if beyond:
        return f"has parameters besides its last matrix ({beyond[0]})"
    if rows.shape[1] != head.in_features:
        return "does more than one matrix product"
    product = linear(rows, head.weight, head.bias)
    wide = torch.promote_types(product.dtype, logits.dtype)
    if not torch.equal(product.to(wide), logits.to(wide)):
        return "does more than one matrix product"
    return None if product.any() else "is all zero, so its logits do not show whether it is one matrix product"


def _parameters_beyond(parts: Parts) -> list[str]:
    """List the parameters that are neither the backbone's nor the output embeddings'."""
    known = {id(parameter) for module in (parts.backbone, parts.head) for parameter in module.parameters()}
    return [name for name, parameter in parts.base.named_parameters() if id(parameter) not in known]


@torch.no_grad()
def _logits_of_random_rows(parts: Parts) -> tuple[Tensor, Tensor]:
    """Return three rows a, b, a, (3, D), and the logits that the model computes from them, (3, V)."""
    base, head = parts.base, parts.head
    weight = getattr(head, "weight", None)
    like = weight if isinstance(weight, Tensor) and weight.is_floating_point() else next(base.parameters())
    # The second is for backbones that end with a projection (OPT).
    widths = [getattr(base.config.get_text_config(), "hidden_size", None), getattr(head, "in_features", None)]
    errors = ["its hidden size is unknown"]
    for width in dict.fromkeys(filter(None, widths)):
        rows = _random_rows(width, like)
        try:
            with evaluating(base):
                logits = logits_of(parts, rows)
        except Exception as error:  # a model that expects other inputs may raise anything
            errors.append(f"{type(error).__name__}: {first_line(error)}")
            continue
        _check_rows(parts.name, logits)
        return rows, logits[0]
    raise UserError(
        f"{parts.name} computes no logits from input_ids only ({errors[-1]}), so its loss cannot be computed "
        f"from the rows that predict"
    )


def _random_rows(width: int, like: Tensor) -> Tensor:
    """Draw two rows, (3, D) with the first one repeated, without touching the global random state."""
    generator = torch.Generator(like.device).manual_seed(0)
    small, large = torch.randn(2, width, generator=generator, device=like.device, dtype=torch.float32)
    return torch.stack([small, LARGE * large, small]).to(like.dtype)


def logits_of(parts: Parts, rows: Tensor) -> Tensor:
    """Return the logits, (1, R, V), of the model if its backbone returned these rows, (R, D)."""
    ids = torch.arange(1, NUM_TOKENS + 1, device=rows.device)[None]
    base: Any = parts.base
    with _returning(parts.backbone, rows):
        return base(input_ids=ids).logits


def _check_rows(name: str, logits: Tensor) -> None:
    """Refuse logits that depend on more than one hidden row each. name: the class of the model."""
    if logits.shape[:2] != (1, 3):
        raise UserError(
            f"{name} makes logits {list(logits.shape)} of 3 hidden rows, not those of its backbone's "
            f"last_hidden_state, so its loss cannot be computed from the rows that predict"
        )
    first, _, again = logits[0].double()
    if not (first - again).norm() <= SAME_ROW * first.norm():
        raise UserError(
            f"the head of {name} gives a hidden row other logits if other rows are next to it, so its loss cannot be "
            f"computed from the rows that predict"
        )


@dataclass
class _Returned(ModelOutput):
    """What a backbone returns: hidden rows. Every other attribute that a model may read is None."""

    last_hidden_state: Tensor | None = None

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


@contextmanager
def _returning(backbone: PreTrainedModel, rows: Tensor) -> Iterator[None]:
    """Make the backbone return these rows to this thread, whatever its arguments."""
    thread = get_ident()

    @wraps(backbone.forward)  # or a model that is judged again meanwhile seems to take no position_ids
    def forward(*args: object, **kwargs: object) -> Any:
        return _Returned(last_hidden_state=rows[None]) if get_ident() == thread else ordinary(*args, **kwargs)

    with _REPLACING:
        ordinary, own = backbone.forward, vars(backbone).get("forward")  # accelerate sets one on the instance
        backbone.forward = forward
        try:
            yield
        finally:
            if own is None:
                del backbone.forward
            else:
                backbone.forward = own
