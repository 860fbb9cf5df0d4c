"""Multimodal models on rows of text: the text decoder is a plain decoder, so its rows share. Images are refused.

The gradient of every multimodal family is in tests/claims/equivalence/test_families.py.
"""

from typing import Any

import pytest
import torch

from radixtrain import RadixCollator, share_prefixes, verify_equivalence
from radixtrain.errors import UserError
from tests.support import FULL
from tests.support.models import tiny_model

N = -100
FEATURES = [
    {"input_ids": [7, 8, 9, 10, 11, 12, 1, 2, 3], "labels": [N, N, N, N, 11, 12, 1, 2, 3]},
    {"input_ids": [7, 8, 9, 10, 11, 12, 5], "labels": [N, N, N, N, N, N, 5]},
    {"input_ids": [30, 31, 32, 33, 34], "labels": [30, 31, 32, 33, 34]},
]


def gemma3() -> Any:
    """Windows of 4 in one layer, and 4 tokens for an image."""
    return tiny_model("Gemma3ForConditionalGeneration", image_token_index=60)


def with_image() -> dict[str, torch.Tensor]:
    ids = torch.tensor([[7, 60, 60, 60, 60, 8, 9]])
    return {
        "input_ids": ids,
        "token_type_ids": (ids == 60).long(),
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.randn(1, 3, 28, 28, generator=torch.Generator().manual_seed(0)),
    }


@FULL
@pytest.mark.parametrize("family", ["Gemma3", "Qwen3VL"])
def test_activation_checkpointing(family: str) -> None:
    """The vision tower has no gradient in either arm."""
    model = tiny_model(f"{family}ForConditionalGeneration").train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    report = verify_equivalence(model, FEATURES, precisions=["float64"])
    assert report["float64"].worst.radix <= 1e-12, str(report)


def test_an_image_in_a_radix_batch():
    with pytest.raises(UserError, match="a radix batch came with pixel_values; a radix batch has text only"):
        share_prefixes(gemma3())(**RadixCollator()(FEATURES), pixel_values=with_image()["pixel_values"])
