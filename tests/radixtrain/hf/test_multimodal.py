"""Multimodal models on rows of text: the text decoder is a plain decoder, so its rows share. Images are refused.

These are the classes that Gemma 3, Mistral 3 and the vision models of Qwen load as; more are in
tests/claims/equivalence/test_families.py.
"""

from typing import Any

import pytest
import torch
import transformers

from radixtrain import RadixCollator, prepare_model, restore_model, verify_equivalence
from radixtrain.errors import UserError

N = -100
FEATURES = [
    {"input_ids": [7, 8, 9, 10, 11, 12, 1, 2, 3], "labels": [N, N, N, N, 11, 12, 1, 2, 3]},
    {"input_ids": [7, 8, 9, 10, 11, 12, 5], "labels": [N, N, N, N, N, N, 5]},
    {"input_ids": [30, 31, 32, 33, 34], "labels": [30, 31, 32, 33, 34]},
]
TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
GEMMA3_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
QWEN_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
SECTIONS = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}


def gemma3() -> Any:
    """Windows of 4 in one layer, and 4 tokens for an image."""
    text = {**TEXT, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=GEMMA3_VISION, mm_tokens_per_image=4, image_token_index=60
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def qwen2_5_vl() -> Any:
    text = {**TEXT, "rope_parameters": SECTIONS}
    vision = {**QWEN_VISION, "fullatt_block_indexes": [0]}
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, image_token_id=60)
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def qwen3_vl() -> Any:
    text = {**TEXT, "rope_parameters": SECTIONS}
    vision = {**QWEN_VISION, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision, image_token_id=60)
    return transformers.Qwen3VLForConditionalGeneration(config)


MODELS = {"Gemma 3": gemma3, "Qwen2.5-VL": qwen2_5_vl, "Qwen3-VL": qwen3_vl}


def with_image() -> dict[str, torch.Tensor]:
    ids = torch.tensor([[7, 60, 60, 60, 60, 8, 9]])
    return {
        "input_ids": ids,
        "token_type_ids": (ids == 60).long(),
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0)),
    }


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_rows_of_text_have_the_same_gradient(name, checkpointing):
    """In training mode; the vision tower has no gradient in either arm."""
    torch.manual_seed(0)
    model = MODELS[name]().train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    report = verify_equivalence(model, FEATURES, precisions=["float64"])
    assert report.passed and report["float64"].worst.radix <= 1e-12, str(report)
    dead = {tensor.name for tensor in report["float64"].dead}
    assert not [part for part in dead if "vis" not in part and "multi_modal_projector" not in part]


def test_ordinary_batches_with_images_are_bit_equal():
    torch.manual_seed(0)
    model = gemma3().eval()
    before = model(**with_image()).logits
    assert torch.equal(prepare_model(model)(**with_image()).logits, before)
    vision = model.model.vision_tower.config
    assert restore_model(model).config.text_config._attn_implementation == "sdpa" == vision._attn_implementation


def test_ordinary_batches_stay_on_the_attention_of_the_text():
    """GOT-OCR's class says that it has no sdpa, but its text decoder runs on it."""
    model = gemma3()
    model._supports_sdpa = False
    assert prepare_model(model).config.text_config._attn_implementation == "radix"


def test_a_part_that_the_user_chose_comes_back():
    model = gemma3()
    model.set_attn_implementation({"text_config": "eager"})
    restored = restore_model(prepare_model(model)).config
    assert restored.text_config._attn_implementation == "eager"
    assert restored.vision_config._attn_implementation == "sdpa"


def test_the_text_decoder_called_directly():
    """The hooks are on the backbone around it."""
    model = prepare_model(gemma3())
    batch = RadixCollator()(FEATURES)
    inputs = {name: value for name, value in batch.items() if name not in ("labels", "shift_labels")}
    with pytest.raises(UserError, match="receives a radix batch that did not pass the backbone"):
        model.get_decoder()(**inputs)


def test_an_image_in_a_radix_batch():
    with pytest.raises(UserError, match="a radix batch came with pixel_values; a radix batch is text only"):
        prepare_model(gemma3())(**RadixCollator()(FEATURES), pixel_values=with_image()["pixel_values"])


def test_a_feature_with_an_image():
    with pytest.raises(ValueError, match=r"feature 1.*pixel_values"):
        RadixCollator()([FEATURES[0], {**FEATURES[1], "pixel_values": [[0.0]]}])
