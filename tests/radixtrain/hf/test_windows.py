"""The window of a layer is the one that its mask would have had; what contradicts it is refused."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

from radixtrain import RadixCollator, share_prefixes
from radixtrain.attention import tree_attention
from radixtrain.errors import UserError
from radixtrain.hf.windows import mask_function, no_mask, on_mask
from tests.support.models import tiny_model
from tests.support.steps import FEATURES


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("Olmoe", {"sliding_window": 4}),
        ("Qwen2Moe", {"use_sliding_window": True, "layer_types": ["sliding_attention"] * 2}),
    ],
)
@pytest.mark.parametrize("name", ["sdpa", "flash_attention_2"])
@pytest.mark.usefixtures("without_the_trial")  # which would run flash attention
def test_a_layer_obeys_what_its_own_attention_obeys(family, settings, name, monkeypatch):
    """OLMoE hands a window to its attention function and masks none; Qwen2-MoE does the reverse."""
    asked = []

    def attend(*args, window, **options):
        asked.append(window)
        return tree_attention(*args, window=window, **options)

    monkeypatch.setattr("radixtrain.hf.attention_interface.tree_attention", attend)
    model = tiny_model(f"{family}ForCausalLM", **settings)
    model.config._attn_implementation_internal = name
    share_prefixes(model)(**RadixCollator()(FEATURES))
    assert asked == [4 if (family == "Olmoe") == (name == "flash_attention_2") else None] * 2


@pytest.mark.parametrize(
    ("model_class", "mask", "message"),
    [
        ("Qwen3ForCausalLM", torch.zeros(1, 1, 10, 10), r"layer 1 gets a mask \(1, 1, 10, 10\) that its model made"),
        ("MistralForCausalLM", None, r"MistralAttention of layer 1 gets a mask that .* has not made"),
    ],
)
@pytest.mark.usefixtures("hooks_that_may_stay", "without_the_trial")
def test_a_mask_that_does_not_come_from_masking_utils(model_class, mask, message):
    model = share_prefixes(tiny_model(model_class))
    model.model.layers[1].self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: (args, {**kwargs, "attention_mask": mask}), with_kwargs=True
    )
    with pytest.raises(UserError, match=message):
        model(**RadixCollator()(FEATURES))


SLIDING, BOTH_WAYS = sliding_window_causal_mask_function(4), bidirectional_mask_function


@pytest.mark.parametrize(
    ("asked", "window"),
    [
        ({}, 9),
        ({"mask_function": SLIDING}, 4),
        ({"mask_function": SLIDING, "local_size": 5}, 4),
        ({"mask_function": SLIDING, "local_size": 4, "q_length": 2}, 4),
        ({"q_length": 2}, 0),
        ({"mask_function": BOTH_WAYS}, "the model of Qwen3Config has a mask of other tokens than the last ones"),
        ({"use_vmap": True, "local_size": 4}, r"the model of Qwen3Config adds a mask of its own.*max_length to 4"),
        ({"window_size": 4}, "requests its mask with window_size, which this version of radixtrain cannot read"),
    ],
)
def test_a_mask_is_asked_for_its_window(tiny_qwen3, asked, window):
    call = SimpleNamespace(layout=SimpleNamespace(max_seqlen=9, blocks=None))
    given = {"mask_function": causal_mask_function, "config": tiny_qwen3().config, **asked}
    ask = partial(mask_function(sdpa_mask), attention_mask=no_mask(True, torch.device("cpu"), call), **given)
    if isinstance(window, int):
        assert on_mask(ask()) == (call, window, False)
    else:
        with pytest.raises(UserError, match=window):
            ask()
