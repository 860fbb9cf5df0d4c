"""Prompts of a frozen model, computed once per run: a padded call computes only what its cache does not hold.

    cache  7 8 9    input_ids  7 8 9 1 0    computed  1 5 6    hidden states  7 8 9 1 5 6    places  0 1 2 3 6
                               7 8 9 5 6                                                             0 1 2 4 5

The cache keeps keys and values of every layer and what the backbone returns, since callers read the logits of prompts
too. The last token of each row is always computed, so that no call is empty. Rows that several sequences of a batch
read, such as the prompt of a group, may evict others; rows that only one reads, such as a completion, are kept while
there is room: mostly they never come again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from radixtrain.errors import UserError
from radixtrain.hf.attention_interface import CachedCall
from radixtrain.hf.backbone import text_decoder_of
from radixtrain.hf.padded.calls import option
from radixtrain.hf.padded.rows import BoolArray, PaddedRows, Places
from radixtrain.hf.sharing_report import is_frozen
from radixtrain.hf.windows import window_may_bind
from radixtrain.tree.arrays import IntArray, lengths_of
from radixtrain.tree.cached_layout import CachedLayout, Continuations, on_device
from radixtrain.tree.plan import PrefixPlan

SHARDED = ("ds_id", "placements")  # on weights of ZeRO-3 and FSDP2
FSDP = "FullyShardedDataParallel"


class KeptCall(CachedCall):
    """A forward pass on the tokens of a padded batch that are not kept.

    ends: of its sequences. to_keep: token ids and slots of what each sequence has in the cache afterwards.
    stored_slots: (R,), int64. kept rows that stand in the batch.
    places: where they stand, and after them the new rows. misses_cache: as in `RadixCall`.
    held: what this call holds of the cache.
    """

    ends: Continuations
    to_keep: list[tuple[IntArray, IntArray]]
    stored_slots: IntArray
    places: Places
    misses_cache: bool
    held: Held


NONE: IntArray = np.zeros(0, dtype=np.int64)


@dataclass(eq=False)
class Held:
    """What a call holds of a cache: locked nodes, slots that are reserved, and slots outside of its tree.

    A call that never ends, as with Ctrl-C, gives them back when it is collected.
    """

    cache: Any
    thread: int = field(default_factory=get_ident)
    locked: list[Any] = field(default_factory=list)
    reserved: IntArray = field(default_factory=lambda: NONE)
    unkept: IntArray = field(default_factory=lambda: NONE)
    is_released: bool = False

    def release(self) -> None:
        """Give all of it back, once."""
        with self.cache.exclusive():
            for node in self.locked:
                self.cache.unlock(node)
            self.cache.cancel(self.reserved)
            self.cache.pool.release(self.unkept)
            self.locked, self.reserved, self.unkept, self.is_released = [], NONE, NONE, True

    __del__ = release


@dataclass(eq=False)
class KeptPrefixes:
    """Runs the calls of a frozen backbone on what its cache does not hold.

    cache: a `RadixCache`, which is defined on a floor above this one.
    running: what unfinished calls hold. Calls of one thread may be nested.
    """

    cache: Any
    running: WeakSet[Held] = field(default_factory=WeakSet)

    def __reduce__(self) -> tuple[type, tuple[Any]]:
        """Pickle with an empty cache in which no call runs, also for the copy of a model."""
        return type(self), (self.cache,)

    def why_not(
        self, model: nn.Module, backbone: PreTrainedModel, given: Mapping[str, Any], rows: PaddedRows
    ) -> str | None:
        """Say why a call that can be shared cannot use the cache; None if it can: then `start` it. given: arguments."""
        if "pixel_values" in given:
            return "images are given, and the cache compares token ids"
        if not is_frozen(backbone):
            if torch.is_grad_enabled():
                return "it has gradients"
            if getattr(model, "peft_config", None):  # its weights change, while those of the base model must stay
                return "a trained adapter is active"
        is_sharded = any(hasattr(weight, name) for weight in backbone.parameters() for name in SHARDED)
        if is_sharded or any(type(module).__name__ == FSDP for module in backbone.modules()):
            return "its weights are spread over ranks"
        starts = rows.cu_seqlens[:-1].repeat(lengths_of(rows.cu_seqlens))
        if rows.kept_positions is not None and (rows.kept_positions != np.arange(len(starts)) - starts).any():
            return "position_ids do not count from 0 in every row"
        for name in ("output_hidden_states", "output_router_logits"):
            if option(name, text_decoder_of(backbone).config, given):
                return name
        return None

    def start(
        self, backbone: PreTrainedModel, rows: PaddedRows, min_shared_tokens: int, kernel: str
    ) -> KeptCall | None:
        """Make the call for the tokens of a batch that are not kept; None while another call uses the cache.

        An outer call of this thread does not count, unless the model has changed since it began.
        """
        held = Held(self.cache)
        with self.cache.exclusive():
            others = [other for other in self.running if not other.is_released]
            if any(other.thread != held.thread for other in others):
                return None
            try:
                self.cache.of_model(backbone, "keys, values and hidden states")
            except RuntimeError:  # it is in use
                if not others:
                    raise
                return None
            self.running.add(held)
        try:
            return self._started(held, backbone, rows, min_shared_tokens, kernel)
        except BaseException:
            held.release()
            raise

    def _started(
        self, held: Held, backbone: PreTrainedModel, rows: PaddedRows, min_shared_tokens: int, kernel: str
    ) -> KeptCall:
        sequences = [ids for ids in np.split(rows.input_ids[rows.kept], rows.cu_seqlens[1:-1]) if len(ids)]
        matches = [self.cache.match_prefix(ids[:-1]) for ids in sequences]
        for match in matches:
            self.cache.lock(match.node)
            held.locked.append(match.node)
        ends = Continuations.of(sequences, matches, min_shared_tokens)
        may_bind = window_may_bind(text_decoder_of(backbone).config, int(ends.lengths.max()))
        is_kept = self._rows_to_keep(ends.plan)
        held.reserved = self.cache.reserve(int(is_kept.sum()))
        if may_bind:  # a layer with a window reads all rows where they are stored
            held.unkept = self.cache.pool.allocate(int((~is_kept).sum()))
        new = np.append(is_kept.nonzero()[0], (~is_kept).nonzero()[0][: len(held.unkept)])
        slots = np.append(held.reserved, held.unkept)
        rows_of_ends = np.split(ends.plan.inverse_indices, ends.plan.cu_seqlens[1:-1])
        stored_slots, stored_rows = np.unique(np.concatenate(ends.stored), return_inverse=True)
        rows_of_beginnings = np.split(stored_rows, ends.num_stored.cumsum()[:-1])
        path_of, to_keep, row_of_token = ends.paths(new, slots), [], list[IntArray]()
        for place, (ids, stored, own) in enumerate(zip(sequences, rows_of_beginnings, rows_of_ends, strict=True)):
            length = len(stored) + int(is_kept[own].sum())
            to_keep.append((ids[:length], path_of(place)[:length]))
            row_of_token += [stored, len(stored_slots) + own]
        layout = ends.layout(new, slots, next(backbone.parameters()).device)
        call = KeptCall(layout, self._write, kernel, may_bind)
        call.held, call.ends, call.to_keep, call.stored_slots = held, ends, to_keep, stored_slots
        call.places = rows.places(np.concatenate(row_of_token), len(stored_slots) + ends.plan.num_rows)
        return call

    def _rows_to_keep(self, plan: PrefixPlan) -> BoolArray:
        """Choose the rows to keep, (U,), bool: those that most sequences read first, so none precedes the one above."""
        room = max(self.cache.num_free, min(self.cache.num_available, int((plan.counts > 1).sum())))
        is_kept = np.zeros(plan.num_rows, dtype=bool)
        is_kept[np.lexsort((plan.position_ids, -plan.counts))[:room]] = True
        return is_kept

    def _write(self, call: int, new_rows: tuple[Tensor, ...], layout: CachedLayout) -> tuple[Tensor, ...]:
        if any(rows.requires_grad for rows in new_rows):
            raise UserError(
                "a cache keeps rows without gradients, and a hook requests them (enable_input_require_grads?): call "
                "the model under torch.no_grad(), or leave out cache"
            )
        return self.cache.store.write(call, new_rows, layout)

    def finish(self, call: KeptCall, hidden: Tensor) -> Tensor:
        """Return the hidden states, (R + U, D), of the kept rows of the batch and of the new ones, (U, D), kept now."""
        (stored,) = self._write(len(call.calls), (hidden[:, None],), call.layout)
        kept = stored[:, 0].index_select(0, on_device(call.stored_slots, hidden.device))
        call.held.reserved = NONE
        for ids, slots in call.to_keep:
            self.cache.insert(ids, slots)
        call.held.release()
        return torch.cat([kept, hidden])
