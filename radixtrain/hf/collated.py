"""Batches of a `RadixCollator`: the arguments of their call, and the rows that predict, which the head gets.

What would change the gradient is refused: the batch has no other form in which it could run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from radixtrain.collators.misuse_guard import end_watch
from radixtrain.errors import TRAIN_WITHOUT_SHARING, UserError
from radixtrain.hf.attention_interface import RadixCall
from radixtrain.hf.backbone import arguments_of, in_one_row, text_decoder_of, with_rows
from radixtrain.hf.guards.batch import Options, check_batch, on_device_of_rows, own_layout
from radixtrain.hf.guards.model import verdict_of
from radixtrain.hf.padded.calls import is_compiled
from radixtrain.hf.padded.fused_heads import share_fused_heads
from radixtrain.hf.padded.places import NO_ROW
from radixtrain.hf.padded.row_functions import MIN_SAVING
from radixtrain.hf.padded.spread_rows import SpreadRows
from radixtrain.hf.progress import Progress
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
    progress: Progress
    report: SharingReport

    def arguments(
        self, model: PreTrainedModel, backbone: PreTrainedModel, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the arguments of the call that computes unique tokens. Raises UserError if it would be inexact.

        model: around the backbone, which is called with args and kwargs.
        """
        end_watch()
        given = arguments_of(backbone, args, kwargs)
        radix = on_device_of_rows(given.pop(RADIX), given)
        layout = own_layout(radix)
        given.update(in_one_row(given, layout))
        head, allowed = model.get_output_embeddings(), self.options.allow_dropout
        check_batch(backbone, head, radix, given, self._num_rows(radix, layout), allowed)
        shape = layout.num_sequences, layout.max_seqlen
        reason, forks = verdict_of(
            model, backbone, head, progress=self.progress, allowed=allowed, shape=shape, outer=[backbone]
        )
        if reason is not None:
            fix = "" if TRAIN_WITHOUT_SHARING in reason else f"; leave out what differs, or {TRAIN_WITHOUT_SHARING}"
            raise UserError(f"a batch of a RadixCollator: {reason}{fix}")
        predictors = _requested_rows(radix)
        self._count(radix, layout, 0 if model is backbone else predictors.shape[0])
        may_bind = window_may_bind(text_decoder_of(backbone).config, layout.max_seqlen)
        how = layout, predictors, self.options.attention, self.options.kernel, may_bind
        call = RadixCall(*how) if self.split is None else SplitCall(self.split, *how)
        call.token_loss, call.place_rows, call.forks = radix.token_loss, radix.place_rows, forks
        mask = no_mask(may_bind, layout.device, call)
        return {**given, "attention_mask": mask, "use_cache": False, "radix_call": call}

    def _num_rows(self, radix: RadixInputs, layout: TreeLayout) -> int:
        """Return the number of unique tokens that this process has to get."""
        if self.split is None:
            return layout.num_rows
        if radix.split is None:
            raise UserError(
                "a radix batch came to a model of share_prefixes(model, sp_group=...) without having been split over "
                "its ranks: call what share_prefixes got, not a part of it; let PEFT wrap the model before that"
            )
        return self.split.rows_per_rank(layout.num_rows)

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
        """Return the rows that predict in place of the backbone's, (1, U, D): in a row for each sequence."""
        if call.predictor_indices is None:
            return output
        rows = gather_rows(output[0][0], call.predictor_indices)
        if not (call.token_loss or is_compiled()):
            share_fused_heads()
            rows = watched(rows, not is_frozen(model), call.place_rows)
        if call.place_rows is None:
            return with_rows(output, rows[None])
        if len(rows) == call.place_rows.size:
            return with_rows(output, rows.view(*call.place_rows.shape, -1))
        counted = SharingReport()  # with the batch
        return with_rows(output, SpreadRows.of(rows, call.place_rows.clip(0), NO_ROW, counted))

    def of_every_token(self, rows: Tensor, call: RadixCall) -> Tensor:
        """Return (T, W), the rows of the original tokens, of those of this process, (u, W)."""
        return gather_rows(call.all_rows(rows), call.layout.inverse_indices)


def _requested_rows(radix: RadixInputs) -> Tensor:
    """Return the rows that the head gets, int64: one for each place, in order, or each once if that saves enough."""
    rows, place_rows = radix.predictor_indices, radix.place_rows
    if place_rows is not None and (is_compiled() or place_rows.size < MIN_SAVING * len(rows)):
        return rows[radix.prediction_rows]
    return rows
