"""The head of a language model: whether it is one matrix product, and the rows from which the loss is computed.

The fused loss (`linear_cross_entropy`) multiplies hidden rows by the matrix of the output embeddings. Many heads do
more: a dense layer and a norm before it (BERT, ModernBERT), a scale or a soft-cap after it (Granite, Cohere, Gemma 2),
an adapter on it. Configurations name this in too many ways to list them, so `has_plain_head` measures it, once, when a
model is loaded. Then the loss is computed from

    hidden_rows    (R, D)  the rows that predict, for the fused loss, if the head is plain
    logits_rows    (R, V)  the logits of these rows, by the model's own head, if it is not

Of a radix batch the backbone returns only the rows that predict. Of an ordinary padded batch they are selected before
the head, so that both arms compute the same rows of logits.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from radixtrain.errors import UserError, first_line
from radixtrain.hf.backbone import backbone_of, pretrained_model_of, text_decoder_of, with_rows
from radixtrain.hf.positions import padding_idx_of_positions

__all__ = ["has_plain_head", "hidden_rows", "logits_rows"]

logger = logging.getLogger(__name__)

ORDINARY_KEYS = ("input_ids", "attention_mask", "position_ids")
NUM_TOKENS = 8
LARGE = 1000.0  # a row of order one shows a bias, one of this order a soft-cap
SAME_ROW = 1e-2  # relative L2: rounding of 16 bits stays below it, the influence of another row does not
# Settings of transformers' configurations that change the logits, for the meta device, where nothing can be measured.
HEAD_SETTINGS = (
    "final_logit_softcapping", "logits_scaling", "logit_scale", "logits_soft_cap", "output_logit_soft_cap",
    "lm_head_multiplier", "dim_model_base",
)  # fmt: skip


def has_plain_head(model: nn.Module) -> bool:
    """Whether the logits are `linear(last_hidden_state, weight, bias)` of the output embeddings and nothing else.

    model: a `PreTrainedModel` for causal language modelling, or one wrapped by PEFT. It is not changed.

    The model computes logits from three random rows in place of what its backbone returns, in evaluation mode and
    without gradients. Its layers do not run, so this takes as long as three rows of the head, on any device. A head is
    plain if its logits are the product bit for bit, and if no parameter lies outside of it and the backbone: a bias
    that is zero now would not stay zero. On the meta device the configuration decides. The log says which head it is,
    and why.

    Raises UserError if the model computes no logits from `input_ids` only, or if its logits are not computed row by row
    from its backbone's `last_hidden_state`.
    """
    base = pretrained_model_of(model)
    reason = _why_not_plain(base)
    name = type(base).__name__
    if reason is None:
        logger.info("the head of %s is one matrix product: head and loss are fused", name)
    else:
        logger.info("the head of %s %s: its own head is used, which holds [P, vocab] logits", name, reason)
    return reason is None


def hidden_rows(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """(R, D). The hidden rows that predict.

    batch: for a prepared model, what a `RadixCollator` returns, without labels and shift_labels; for any other model,
        `input_ids`, `attention_mask`, `position_ids` and `predictor_indices` of a `PaddedCollator`.
    """
    backbone = backbone_of(model)
    if "predictor_indices" not in batch:
        return backbone(**batch).last_hidden_state[0]
    hidden = backbone(**_ordinary_inputs(backbone, batch)).last_hidden_state
    return _selected(hidden, batch["predictor_indices"])


def logits_rows(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """(R, V). The logits of the hidden rows that predict, by the model's own head. batch: as for `hidden_rows`."""
    base: Any = pretrained_model_of(model)
    if "predictor_indices" not in batch:
        return base(**batch).logits[0]
    backbone = backbone_of(model)
    with _only_rows(backbone, batch["predictor_indices"]):
        return base(**_ordinary_inputs(backbone, batch)).logits[0]


def _ordinary_inputs(backbone: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
    """An ordinary batch for a model.

    RoBERTa and its relatives count positions from `padding_idx + 1` if none are given. The collator counts from 0, so
    these models do not get its positions.
    """
    given = {name: batch[name] for name in ORDINARY_KEYS}
    if padding_idx_of_positions(text_decoder_of(backbone)) is not None:
        positions = given["position_ids"]
        counted = torch.arange(positions.shape[1], device=positions.device).expand_as(positions)
        if torch.equal(positions, counted):  # waits for the device, in the ordinary arm of these models
            del given["position_ids"]
    return {**given, "use_cache": False}


def _selected(hidden: Tensor, indices: Tensor) -> Tensor:
    return hidden.flatten(0, 1)[indices]


@contextmanager
def _only_rows(backbone: nn.Module, indices: Tensor) -> Iterator[None]:
    """Inside, the backbone returns only these rows of the flattened batch, `[1, P, D]`."""

    def select(backbone: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return with_rows(output, _selected(output[0], indices)[None])

    handle = backbone.register_forward_hook(select)
    try:
        yield
    finally:
        handle.remove()


def _why_not_plain(base: PreTrainedModel) -> str | None:
    """What the head does besides one matrix product, None if nothing."""
    head: Any = base.get_output_embeddings()
    rows, logits = _logits_of_random_rows(base, head)
    if type(head) is not nn.Linear:
        return f"is no plain nn.Linear ({type(head).__module__}.{type(head).__qualname__})"
    beyond = _parameters_beyond(base, head)
    if beyond:
        return f"has parameters besides its last matrix ({beyond[0]})"
    if rows.is_meta:
        return _changed_by_settings(base)
    return None if _is_product(logits, rows, head) else "does more than one matrix product"


def _is_product(logits: Tensor, rows: Tensor, head: nn.Linear) -> bool:
    """False for a head that is all zero, since its logits say nothing."""
    if rows.shape[1] != head.in_features:
        return False
    product = linear(rows, head.weight, head.bias)
    wide = torch.promote_types(product.dtype, logits.dtype)
    return torch.equal(product.to(wide), logits.to(wide)) and bool(product.any())


def _changed_by_settings(base: PreTrainedModel) -> str | None:
    config = base.config.get_text_config()
    found = [name for name in HEAD_SETTINGS if getattr(config, name, None) not in (None, 1.0)]
    return f"changes its logits ({found[0]}={getattr(config, found[0])})" if found else None


def _parameters_beyond(base: PreTrainedModel, head: nn.Module) -> list[str]:
    """Names of the parameters that are neither the backbone's nor the output embeddings'."""
    known = {id(parameter) for module in (backbone_of(base), head) for parameter in module.parameters()}
    return [name for name, parameter in base.named_parameters() if id(parameter) not in known]


@torch.no_grad()
def _logits_of_random_rows(base: PreTrainedModel, head: Any) -> tuple[Tensor, Tensor]:
    """Three rows a, b, a, (3, D), and the logits that the model computes from them, (3, V)."""
    weight = getattr(head, "weight", None)
    like = weight if isinstance(weight, Tensor) and weight.is_floating_point() else next(base.parameters())
    # The second is for backbones that end with a projection (OPT).
    widths = [getattr(base.config.get_text_config(), "hidden_size", None), getattr(head, "in_features", None)]
    errors = ["its hidden size is unknown"]
    for width in dict.fromkeys(filter(None, widths)):
        rows = _random_rows(width, like)
        try:
            logits = _logits_of(base, rows)
        except Exception as error:  # a model that expects other inputs may raise anything
            errors.append(f"{type(error).__name__}: {first_line(error)}")
            continue
        _check_rows(base, logits)
        return rows, logits[0]
    raise UserError(
        f"{type(base).__name__} computes no logits from input_ids only ({errors[-1]}), so its loss cannot be computed "
        f"from the rows that predict"
    )


def _random_rows(width: int, like: Tensor) -> Tensor:
    """(3, D). The global random state is not touched."""
    if like.is_meta:
        return like.new_empty(3, width)
    generator = torch.Generator(like.device).manual_seed(0)
    small, large = torch.randn(2, width, generator=generator, device=like.device, dtype=torch.float32)
    return torch.stack([small, LARGE * large, small]).to(like.dtype)


def _logits_of(base: Any, rows: Tensor) -> Tensor:
    """(1, R, V). The logits of the model if its backbone returned these rows, (R, D)."""
    ids = torch.arange(1, NUM_TOKENS + 1, device=rows.device)[None]
    with _evaluating(base), _returning(backbone_of(base), rows):
        return base(input_ids=ids).logits


def _check_rows(base: PreTrainedModel, logits: Tensor) -> None:
    """Each row of logits has to depend on one hidden row, not on the others."""
    if logits.shape[:2] != (1, 3):
        raise UserError(
            f"{type(base).__name__} makes logits {list(logits.shape)} of 3 hidden rows, not those of its backbone's "
            f"last_hidden_state, so its loss cannot be computed from the rows that predict"
        )
    if logits.is_meta:
        return
    first, _, again = logits[0].double()
    if not (first - again).norm() <= SAME_ROW * first.norm():
        raise UserError(
            f"the head of {type(base).__name__} gives a hidden row other logits if other rows are beside it, so its "
            f"loss cannot be computed from the rows that predict"
        )


@dataclass
class _Returned(ModelOutput):
    """What a backbone returns: hidden rows. Every other attribute that a model may read is None."""

    last_hidden_state: Tensor | None = None

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


@contextmanager
def _returning(backbone: Any, rows: Tensor) -> Iterator[None]:
    """Inside, the backbone returns these rows, whatever it is given."""
    own = vars(backbone).get("forward")  # accelerate sets one on the instance
    backbone.forward = lambda *args, **kwargs: _Returned(last_hidden_state=rows[None])
    try:
        yield
    finally:
        if own is None:
            del backbone.forward
        else:
            backbone.forward = own


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside, then every module's own mode again."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
