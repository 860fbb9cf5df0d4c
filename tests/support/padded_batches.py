"""Generated padded batches, as a trainer would make them: what a call gets, and which of its places are read.

Rows are copies, prefixes, extensions and forks of each other, single tokens and new ones, of two to four distinct
tokens, so that they share by accident too. Padding stands on the left, on the right or on both sides, and the ids there
are any. One batch in ten is packed: its rows stand one after the other, and their positions start again.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

__all__ = ["PaddedBatch", "draw_batch", "packed", "pad"]

LONGEST = 11  # tokens; every sliding window of a tiny model is shorter
MASKS = [torch.bool, torch.int64, torch.int32, torch.float64]
# A row that gives every parameter of a small model a gradient: if every query sees one key, q and k have none.
ALIVE = [1, 2, 3, 1, 1, 2, 2, 1]


@dataclass(frozen=True)
class PaddedBatch:
    """inputs: `input_ids`, (B, L), and what else of mask and positions the call gets.

    kept: (B, L), bool. False at padding.
    starts: (B, L), bool. True at the first token of each sequence, two or more in a packed row.
    positions: (B, L), int64. of each token, as Hugging Face counts those that are not given.
    kind: in words, for messages.
    """

    inputs: dict[str, Tensor]
    kept: Tensor
    starts: Tensor
    positions: Tensor
    kind: str

    @property
    def is_packed(self) -> bool:
        """Whether a row has several sequences."""
        return int(self.starts.sum()) > len(self.starts)

    @property
    def counts_padding(self) -> bool:
        """Whether Hugging Face counts the positions of some sequence from its padding."""
        return "position_ids" not in self.inputs and bool((~self.kept[:, 0] & self.kept.any(1)).any())

    @cached_property
    def num_unique_tokens(self) -> int:
        """Distinct histories of (token, position), counted in a set. Padding in front of a sequence moves nothing."""
        found: set[tuple[tuple[int, int], ...]] = set()
        for ids, positions, kept, starts in zip(
            self.inputs["input_ids"].tolist(),
            self.positions.tolist(),
            self.kept.tolist(),
            self.starts.tolist(),
            strict=True,
        ):
            history: tuple[tuple[int, int], ...] = ()
            for token, position, is_kept, is_start in zip(ids, positions, kept, starts, strict=True):
                history = () if is_start else history
                if is_kept:
                    place = len(history) if "position_ids" not in self.inputs else position
                    history = (*history, (token, place))
                    found.add(history)
        return len(found)

    def labels(self) -> Tensor:
        """(B, L). the model's own: each token, except padding and what is predicted from padding, which are -100."""
        hidden = ~self.kept
        hidden[:, 1:] |= ~self.kept[:, :-1]
        return self.inputs["input_ids"].masked_fill(hidden, -100)


def draw_batch(rng: np.random.Generator, pad_id: int | None = None) -> PaddedBatch:
    """pad_id: the id of padding, which then no token has; None for any ids."""
    rows = draw_rows(rng, lowest=0 if pad_id is None else pad_id + 1)
    if rng.random() < 0.1:
        return packed(rows)
    side = ["left", "right", "both"][rng.integers(3)]
    width = max(map(len, rows)) + int(rng.integers(3))
    room = [width - len(row) for row in rows]
    left = [{"left": most, "right": 0, "both": int(rng.integers(most + 1))}[side] for most in room]
    fill = rng.integers(0, 5, (len(rows), width)) if pad_id is None else np.full((len(rows), width), pad_id)
    hidden = len(rows) - 1 if pad_id is None and len(rows) > 1 and rng.random() < 0.1 else None
    positions = [None, None, "mask", "columns", "one row", "offset", "jumps"][rng.integers(7)]
    return pad(rng, rows, left, fill, positions, hidden, side)


def draw_rows(rng: np.random.Generator, lowest: int) -> list[list[int]]:
    """Two to seven rows. lowest: of the token ids."""
    alphabet = np.arange(lowest, lowest + rng.integers(2, 5))
    kind = ["nested", "nested", "nested", "identical", "prefixes", "single tokens", "one row"][rng.integers(7)]
    first = [lowest + token for token in ALIVE] if rng.random() < 0.7 else draw_row(rng, alphabet, LONGEST)
    if kind == "one row":
        return [first]
    rows = [first]
    for _ in range(rng.integers(1, 7)):
        row = rows[rng.integers(len(rows))]
        cut = int(rng.integers(1, len(row) + 1))
        rows.append(
            {
                "nested": (row[:cut] + draw_row(rng, alphabet, 4) * bool(rng.integers(4)))[:LONGEST],
                "identical": list(row),
                "prefixes": row[:cut],
                "single tokens": draw_row(rng, alphabet, 1),
            }[kind]
        )
    return [rows[index] for index in rng.permutation(len(rows))]


def draw_row(rng: np.random.Generator, alphabet: np.ndarray, longest: int) -> list[int]:
    return rng.choice(alphabet, rng.integers(1, longest + 1)).tolist()


def pad(
    rng: np.random.Generator,
    rows: list[list[int]],
    left: list[int],
    fill: np.ndarray,
    positions: str | None,
    hidden: int | None = None,
    side: str = "left",
) -> PaddedBatch:
    """left: padding in front of each row. fill: (B, L). the ids of padding. positions: how they are counted, None if
    they are not given. hidden: a row that the mask hides as a whole.
    """
    ids, kept, starts = fill.copy(), np.zeros(fill.shape, dtype=bool), np.zeros(fill.shape, dtype=bool)
    for row, tokens in enumerate(rows):
        ids[row, left[row] : left[row] + len(tokens)] = tokens
        kept[row, left[row] : left[row] + len(tokens)] = row != hidden
        starts[row, left[row]] = True
    inputs = {"input_ids": torch.from_numpy(ids)}
    columns = np.broadcast_to(np.arange(fill.shape[1]), fill.shape)
    without_mask = (kept.all() and rng.random() < 0.5) or (side == "right" and hidden is None and rng.random() < 0.15)
    if without_mask:  # then what looked like padding are tokens, too
        kept[:], starts[:], positions = True, columns == 0, "columns" if positions else None
    else:
        inputs["attention_mask"] = torch.from_numpy(kept).to(MASKS[rng.integers(len(MASKS))])
    counted = count_positions(rng, positions, kept, columns)
    if positions is not None:
        inputs["position_ids"] = torch.from_numpy(counted[:1] if positions == "one row" else counted)
    mask = inputs["attention_mask"].dtype if "attention_mask" in inputs else None
    kind = f"{side} padding, {mask=}, positions={positions}"
    return PaddedBatch(inputs, *map(torch.from_numpy, (kept, starts, counted)), kind)


def count_positions(rng: np.random.Generator, how: str | None, kept: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """(B, L), int64. mask: from the first token that is kept, 0 or 1 at padding."""
    from_mask = np.where(kept, kept.cumsum(1) - 1, rng.integers(2))
    steps = rng.integers(1, 4, kept.shape[1]).cumsum()
    return {
        "mask": from_mask,
        "offset": from_mask + 3,
        "jumps": steps[from_mask],
    }.get(how or "", columns.copy())


def packed(rows: list[list[int]]) -> PaddedBatch:
    """The rows one after the other in a single one, without a mask."""
    ids = torch.tensor([[token for row in rows for token in row]])
    positions = torch.tensor([[place for row in rows for place in range(len(row))]])
    inputs = {"input_ids": ids, "position_ids": positions}
    return PaddedBatch(inputs, torch.ones_like(ids, dtype=torch.bool), positions == 0, positions, "packed")
