"""Prompts that are versions of one text, each aligned with the version that most rows have.

Only the trunk of a prompt is compared: up to the last text that another prompt computes too. What follows is the row's
own, as a question is.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from radixtrain.report.divergence.alignment import Alignment, Block, Model, align, num_equal
from radixtrain.report.divergence.prompts import Prompt
from radixtrain.report.divergence.repeats import MIN_RUN, SHINGLE, Hashes, repeated_symbols, shingles
from radixtrain.tree.arrays import IntArray

__all__ = ["Family", "Member", "Trunk", "find_families"]

MIN_REPEATED = 48  # symbols of a prompt: questions made from a pattern repeat fewer
MIN_ALIKE = 0.5  # of the repeated text of a trunk, for it to be a version of another
MIN_MIXED = 0.6  # of the repeated text of a trunk, for it to be put together from the texts of others
MAX_SHINGLES = 200_000  # of all trunks, by which they are put into families
MIN_COVER = 0.05  # of a family's rows have a text, for it to be common


@dataclass(frozen=True, eq=False)
class Trunk:
    """The beginning of some prompts, the same tokens in all.

    prompt: one of them. size: symbols of the trunk. rows: the prompts, by index.
    hashes: its shingles. repeated: (size,), bool. text that is computed at several places.
    """

    prompt: Prompt
    size: int
    rows: tuple[int, ...]
    hashes: Hashes
    repeated: npt.NDArray[np.bool_]

    @property
    def symbols(self) -> IntArray:
        return self.prompt.symbols[: self.size]

    @property
    def starts(self) -> npt.NDArray[np.bool_]:
        return self.prompt.starts[: self.size + 1]

    def fingerprint(self, largest: int) -> set[int]:
        """Its repeated shingles up to this hash: a sample that is drawn alike from every text."""
        own = self.hashes[self.repeated[: len(self.hashes)]]
        return set(own[own <= np.uint64(largest)].tolist())


@dataclass(frozen=True, eq=False)
class Member:
    """A trunk beside the model of its family, cut where their common text ends.

    reach: one past the last place of the model that the trunk has an answer to; all of the common text if it has
        parts of it in another order.
    """

    trunk: Trunk
    alignment: Alignment
    reach: int

    @property
    def end(self) -> int:
        """One past the last symbol of the common text."""
        return self.alignment.end_of(self.reach)


@dataclass(frozen=True, eq=False)
class Family:
    """model: the trunk that most rows have. members: all trunks, the model among them.

    end: one past the last symbol of the model that is common.
    """

    model: Trunk
    members: tuple[Member, ...]
    end: int


def find_families(prompts: list[Prompt]) -> list[Family]:
    """The families of two trunks or more. A prompt whose common text is all shared is in none."""
    trunks = _trunks(prompts)
    num_shingles = sum(len(trunk.hashes) for trunk in trunks)
    largest = (2**64 - 1) // max(1, num_shingles // MAX_SHINGLES)
    groups, mixed = _apart(_groups([(trunk, trunk.fingerprint(largest)) for trunk in trunks]))
    families = [_family(group) for group in groups if len(group) > 1]
    return [*families, *([_mixed_family(mixed)] if mixed else [])]


def _trunks(prompts: list[Prompt]) -> list[Trunk]:
    """The trunks of the prompts with enough repeated text, those of most rows first."""
    hashes = [shingles(prompt.symbols) for prompt in prompts]
    repeated = repeated_symbols(prompts, hashes)
    rows: dict[bytes, list[int]] = {}
    for index, (prompt, mask) in enumerate(zip(prompts, repeated, strict=True)):
        if np.count_nonzero(mask) >= MIN_REPEATED:
            size = len(mask) - int(mask[::-1].argmax())
            rows.setdefault(prompt.tokens(0, size).tobytes(), []).append(index)
    trunks = []
    for same in rows.values():
        mask = repeated[same[0]]
        size = len(mask) - int(mask[::-1].argmax())
        found = hashes[same[0]][: max(0, size - SHINGLE + 1)]
        trunks.append(Trunk(prompts[same[0]], size, tuple(same), found, mask[:size]))
    return sorted(trunks, key=lambda trunk: -len(trunk.rows))


def _groups(trunks: list[tuple[Trunk, set[int]]]) -> list[tuple[list[Trunk], set[int]]]:
    """Trunks that have half their fingerprint, or more, in common with the first of their group; and that one's."""
    groups: list[tuple[list[Trunk], set[int]]] = []
    groups_with: dict[int, list[int]] = {}
    for trunk, own in trunks:
        found = Counter(group for value in own for group in groups_with.get(value, ()))
        best, count = found.most_common(1)[0] if found else (-1, 0)
        if count and count >= MIN_ALIKE * len(own):
            groups[best][0].append(trunk)
            continue
        for value in own:
            groups_with.setdefault(value, []).append(len(groups))
        groups.append(([trunk], own))
    return groups


def _apart(groups: list[tuple[list[Trunk], set[int]]]) -> tuple[list[list[Trunk]], list[Trunk]]:
    """The groups with a text of their own, and the trunks of those that are put together from the texts of others."""
    num_groups = Counter(value for _, own in groups for value in own)
    apart: list[list[Trunk]] = []
    mixed: list[list[Trunk]] = []
    for trunks, own in groups:
        of_others = sum(num_groups[value] > 1 for value in own)
        (mixed if own and of_others >= MIN_MIXED * len(own) else apart).append(trunks)
    return (apart, [trunk for trunks in mixed for trunk in trunks]) if len(mixed) > 2 else (apart + mixed, [])


def _family(trunks: list[Trunk]) -> Family:
    first = trunks[0]
    model = Model.of(first.symbols, first.starts, first.hashes)
    aligned = [(trunk, align(trunk.symbols, trunk.starts, trunk.hashes, model)) for trunk in trunks]
    end = _common_end(aligned, first.size)
    return Family(first, tuple(_member(trunk, alignment, end) for trunk, alignment in aligned), end)


def _common_end(aligned: list[tuple[Trunk, Alignment]], size: int) -> int:
    """One past the last place of the model with 20 symbols in a row that several trunks and enough rows have."""
    steps = np.zeros((2, size + 1), dtype=np.int64)
    for trunk, alignment in aligned:
        for block in alignment.blocks:
            steps[:, block.model] += (1, len(trunk.rows))
            steps[:, block.model_end] -= (1, len(trunk.rows))
    num_trunks, num_rows = np.add.accumulate(steps, axis=1)
    needed = MIN_COVER * sum(len(trunk.rows) for trunk, _ in aligned)
    common = np.append(0, np.add.accumulate((num_trunks[:-1] > 1) & (num_rows[:-1] >= needed)))
    ends = (common[MIN_RUN:] - common[:-MIN_RUN] == MIN_RUN).nonzero()[0]
    return int(ends[-1]) + MIN_RUN if len(ends) else 0


def _member(trunk: Trunk, alignment: Alignment, end: int) -> Member:
    blocks = tuple(
        Block(block.start, block.model, min(block.length, end - block.model))
        for block in alignment.blocks
        if block.model < end
    )
    reach = blocks[-1].model_end if blocks else 0
    return Member(trunk, Alignment(blocks, alignment.moved_end), end if alignment.moved_end else reach)


def _mixed_family(trunks: list[Trunk]) -> Family:
    """What all have in common at their start, and then one difference up to the end of their trunks."""
    first = trunks[0]
    common = [num_equal(trunk.symbols, first.symbols) for trunk in trunks]
    start = int(np.quantile(common, 0.05, method="lower"))
    members = [
        Member(trunk, Alignment((Block(0, 0, start),) if start else (), trunk.size), first.size)
        for trunk, shared in zip(trunks, common, strict=True)
        if shared >= start
    ]
    return Family(first, tuple(members), first.size)
