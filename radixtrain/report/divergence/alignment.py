"""Two prompts side by side: the stretches that they have in common, in order, and what differs between them."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from radixtrain.report.divergence.repeats import MIN_RUN, SHINGLE, Hashes
from radixtrain.tree.arrays import IntArray

__all__ = ["Alignment", "Block", "Model", "align", "num_equal"]

MAX_BLOCKS = 200  # that are put in order: the longest
MAX_SMALL_GAP = 60  # symbols of a difference that is compared word by word

Flags = npt.NDArray[np.bool_]


class Block(NamedTuple):
    """The same `length` symbols, from `start` in one prompt and from `model` in the other."""

    start: int
    model: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def model_end(self) -> int:
        return self.model + self.length


@dataclass(frozen=True, eq=False)
class Model:
    """The prompt that others are compared with.

    symbols: (M,), int64. starts: (M + 1,), bool. where words start.
    hashes, positions: its shingles that occur once in it, sorted, and where.
    """

    symbols: IntArray
    starts: Flags
    hashes: Hashes
    positions: IntArray

    @classmethod
    def of(cls, symbols: IntArray, starts: Flags, hashes: Hashes) -> Model:
        values, first, counts = np.unique(hashes, return_index=True, return_counts=True)
        return cls(symbols, starts, values[counts == 1], first[counts == 1])


@dataclass(frozen=True, eq=False)
class Alignment:
    """What a prompt has in common with the model.

    blocks: in order in both, with words as their borders. What lies between two of them differs.
    moved_end: one past the last symbol of the prompt that the model has at another place; 0 if there is none.
    """

    blocks: tuple[Block, ...]
    moved_end: int

    def start_of(self, model: int) -> int:
        """The place in the prompt of a difference that starts at this place of the model."""
        before = [block for block in self.blocks if block.model < model]
        return before[-1].start + min(model - before[-1].model, before[-1].length) if before else 0

    def end_of(self, model: int) -> int:
        """The place in the prompt of a difference that ends at this place of the model."""
        for block in self.blocks:
            if block.model_end > model:
                return block.start + max(model - block.model, 0)
        return max(self.blocks[-1].end if self.blocks else 0, self.moved_end)


def align(symbols: IntArray, starts: Flags, hashes: Hashes, model: Model) -> Alignment:
    """The alignment of a prompt with the model. Anchors are shingles that the model has once; repeats join them.

    symbols: (M,), int64. starts: (M + 1,), bool. hashes: the shingles of the symbols.
    """
    found = _grown(_anchors(hashes, model), symbols, model.symbols)
    chain = _heaviest_chain(found)
    moved = [block.end for block in found if block.length >= MIN_RUN and not _is_inside(block, chain)]
    whole_words = _between_words(chain, starts, model.starts)
    blocks = [*_refined(whole_words, symbols, starts, model)]
    return Alignment(tuple(blocks), max(moved, default=0))


def _anchors(hashes: Hashes, model: Model) -> list[Block]:
    """Runs of shingles that both have, as blocks, in the order of the prompt."""
    if not len(hashes) or not len(model.hashes):
        return []
    places = np.minimum(model.hashes.searchsorted(hashes), len(model.hashes) - 1)
    found = (model.hashes[places] == hashes).nonzero()[0]
    if not len(found):
        return []
    other = model.positions[places[found]]
    breaks = ((np.diff(found) != 1) | (np.diff(other) != 1)).nonzero()[0] + 1
    bounds = [0, *breaks.tolist(), len(found)]
    runs = [(int(found[a]), int(other[a]), b - a + SHINGLE - 1) for a, b in pairwise(bounds)]
    return [Block(*run) for run in sorted(sorted(runs, key=lambda run: -run[2])[:MAX_BLOCKS])]


def _grown(anchors: list[Block], symbols: IntArray, model: IntArray) -> list[Block]:
    """Blocks as long as they get; one that an earlier one contains is left out. The common beginning is one of them."""
    blocks = [Block(0, 0, num_equal(symbols, model))]
    for block in anchors:
        last = blocks[-1]
        if block.end <= last.end and block.start - block.model == last.start - last.model:
            continue
        back = num_equal(symbols[: block.start][::-1], model[: block.model][::-1])
        ahead = num_equal(symbols[block.end :], model[block.model_end :])
        blocks.append(Block(block.start - back, block.model - back, block.length + back + ahead))
    return [block for block in blocks if block.length]


def num_equal(one: IntArray, other: IntArray) -> int:
    """Symbols with which both begin."""
    size = min(len(one), len(other))
    differs = one[:size] != other[:size]
    return int(differs.argmax()) if differs.any() else size


def _heaviest_chain(blocks: list[Block]) -> list[Block]:
    """The blocks in order in both prompts that have most symbols together; where two overlap, the later one is cut."""
    weight = [block.length for block in blocks]
    before = [-1] * len(blocks)
    for index, block in enumerate(blocks):
        for earlier in range(index):
            gain = weight[earlier] + block.length - _overlap(blocks[earlier], block)
            if blocks[earlier].model < block.model and blocks[earlier].start < block.start and gain > weight[index]:
                weight[index], before[index] = gain, earlier
    place = max(range(len(blocks)), key=weight.__getitem__, default=-1)
    chain: list[Block] = []
    while place >= 0:
        chain.append(blocks[place])
        place = before[place]
    return _without_overlaps(chain[::-1])


def _overlap(earlier: Block, block: Block) -> int:
    return min(block.length, max(0, earlier.end - block.start, earlier.model_end - block.model))


def _without_overlaps(chain: list[Block]) -> list[Block]:
    cut: list[Block] = []
    for block in chain:
        extra = _overlap(cut[-1], block) if cut else 0
        if block.length > extra:
            cut.append(Block(block.start + extra, block.model + extra, block.length - extra))
    return cut


def _is_inside(block: Block, chain: list[Block]) -> bool:
    """Whether half of the block's symbols in the prompt, or more, belong to the chain."""
    shared = sum(max(0, min(block.end, other.end) - max(block.start, other.start)) for other in chain)
    return 2 * shared >= block.length


def _between_words(chain: list[Block], starts: Flags, model_starts: Flags) -> list[Block]:
    """The blocks without the parts of words at their borders, so that what differs is whole words."""
    blocks = []
    for index, block in enumerate(chain):
        borders = starts[block.start : block.end + 1] & model_starts[block.model : block.model_end + 1]
        inside = borders.nonzero()[0]
        at_start = block.start == block.model == 0
        at_end = index == len(chain) - 1
        if at_end and len(inside):
            inside = np.append(inside, block.length)
        if at_start:
            inside = np.append(0, inside)
        if len(inside) and inside[-1] > inside[0]:
            first, last = int(inside[0]), int(inside[-1])
            blocks.append(Block(block.start + first, block.model + first, last - first))
    return blocks


def _refined(blocks: list[Block], symbols: IntArray, starts: Flags, model: Model) -> list[Block]:
    """The blocks, and the words that small differences between them have in common."""
    refined: list[Block] = []
    for block in blocks:
        start, other = (refined[-1].end, refined[-1].model_end) if refined else (0, 0)
        if max(block.start - start, block.model - other) <= MAX_SMALL_GAP:
            refined += _common_words(symbols, starts, (start, block.start), model, (other, block.model))
        refined.append(block)
    return refined


def _common_words(
    symbols: IntArray, starts: Flags, place: tuple[int, int], model: Model, other: tuple[int, int]
) -> list[Block]:
    ours, theirs = _words(symbols, starts, *place), _words(model.symbols, model.starts, *other)
    matcher = SequenceMatcher(None, [word for _, word in ours], [word for _, word in theirs], autojunk=False)
    return [
        Block(ours[a][0], theirs[b][0], sum(len(word) for _, word in ours[a : a + size]))
        for a, b, size in matcher.get_matching_blocks()
        if size
    ]


def _words(symbols: IntArray, starts: Flags, start: int, end: int) -> list[tuple[int, tuple[int, ...]]]:
    """Each word of a stretch and where it starts."""
    borders = [start, *(starts[start + 1 : end].nonzero()[0] + start + 1).tolist(), end] if end > start else []
    return [(a, tuple(symbols[a:b].tolist())) for a, b in pairwise(borders)]
