"""`PaddedSharing`: a padded call of the backbone -> a call on unique tokens, with its outputs put back in `[B, L]`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from radixtrain.errors import UserError
from radixtrain.hf.attention_interface import RadixCall
from radixtrain.hf.backbone import arguments_of, text_decoder_of, with_rows
from radixtrain.hf.image_models import axes_of, given_of_images, without_empty_types
from radixtrain.hf.modules import why_padding_leaks
from radixtrain.hf.names import IMAGES, is_cache
from radixtrain.hf.padded.calls import (
    DROPS_ROWS,
    is_compiled,
    option,
    separates_packed_sequences,
    why_rows_are_not_shared,
    why_unshared,
)
from radixtrain.hf.padded.fused_heads import share_fused_heads
from radixtrain.hf.padded.images import Images
from radixtrain.hf.padded.rows import PaddedRows, Places
from radixtrain.hf.padded.spread import NO_ROW
from radixtrain.hf.padded.spread_rows import SpreadRows
from radixtrain.hf.positions import why_padding_matters
from radixtrain.hf.sharing_report import SharingReport
from radixtrain.hf.windows import no_mask, window_may_bind
from radixtrain.images.tower import NotShared
from radixtrain.tree.arrays import IntArray
from radixtrain.tree.cached_layout import on_device
from radixtrain.tree.layout import TreeLayout
from radixtrain.tree.plan import build_prefix_plan
from radixtrain.tree.runs import RunCost
from radixtrain.versions import saying_what_was_tested

# Outputs of a backbone that may be tensors or hold some; of a tuple only the first, its hidden states.
AT_PLACES = {0, "last_hidden_state", "rope_deltas", *IMAGES}


@dataclass(eq=False)
class PaddedSharing:
    """Runs padded calls of one backbone on their unique tokens.

    attention, kernel, min_shared_tokens, min_ratio: as given to `share_prefixes`.
    generates: whether the model can generate, with a cache.
    run_cost: of its recurrent layers, to choose their runs on the host; None without any.
    separates: whether the model separates the sequences of a packed row; None until such a row comes.
    left_padding: why rows with padding on the left cannot be shared without position_ids, empty if they can; None until
        such a row comes.
    leaks: why they cannot be shared with position_ids either; empty if they can.
    leaves_refused: whether a call that would be refused, as for a dropout that draws, runs unshared instead.
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
        self,
        model: nn.Module,
        backbone: PreTrainedModel,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        why_inexact: Callable[..., str | None],
    ) -> dict[str, Any] | None:
        """Return the arguments of the call that computes unique tokens; None for a call that is not shared.

        model: around the backbone, which is called with args and kwargs. why_inexact: tries the backbone.
        """
        given = without_empty_types(backbone, arguments_of(backbone, args, kwargs))
        reason = why_unshared(model, backbone, given, self.generates)
        if reason is None:
            began = time.perf_counter()
            try:
                planned = self._planned(backbone, given, why_inexact)
            except NotShared as error:
                planned = str(error)
            self.report.plan_seconds += time.perf_counter() - began
            if not isinstance(planned, str):
                return planned
            reason = planned
        self.report.count_unshared(reason)
        return None

    def _planned(
        self, backbone: PreTrainedModel, given: Mapping[str, Any], why_inexact: Callable[..., str | None]
    ) -> dict[str, Any] | str:
        """Return the arguments of the shared call, or why there is none."""
        decoder = text_decoder_of(backbone)
        of_images = given_of_images(backbone, given)
        axes = axes_of(backbone, given) if of_images else None
        position_ids = given.get("position_ids") if axes is None else None
        rows = PaddedRows.read(given["input_ids"], given.get("attention_mask"), position_ids)
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
        ids = rows.input_ids[rows.kept]
        images = Images.read(backbone, given, rows, axes) if of_images else None
        compared_ids = ids if images is None else images.tokens.codes
        plan = build_prefix_plan(
            compared_ids, rows.cu_seqlens, rows.kept_positions, min_shared_tokens=self.min_shared_tokens
        )
        if rows.kept.size < self.min_ratio * plan.num_rows and not (images and images.tower.has_copies):
            return f"less than min_ratio = {self.min_ratio} to save"
        if reason := why_inexact(backbone, shape=given["input_ids"].shape):
            return reason
        blocks = None if images is None else images.tokens.blocks_of(plan)
        layout = TreeLayout.from_plan(plan, self.run_cost, blocks).to(given["input_ids"].device, non_blocking=True)
        may_bind = layout.blocks is not None or window_may_bind(decoder.config, layout.max_seqlen)
        places = rows.places(plan.inverse_indices, plan.num_rows)
        call = RadixCall(layout, None, self.attention, self.kernel, may_bind, places=places)
        call.misses_cache = option("use_cache", decoder.config, given)
        arguments = self._arguments(given, call, ids[plan.gather_indices], plan.position_ids)
        if images is None:
            return arguments
        call.images = images
        return images.in_place_of(backbone, arguments, plan.gather_indices, call.layout)

    def _why_left_padding_matters(self, decoder: PreTrainedModel, rows: PaddedRows) -> str | None:
        """Say why padding on the left cannot be shared, found once: with LoRA in 28 layers it takes 9 ms."""
        if self.left_padding is None:
            reason = why_padding_matters(decoder)
            self.left_padding = f"left padding without position_ids, and {reason}" if reason else ""
            self.leaks = why_padding_leaks(decoder) or ""
        return self.leaks or (self.left_padding if rows.position_ids is None else "") or None

    def count(self, call: RadixCall) -> None:
        """Count a call that runs on unique tokens."""
        assert call.places is not None
        if call.images is not None:
            self.report.num_images += len(call.images.tower.owners)
            self.report.num_distinct_images += call.images.tower.num_distinct
        self.report.num_shared += 1
        self.report.count_tokens(call.places.rows.size, call.places.num_tokens, call.layout.num_rows)

    def _arguments(
        self, given: Mapping[str, Any], call: RadixCall, ids: IntArray, position_ids: IntArray
    ) -> dict[str, Any]:
        """Return the arguments with the tokens to compute in place of the padded ones. ids, position_ids: (U,)."""
        device = given["input_ids"].device
        return {
            **{name: value for name, value in given.items() if name not in ("cache_position", DROPS_ROWS)},
            "input_ids": on_device(ids, device)[None],
            "position_ids": on_device(position_ids, device)[None],
            "attention_mask": no_mask(call.window_may_bind, device, call),
            "use_cache": False,
            "radix_call": call,
        }

    @torch.compiler.disable  # the indices are new in every call
    @saying_what_was_tested()
    def outputs_at_places(self, output: Any, call: RadixCall) -> Any:
        """Put the hidden states of the backbone's output, (1, U, D), back in (B, L, D)."""
        places = call.places
        assert places is not None
        images = call.images
        if images is not None and isinstance(output, Mapping):
            self._set_images(output, images)
        _check_outputs(output)
        rows: Tensor = output[0]
        spread = self.at_places(rows[0], places)
        hidden: Tensor = spread.whole() if is_compiled() else spread
        share_fused_heads()
        states = output.get("hidden_states") if isinstance(output, Mapping) else None
        if states is not None:
            output.hidden_states = tuple(hidden if each is rows else self._state(each, places) for each in states)
        if call.misses_cache:
            for each in fields(output) if is_dataclass(output) else ():
                if is_cache(each.name, each.type):
                    setattr(output, each.name, MissingCache())
        return with_rows(output, hidden)

    def _set_images(self, output: Any, images: Images) -> None:
        """Return what the tower computes of every image of the batch in place of that of its unique placeholders.

        Of features that a model returns by themselves only those in a tensor: a tower may return more, as SmolVLM's.
        """
        features, rows = images.tower.features_at_each(images.tokens.rows)

        def features_at(rows: IntArray, dtype: torch.dtype = features.dtype) -> SpreadRows:
            return SpreadRows.of(features.to(dtype), rows, NO_ROW, self.report)

        for name, value in list(output.items()):
            if isinstance(value, type(images.tower.output)):
                output[name] = images.output_of_every(features_at)
            elif name in IMAGES and isinstance(value, Tensor):  # perhaps joined, and cast: to float32 under autocast
                output[name] = features_at(rows.reshape(-1) if value.ndim == 2 else rows, value.dtype)
            elif name in IMAGES:
                setattr(output, name, None)

    def at_places(self, rows: Tensor, places: Places) -> SpreadRows:
        """Put the unique rows, (U, W), at their places, (B, L, W)."""
        padding_row = len(rows) if places.has_padding else NO_ROW
        return SpreadRows.of(places.with_padding(rows), places.rows, padding_row, self.report)

    def _state(self, state: Tensor | None, places: Places) -> Tensor | None:
        """Put the hidden states of a layer, (1, U, D), at their places, (B, L, D); None if they were not asked for."""
        if state is None:
            return None
        if state.ndim != 3:  # Gemma 3n has several streams of them, (4, 1, U, D)
            raise UserError(
                f"output_hidden_states: a layer returns states of shape {tuple(state.shape)}, whose places in the "
                f"batch are not known; leave it out, or call restore_model(model)"
            )
        return self.at_places(state[0], places).whole()


class MissingCacheError(UserError, AttributeError):
    """Refuses to read a cache that does not exist. `hasattr` and `getattr` see a missing attribute."""


class MissingCache:
    """Replaces the cache that an ordinary call would have returned, and raises `MissingCacheError` when it is read.

    None would refuse nothing: a model that gets it as its cache computes without what came before. Programs that look
    through the outputs of a model (Accelerate, pickle, a tree map) find an object without attributes.
    """

    def __getattr__(self, name: str) -> Any:
        raise MissingCacheError(
            f"cache.{name}: share_prefixes made no cache in this call, as training needs none; pass use_cache=True "
            f"for a cache"
        )

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: object) -> Any:
        return self.layers[index]


def _check_outputs(output: Any) -> None:
    """Refuse other outputs, which would be those of the unique tokens, such as a pooler's."""
    named = output.items() if isinstance(output, Mapping) else enumerate(output)
    for name, value in named:
        if name not in AT_PLACES and isinstance(value, Tensor | Cache):
            raise UserError(
                f"the backbone returns {name}, which it computes from other tokens when they are shared; call "
                f"restore_model(model), or leave its pooler out (add_pooling_layer=False)"
            )
