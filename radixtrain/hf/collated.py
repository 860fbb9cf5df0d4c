"""Batches of a `RadixCollator`: the arguments of their call, and the rows that predict, which the head gets.

What would change the gradient is refused: the batch has no other form in which it could run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from radixtrain.collators.misuse_guard import end_watch
from radixtrain.errors import TRAIN_WITHOUT_SHARING, UserError
from radixtrain.hf.attention_interface import RadixCall
from radixtrain.hf.backbone import Parts, arguments_of, in_one_row, with_rows
from radixtrain.hf.guards.batch import Options, check_batch, check_evaluation, on_device_of_rows, own_layout
from radixtrain.hf.guards.model import verdict_of
from radixtrain.hf.padded.calls import is_compiled
from radixtrain.hf.padded.row_functions import share_fused_heads
from radixtrain.hf.sequence_parallel import RowSplit, SplitCall
from radixtrain.hf.sharing_report import NOT_ALIKE, SharingReport, is_frozen
from radixtrain.hf.token_losses import watched
from radixtrain.hf.windows import no_mask, window_may_bind
from radixtrain.kernels.rows import gather_rows
from radixtrain.tree.layout import TreeLayout
from radixtrain.tree.radix_inputs import RADIX, RadixInputs


@dataclass(eq=False)
class CollatedBatches:
    """Runs the batches of a `RadixCollator` on one backbone.

    refused: why the model cannot use such a batch; None if it can.
    split: their rows over the ranks of `sp_group`; None without one.
    """

    options: Options
    refused: str | None
    split: RowSplit | None
    report: SharingReport

    def arguments(self, parts: Parts, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of the call that computes unique tokens. Raises UserError if it would be inexact.

        parts: of the model, whose backbone is called with args and kwargs.
        """
        model, backbone, decoder = parts
        end_watch()
        check_evaluation()
        given = arguments_of(backbone, args, kwargs)
        radix = on_device_of_rows(given.pop(RADIX), given)
        layout = own_layout(radix)
        given.update(in_one_row(given, layout))
        head, allowed = model.get_output_embeddings(), self.options.allow_dropout
        num_rows = layout.num_rows if self.split is None else self._num_own_rows(self.split, radix, layout)
        check_batch(parts, head, layout, given, num_rows, allowed)
        shape = layout.num_sequences, layout.max_seqlen
        verdict = verdict_of(model, backbone, head, allowed=allowed, shape=shape, outer=[backbone])
        if (reason := verdict.reason) is not None:
            fix = "" if TRAIN_WITHOUT_SHARING in reason else f"; leave out what differs, or {TRAIN_WITHOUT_SHARING}"
            raise UserError(f"a batch of a RadixCollator: {reason}{fix}")
        predictors = radix.predictor_indices
        if radix.place_rows is not None:
            predictors = predictors[radix.prediction_rows]
        self._count(radix, layout, 0 if model is backbone else predictors.shape[0])
        may_bind = window_may_bind(decoder.config, layout.max_seqlen)
        how = layout, predictors, self.options.attention, self.options.kernel, may_bind
        call = RadixCall(*how) if self.split is None else SplitCall(self.split, *how)
        call.token_loss, call.place_rows, call.forks = radix.token_loss, radix.place_rows, verdict.forks
        mask = no_mask(may_bind, layout.device, call)
        return {**given, "attention_mask": mask, "use_cache": False, "radix_call": call}

    def _num_own_rows(self, split: RowSplit, radix: RadixInputs, layout: TreeLayout) -> int:
        """Return the number of unique tokens that this rank of an `sp_group` has to get."""
        if radix.split is None:
            raise UserError(
                "a radix batch came to a model of share_prefixes(model, sp_group=...) without having been split over "
                "its ranks: call what share_prefixes got, not a part of it; let PEFT wrap the model before that"
            )
        return split.share.count(layout.num_rows)

    def _count(self, radix: RadixInputs, layout: TreeLayout, num_head_rows: int) -> None:
        """Count a batch. num_head_rows: 0 for a bare backbone."""
        num_own, shares = layout.num_tokens, layout.shares
        self.report.num_shared += shares
        if not shares:
            self.report.not_shared[NOT_ALIKE] += 1
        num_tokens = num_own if radix.num_tokens is None else radix.num_tokens
        num_places = layout.num_sequences * layout.max_seqlen if num_tokens else 0  # B x L
        self.report.count_tokens(num_places, num_tokens, layout.num_rows)
        if num_head_rows:
            self.report.count_head(num_places, num_head_rows)

    def outputs(self, model: PreTrainedModel, output: Any, call: RadixCall) -> Any:
        """Return the rows that predict in place of the backbone's, (1, U, D).

        In a row for each sequence, one for each label; or in one row, if the loss is not the model's own.
        """
        if call.predictor_indices is None:
            return output
        rows = gather_rows(output[0][0], call.predictor_indices)
        is_watched = not call.token_loss and torch.is_grad_enabled() and (rows.requires_grad or not is_frozen(model))
        if is_watched and not is_compiled():
            share_fused_heads()
            rows = watched(rows, call.place_rows)
        shape = (1, len(rows)) if call.place_rows is None else call.place_rows.shape
        return with_rows(output, rows.view(*shape, rows.shape[1]))

    def of_every_token(self, rows: Tensor, call: RadixCall) -> Tensor:
        """Return (T, W), the rows of the original tokens, of those of this process, (u, W)."""
        return gather_rows(call.all_rows(rows), call.layout.inverse_indices)
