"""`PaddedSharing`: a padded call of the backbone -> a call on unique tokens, and its outputs back in `[B, L]`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from radixtrain.errors import UserError
from radixtrain.hf.attention_interface import RadixCall
from radixtrain.hf.backbone import text_decoder_of, with_rows
from radixtrain.hf.inputs import arguments_of
from radixtrain.hf.padded.calls import (
    is_compiled,
    option,
    separates_packed_sequences,
    why_rows_are_not_shared,
    why_unshared,
)
from radixtrain.hf.padded.rows import PaddedRows, Places
from radixtrain.hf.padded.spread_rows import NO_ROW, SpreadRows, share_fused_head
from radixtrain.hf.positions import why_padding_matters
from radixtrain.hf.recurrent.mixers import why_padding_leaks
from radixtrain.hf.sharing_report import SharingReport
from radixtrain.hf.windows import no_mask, window_may_bind
from radixtrain.tree.layout import TreeLayout
from radixtrain.tree.plan import PrefixPlan, build_prefix_plan
from radixtrain.tree.runs import RunCost

# Outputs of a backbone that may be tensors; of a tuple only the first, its hidden states.
AT_PLACES = {0, "last_hidden_state", "rope_deltas"}


@dataclass(eq=False)
class PaddedSharing:
    """Runs padded calls of one backbone on their unique tokens.

    attention, kernel, min_shared_tokens, min_ratio: as given to `share_prefixes`.
    generates: whether the model can generate, with a cache.
    run_cost: of its recurrent layers, to choose their runs on the host; None without any.
    separates: whether it separates the sequences of a packed row; None until such a row comes.
    left_padding: why rows with padding on the left cannot be shared without position_ids, empty if they can; None until
        such a row comes.
    leaks: why they cannot be shared with position_ids either; empty if they can.
    leaves_refused: a call that is refused, as for a dropout that draws, runs as it is, too.
    """

    attention: str
    kernel: str
    min_shared_tokens: int
    min_ratio: float
    generates: bool
    run_cost: RunCost | None
    report: SharingReport = field(default_factory=SharingReport)
    separates: bool | None = None
    left_padding: str | None = None
    leaks: str = ""
    leaves_refused: bool = False

    def call_on_unique_tokens(
        self, model: nn.Module, backbone: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> dict[str, Any] | None:
        """The arguments of the call that computes unique tokens; None for a call that is not shared.

        model: around the backbone, which is called with args and kwargs.
        """
        given = arguments_of(backbone, args, kwargs)
        reason = why_unshared(model, backbone, given, self.generates)
        if reason is None:
            began = time.perf_counter()
            planned = self._planned(backbone, given)
            self.report.plan_seconds += time.perf_counter() - began
            if not isinstance(planned, str):
                return planned
            reason = planned
        self.report.not_shared[reason] += 1
        return None

    def _planned(self, backbone: nn.Module, given: Mapping[str, Any]) -> dict[str, Any] | str:
        """The arguments of the shared call, or why there is none."""
        decoder = text_decoder_of(backbone)
        rows = PaddedRows.read(given["input_ids"], given.get("attention_mask"), given.get("position_ids"))
        reason = why_rows_are_not_shared(backbone, given, rows)
        if reason is None and rows.is_left_padded:
            reason = self._why_left_padding_matters(decoder, rows)
        if reason is None and rows.is_packed:
            if self.separates is None:
                self.separates = separates_packed_sequences(backbone)
            if not self.separates:
                reason = "a row has several sequences, and this model does not separate them"
        if reason is not None:
            return reason
        packed = rows.input_ids[rows.kept], rows.cu_seqlens, rows.kept_positions
        plan = build_prefix_plan(*packed, min_shared_tokens=self.min_shared_tokens)
        if rows.kept.size < self.min_ratio * plan.num_rows:
            return f"less than min_ratio = {self.min_ratio} to save"
        return self._arguments(decoder, given, rows, plan)

    def _why_left_padding_matters(self, decoder: Any, rows: PaddedRows) -> str | None:
        """Why padding on the left cannot be shared, found once: with LoRA in 28 layers it takes 9 ms."""
        if self.left_padding is None:
            reason = why_padding_matters(decoder)
            self.left_padding = f"left padding without position_ids, and {reason}" if reason else ""
            self.leaks = why_padding_leaks(decoder) or ""
        return self.leaks or (self.left_padding if rows.position_ids is None else "") or None

    def count(self, call: RadixCall) -> None:
        """A call that runs on unique tokens."""
        assert call.places is not None
        self.report.num_shared += 1
        self.report.num_places += call.places.rows.size
        self.report.num_tokens += call.layout.inverse_indices.shape[0]
        self.report.num_unique_tokens += call.layout.num_rows

    def _arguments(self, decoder: Any, given: Mapping[str, Any], rows: PaddedRows, plan: PrefixPlan) -> dict[str, Any]:
        """The call, with the unique tokens in place of the padded ones."""
        device = given["input_ids"].device
        layout = TreeLayout.from_plan(plan, run_cost=self.run_cost).to(device, non_blocking=True)
        may_bind = window_may_bind(decoder.config, layout.max_seqlen)
        places = Places(rows.places(plan), has_padding=not rows.kept.all())
        misses_cache = option("use_cache", decoder.config, given)
        call = RadixCall(layout, None, self.attention, self.kernel, may_bind, None, places, misses_cache)
        return {
            **{name: value for name, value in given.items() if name != "cache_position"},
            "input_ids": torch.from_numpy(rows.input_ids[rows.kept][plan.gather_indices])[None].to(
                device, non_blocking=True
            ),
            "position_ids": torch.tensor(plan.position_ids)[None].to(device, non_blocking=True),
            "attention_mask": no_mask(may_bind, device, call),
            "use_cache": False,
            "radix_call": call,
        }

    @torch.compiler.disable  # the indices are new in every call
    def outputs_at_places(self, output: Any, call: RadixCall) -> Any:
        """The output of the backbone with its hidden states, (1, U, D), back in (B, L, D)."""
        places = call.places
        assert places is not None
        _check_outputs(output)
        rows: Tensor = output[0]
        spread = self.at_places(rows[0], places)
        hidden: Tensor = spread.whole() if is_compiled() else spread
        share_fused_head()
        states = output.get("hidden_states") if isinstance(output, Mapping) else None
        if states is not None:
            output.hidden_states = tuple(hidden if each is rows else self._state(each, places) for each in states)
        if call.misses_cache and hasattr(output, "past_key_values"):
            output.past_key_values = MissingCache()
        return with_rows(output, hidden)

    def at_places(self, rows: Tensor, places: Places) -> SpreadRows:
        """(B, L, W). rows: (U, W), the unique ones."""
        padding_row = len(rows) if places.has_padding else NO_ROW
        return SpreadRows.of(places.with_padding(rows), places.rows, padding_row, self.report)

    def _state(self, state: Tensor, places: Places) -> Tensor:
        """The hidden states of a layer, (1, U, D), in (B, L, D)."""
        if state.ndim != 3:  # Gemma 3n has several streams of them, (4, 1, U, D)
            raise UserError(
                f"output_hidden_states: a layer returns states of shape {tuple(state.shape)}, whose places in the "
                f"batch are not known; leave it out, or call restore_model(model)"
            )
        return self.at_places(state[0], places).whole()


class MissingCache:
    """In place of the cache that an ordinary call would have returned: raises UserError where it is used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python and copy look for these on any object
            raise AttributeError(name)
        raise UserError(
            f"past_key_values.{name}: share_prefixes made no cache in this call, as training needs none; pass "
            f"use_cache=True for a cache"
        )

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        return self.layers[index]


def _check_outputs(output: Any) -> None:
    """Refuse other outputs, which would be those of the unique tokens, such as a pooler's."""
    named = output.items() if isinstance(output, Mapping) else enumerate(output)
    for name, value in named:
        if name not in AT_PLACES and isinstance(value, Tensor):
            raise UserError(
                f"the backbone returns {name}, which it computes from other tokens when they are shared; call "
                f"restore_model(model), or leave its pooler out (add_pooling_layer=False)"
            )
