"""What a cache does not hold of some prompts, computed once on their unique tokens.

The same attention functions as in training (`radixtrain/hf/attention_interface.py`), whether the model is shared or
not. Layers see no cache of Hugging Face's: the attention function itself receives the call (`radix_call`), stores keys
and values, and attends to what is stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from threading import RLock
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from radixtrain.attention import continued_attention
from radixtrain.collators.batching import cut_by_unique_tokens
from radixtrain.errors import TRAIN_WITHOUT_SHARING, UserError
from radixtrain.generation.cache import Match, Node, RadixCache
from radixtrain.hf.attention_interface import Call, Extent, Heads
from radixtrain.hf.backbone import Parts, num_attention_layers
from radixtrain.hf.guards.batch import check_length
from radixtrain.hf.guards.draws import evaluating
from radixtrain.hf.guards.model import look
from radixtrain.hf.guards.rules import WITHOUT, check_supported
from radixtrain.hf.windows import no_mask, window_may_bind
from radixtrain.kernels.stored import Readers, Shared
from radixtrain.tree.arrays import IntArray, back_to_back, concatenate_ranges, lengths_of
from radixtrain.tree.layout import TreeLayout, on_device
from radixtrain.tree.plan import build_prefix_plan
from radixtrain.tree.sorting import sort_sequences

MAX_ROWS = 16_384  # new rows of a pass, as long as it is more than one prompt
_GENERATING = RLock()  # a model has one mode for all threads, and a cache one tree


@contextmanager
def generating(model: nn.Module, parts: Parts, longest: int) -> Iterator[None]:
    """Let the model compute on stored rows: in evaluation mode, without gradients. Restores it afterwards.

    Another thread that generates waits.

    model: as the user gave it, maybe with adapters around it. longest: tokens of the longest prompt and its answer,
        without the last one, which is never computed.

    Raises UserError for a model or an adapter that cannot generate exactly this way.
    """
    check_supported(parts, "generate")
    check_length(parts, longest)
    try:
        with _GENERATING, evaluating(model), torch.no_grad():
            verdict = look(parts, parts.head, outer=[parts.base, parts.backbone])
            if (reason := verdict.why_not(parts.backbone, parts.head, shape=(3, longest))) is not None:
                raise UserError(f"{parts.name}: {reason}; leave it out, or {WITHOUT['generate']}")
            yield
    except UserError as error:  # of a layer
        raise UserError(str(error).replace(TRAIN_WITHOUT_SHARING, WITHOUT["generate"])) from None


@dataclass(frozen=True, eq=False)
class KeyValues:
    """What a `RadixCache` stores for some tokens: their keys and values, (2, n, K, H), by the number of the attention
    call.
    """

    layers: list[Tensor]

    def __len__(self) -> int:
        return self.layers[0].shape[1]

    def __getitem__(self, part: slice) -> KeyValues:
        """Return those of some tokens, in memory of their own, so that the others may be freed."""
        return KeyValues([layer[:, part].clone() for layer in self.layers])


def readers_of(paths: Iterable[Sequence[Node]], device: torch.device, saved: int = 0) -> dict[Node, Readers]:
    """Return which rows read each stored node, by the path of each row.

    saved: (query, key) pairs that one call for all readers of a node has to save; other nodes are left out.
    """
    rows: dict[Node, list[int]] = {}
    for row, path in enumerate(paths):
        for node in path:
            rows.setdefault(node, []).append(row)
    shared = {node: found for node, found in rows.items() if len(node.tokens) * (len(found) - 1) >= saved}
    return {node: Readers.of(np.array(found), device) for node, found in shared.items()}


def shared_by(readers: Mapping[Node, Readers], layer: int) -> list[Shared]:
    """Return the keys and values of nodes in one layer, for those that read them."""
    stored = ((node, found, node.rows.layers[layer]) for node, found in readers.items())
    return [Shared(found, keys, values, node.start) for node, found, (keys, values) in stored]


class StoredCall(Call):
    """A forward pass on new rows of some sequences, whose earlier rows are stored.

    depths: (U,), int64. the place of each new row in its sequence. longest: sequence, in tokens, with these.
    """

    def __init__(self, parts: Parts, depths: Tensor, longest: int) -> None:
        super().__init__(Extent(longest), "auto", window_may_bind(parts.decoder.config, longest))
        self.parts, self.depths = parts, depths

    def arguments(self, input_ids: Tensor) -> dict[str, Any]:
        """Return the arguments of the model for these rows. input_ids: (U,)."""
        mask = no_mask(self.window_may_bind, self.depths.device, self)
        positions = {"position_ids": self.depths[None], "attention_mask": mask}
        return {"input_ids": input_ids[None], **positions, "use_cache": False, "radix_call": self}

    def check(self) -> None:
        """Raise RuntimeError if a layer attended without the stored rows."""
        number = num_attention_layers(self.parts.decoder)
        self.check_layers(self.parts.backbone, number, "did not see the stored rows; use model.generate")


class PromptCall(StoredCall):
    """A pass of what sequences add to what is stored of them.

    Two of them share a row only if they continue the same node, so each token is marked with the node that its
    sequence continues.

    plan: of their ends. ids: (U,), int64. the token of each of its rows. num_stored: tokens of each sequence.
    readers: the rows that see each stored node. stored: keys and values of the new rows, as `KeyValues` holds them.
    """

    def __init__(self, parts: Parts, sequences: Sequence[tuple[IntArray, Match]]) -> None:
        """Take sequences, (n,), int64 each, and what is stored of them, of none the whole."""
        self.num_stored = [match.length for _, match in sequences]
        tokens, bounds = back_to_back([ids[match.length :] for ids, match in sequences])
        lengths = lengths_of(bounds)
        nodes = dict.fromkeys(match.node for _, match in sequences)
        numbers = {node: number for number, node in enumerate(nodes)}
        owners = np.array([numbers[match.node] for _, match in sequences]).repeat(lengths)
        marked = tokens + owners * (1 + int(tokens.max()))
        self.plan = build_prefix_plan(marked, bounds, concatenate_ranges(np.array(self.num_stored), lengths))
        first, device = self.plan.gather_indices, parts.base.device
        super().__init__(parts, on_device(self.plan.position_ids, device), max(len(ids) for ids, _ in sequences))
        self.ids = on_device(tokens[first], device)
        self.tree = TreeLayout.from_plan(self.plan).to(device, non_blocking=True)
        paths = [node.path for node in nodes]
        self.readers = readers_of((paths[owner] for owner in owners[first].tolist()), device)
        self.stored: list[Tensor] = []

    def run(self) -> None:
        """Run the model without its head."""
        self.parts.backbone(**self.arguments(self.ids))
        self.check()

    def attend(self, heads: Heads, window: int | None, both_ways: bool = False, **scoring: Any) -> Tensor:
        """Store the keys and values of the new rows, and attend to them and to what they continue."""
        self.stored.append(torch.stack(heads[1:]))
        shared = shared_by(self.readers, len(self.ran))
        return continued_attention(*heads, self.tree, shared, depths=self.depths, window=window, **scoring)

    def key_values(self, sequence: int, start: int) -> KeyValues:
        """Return the keys and values of a sequence from a place in it on."""
        first, end = self.plan.cu_seqlens[sequence : sequence + 2]
        new = self.plan.inverse_indices[first + start - self.num_stored[sequence] : end]
        rows = on_device(new, self.depths.device)
        return KeyValues([layer.index_select(1, rows) for layer in self.stored])


def prefill(parts: Parts, cache: RadixCache, prompts: Sequence[IntArray]) -> dict[int, Node]:
    """Compute what a cache does not hold of some prompts, (n,), int64 each; returns where each ends, by its number.

    Call it inside `generating`.
    """
    ends = dict.fromkeys(range(len(prompts)), cache.root)  # where those without tokens end
    for members in cut_by_unique_tokens(sort_sequences(*back_to_back(prompts)), MAX_ROWS):
        matches = {member: cache.match_prefix(prompts[member]) for member in members}
        ends |= {member: match.node for member, match in matches.items()}
        new = [member for member, match in matches.items() if match.length < len(prompts[member])]
        if new:
            call = PromptCall(parts, [(prompts[member], matches[member]) for member in new])
            call.run()
            cache.counters.num_computed += call.plan.num_rows
            for number, member in enumerate(new):
                ends[member] = cache.insert(prompts[member], partial(call.key_values, number))
    return ends
