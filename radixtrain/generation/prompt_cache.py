"""The cache that `model.generate` works on: prompts once, as a `RadixCache` stores them, and each row's own tokens.

A *row* is a sequence of the batch. At the first step it is decided what rows share (`Sharing`): long runs of prompt
tokens that several rows read stay where they are and are attended to once for all of these rows; the rest of each
prompt, its *tail*, is copied to the row's own keys, which then grow by what is generated. Tails are aligned right, so
that a step adds the same column for all rows:

    columns of a row's own keys    [hidden | tail of the prompt | generated]

A layer with a sliding window that binds has no shared keys: its tails are what the window shows of the prompts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from radixtrain.attention import decoding_attention
from radixtrain.generation.cache import Node
from radixtrain.generation.key_values import KeyValues, LayerRows
from radixtrain.hf.attention_interface import Heads
from radixtrain.hf.backbone import Parts, arguments_of
from radixtrain.hf.generating import GeneratingCall
from radixtrain.hf.names import CACHE
from radixtrain.hf.refusals import check_length
from radixtrain.kernels.stored import Readers, Shared
from radixtrain.tree.arrays import IntArray, cumulative
from radixtrain.tree.movable import on_device

# (query, key) pairs that a call of its own has to save at every step to be worth it. On one CPU thread, with 2 layers
# of 128 and of 512, both ways were equally fast somewhere between 200 and 1,800 pairs.
PIECE_CELLS = 512
FIRST_NEW = 64  # columns for generated tokens to begin with


@dataclass(frozen=True, eq=False)
class Sharing:
    """What rows read of their prompts.

    paths: the nodes of each row's prompt, from the root. shared: those that are attended to where they are stored.
    """

    paths: Sequence[Sequence[Node]]
    shared: frozenset[Node]

    _readers: dict[int, dict[Node, Readers]] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of(cls, paths: Sequence[Sequence[Node]]) -> Sharing:
        """Choose what is shared: what saves enough pairs, and tails that would make those of all rows much wider."""
        num_readers: dict[Node, int] = {}
        for path in paths:
            for node in path:
                num_readers[node] = num_readers.get(node, 0) + 1
        shared = {node for node, number in num_readers.items() if len(node.tokens) * (number - 1) >= PIECE_CELLS}
        tails = cls(paths, frozenset(shared)).tails
        lengths = np.array([num_tokens(tail) for tail in tails])
        most = _longest_worth(lengths)
        for tail, length in zip(tails, lengths, strict=True):
            if length > most:
                shared.update(tail)
        return cls(paths, frozenset(shared))

    @property
    def tails(self) -> list[list[Node]]:
        """Return what of each row's prompt is copied to it."""
        return [[node for node in path if node not in self.shared] for path in self.paths]

    def readers(self, num_new: int, device: torch.device) -> dict[Node, Readers]:
        """Return the queries that read each shared node. num_new: of each row."""
        if num_new not in self._readers:
            rows: dict[Node, list[int]] = {}
            for row, path in enumerate(self.paths):
                for node in self.shared.intersection(path):
                    rows.setdefault(node, []).extend(range(row * num_new, (row + 1) * num_new))
            self._readers[num_new] = {node: Readers.of(np.array(each), device) for node, each in rows.items()}
        return self._readers[num_new]


def num_tokens(nodes: Sequence[Node]) -> int:
    """Count the tokens of some nodes."""
    return sum(len(node.tokens) for node in nodes)


def _longest_worth(lengths: IntArray) -> int:
    """Return the longest tail that rows should have: all become as wide, and a longer one costs calls of its own."""
    ordered = np.sort(np.maximum(lengths, 1))
    longer = len(ordered) - 1 - np.arange(len(ordered))  # tails that are longer than each
    cells = ordered * len(ordered) + longer * PIECE_CELLS
    return int(ordered[cells.argmin()])


@dataclass(eq=False)
class Tails:
    """Which prompt tokens rows have of their own.

    nodes: whose tokens are numbered back to back. tokens: (B, T), int64. these numbers, aligned right; hidden places
        have the next number, that of a row of zeros.
    mask: (B, 1, 1, T), float32, -inf at hidden places and 0 elsewhere.
    """

    nodes: Sequence[Node]
    tokens: Tensor
    mask: Tensor

    @classmethod
    def of(cls, tails: Sequence[Sequence[Node]], device: torch.device, longest: int | None = None) -> Tails:
        """Lay out the nodes of each row's tail. longest: tokens that it keeps, the last ones; None for all."""
        nodes = list(dict.fromkeys(node for tail in tails for node in tail))
        starts = cumulative(np.array([len(node.tokens) for node in nodes], dtype=np.int64))
        numbers = {node: np.arange(start, start + len(node.tokens)) for node, start in zip(nodes, starts, strict=False)}
        rows = [np.concatenate([starts[:0], *(numbers[node] for node in tail)]) for tail in tails]
        if longest is not None:
            rows = [row[max(0, len(row) - longest) :] for row in rows]
        width = max(map(len, rows))
        tokens = np.full((len(rows), width), starts[-1])
        for place, row in enumerate(rows):
            tokens[place, width - len(row) :] = row
        placed = on_device(tokens, device)
        hidden = (placed == int(starts[-1]))[:, None, None]
        return cls(nodes, placed, torch.zeros(hidden.shape, device=device).masked_fill_(hidden, float("-inf")))

    @property
    def width(self) -> int:
        """Return T."""
        return self.tokens.shape[1]

    def of_layer(self, number: int, like: Tensor) -> LayerRows:
        """Return keys and values of a layer, (B, K, T, H) each. like: new keys, (B, K, n, H)."""
        if not self.nodes:
            return LayerRows(like[:, :, :0], like[:, :, :0])
        parts = zip(*(node.rows.of_layer(number) for node in self.nodes), strict=True)
        keys, values = (torch.cat([*part, part[0].new_zeros(1, *part[0].shape[1:])]) for part in parts)
        return LayerRows(*(x[self.tokens].transpose(1, 2) for x in (keys, values)))


class PromptCache(Cache):
    """Keys and values of prompts, stored once where several rows share them, and beside them each row's own.

    It works inside `serving`, which hides it from the layers: the attention function receives it.

    layers: each row's own keys and values, (B, K, columns, H), with columns to spare.
    num_new: columns that hold tokens after the prompts.
    in_order: whether row i still answers prompt i // (rows per prompt). Beam search mixes rows.
    """

    layers: list[Any]

    def __init__(self, ends: Sequence[Node], width: int, device: torch.device, keeps_prompts: bool) -> None:
        """Make the cache of some prompts.

        ends: where each prompt ends in its `RadixCache`. width: of the padded prompts, in tokens.
        keeps_prompts: whether they have to stay where they are stored: for later calls, or for windows that bind
            later. Otherwise what is copied is freed there.
        """
        num_layers = max(len(end.rows.layers) if end.rows else 0 for end in ends)
        super().__init__(layers=[DynamicLayer() for _ in range(num_layers)])
        self.width, self.device, self.keeps_prompts = width, device, keeps_prompts
        self.num_new, self.in_order = 0, True
        self._paths = [end.path for end in ends]
        self._lengths = np.array([num_tokens(path) for path in self._paths])
        self._rows = np.arange(len(ends))  # the prompt of each row
        self._sharing: Sharing | None = None
        self._tails: dict[int | None, Tails] = {}  # by window; None for layers in which none binds
        self._windows: dict[int, int | None] = {}  # of each layer, if it binds
        self._shared: dict[int, dict[Node, LayerRows]] = {}  # of each layer
        self._masks: dict[int | None, Tensor] = {}  # of one step, by window

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the length of the rows with their padding, as transformers counts it."""
        return self.width + self.num_new

    def update(self, *_: object, **__: object) -> Any:
        """Refuse a layer that would attend to this cache by itself."""
        raise RuntimeError("a cache of radixtrain.generate works only inside of that call")

    def crop(self, max_length: int) -> None:
        """Remove the last tokens: so many if the number is negative, else all beyond this length."""
        removed = -max_length if max_length <= 0 else self.get_seq_length() - max_length
        if removed > self.num_new:
            raise RuntimeError(f"cannot remove {removed} tokens, only the {self.num_new} that follow the prompts")
        self.num_new -= max(0, removed)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let each row continue another one."""
        self.in_order = False
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        self.batch_select_indices(torch.arange(len(self._rows)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, in this order."""
        chosen, rows = indices.to(self.device), self._rows[indices.cpu().numpy()]
        for layer in self.layers:
            if layer.is_initialized:
                layer.keys, layer.values = (x.index_select(0, chosen) for x in (layer.keys, layer.values))
        for tails in self._tails.values():
            tails.tokens, tails.mask = (x.index_select(0, chosen) for x in (tails.tokens, tails.mask))
        if self._sharing is not None and not np.array_equal(rows, self._rows):
            self._sharing = Sharing([self._paths[row] for row in rows], self._sharing.shared)
        self._rows = rows

    def begin(self, parts: Parts, num_rows: int, num_new: int) -> RowsCall:
        """Begin a forward pass of so many tokens of each row."""
        if num_rows != len(self._rows):  # several answers to each prompt
            self._rows = self._rows.repeat(num_rows // len(self._rows))
        if self._sharing is None:
            self._sharing = Sharing.of([self._paths[row] for row in self._rows])
        self._masks = {}
        return RowsCall(self, parts, self._lengths[self._rows][:, None] + self.num_new + np.arange(num_new))

    def attend(self, number: int, heads: Heads, window: int | None, **scoring: Any) -> Tensor:
        """Store the keys and values of a step in one layer, and attend to all that each row sees.

        window: of the layer, if it binds.
        """
        assert self._sharing is not None
        query, new_keys, new_values = (x.unflatten(0, (len(self._rows), -1)).transpose(1, 2) for x in heads)
        num_new, layer = query.shape[2], self._opened(number, window, new_keys)
        first = self._tails[window].width + self.num_new
        layer.keys = _with_columns(layer.keys, new_keys, first)
        layer.values = _with_columns(layer.values, new_values, first)
        keys, values = (x[:, :, : first + num_new].transpose(1, 2) for x in (layer.keys, layer.values))
        readers = self._sharing.readers(num_new, self.device)
        shared = [Shared(readers[node], *stored) for node, stored in self._shared[number].items() if node in readers]
        return decoding_attention(heads[0], (keys, values), self._mask(window, num_new), shared, **scoring)

    def _opened(self, number: int, window: int | None, new_keys: Tensor) -> Any:
        """Return a layer. When it is first used, or its window begins to bind, tails are copied to it."""
        if number == len(self.layers):  # every prompt has one token, so that nothing was stored
            self.layers.append(DynamicLayer())
        layer = self.layers[number]
        if layer.is_initialized and self._windows[number] == window:
            return layer
        own = [*self._tails_of(window).of_layer(number, new_keys)]
        if layer.is_initialized:
            first = self._tails[self._windows[number]].width
            generated = (x[:, :, first : first + self.num_new] for x in (layer.keys, layer.values))
            own = [torch.cat(parts, 2) for parts in zip(own, generated, strict=True)]
        layer.keys, layer.values = own
        layer.is_initialized = True
        self._windows[number] = window
        self._share(number, window)
        return layer

    def _tails_of(self, window: int | None) -> Tails:
        assert self._sharing is not None
        if window not in self._tails:
            whole = [self._paths[row] for row in self._rows]
            tails, longest = (self._sharing.tails, None) if window is None else (whole, window - 1)
            self._tails[window] = Tails.of(tails, self.device, longest)
        return self._tails[window]

    def _share(self, number: int, window: int | None) -> None:
        """Keep what rows of a layer share, and free the rest of the prompts if no one needs it any more."""
        assert self._sharing is not None
        nodes = self._sharing.shared if window is None else frozenset[Node]()
        self._shared[number] = {node: node.rows.of_layer(number) for node in nodes}
        if not self.keeps_prompts:
            for node, stored in self._shared[number].items():
                self._shared[number][node] = LayerRows(*(x.clone() for x in stored))
            for node in {node for path in self._paths for node in path}:
                node.rows.free(number)

    def _mask(self, window: int | None, num_new: int) -> Tensor:
        """Return what the new tokens see of their row's own keys, as `attention_to_own` takes it."""
        if window not in self._masks:
            tails = self._tails[window]
            columns = torch.arange(tails.width + self.num_new + num_new, device=self.device)
            mask = nn.functional.pad(tails.mask, (0, self.num_new + num_new))
            if window is not None or num_new > 1:
                distance = columns[-num_new:, None] - columns
                hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
                mask = mask.expand(-1, -1, num_new, -1).masked_fill(hidden, float("-inf"))
            self._masks[window] = mask
        return self._masks[window]

    def answers(self, prompts: Sequence[IntArray], sequences: Tensor) -> Iterator[tuple[IntArray, KeyValues]]:
        """Yield for each row the tokens that it has computed, and the keys and values of those after its prompt.

        prompts: whose ends the cache was made of. sequences: (B, L), int64, that `generate` returned.
        """
        ids = sequences[:, self.width : self.width + self.num_new].cpu().numpy()
        for row, prompt in enumerate(self._rows.tolist()):
            layers = []
            for number, layer in enumerate(self.layers):
                first = self._tails[self._windows[number]].width
                own = (x[row, :, first : first + self.num_new] for x in (layer.keys, layer.values))
                layers.append(LayerRows(*(x.transpose(0, 1).contiguous() for x in own)))
            yield np.append(prompts[prompt], ids[row]), KeyValues(layers, np.arange(self.num_new))


def _with_columns(x: Tensor, new: Tensor, first: int) -> Tensor:
    """Write new columns, (B, K, n, H), from `first` on. Returns x itself, or a wider copy."""
    end = first + new.shape[2]
    if end > x.shape[2]:
        wider = x.new_empty(*x.shape[:2], end + max(FIRST_NEW, first // 2), x.shape[3])
        wider[:, :, :first] = x[:, :, :first]
        x = wider
    x[:, :, first:end] = new
    return x


class RowsCall(GeneratingCall):
    """A forward pass of the next tokens of each row."""

    def __init__(self, cache: PromptCache, parts: Parts, places: IntArray) -> None:
        """Take the places of the new tokens in their sequences, (B, n), int64."""
        super().__init__(parts, on_device(places.flatten(), cache.device), int(places.max()) + 1)
        self.cache, self.shape = cache, places.shape

    def attend(self, heads: Heads, window: int | None, **scoring: Any) -> Tensor:
        """Attend to what is stored of each row."""
        del scoring["both_ways"]  # only images attend so
        return self.cache.attend(len(self.calls), heads, window, **scoring)

    def end(self, output: Any) -> Any:
        """Return the output of the model with the logits of each row's tokens, (B, n, V), and its cache."""
        self.check()
        self.cache.num_new += self.shape[1]
        output.logits = output.logits.unflatten(1, self.shape)[0]
        output[next(name for name in CACHE if hasattr(output, name))] = self.cache
        return output


OF_CALL = {"use_cache", "logits_to_keep", *CACHE}  # arguments that only an ordinary call has


@contextmanager
def serving(parts: Parts, cache: PromptCache) -> Iterator[None]:
    """Let calls of the model with this cache run on all rows as one sequence, whose layers attend to the cache."""

    def before(base: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = arguments_of(base, args, kwargs)
        if all(given.get(name) is not cache for name in CACHE):
            return None
        ids: Tensor = given["input_ids"]
        if not cache.num_new and ids.shape[1] > cache.width:  # an assistant's first tokens come with the whole prompt
            ids = ids[:, cache.width :]
        call = cache.begin(parts, *ids.shape)
        check_length(parts, call.layout.max_seqlen)
        kept = {name: x for name, x in given.items() if not isinstance(x, Tensor) and name not in OF_CALL}
        return (), {**kept, **call.arguments({"input_ids": ids.reshape(1, -1)})}

    def after(base: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        call = kwargs.get("radix_call")
        return call.end(output) if isinstance(call, RowsCall) else None

    hooks = (
        parts.base.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
        parts.base.register_forward_hook(after, with_kwargs=True, prepend=True),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
