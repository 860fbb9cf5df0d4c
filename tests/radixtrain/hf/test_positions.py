"""Positions: those of a batch are used as they are, and models that would count differently are refused."""

from typing import Any

import pytest
import torch
import transformers

from radixtrain import RadixCollator, prepare_model
from radixtrain.errors import UserError
from radixtrain.verification.oracle import float64_throughout

N = -100
FEATURES = [
    {"input_ids": [7, 8, 9, 1, 2], "labels": [N, N, N, 1, 2]},
    {"input_ids": [7, 8, 9, 3], "labels": [N] * 3 + [3]},
]
TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@pytest.mark.parametrize("family", ["Roberta", "XLMRoberta", "Camembert", "Data2VecText", "RobertaPreLayerNorm"])
def test_positions_that_start_after_the_padding_index(family):
    """Hugging Face gives the first token position padding_idx + 1: gradients were 1.3 to 1.9 off."""
    config = getattr(transformers, f"{family}Config")(**TINY, **NO_DROPOUT, is_decoder=True)
    with pytest.raises(UserError, match=r"counts positions from padding_idx \+ 1 = 1 .* a radix batch counts from 0"):
        prepare_model(getattr(transformers, f"{family}ForCausalLM")(config))


ROPES: list[dict[str, Any]] = [
    {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "original_max_position_embeddings": 8,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
    },
]


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope["rope_type"])
class TestFrequenciesThatFollowTheLargestPosition:
    """Hugging Face looks at the largest position of a batch; the check looked at the longest row."""

    def batch(self, first: int) -> dict[str, Any]:
        return RadixCollator()(
            [{**f, "position_ids": [first + n for n in range(len(f["input_ids"]))]} for f in FEATURES]
        )

    def test_up_to_the_limit(self, tiny_qwen3, rope):
        model = prepare_model(tiny_qwen3(rope_parameters=rope, max_position_embeddings=8))
        assert model(**self.batch(3)).loss.isfinite()

    def test_beyond_it_though_every_row_is_short(self, tiny_qwen3, rope):
        model = prepare_model(tiny_qwen3(rope_parameters=rope, max_position_embeddings=8))
        message = rf"has {rope['rope_type']} rotary embeddings.*this batch has position 8; set max_length to 8 or less"
        with pytest.raises(UserError, match=message):
            model(**self.batch(4))


PADDED = {
    "input_ids": [0, 0, *FEATURES[0]["input_ids"]],
    "labels": [N, N, *FEATURES[0]["labels"]],
    "attention_mask": [0, 0, 1, 1, 1, 1, 1],
}
POSITIONS = [0, 0, 0, 1, 2, 3, 4]


class TestLeftPadding:
    """Hugging Face counts positions from the padding unless it is given some."""

    def batch(self, **changes: Any) -> dict[str, Any]:
        return RadixCollator()([{**PADDED, **changes}, FEATURES[1]])

    def gpt2(self) -> Any:
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4, n_positions=32, **dropout)
        return prepare_model(transformers.GPT2LMHeadModel(config))

    def test_learned_positions_are_refused(self):
        with pytest.raises(UserError, match=r"padded on the left, .* GPT2Model has learned positions \(wpe\)"):
            self.gpt2()(**self.batch())

    def test_positions_that_the_feature_brings(self):
        """Then the padding changes nothing in any model."""
        model = self.gpt2()
        assert torch.equal(model(**self.batch(position_ids=POSITIONS)).loss, model(**RadixCollator()(FEATURES)).loss)

    def test_rotary_embeddings_look_at_distances(self, tiny_qwen3):
        """Equal up to rounding to what Hugging Face computes on the padded row, at positions from 2."""
        model = tiny_qwen3()
        padded = {name: torch.tensor(values)[None] for name, values in PADDED.items()}
        with float64_throughout(model):
            ordinary = model(**padded).loss.item()
            radix = prepare_model(model)(**RadixCollator()([PADDED])).loss.item()
        assert radix == pytest.approx(ordinary, rel=1e-12)

    def test_scores_that_are_scaled_by_the_position(self):
        config = transformers.Llama4TextConfig(
            **TINY, num_key_value_heads=2, head_dim=8, intermediate_size_mlp=32, num_local_experts=2
        )
        model = prepare_model(transformers.Llama4ForCausalLM(config))
        with pytest.raises(UserError, match="Llama4TextModel has scores that are scaled by the position"):
            model(**self.batch())
