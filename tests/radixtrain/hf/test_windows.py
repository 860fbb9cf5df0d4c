"""The window of a layer is the one that its mask would have had; what contradicts it is refused."""

import pytest
import torch
from tiny_models import tiny_model
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from radixtrain import RadixCollator, prepare_model
from radixtrain.errors import UserError

FEATURES = [{"input_ids": ids, "labels": ids} for ids in ([7, 8, 9, 1, 2, 3, 4, 5, 6], [7, 8, 9, 3])]


def test_a_window_that_contradicts_the_mask():
    """OLMoE hands a window to its attention function, which flash attention obeys, and masks none."""
    model = tiny_model("OlmoeForCausalLM", sliding_window=4)
    message = "OlmoeAttention of layer 0 attends to the last 4 tokens by its sliding_window and to all by its mask"
    with pytest.raises(UserError, match=message):
        prepare_model(model)(**RadixCollator()(FEATURES))


def test_a_mask_that_a_model_made(tiny_qwen3):
    model = prepare_model(tiny_qwen3())
    attention = model.model.layers[1].self_attn
    attention.register_forward_pre_hook(
        lambda module, args, kwargs: (args, {**kwargs, "attention_mask": torch.zeros(1, 1, 10, 10)}), with_kwargs=True
    )
    with pytest.raises(UserError, match=r"Qwen3Attention of layer 1 gets a mask \(1, 1, 10, 10\) that its model made"):
        model(**RadixCollator()(FEATURES))


def test_a_window_whose_mask_does_not_come_from_masking_utils():
    model = prepare_model(tiny_model("MistralForCausalLM"))
    model.model.layers[1].self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: (args, {**kwargs, "attention_mask": None}), with_kwargs=True
    )
    with pytest.raises(UserError, match=r"MistralAttention of layer 1 gets a mask that .* has not made"):
        model(**RadixCollator()(FEATURES))


def test_a_mask_that_a_model_has_changed(tiny_qwen3):
    config = prepare_model(tiny_qwen3()).config
    mask = ALL_MASK_ATTENTION_FUNCTIONS["radix"]
    asked = {"attention_mask": torch.empty(1, 0, dtype=torch.bool), "local_size": 4, "config": config}
    assert mask(use_vmap=False, **asked).shape == (1, 1, 0, 4)
    with pytest.raises(UserError, match=r"the model of Qwen3Config adds a mask of its own.*max_length to 4"):
        mask(use_vmap=True, **asked)
