"""The arrays of a batch with their legend: every entry that a collator makes has its line."""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

from radixtrain.collators.radix import RadixCollator
from radixtrain.data.sample import Sample
from radixtrain.inspection.micro_batch import MicroBatch
from radixtrain.inspection.show import MEANINGS, index_arrays


def test_names_shapes_dtypes_and_values(
    sample_of: Callable[..., Sample], part_of: Callable[..., MicroBatch], printed: Callable[..., str]
) -> None:
    part = part_of([sample_of("abcdefghijklmnopqrstuvwxyz", "1"), sample_of("abcdefghijklmnopqrstuvwxyz", "2")])
    lines = printed(index_arrays(part.batch), width=200).splitlines()
    found = {line.split("  ")[0]: (line, values) for line, values in pairwise(lines)}
    assert part.batch.keys() <= found.keys()
    assert found["radix_cu_seqlens"] == (
        "radix_cu_seqlens  int32 [3]  [B + 1] where each sequence begins among the T tokens",
        "    0 27 54",
    )
    assert found["input_ids"][0].startswith("input_ids  int64 [1, 28]  ")
    assert found["input_ids"][1] == "    97 98 99 100 101 102 103 104 105 106 ⋯ 14 more ⋯ 121 122 49 50"
    assert found["radix_loss_weights"][1] == "    1 1"
    assert found["radix_max_seqlen"] == ("radix_max_seqlen  int  longest sequence, in tokens", "    27")
    assert "⋯" not in printed(index_arrays(part.batch, full=True))


@pytest.mark.parametrize("floats", [{}, {"loss_weights": [1.0, 0.5, 2.0], "old_logprobs": [0.0, -1.0, -2.0]}])
def test_every_entry_has_a_meaning(floats: dict[str, list[float]]) -> None:
    feature = {"input_ids": [5, 6, 7], "attention_mask": [0, 1, 1], "labels": [-100, -100, 7], **floats}
    batch = RadixCollator(merge_labels=True)([feature])
    assert batch.keys() <= MEANINGS.keys()
    assert "radix_left_padded" in batch


def test_an_unknown_entry_is_not_passed_over() -> None:
    with pytest.raises(KeyError, match="radix_new"):
        index_arrays({"radix_new": np.zeros(1)})
