"""The ideal beside a measured speed-up: literal counts, then pairs counted one by one."""

import numpy as np
import pytest
from hypothesis import given, settings
from transformers import BloomConfig, DeepseekV3Config, LlamaConfig, Qwen3_5TextConfig

from radixtrain.bench.flops import ordinary_flops, unique_flops
from radixtrain.errors import UserError
from radixtrain.testing import ragged_batches
from radixtrain.tree.plan import build_prefix_plan

# One layer: q and o 8 x 8 each, k and v 8 x 4 each, gate, up and down 8 x 16 each: 576 parameters.
SIZES = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 10}
LINEAR = {"num_key_heads": 2, "num_value_heads": 2, "key_head_dim": 4, "value_head_dim": 4, "conv_kernel_dim": 2}
CONFIG = LlamaConfig(**SIZES, num_key_value_heads=1, head_dim=4)


def plan_of(sequences, **options):
    ids = np.array([token for sequence in sequences for token in sequence], dtype=np.int64)
    return build_prefix_plan(ids, np.cumsum([0] + [len(sequence) for sequence in sequences]), **options)


def test_two_sequences_that_share_two_tokens():
    plan = plan_of([[1, 2, 3], [1, 2, 4]])
    ordinary, unique = ordinary_flops(CONFIG, plan, num_labels=2), unique_flops(CONFIG, plan, num_predictors=1)
    assert (ordinary.linear, unique.linear) == (2 * 576 * 6, 2 * 576 * 4)
    assert (ordinary.attention, unique.attention) == (4 * 8 * 12, 4 * 8 * 9)  # 6 + 6 pairs; 1 + 2 + 3 + 3
    assert (ordinary.head, unique.head) == (2 * 8 * 10 * 2, 2 * 8 * 10)
    assert (ordinary.total, unique.total) == (6912 + 384 + 320, 4608 + 288 + 160)


def test_latent_attention_has_its_own_matrices_and_head_dims():
    """q 8 x 3 and 3 x 2 * 6; k and v 8 x 5 and 5 x 2 * (4 + 3); the shared key 8 x 2; o 2 * 3 x 8; the MLP as above."""
    dims = {"qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 3, "q_lora_rank": 3, "kv_lora_rank": 5}
    flops = ordinary_flops(DeepseekV3Config(**SIZES, **dims), plan_of([[1, 2, 3]]), 2)
    assert flops.linear == 2 * 3 * (24 + 36 + 40 + 70 + 16 + 48 + 384)
    assert flops.attention == 2 * 2 * (6 + 3) * 6


def test_a_hybrid_attends_in_some_layers_only():
    """Of 4 layers one attends, all have an MLP, and three mix: in parameters and 3 x 2 heads x 4 x 4 of state each."""
    linear = {f"linear_{name}": size for name, size in LINEAR.items()}
    config = Qwen3_5TextConfig(**{**SIZES, "num_hidden_layers": 4}, num_key_value_heads=1, head_dim=4, **linear)
    plan = plan_of([[1, 2, 3], [1, 2, 4]])
    ordinary, unique = ordinary_flops(config, plan, num_labels=2), unique_flops(config, plan, num_predictors=1)
    assert (ordinary.attention, unique.attention) == (4 * 8 * 12, 4 * 8 * 9)
    matrices = 8 * (8 + 8 + 8) + 8 * 8 + 8 * (2 + 2) + 8 * 8  # q, k, v; z; a and b; o
    others = 24 * 2 + 2 + 2 + 4  # convolution, decay, step, norm
    mixer = matrices + others + 3 * 2 * 4 * 4
    assert (ordinary.linear, unique.linear) == tuple(2 * n * (192 + 4 * 384 + 3 * mixer) for n in (6, 4))


def test_a_hybrid_that_cannot_be_made():
    config = Qwen3_5TextConfig(**SIZES, num_key_value_heads=1, layer_types=["linear_attention"])
    config.linear_value_head_dim = -1
    with pytest.raises(UserError, match="Qwen3_5TextConfig: its recurrent layers cannot be counted: "):
        ordinary_flops(config, plan_of([[1, 2, 3]]), 2)


def test_a_width_that_the_configuration_does_not_say():
    with pytest.raises(UserError, match="BloomConfig does not say the width of its MLP"):
        ordinary_flops(BloomConfig(), plan_of([[1, 2, 3]]), 2)


def test_nothing_shared_is_worth_nothing():
    plan = plan_of([[1, 2, 3], [4, 5]])
    assert ordinary_flops(CONFIG, plan, 5) == unique_flops(CONFIG, plan, 5)


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
