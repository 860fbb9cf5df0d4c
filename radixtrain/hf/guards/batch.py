"""Refuses what would change the gradient of this batch. Errors name the model or the layer, the reason and the fix.

The model itself is judged in `model.py` and `rules.py`; this file checks what depends on the batch, on the options, or
was added since: a trainer may add adapters with dropout, or noise on the embeddings, after `share_prefixes`. What a
layer requests of its attention function is checked in `attention_interface.py`, random draws in `draws.py`.

Every tensor of an ordinary batch has one row per example, so trainers cut and join batches along the first axis: with
`dispatch_batches=True` every tensor comes cut to its first element, with `nn.DataParallel` each GPU gets a share. The
tensors of a radix batch have the lengths of the tree, so both are refused, dispatching already by the collator
(`radixtrain/collators/misuse_guard.py`). So are inputs that a wrapper dropped or added, and evaluations that take the
logits for one row per example: a radix batch gives only those of labelled tokens, `[B, P / B, V]`. Only
the stack says what an evaluation is for: `Trainer` takes `labels` from the batch before it calls the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import Cache, PreTrainedConfig, PreTrainedModel

from radixtrain.attention import STRATEGIES, choose_attention
from radixtrain.collators.misuse_guard import callers, is_instance_by_name
from radixtrain.collators.row_split import RowShare
from radixtrain.errors import UserError
from radixtrain.hf.attention_interface import OPTIONS
from radixtrain.hf.backbone import CACHE, Parts, pretrained_model_of
from radixtrain.hf.guards.draws import number_that_draws, why_refused
from radixtrain.hf.guards.rules import (
    Limit,
    limit_of,
    positions_in_table,
    why_no_soft_cap,
)
from radixtrain.tree.layout import TreeLayout
from radixtrain.tree.radix_inputs import RadixInputs

# Arguments of a forward pass that cannot be used with a radix batch, by pattern, and what to do instead.
NOT_USABLE = {
    "^attention_mask$": "a radix batch has no padding: take the mask out, and train prompt or prefix tuning without it",
    f"^({'|'.join(CACHE)})$": "a cache, or prefix tuning, puts keys in front of every sequence: use an ordinary batch",
    "token_type_ids$": "they are not part of a radix batch: use an ordinary batch",
    "pixel|image|video|audio|^input_features": "a radix batch has text only: use an ordinary batch",
}
HEAD_DIM = 64  # which every kernel takes
# Outputs that would hold the unique tokens, not the tokens of each sequence.
RETURNED_PER_TOKEN = ("output_hidden_states", "output_attentions")


def on_device_of_rows(radix: RadixInputs, given: Mapping[str, Any]) -> RadixInputs:
    """Move what a batch carries to where its rows are: some wrappers move only tensors. given: its other arguments."""
    rows = _rows_of(given)
    return radix if rows is None or rows.device == radix.rows.device else radix.to(rows.device)


def own_layout(radix: RadixInputs) -> TreeLayout:
    """Return the plan of a batch, for one call. Raises UserError if the batch has none."""
    layout = radix.layout
    if layout is None:
        raise UserError(
            "a padded batch of StepCollator(dedup=False) has no plan: give an ordinary model its input_ids, "
            "attention_mask and position_ids"
        )
    return layout


def check_batch(
    parts: Parts,
    head: Any,
    radix: RadixInputs,
    layout: TreeLayout,
    given: Mapping[str, Any],
    share: RowShare | None,
    allowed: tuple[str, ...],
) -> None:
    """Refuse a batch of which the gradient would be another one, although the model could be shared.

    given: the arguments of the call without `radix`. share: of its rows that this rank of an `sp_group` computes.
    """
    decoder = parts.decoder
    if getattr(parts.backbone, "_is_replica", False):  # torch sets it on the copies of DataParallel
        raise UserError(
            "torch.nn.DataParallel cannot spread a radix batch over several GPUs; Trainer uses it if one process sees "
            "several: start one process per GPU (torchrun), or show the process one: CUDA_VISIBLE_DEVICES=0"
        )
    if share is not None and radix.split is None:
        raise UserError(
            "a radix batch came to a model of share_prefixes(model, sp_group=...) without having been split over "
            "its ranks: call what share_prefixes got, not a part of it; let PEFT wrap the model before that"
        )
    _check_inputs(decoder, given, layout.num_rows if share is None else share.count(layout.num_rows))
    if limit := limit_of(decoder, layout.max_seqlen, layout.max_position):
        raise UserError(f"{type(decoder).__name__} has {limit.reason}; set max_length to {limit.tokens} or less")
    if head is not None and number_that_draws(head, allowed)[0]:
        raise UserError(why_refused("the head draws at random", head, allowed))


def _check_inputs(decoder: PreTrainedModel, given: Mapping[str, Any], num_rows: int) -> None:
    """Refuse a batch that lost tokens or positions, and what cannot be used with a batch of unique tokens."""
    rows = _rows_of(given)
    if rows is None or tuple(rows.shape[:2]) != (1, num_rows):
        came = None if rows is None else tuple(rows.shape)
        raise UserError(
            f"a radix batch of {num_rows} unique tokens needs input_ids [1, {num_rows}], got {came}; "
            f"something on the way cut the batch or added tokens to it (prompt tuning does)"
        )
    positions = given.get("position_ids")
    if positions is None or positions.shape[-1] != num_rows:
        came = None if positions is None else tuple(positions.shape)
        raise UserError(
            f"a radix batch of {num_rows} unique tokens needs its position_ids [1, {num_rows}], got "
            f"{came}: without them a token after a shared prefix would get the position of its row; keep every key of "
            f"the collator"
        )
    for name in OPTIONS & given.keys():
        raise UserError(f"a radix batch came with {name}, which layers hand on to their attention: leave it out")
    for name, value in given.items():
        called = CACHE[0] if isinstance(value, Cache) else name
        reason = next((reason for pattern, reason in NOT_USABLE.items() if re.search(pattern, called)), None)
        if reason and isinstance(value, Tensor | Cache):
            raise UserError(f"a radix batch came with {name}; {reason}")
    for name in RETURNED_PER_TOKEN:
        if given.get(name, getattr(decoder.config, name, False)):
            raise UserError(
                f"{name} would hold unique tokens, not those of each sequence; turn it off, or use an ordinary batch"
            )


def _rows_of(given: Mapping[str, Any]) -> Tensor | None:
    """Return the unique tokens, as ids or as embeddings."""
    ids = given.get("input_ids")
    return given.get("inputs_embeds") if ids is None else ids


TRAINER = "transformers.trainer", "Trainer"  # without importing it: that needs accelerate
COLLATOR = "radixtrain.collators.radix", "RadixCollator"


def check_evaluation() -> None:
    """Refuse a radix batch whose logits a Hugging Face `Trainer` will use: `compute_metrics`, `predict`.

    Takes 3 us under a `Trainer`, 7 us at most.

    Raises UserError inside `Trainer.prediction_step`, also in a subclass, unless it wants only the loss, and inside
    `Trainer.training_step` if evaluations will follow that do so with the same collator.
    """
    trainer = _trainer_that_uses_the_logits()
    if trainer is not None:
        raise UserError(
            f"{trainer} uses the logits of an evaluation (compute_metrics, predict) as one row per example, but a "
            f"batch of RadixCollator has the logits of labelled tokens only, so the metrics would be wrong. Evaluate "
            f"on ordinary batches: by the trainer's own collator, or with Hugging Face's Trainer by another collator "
            f"for evaluation "
            f"(recipes/hf_trainer_metrics.py in the repository). For the loss only, leave out compute_metrics, or set "
            f"prediction_loss_only=True in the training arguments"
        )


def _trainer_that_uses_the_logits() -> str | None:
    """Return the class of the `Trainer` that calls the model for its logits, now or later; None if there is none.

    The innermost `prediction_step` decides: an override may request something else of its parent class.
    """
    for frame in callers():
        if frame.f_code.co_name == "prediction_step":
            names = frame.f_locals
            if "prediction_loss_only" in names and is_instance_by_name(names.get("self"), *TRAINER):
                return None if names["prediction_loss_only"] else type(names["self"]).__name__
        elif frame.f_code.co_name == "training_step" and is_instance_by_name(frame.f_locals.get("self"), *TRAINER):
            trainer = frame.f_locals["self"]
            return type(trainer).__name__ if _will_use_the_logits(trainer) else None
    return None


def _will_use_the_logits(trainer: Any) -> bool:
    """Return whether evaluations during the training use logits of `trainer.data_collator`'s batches.

    False for a class of the user's, which may take other batches.
    """
    args, is_stock = trainer.args, type(trainer).__module__.startswith(("transformers.", "trl."))
    wants = trainer.compute_metrics is not None and args.eval_strategy != "no" and not args.prediction_loss_only
    return wants and is_stock and is_instance_by_name(trainer.data_collator, *COLLATOR)


def check_length(parts: Parts, longest: int) -> None:
    """Refuse so many positions of a prompt and its answer, if a table or chunks of the model do not reach so far."""
    limit, table = limit_of(parts.decoder, longest, longest - 1), positions_in_table(parts.decoder)
    if limit is None and table is not None and longest > table:
        limit = Limit(f"a table of {table} positions", table)
    if limit is not None:
        raise UserError(
            f"{parts.name} has {limit.reason}, and the longest prompt with its answer takes {longest} positions; "
            f"shorten them to {limit.tokens}"
        )


def check_choice(decoder: PreTrainedModel, attention: str, kernel: str) -> None:
    """Refuse an unknown name, and a kernel that does not run on the model's device. A call refuses its head dims."""
    if attention not in ("auto", *STRATEGIES) or kernel != "auto":
        weight = next(decoder.parameters())
        softcap = getattr(decoder.config, "attn_logit_softcapping", None) is not None
        choose_attention(attention, kernel, weight.device, weight.dtype, HEAD_DIM, softcap=softcap)


def check_soft_cap(name: str, config: PreTrainedConfig) -> None:
    """Refuse `sdpa` for a model with a soft-cap: transformers before 5.21 chooses it, and leaves the soft-cap out."""
    if reason := why_no_soft_cap(config):
        raise UserError(f"{name} has {reason}; load it with 'eager' (fit: model.attn_implementation: eager)")


def added_losses(model: nn.Module) -> list[tuple[Any, str, str]]:
    """List what a model adds to its cross-entropy: the configuration, the key that turns it on, and its name."""
    adapters = (getattr(model, "peft_config", None) or {}).values()
    keys = [
        (pretrained_model_of(model).config.get_text_config(), "output_router_logits", "router loss"),
        *((adapter, "orth_reg_weight", "regularizer of AdaLoRA") for adapter in adapters),
    ]
    return [(config, key, name) for config, key, name in keys if getattr(config, key, None)]


def check_only_cross_entropy(model: nn.Module) -> None:
    """Refuse a model whose own loss is not the cross-entropy of the predictions."""
    base: Any = pretrained_model_of(model)
    for config, key, name in added_losses(model):
        raise UserError(
            f"{type(base).__name__} adds a {name} ({key}={getattr(config, key)}), which is not part of the loss here; "
            f"set {key} to {type(getattr(config, key))()}, or use the drop-in RadixCollator with the model's own loss"
        )
    origin = str(base.loss_function.__module__)
    if not origin.startswith(("transformers.", "radixtrain.")):
        raise UserError(
            f"{type(base).__name__} has its own loss_function ({origin}), and the loss here is the "
            f"cross-entropy; use the drop-in RadixCollator with the model's own loss"
        )


class Options(NamedTuple):
    """The options of `share_prefixes`, as they were given."""

    attention: str
    kernel: str
    min_shared_tokens: int
    min_ratio: float
    allow_dropout: tuple[str, ...]

    @classmethod
    def checked(cls, min_shared_tokens: Any, min_ratio: Any, allow_dropout: Any, **others: str) -> Options:
        """Raise UserError for values of another type or below the smallest."""
        if isinstance(allow_dropout, str) or not isinstance(allow_dropout, Iterable):
            raise UserError(f"allow_dropout must be a list of names, got {allow_dropout!r}")
        if type(min_shared_tokens) is not int or min_shared_tokens < 1:
            raise UserError(f"min_shared_tokens must be a whole number from 1 on, got {min_shared_tokens!r}")
        if type(min_ratio) not in (int, float) or not min_ratio >= 0:
            raise UserError(f"min_ratio must be a number from 0 on, got {min_ratio!r}")
        return cls(
            min_shared_tokens=min_shared_tokens,
            min_ratio=min_ratio,
            allow_dropout=tuple(allow_dropout),
            **others,
        )


def check_not_shared(model: nn.Module) -> None:
    """Refuse an adapter on a matrix that two modules share: it would be merged into both of them.

    model: wrapped by PEFT.

    Raises UserError that names both modules.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    modules = dict(pretrained_model_of(model).named_modules())
    holders = [(path, p) for path, module in modules.items() for p in module._parameters.values()]
    for path, layer in modules.items():
        weight = getattr(layer.get_base_layer(), "weight", None) if isinstance(layer, BaseTunerLayer) else None
        if weight is not None:
            others = [holder for holder, p in holders if p is weight and not f"{holder}.".startswith(f"{path}.")]
            if others:
                raise UserError(
                    f"model.lora_target_modules: {path} shares its weight with {others[0]} (tie_word_embeddings), so "
                    f"merging the adapter would change both; leave it out, or train a checkpoint that does not share it"
                )
