"""What the attention kernels are given, against the pairs of (query, key) that the tree mask allows."""

import pickle
from collections import Counter

import pytest
import torch
from accelerate.utils import send_to_device
from batch_contents import as_python
from hypothesis import example, given, settings
from hypothesis import strategies as st
from lightning.fabric.utilities import move_data_to_device
from plans import DEEP, FOREST, plan_of
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from radixtrain.testing import FREE_FORKS, ragged_batches
from radixtrain.tree.layout import TreeLayout

INTS = {"max_seqlen", "max_segment", "max_new_tokens", "max_path", "max_position"}


def layout_of(sequences, run_cost=None, **options):
    return TreeLayout.from_plan(plan_of(sequences, **options), run_cost)


def whole_layout(sequences=FOREST, **options):
    """With the runs of recurrent layers, which a batch has only if asked for."""
    return layout_of(sequences, FREE_FORKS, **options)


def mask_pairs(plan):
    ends = plan.row_subtree_ends.tolist()
    return {(query, key) for key, end in enumerate(ends) for query in range(key, end)}


def test_a_forest_in_full():
    """A forest of two trees: [0, 2) 7 8 -> 5 | 9 6 and [5, 6) 9 -> 1 | 2 -> 2 | 4."""
    long, short = torch.int64, torch.int32
    assert as_python(layout_of(FOREST)) == {
        "gather_indices": (long, [0, 1, 5, 2, 9, 10, 11, 13, 14, 17]),
        "inverse_indices": (short, [0, 1, 3, 0, 1, 2, 0, 1, 3, 4, 5, 6, 5, 7, 8, 5, 7, 9]),
        "cu_seqlens": (short, [0, 3, 6, 10, 12, 15, 18]),
        "segment_starts": (short, [0, 2, 3, 5, 6, 7, 8, 9, 10]),
        "subtree_ends": (short, [5, 3, 5, 10, 7, 10, 9, 10]),
        "path_keys": (short, [0, 1, 2, 0, 1, 3, 0, 1, 3, 4, 5, 6, 5, 7, 8, 5, 7, 9]),
        "path_cu_seqlens_q": (short, [0, 3, 4, 5, 7, 9, 10]),
        "path_cu_seqlens_k": (short, [0, 3, 6, 10, 12, 15, 18]),
        "level_queries": (long, [2, 3, 4, 6, 7, 8, 9]),
        "level_keys": (long, [0, 1, 5]),
        "level_cu_seqlens_q": (short, [0, 3, 7, 0, 2]),
        "level_cu_seqlens_k": (short, [0, 2, 3, 0, 1]),
        "max_seqlen": 4,
        "max_segment": 2,
        "max_new_tokens": 3,
        "max_path": 4,
        "max_position": 3,
        "levels": ((2, 7, 3, 4, 2, 2, 0), (1, 2, 1, 2, 1, 8, 7)),
    }


@pytest.mark.parametrize(
    ("sequences", "positions", "expected"),
    [([[7, 8, 9]], None, 2), ([[7, 8], [7, 9]], [4, 900, 4, 5], 900), ([[7]], None, 0), ([], None, 0)],
    ids=["counted", "given", "one token", "no sequence"],
)
def test_max_position_leaves_padding_rows_out(sequences, positions, expected):
    """Eight rows: those of padding count on to 4 and more."""
    layout = layout_of(sequences, position_ids=positions, pad_to_multiple_of=8)
    assert layout.max_position == expected


@example(DEEP, 1, None)
@settings(max_examples=60, deadline=None)
@given(ragged_batches(min_length=0, min_sequences=0), st.sampled_from([1, 2, 3]), st.sampled_from([None, 8]))
def test_paths_cover_every_pair_of_the_mask_once(sequences, min_shared_tokens, pad_to_multiple_of):
    plan = plan_of(sequences, min_shared_tokens=min_shared_tokens, pad_to_multiple_of=pad_to_multiple_of)
    layout = TreeLayout.from_plan(plan)
    assert layout.row_subtree_ends.tolist() == plan.row_subtree_ends.tolist()
    paths, found = layout.paths, Counter()
    assert paths.causal
    for q0, q1, k0, k1 in paths.bounds:
        rows, path = range(q0, q1), plan.path_keys[k0:k1].tolist()
        assert len(rows) <= paths.max_seqlen_q
        assert len(path) <= paths.max_seqlen_k
        for i, row in enumerate(rows):
            found.update((row, key) for key in path[: len(path) - len(rows) + i + 1])
    assert found == Counter(mask_pairs(plan))


MOVERS = {
    "pickle": lambda batch, device: pickle.loads(pickle.dumps(batch)),
    "DataLoader": lambda batch, device: next(iter(DataLoader([batch], batch_size=None, num_workers=1))),
    "lightning": move_data_to_device,
    "accelerate": send_to_device,
}


@pytest.mark.parametrize("sequences", [FOREST, [[1, 2, 3], [4, 5]], [[3]]], ids=["forks", "no fork", "one token"])
@pytest.mark.parametrize("move", MOVERS.values(), ids=MOVERS)
def test_a_batch_survives(move, sequences):
    layout = whole_layout(sequences)
    again = move({"layout": layout}, torch.device("cpu"))["layout"]
    assert as_python(again) == as_python(layout)


@pytest.mark.parametrize("move", [move_data_to_device, send_to_device, None], ids=["lightning", "accelerate", "to"])
def test_moved_to_a_device(move):
    """Every tensor and nothing else. Torch's meta device has no values, so none is read back."""
    layout, meta = whole_layout(), torch.device("meta")
    moved = move({"layout": layout}, meta)["layout"] if move else layout.to(meta, non_blocking=True)
    devices = {x.device for x in tree_leaves([vars(part) for part in (moved, moved.runs)]) if torch.is_tensor(x)}
    assert devices == {moved.device} == {meta} and layout.device.type == "cpu"
    assert [getattr(moved, name) for name in (*INTS, "levels")] == [getattr(layout, name) for name in (*INTS, "levels")]
    assert moved.runs.calls == layout.runs.calls
    assert [piece.ragged.bounds for piece in moved.pieces] == [None] * 3, "levels are packed"
    assert moved.sequences.bounds is moved.paths.bounds is None
    assert layout.to("cpu") is layout, "and keeps what its layers have made"
