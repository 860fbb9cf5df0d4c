"""What the attention kernels are given. `test_chains.py` compares it with the tree mask."""

import numpy as np
import pytest
import torch

from radixtrain.tree.layout import TreeLayout
from tests.support.batches import FOREST, as_python, of_piece, plan_of

META = torch.device("meta")


def whole_layout(sequences=FOREST):
    """With a block of the first two rows; and the plan."""
    plan = plan_of(sequences)
    return TreeLayout.from_plan(plan, np.where(np.arange(plan.num_rows) < 2, 0, -1)), plan


def test_a_forest_in_full():
    """Two trees, with the heaviest branch first: rows 7 8 -> 9 6 | 5 and 9 -> 2 -> 2 | 4, and 9 -> 1."""
    layout = TreeLayout.from_plan(plan_of(FOREST))
    assert as_python(layout) == {
        "gather_indices": [6, 7, 8, 9, 5, 12, 13, 14, 17, 11],
        "inverse_indices": [0, 1, 2, 0, 1, 4, 0, 1, 2, 3, 5, 9, 5, 6, 7, 5, 6, 8],
        "cu_seqlens": [0, 3, 6, 10, 12, 15, 18],
        "segment_starts": [0, 2, 4, 5, 6, 7, 8, 9, 10],
        "subtree_ends": [5, 4, 5, 10, 9, 8, 9, 10],
        "path_keys": [0, 1, 2, 3, 0, 1, 4, 5, 6, 7, 5, 6, 8, 5, 9],
        "pieces": [
            [([0, 3, 6, 10, 12, 15, 18], slice(0, 18))] * 2,
            [([0, 4, 5, 8, 9, 10], slice(0, 10)), ([0, 4, 7, 10, 13, 15], slice(0, 15))],
            [([0, 4, 5, 8, 9, 10], slice(0, 10))] * 2,
            [([0, 1, 2], [4, 9]), ([0, 2, 3], [0, 1, 5])],
            [([0, 1], slice(8, 9)), ([0, 2], slice(5, 7))],  # rows that follow each other are no copy
        ],
    }
    assert (layout.num_rows, layout.num_tokens, layout.num_sequences, layout.max_seqlen) == (10, 18, 6, 4)
    assert layout.shares and not layout.has_blocks and not layout.later


def test_segments_and_blocks_come_back():
    layout, plan = whole_layout()
    for each in (layout, TreeLayout.from_plan(plan)):
        starts, parents = each.segments
        assert (starts.tolist(), parents.tolist()) == (plan.segment_starts.tolist(), plan.segment_parents.tolist())
    assert layout.has_blocks and layout.block_of_row.tolist() == [0, 0, *[-1] * 8]
    assert [of_piece(piece) for piece in layout.later] == [[([0, 1], [0]), ([0, 1], [1])]] * 2


@pytest.mark.parametrize(
    ("sequences", "positions", "expected"),
    [([[7, 8, 9]], None, 2), ([[7, 8], [7, 9]], [4, 900, 4, 5], 900), ([[7]], None, 0), ([], None, 0)],
    ids=["counted", "given", "one token", "no sequence"],
)
def test_max_position_leaves_padding_rows_out(sequences, positions, expected):
    """Eight rows: those of padding count on to 4 and more."""
    layout = TreeLayout.from_plan(plan_of(sequences, position_ids=positions, pad_to_multiple_of=8))
    assert layout.max_position == expected


def test_moved_to_a_device():
    """Only `rows` moves. Torch's meta device has no values, so none is read back."""
    layout, plan = whole_layout()
    moved = layout.to(META, non_blocking=True)
    assert moved.host is layout.host and moved.rows.device == moved.device == META and layout.device.type == "cpu"
    assert moved.segments[1].tolist() == plan.segment_parents.tolist()
    assert moved.later[0].q_rows.device == moved.block_of_row.device == META
    calls = [piece.ragged for piece in (*moved.pieces, moved.sequences, moved.paths)]
    longest = [(call.max_seqlen_q, call.max_seqlen_k) for call in calls]
    assert longest == [(4, 4), (1, 2), (1, 2), (4, 4), (4, 4)]
    assert layout.to("cpu") is layout, "and keeps what its layers have made"
