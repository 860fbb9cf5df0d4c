"""`PaddedSharing`: a padded call of the backbone -> a call on unique tokens, with its outputs put back in `[B, L]`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from radixtrain.errors import UserError
from radixtrain.hf.attention_interface import RadixCall
from radixtrain.hf.backbone import Parts, arguments_of, is_cache, text_decoder_of, why_padding_leaks, with_rows
from radixtrain.hf.guards.batch import Options
from radixtrain.hf.guards.code import hooks_between_ours
from radixtrain.hf.guards.model import Verdict, look
from radixtrain.hf.guards.rules import why_padding_matters
from radixtrain.hf.padded.calls import (
    is_compiled,
    option,
    separates_packed_sequences,
    why_batch_is_not_shared,
    why_unshared,
)
from radixtrain.hf.padded.causes import Causes, NotShared
from radixtrain.hf.padded.places import NO_ROW, Places
from radixtrain.hf.padded.row_functions import share_fused_heads
from radixtrain.hf.padded.spread_rows import SpreadRows
from radixtrain.hf.progress import Upstream
from radixtrain.hf.sharing_report import SharingReport
from radixtrain.hf.windows import no_mask, window_may_bind
from radixtrain.tree.layout import TreeLayout
from radixtrain.tree.plan import build_prefix_plan
from radixtrain.versions import saying_what_was_tested

# Outputs of a backbone that may be tensors or hold some; of a tuple only the first, its hidden states.
AT_PLACES = {0, "last_hidden_state"}


@dataclass(eq=False)
class PaddedSharing:
    """Runs padded calls of one backbone on their unique tokens.

    generates: whether the model can generate, with a cache.
    leaves_refused: whether a call that would be refused, as for a dropout that draws, runs unshared instead.
    """

    options: Options
    generates: bool
    report: SharingReport
    leaves_refused: bool = False

    def begin(
        self, model: PreTrainedModel, backbone: PreTrainedModel, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Upstream | None:
        """Return a call of the backbone that its decoder may share; None, and the reason counted, for any other.

        model: around the backbone. args, kwargs: of the backbone.
        """
        decoder = text_decoder_of(backbone)
        call = Upstream(backbone, decoder, arguments_of(backbone, args, kwargs))
        reason = why_unshared(call, self.generates)
        if reason is None:
            call.verdict = look(  # before the backbone makes masks, for which attention has to be taken over
                Parts(model, backbone, decoder),
                rules="share_prefixes",
                allowed=self.options.allow_dropout,
                hooks=hooks_between_ours(decoder),
                besides=None if backbone is decoder else backbone.get_input_embeddings(),  # which the backbone calls
            )
            reason = call.verdict.reason
        if reason is None:
            return call
        self.report.count_unshared(reason)
        return None

    def arguments(self, call: Upstream, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the arguments by which the decoder computes unique tokens; None, and the reason counted, if it cannot.

        args, kwargs: of the decoder.
        """
        call.is_over = True
        began = time.perf_counter()
        try:
            given = self._planned(call, arguments_of(call.decoder, args, kwargs))
        except NotShared as reason:
            self.report.count_unshared(str(reason))
            return None
        finally:
            self.report.plan_seconds += time.perf_counter() - began
        self._count(given["radix_call"], call)
        return given

    def _planned(self, upstream: Upstream, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of the shared call. Raises NotShared if there is none. given: of the decoder."""
        decoder, verdict, options = upstream.decoder, upstream.verdict, self.options
        causes = Causes.read(upstream, given)
        batch, device = causes.batch, causes.device
        _refuse(why_batch_is_not_shared(upstream, batch))
        if batch.is_left_padded:
            _refuse(_why_left_padding_matters(decoder, verdict, batch.position_ids is not None))
        if batch.is_packed:
            if verdict.separates is None:
                verdict.separates = separates_packed_sequences(upstream.backbone, upstream.given["input_ids"].device)
            if not verdict.separates:
                raise NotShared("a row has several sequences, and this model does not separate them")
        shortest = {"min_shared_tokens": options.min_shared_tokens}
        plan = build_prefix_plan(causes.codes, batch.cu_seqlens, batch.attended_positions, **shortest)
        if batch.attended.size < options.min_ratio * plan.num_rows:
            raise NotShared(f"less than min_ratio = {options.min_ratio} to save")
        causes.check_bits(plan)
        shape = upstream.given["input_ids"].shape
        _refuse(verdict.why_not(decoder, allowed=options.allow_dropout, shape=shape))
        layout = TreeLayout.from_plan(plan, causes.block_of_row(plan)).to(device, non_blocking=True)
        may_bind = bool(causes.requests) or window_may_bind(decoder.config, layout.max_seqlen)
        places = batch.places(plan.inverse_indices, plan.num_rows)
        call = RadixCall(layout, None, options.attention, options.kernel, may_bind, places, verdict)
        call.misses_cache = option("use_cache", decoder.config, upstream.given)
        mask = causes.masks_for(call) if causes.requests else no_mask(may_bind, device, call)
        arguments = causes.of_unique_tokens(plan)
        return {**arguments, "attention_mask": mask, "use_cache": False, "radix_call": call}

    def _count(self, call: RadixCall, upstream: Upstream) -> None:
        """Count a call that runs on unique tokens."""
        assert call.places is not None
        if upstream.pictures is not None:
            self.report.num_images += upstream.pictures.num_pictures
            self.report.num_distinct_images += upstream.pictures.num_distinct
            self.report.why_every_image = upstream.pictures.why_every or self.report.why_every_image
        self.report.num_shared += 1
        self.report.count_tokens(call.places.rows.size, call.places.num_tokens, call.layout.num_rows)

    @torch.compiler.disable  # the indices are new in every call
    @saying_what_was_tested()
    def outputs(self, output: Any, call: RadixCall) -> Any:
        """Put the hidden states of the backbone's output, (1, U, D), back in (B, L, D)."""
        places = call.places
        assert places is not None
        _check_outputs(output)
        rows: Tensor = output[0]
        spread = self._at_places(rows[0], places)
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

    def of_every_token(self, rows: Tensor, call: RadixCall) -> Tensor:
        """Return (B L, W), the rows of all places, of the unique ones, (U, W)."""
        assert call.places is not None
        return self._at_places(rows, call.places).whole().flatten(0, 1)

    def _at_places(self, rows: Tensor, places: Places) -> SpreadRows:
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
        return self._at_places(state[0], places).whole()


def _why_left_padding_matters(decoder: PreTrainedModel, verdict: Verdict, has_positions: bool) -> str | None:
    """Say why padding on the left cannot be shared, found once: with LoRA in 28 layers it takes 9 ms."""
    if verdict.left_padding is None:
        verdict.left_padding = why_padding_leaks(decoder), why_padding_matters(decoder)
    leaks, matters = verdict.left_padding
    return leaks or (f"left padding without position_ids, and {matters}" if matters and not has_positions else None)


def _refuse(reason: str | None) -> None:
    if reason is not None:
        raise NotShared(reason)


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
