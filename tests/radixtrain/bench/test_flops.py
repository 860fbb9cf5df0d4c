"""The ideal that measured speed-ups stand beside: literal counts, then pairs counted one by one."""

from types import SimpleNamespace

import numpy as np
from hypothesis import given, settings

from radixtrain.bench.flops import ideal_speedup, ordinary_flops, unique_flops
from radixtrain.testing import ragged_batches
from radixtrain.tree.plan import build_prefix_plan

# One layer: q and o 8 x 8 each, k and v 8 x 4 each, gate, up and down 8 x 16 each: 576 parameters.
CONFIG = SimpleNamespace(
    hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=4,
    vocab_size=10,
)  # fmt: skip


def plan_of(sequences, **options):
    ids = np.array([token for sequence in sequences for token in sequence], dtype=np.int64)
    return build_prefix_plan(ids, np.cumsum([0] + [len(sequence) for sequence in sequences]), **options)


def test_two_sequences_that_share_two_tokens():
    plan = plan_of([[1, 2, 3], [1, 2, 4]])
    ordinary, unique = ordinary_flops(CONFIG, plan, num_labels=2), unique_flops(CONFIG, plan, num_predictors=1)
    assert (ordinary.linear, unique.linear) == (2 * 576 * 6, 2 * 576 * 4)
    assert (ordinary.attention, unique.attention) == (4 * 8 * 12, 4 * 8 * 9)  # 6 + 6 pairs; 1 + 2 + 3 + 3
    assert (ordinary.head, unique.head) == (2 * 8 * 10 * 2, 2 * 8 * 10)
    assert ideal_speedup(CONFIG, plan, 2, 1) == (6912 + 384 + 320) / (4608 + 288 + 160)


def test_nothing_shared_is_worth_nothing():
    assert ideal_speedup(CONFIG, plan_of([[1, 2, 3], [4, 5]]), 5, 5) == 1.0


def test_padding_rows_are_not_part_of_the_ideal():
    sequences = [[1, 2, 3], [1, 2, 4]]
    padded, plain = plan_of(sequences, pad_to_multiple_of=8), plan_of(sequences)
    assert unique_flops(CONFIG, padded, 1) == unique_flops(CONFIG, plain, 1)


@settings(max_examples=100, deadline=None)
@given(ragged_batches())
def test_attention_counts_every_pair_of_the_trie_once(sequences):
    paths = {tuple(sequence[: end + 1]) for sequence in sequences for end in range(len(sequence))}
    unique = unique_flops(CONFIG, plan_of(sequences), 1)
    assert unique.linear == 2 * 576 * len(paths)
    assert unique.attention == 4 * 8 * sum(map(len, paths))
