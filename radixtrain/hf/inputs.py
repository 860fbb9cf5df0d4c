"""What a radix batch contains when it reaches the backbone: all that the collator gave, and only what can be used.

Every tensor of an ordinary batch has one row per example, so trainers cut and join batches along the first axis: with
`dispatch_batches=True` every tensor comes cut to its first element, with `nn.DataParallel` each GPU gets a share. The
tensors of a radix batch have the lengths of the tree, so both are refused, dispatching already by the collator
(`radixtrain/collators/misuse_guard.py`). So are inputs that a wrapper dropped or added, and evaluations that take the
logits for one row per example: a radix batch gives one list of predictions, `[1, P, V]`, in the order of the tree. Only
the stack says what an evaluation is for: `Trainer` takes `labels` from the batch before it calls the model.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from radixtrain.collators.misuse_guard import callers, is_instance_by_name
from radixtrain.errors import UserError
from radixtrain.tree.layout import TreeLayout
from radixtrain.tree.radix_inputs import RadixInputs

# Arguments of a forward pass that cannot be used with a radix batch, by pattern, and what to do instead.
NOT_USABLE = {
    "^attention_mask$": "a radix batch has no padding: take the mask out, and train prompt or prefix tuning without it",
    "^past_key_values$": "a cache, or prefix tuning, puts keys in front of every sequence: use an ordinary batch",
    "token_type_ids$": "they are not part of a radix batch: use an ordinary batch",
    "pixel|image": "its collator did not read them, or its model has an sp_group, which takes text only: "
    "RadixCollator(images=image_inputs_of(model)) reads the images of its rows",
    "video|audio|^input_features": "a radix batch has text and images only: use an ordinary batch",
}
# Outputs that would hold the unique tokens, not the tokens of each sequence.
RETURNED_PER_TOKEN = ("output_hidden_states", "output_attentions")


def arguments_of(backbone: PreTrainedModel, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, without those that are None."""
    given = dict(zip(inspect.signature(backbone.forward).parameters, args, strict=False)) if args else {}
    return {name: value for name, value in {**given, **kwargs}.items() if value is not None}


def on_device_of_rows(radix: RadixInputs, given: Mapping[str, Any]) -> RadixInputs:
    """Move what a batch carries to where its rows are: some wrappers move only tensors. given: its other arguments."""
    rows = _rows_of(given)
    return radix if rows is None or rows.device == radix.cu_seqlens.device else radix.to(rows.device)


def layout_of(radix: RadixInputs) -> TreeLayout:
    """The plan of a batch, in a copy of its own: what layers keep in it is of the dtype and the mode of one call.

    UserError if the batch has none.
    """
    if radix.layout is None:
        raise UserError(
            "a padded batch of StepCollator(dedup=False) has no plan: give an ordinary model its input_ids, "
            "attention_mask and position_ids"
        )
    return radix.layout.changed()


def check_inputs(decoder: PreTrainedModel, given: Mapping[str, Any], num_rows: int) -> None:
    """Refuse a batch that lost tokens or positions, and what cannot be used with a batch of unique tokens.

    given: the arguments of the call without `radix`. num_rows: unique tokens of this process.
    """
    _check_complete(given, num_rows)
    for name, value in given.items():
        reason = next((reason for pattern, reason in NOT_USABLE.items() if re.search(pattern, name)), None)
        if reason and isinstance(value, Tensor | Cache):
            raise UserError(f"a radix batch came with {name}; {reason}")
    for name in RETURNED_PER_TOKEN:
        if given.get(name, getattr(decoder.config, name, False)):
            raise UserError(
                f"{name} would hold unique tokens, not those of each sequence; turn it off, or use an ordinary batch"
            )


def _check_complete(given: Mapping[str, Any], num_rows: int) -> None:
    """Unique tokens, as ids or as embeddings, and their positions."""
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


def _rows_of(given: Mapping[str, Any]) -> Tensor | None:
    """Unique tokens, as ids or as embeddings."""
    ids = given.get("input_ids")
    return given.get("inputs_embeds") if ids is None else ids


def check_one_device(backbone: PreTrainedModel) -> None:
    """Refuse a radix batch that a trainer spread over devices. backbone: the module that received the batch."""
    if getattr(backbone, "_is_replica", False):  # torch sets it on the copies of DataParallel
        raise UserError(
            "torch.nn.DataParallel cannot spread a radix batch over several GPUs; Trainer uses it if one process sees "
            "several: start one process per GPU (torchrun), or show the process one: CUDA_VISIBLE_DEVICES=0"
        )


TRAINER = "transformers.trainer", "Trainer"  # without importing it: that needs accelerate


def check_evaluation(model: nn.Module) -> None:
    """Refuse a radix batch whose logits a Hugging Face `Trainer` will use: `compute_metrics`, `predict`.

    model: the backbone that received the batch. In training mode the stack is not read; in evaluation mode the check
        takes 3 us under a `Trainer`, 7 us at most.

    Raises UserError inside `Trainer.prediction_step`, also in a subclass, unless it wants only the loss.
    """
    trainer = None if model.training else _trainer_that_uses_the_logits()
    if trainer is not None:
        raise UserError(
            f"{trainer} uses the logits of this evaluation (compute_metrics, predict) as one row per example, but a "
            f"batch of RadixCollator has one list of predictions for all its examples, in the order of the tree, so "
            f"the metrics would be wrong. Evaluate on ordinary batches, which a prepared model computes as before, by "
            f"a trainer that has another collator for evaluation: recipes/hf_trainer_metrics.py. For the loss only, "
            f"leave out compute_metrics, or set prediction_loss_only=True in the training arguments"
        )


def _trainer_that_uses_the_logits() -> str | None:
    """The class of the `Trainer` that called the model for its logits, None if there is none.

    The innermost `prediction_step` decides: an override may ask its parent class for something else.
    """
    for frame in callers():
        if frame.f_code.co_name == "prediction_step":
            names = frame.f_locals
            if "prediction_loss_only" in names and is_instance_by_name(names.get("self"), *TRAINER):
                return None if names["prediction_loss_only"] else type(names["self"]).__name__
    return None
