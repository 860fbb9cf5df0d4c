"""Positions: those of a batch are used as they are, and models that would count differently are refused."""

from typing import Any

import pytest
import torch
from older_transformers import PASSED_ON
from tiny_models import tiny_model

from radixtrain import RadixCollator, share_prefixes
from radixtrain.errors import UserError
from radixtrain.verification.oracle import float64_throughout

N = -100
FEATURES = [
    {"input_ids": [7, 8, 9, 1, 2], "labels": [N, N, N, 1, 2]},
    {"input_ids": [7, 8, 9, 3], "labels": [N] * 3 + [3]},
]
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
def test_frequencies_that_follow_the_largest_position(tiny_qwen3, rope):
    """Hugging Face looks at the largest position of a batch, not at the longest row: up to 8 it is like any other."""
    model = share_prefixes(tiny_qwen3(rope_parameters=rope, max_position_embeddings=8))

    def batch(first: int) -> dict[str, Any]:
        return RadixCollator()([{**f, "position_ids": range(first, first + len(f["input_ids"]))} for f in FEATURES])

    assert model(**batch(3)).loss.isfinite()
    message = rf"has {rope['rope_type']} rotary embeddings change .* at 8 tokens; set max_length to 8 or less"
    with pytest.raises(UserError, match=message):
        model(**batch(4))


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

    @pytest.mark.parametrize(
        ("model_class", "message"),
        [
            pytest.param(
                "GPT2LMHeadModel", r"padded on the left, .* GPT2Model has learned positions \(wpe\)", marks=PASSED_ON
            ),
            ("Llama4ForCausalLM", "Llama4TextModel has scores that are scaled by the position"),
        ],
    )
    def test_what_reads_absolute_positions_is_refused(self, model_class, message):
        model = share_prefixes(tiny_model(model_class, attention_chunk_size=64))
        with pytest.raises(UserError, match=message):
            model(**self.batch())

    @PASSED_ON
    def test_positions_that_the_feature_brings(self):
        """Then the padding changes nothing in any model."""
        model = share_prefixes(tiny_model("GPT2LMHeadModel"))
        assert torch.equal(model(**self.batch(position_ids=POSITIONS)).loss, model(**RadixCollator()(FEATURES)).loss)

    def test_rotary_embeddings_look_at_distances(self, tiny_qwen3):
        """Equal up to rounding to what Hugging Face computes on the padded row, at positions from 2."""
        model = tiny_qwen3()
        padded = {name: torch.tensor(values)[None] for name, values in PADDED.items()}
        with float64_throughout(model):
            ordinary = model(**padded).loss.item()
            radix = share_prefixes(model)(**RadixCollator()([PADDED])).loss.item()
        assert radix == pytest.approx(ordinary, rel=1e-12)
