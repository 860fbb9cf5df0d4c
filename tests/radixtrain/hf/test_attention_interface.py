"""The attention of one layer, as Hugging Face calls it: values of another width, and what is missing in a call."""

import pytest
import torch
from older_transformers import PASSED_ON
from tiers import FULL, cases
from tiny_models import tiny_model
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from radixtrain import RadixCollator, prepare_model, verify_equivalence
from radixtrain.attention import EVERYWHERE
from radixtrain.errors import UserError
from radixtrain.hf.attention_interface import radix_attention
from radixtrain.hf.windows import no_mask

FEATURES = [
    {"input_ids": [7, 8, 9, 1, 2, 3, 4, 5, 6], "labels": [7, 8, 9, 1, 2, 3, 4, 5, 6]},
    {"input_ids": [7, 8, 9, 1, 2, 11, 12], "labels": [7, 8, 9, 1, 2, 11, 12]},
    {"input_ids": [7, 8, 9, 3, 3], "labels": [-100, 8, 9, -100, 3]},
    {"input_ids": [7, 8], "labels": [7, 8]},
    {"input_ids": [30, 31, 32], "labels": [30, 31, 32]},
]


@pytest.mark.parametrize("v_head_dim", cases([1, 3, 12, 13, 20], quick=[3, 20]))
@pytest.mark.parametrize("attention", cases(EVERYWHERE, quick=["path"]))
def test_values_of_another_head_dim(attention, v_head_dim):
    """Queries have 12: scores are scaled by theirs, whatever is padded. Other families: tests/claims/equivalence."""
    model = tiny_model("DeepseekV3ForCausalLM", v_head_dim=v_head_dim)
    report = verify_equivalence(model, FEATURES, attention=attention, precisions=["float64"])
    assert report["float64"].worst.radix <= 1e-12 and report.conclusive, str(report)


def test_sinks_that_do_not_reach_the_attention_function(tiny_qwen3):
    model = prepare_model(tiny_qwen3())
    model.model.layers[1].self_attn.sinks = nn.Parameter(torch.zeros(4))
    with pytest.raises(UserError, match=r"Qwen3Attention of layer 1 has sinks and does not hand it .* as s_aux"):
        model(**RadixCollator()(FEATURES))


class TestLayersWithoutKeywordArguments:
    """StableLM and Nemotron hand their attention no keyword arguments; the call reaches it on the mask."""

    @PASSED_ON
    @pytest.mark.parametrize("family", ["StableLm", pytest.param("Nemotron", marks=FULL)])
    @pytest.mark.parametrize("use_reentrant", [False, pytest.param(True, marks=FULL)])
    def test_recomputed_activations(self, family, use_reentrant):
        """In the backward pass the layers run again, with the same mask."""
        model = tiny_model(f"{family}ForCausalLM", head_dim=8, num_key_value_heads=2).train()
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        report = verify_equivalence(model, FEATURES, precisions=["float64"])
        assert report["float64"].worst.radix <= 1e-12, str(report)

    def test_a_layer_that_loses_its_mask_too(self):
        module = tiny_model("MistralForCausalLM").model.layers[0].self_attn
        query = torch.zeros(1, 4, 2, 8)
        lost = no_mask(False, query.device)
        with pytest.raises(UserError, match="MistralAttention of layer 0 receives neither the keyword arguments"):
            radix_attention(sdpa_attention_forward)(module, query, query, query, lost)


def test_cascade_if_a_window_binds():
    model = prepare_model(tiny_model("MistralForCausalLM"), attention="cascade")
    message = (
        r"MistralAttention of layer 0 attends to the last 4 tokens, and this batch has a sequence of 9: "
        r"attention='cascade' cannot be used: .* attention='auto' or 'path' keeps the window"
    )
    with pytest.raises(UserError, match=message):
        model(**RadixCollator()(FEATURES))
