"""The calls onto stored rows that new rows see whole: what generation finds in its cache, named by slots."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from radixtrain.kernels.merge_attention import Piece
from radixtrain.kernels.varlen_args import Bounds, Ragged


def shared_pieces(runs: Sequence[tuple[np.ndarray, np.ndarray]], device: torch.device) -> tuple[Piece, ...]:
    """Make the calls onto runs of stored rows. runs: (queries that see it whole, slots), ascending, int64.

    On the host, whose kernels loop, runs that no query sees both of are one piece with a rectangle for each, so that
    they are merged at once. A device takes one call a run: a call of several would need their keys side by side.
    """
    if device.type != "cpu":
        bounds = torch.tensor([[[0, len(rows)] for rows in run] for run in runs], dtype=torch.int32, device="cpu")
        on_device = bounds.to(device, non_blocking=True)  # a copy for all runs, which the host does not wait for
        return tuple(shared_piece(*run, each) for run, each in zip(runs, on_device, strict=True))
    levels: list[list[Bounds]] = []
    pieces = []
    for run in sorted(runs, key=lambda run: -len(run[0])):
        queries, keys = (_range_of(each) for each in run)
        if queries is None or keys is None:
            pieces.append(shared_piece(*run))
            continue
        level = next((level for level in levels if _is_apart(queries, level)), None)
        if level is None:
            levels.append(level := [])
        level.append((*queries, *keys))
    return (*(_level_piece(sorted(level)) for level in levels), *pieces)


def _range_of(rows: np.ndarray) -> tuple[int, int] | None:
    """Return start and end of consecutive rows; None if they are not consecutive."""
    first, end = int(rows[0]), int(rows[-1]) + 1
    return (first, end) if end - first == len(rows) and bool((np.diff(rows) == 1).all()) else None


def _is_apart(queries: tuple[int, int], level: list[Bounds]) -> bool:
    """Return whether none of these queries is in a rectangle of the level."""
    start, end = queries
    return all(end <= q0 or q1 <= start for q0, q1, _, _ in level)


def _level_piece(level: list[Bounds]) -> Piece:
    """Make one piece of rectangles whose queries do not meet. Queries between them see nothing."""
    first, end = level[0][0], level[-1][1]
    low, high = min(each[2] for each in level), max(each[3] for each in level)
    bounds = tuple((q0 - first, q1 - first, k0 - low, k1 - low) for q0, q1, k0, k1 in level)
    # With gaps, `cu_seqlens` would not say what each query sees: kernels of the host read `bounds`.
    q, k = (torch.tensor([0, *(each[side] for each in bounds)], dtype=torch.int32, device="cpu") for side in (1, 3))
    longest_q, longest_k = (max(each[side + 1] - each[side] for each in bounds) for side in (0, 2))
    return Piece(
        slice(first, end), slice(low, high), Ragged(q, k, longest_q, longest_k, False, bounds), of_further=True
    )


def shared_piece(q_rows: Sequence[int] | np.ndarray, slots: np.ndarray, cu_seqlens: Tensor | None = None) -> Piece:
    """Make a call of queries that see stored rows whole. Consecutive rows or slots become slices, which are not copied.

    cu_seqlens: as in `Ragged.whole`; index tensors are made on its device.
    """
    ragged = Ragged.whole(len(q_rows), len(slots), cu_seqlens)
    queries, keys = (_slice_or_indices(np.asarray(each), ragged.cu_seqlens_q.device) for each in (q_rows, slots))
    return Piece(queries, keys, ragged, of_further=True)


def _slice_or_indices(rows: np.ndarray, device: torch.device) -> slice | Tensor:
    found = _range_of(rows)
    return slice(*found) if found else torch.from_numpy(rows.astype(np.int64)).to(device, non_blocking=True)
