"""The cache that `model.generate` works on: prompts once, as a `RadixCache` stores them, and each row's own tokens.

A *row* is a sequence of the batch. At the first step it is decided what rows share: long runs of prompt tokens that
several rows read stay where they are and are attended to once for all of these rows; the rest of each prompt, its
*tail*, is copied to the row's own keys, which then grow by what is generated. Tails are aligned right, so that a step
adds the same column for all rows:

    columns of a row's own keys    [hidden | tail of the prompt | generated]

A layer with a sliding window that may bind has no shared keys: its tails are what the window shows of the prompts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from radixtrain.attention import decoding_attention
from radixtrain.errors import UserError
from radixtrain.generation.cache import Node, RadixCache
from radixtrain.generation.prefill import StoredCall, prefill, readers_of, shared_by
from radixtrain.hf.attention_interface import Heads
from radixtrain.hf.backbone import CACHE, Parts, arguments_of
from radixtrain.hf.guards.batch import check_length
from radixtrain.kernels.stored import Readers, Shared
from radixtrain.kernels.varlen_args import added_to_scores
from radixtrain.tree.arrays import IntArray
from radixtrain.tree.layout import on_device

# (query, key) pairs that a call of its own has to save at every step to be worth it. On one CPU thread, with 2 layers
# of 128 and of 512, both ways were equally fast somewhere between 200 and 1,800 pairs.
PIECE_CELLS = 512
SPARE = 64  # columns for generated tokens: to append each one would copy a row's own keys at every step


@dataclass(eq=False)
class Tails:
    """Which prompt tokens rows have of their own.

    nodes: whose tokens are numbered back to back. tokens: (B, T), int64. these numbers, aligned right; -1 at hidden
        places.
    """

    nodes: Sequence[Node]
    tokens: Tensor

    @classmethod
    def of(cls, tails: Sequence[Sequence[Node]], device: torch.device, longest: int) -> Tails:
        """Lay out the nodes of each row's tail. longest: tokens that it keeps, the last ones."""
        nodes = list(dict.fromkeys(chain(*tails)))
        lengths = [len(node.tokens) for node in nodes]
        numbers = dict(zip(nodes, torch.arange(sum(lengths)).split(lengths), strict=True))
        none = torch.zeros(0, dtype=torch.int64)
        rows = [torch.cat([none, *(numbers[node] for node in tail)]) for tail in tails]
        last = [row[max(0, len(row) - longest) :] for row in rows]
        tokens = pad_sequence(last, batch_first=True, padding_value=-1, padding_side="left")
        return cls(nodes, tokens.to(device, non_blocking=True))


class PromptCache(Cache):
    """Keys and values of prompts, stored once where several rows share them, and beside them each row's own.

    The first forward pass brings the prompts. It works inside `serving`, which hides it from the layers: the attention
    function receives it.

    own: each row's own keys and values, by layer, (2, B, K, columns, H), with columns to spare.
    num_new: columns that hold tokens after the prompts.
    """

    def __init__(self, parts: Parts, stored: RadixCache, longest: int, num_checked: int, frees: bool) -> None:
        """Make a cache that computes prompts into another one.

        longest: sequence that there may be, in tokens. num_checked: tokens of a sequence that the model is known to
            take.
        frees: whether what is copied is freed where it was stored.
        """
        super().__init__(layers=[DynamicLayer()])  # without any it passes for a recurrent model's
        self.parts, self.stored, self.frees = parts, stored, frees
        self.longest, self.num_checked = longest, num_checked
        self.width = self.num_new = 0  # of the padded prompts without their last tokens, and after them
        self.own: list[Tensor] = []
        self._paths: list[list[Node]] = []  # of each row
        self._lengths = np.zeros(0, dtype=np.int64)  # of each row's prompt
        self._readers: dict[Node, Readers] = {}  # rows that read each shared node
        self._tails: dict[int | None, Tails] = {}  # by window; None for layers in which none may bind
        self._shared: list[list[Shared]] = []  # of each layer
        self._masks: dict[int | None, Tensor] = {}  # of one step, by window

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the length of the rows with their padding, as transformers counts it."""
        return self.width + self.num_new

    def update(self, *_: object, **__: object) -> Any:
        """Refuse a layer that would attend to this cache by itself, and a loop that selects rows of it."""
        raise RuntimeError(
            "a cache of radixtrain.generate works only inside of that call, and its rows cannot be picked"
        )

    batch_select_indices = batch_repeat_interleave = crop = update

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let rows go on from others of the same prompt, (B,), int64."""
        self.own = [layer.index_select(1, beam_idx) for layer in self.own]

    def begin(self, ids: Tensor, mask: Tensor | None) -> RowsCall:
        """Begin a forward pass of the next token of each row. ids: (B, L), at first the prompts. mask: of them."""
        if not self.num_new:
            self._prefill(ids, mask)
        self._masks = {}
        return RowsCall(self, self._lengths + self.num_new)

    def _prefill(self, ids: Tensor, mask: Tensor | None) -> None:
        """Compute the prompts but for their last tokens. ids: (B, L). mask: (B, L), 0 at padding; None without any."""
        seen = torch.ones_like(ids) if mask is None else mask
        from_first_on = (seen == 1).long().cummax(1).values
        if (seen != from_first_on).any() or (seen[:, -1] == 0).any():
            raise UserError(
                "attention_mask: expected padding on the left only, 0 and then 1, and at least one token in each row: "
                "set tokenizer.padding_side = 'left'"
            )
        prompts, numbers = ids.masked_fill(seen == 0, -1).unique(dim=0, return_inverse=True)
        ends = prefill(self.parts, self.stored, [row[row >= 0][:-1] for row in prompts.cpu().numpy()])
        self.width, self._paths = ids.shape[1] - 1, [ends[number].path for number in numbers.tolist()]
        self._lengths = from_first_on.sum(1).cpu().numpy() - 1
        self._readers = readers_of(self._paths, ids.device, PIECE_CELLS)

    def attend(self, number: int, heads: Heads, window: int | None, **scoring: Any) -> Tensor:
        """Store the keys and values of a step in one layer, and attend to all that each row sees.

        window: of the layer, if it may bind.
        """
        query, new = heads[0], torch.stack(heads[1:])
        if number == len(self._shared):
            self._open(number, window, new)
        place = self._tails[window].tokens.shape[1] + self.num_new
        if place == self.own[number].shape[3]:
            self.own[number] = nn.functional.pad(self.own[number], (0, 0, 0, SPARE))
        self.own[number][:, :, :, place] = new
        keys, values = self.own[number][:, :, :, : place + 1].transpose(2, 3)
        return decoding_attention(query, (keys, values), self._mask(window), self._shared[number], **scoring)

    def _open(self, number: int, window: int | None, new: Tensor) -> None:
        """Begin a layer: copy tails to it, hold what its rows share, and free the prompts if no one needs them.

        new: keys and values of the step, (2, B, K, H).
        """
        stays = self._readers if window is None else {}
        if window not in self._tails:
            copied = [[node for node in path if node not in stays] for path in self._paths]
            self._tails[window] = Tails.of(copied, new.device, self.longest if window is None else window - 1)
        tails = self._tails[window]
        stored = torch.cat([new[:, :0], *(node.rows.layers[number] for node in tails.nodes)], 1)
        self.own.append(stored[:, tails.tokens].transpose(2, 3))
        self._shared.append(shared_by(stays, number))
        if self.frees:
            for node in set(chain(*self._paths)):
                node.rows.layers[number] = None

    def _mask(self, window: int | None) -> Tensor:
        """Return what the new tokens see of their row's own keys, as `attention_to_own` takes it."""
        if window not in self._masks:
            hidden = nn.functional.pad(self._tails[window].tokens < 0, (0, self.num_new + 1))[:, None, None]
            if window is not None:
                hidden[..., :-window] = True
            self._masks[window] = added_to_scores(hidden)
        return self._masks[window]


class RowsCall(StoredCall):
    """A forward pass of the next token of each row."""

    def __init__(self, cache: PromptCache, places: IntArray) -> None:
        """Take the places of the new tokens in their sequences, (B,), int64."""
        if (longest := int(places.max()) + 1) > cache.num_checked:
            check_length(cache.parts, longest)
        super().__init__(cache.parts, on_device(places, cache.parts.base.device), cache.longest)
        self.cache = cache

    def attend(self, heads: Heads, window: int | None, both_ways: bool = False, **scoring: Any) -> Tensor:
        """Attend to what is stored of each row. both_ways: as only images do."""
        return self.cache.attend(len(self.ran), heads, window, **scoring)

    def end(self, output: Any) -> Any:
        """Return the output of the model with the logits of each row, (B, 1, V)."""
        if not self.cache.num_new:
            self.check()
        assert len(self.ran) == len(self.cache.own), "the layers of the first step"
        self.cache.num_new += 1
        output.logits = output.logits.transpose(0, 1)
        return output


OF_CALL = {"use_cache", "logits_to_keep", *CACHE}  # arguments that only an ordinary call has


@contextmanager
def serving(cache: PromptCache) -> Iterator[None]:
    """Let calls of the model with this cache run on all rows as one sequence, whose layers attend to the cache."""

    def before(base: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = arguments_of(base, args, kwargs)
        if all(given.get(name) is not cache for name in CACHE):
            return None
        ids: Tensor = given["input_ids"]
        call = cache.begin(ids, given.get("attention_mask"))
        options = {name: x for name, x in given.items() if not isinstance(x, Tensor) and name not in OF_CALL}
        return (), {**options, **call.arguments(ids[:, -1])}

    def after(base: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        call = kwargs.get("radix_call")
        return call.end(output) if isinstance(call, RowsCall) and call.cache is cache else None  # others may be nested

    base = cache.parts.base
    hooks = (
        base.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
        base.register_forward_hook(after, with_kwargs=True, prepend=True),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
