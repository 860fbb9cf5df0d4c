"""The attention of one layer, as Hugging Face calls it: values of another width, and what its arguments ask for."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from tiers import FULL, cases
from tiny_models import tiny_model
from torch import Tensor, nn

import radixtrain.hf.attention_interface
from radixtrain import RadixCollator, build_prefix_plan, prepare_model, verify_equivalence
from radixtrain.attention import EVERYWHERE
from radixtrain.errors import UserError
from radixtrain.hf.attention_interface import RadixCall, radix_attention, radix_eager_attention
from radixtrain.hf.windows import no_mask
from radixtrain.tree.layout import TreeLayout
from radixtrain.tree.plan import PrefixPlan

FEATURES = [
    {"input_ids": [7, 8, 9, 1, 2, 3, 4, 5, 6], "labels": [7, 8, 9, 1, 2, 3, 4, 5, 6]},
    {"input_ids": [7, 8, 9, 1, 2, 11, 12], "labels": [7, 8, 9, 1, 2, 11, 12]},
    {"input_ids": [7, 8, 9, 3, 3], "labels": [-100, 8, 9, -100, 3]},
    {"input_ids": [7, 8], "labels": [7, 8]},
    {"input_ids": [30, 31, 32], "labels": [30, 31, 32]},
]


class TestValuesOfAnotherHeadDim:
    """Narrower ones are in tests/claims/equivalence."""

    @pytest.mark.parametrize("v_head_dim", [pytest.param(12, marks=FULL), 20])
    def test_as_wide_as_the_queries_and_wider(self, v_head_dim):
        model = tiny_model("DeepseekV3ForCausalLM", v_head_dim=v_head_dim)
        report = verify_equivalence(model, FEATURES, precisions=["float64"])
        assert report["float64"].worst.radix <= 1e-12 and report.conclusive, str(report)

    @pytest.mark.parametrize("attention", EVERYWHERE)
    @pytest.mark.parametrize("v_head_dim", cases([1, 3, 8, 13], quick=[3, 13]))
    @pytest.mark.parametrize("scaling", cases([None, 0.7], quick=[None]))
    def test_against_dense_attention(self, attention, v_head_dim, scaling):
        """Scores are scaled by the head dim of the queries before padding, and outputs are as wide as the values."""
        plan = nested_plan()
        query, key, value = heads(plan.num_rows, 8, 8, v_head_dim)
        call = RadixCall(TreeLayout.from_plan(plan), None, attention, "auto", window_may_bind=False)
        output, _ = radix_attention(nn.Module(), query, key, value, None, radix_call=call, scaling=scaling)
        expected = dense_attention(query, key, value, plan, 8**-0.5 if scaling is None else scaling)
        assert output.shape == (1, plan.num_rows, 4, v_head_dim)
        torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
        towards = torch.randn(expected.shape, dtype=torch.float64)
        actual_grads = torch.autograd.grad(output, (query, key, value), towards)
        for actual, exact in zip(
            actual_grads, torch.autograd.grad(expected, (query, key, value), towards), strict=True
        ):
            torch.testing.assert_close(actual, exact, rtol=0, atol=1e-12)

    def test_the_padded_head_dim_as_scale_is_caught(self, monkeypatch):
        """The comparison above can fail."""
        attend = radixtrain.hf.attention_interface.tree_attention
        monkeypatch.setattr(
            radixtrain.hf.attention_interface,
            "tree_attention",
            lambda *args, **rest: attend(*args, **{**rest, "scale": None}),
        )
        with pytest.raises(AssertionError, match="not close"):
            self.test_against_dense_attention("path", 13, None)

    def test_queries_and_keys_that_do_not_fit(self):
        plan = nested_plan()
        call = RadixCall(TreeLayout.from_plan(plan), None, "auto", "auto", window_may_bind=False)
        with pytest.raises(ValueError, match="head_dim must agree, got 12, 8 and 12"):
            radix_attention(nn.Module(), *heads(plan.num_rows, 8, 4, 12), None, radix_call=call)


def nested_plan() -> PrefixPlan:
    sequences = [feature["input_ids"] for feature in FEATURES]
    return build_prefix_plan(np.concatenate(sequences), np.cumsum([0, *map(len, sequences)]))


def heads(num_rows: int, query: int, key: int, value: int) -> list[Tensor]:
    """(1, heads, rows, head dim): four heads of queries, two of keys and values."""
    generator = torch.Generator().manual_seed(0)
    shapes = (4, num_rows, query), (2, num_rows, key), (2, num_rows, value)
    return [torch.randn(1, *shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]


def dense_attention(query: Tensor, key: Tensor, value: Tensor, plan: PrefixPlan, scale: float) -> Tensor:
    """With a mask made from the sequences: a token sees its own row and those of the tokens before it."""
    seen = torch.zeros(plan.num_rows, plan.num_rows, dtype=torch.bool)
    for begin, end in pairwise(plan.cu_seqlens.tolist()):
        rows = torch.from_numpy(plan.inverse_indices[begin:end].astype(np.int64))
        seen[rows[:, None], rows[None]] |= torch.ones(len(rows), len(rows), dtype=torch.bool).tril()
    key, value = (x.repeat_interleave(2, dim=1) for x in (key, value))
    scores = (query @ key.transpose(2, 3) * scale).masked_fill(~seen, float("-inf"))
    return (scores.softmax(-1) @ value).transpose(1, 2)


def test_sinks_that_do_not_reach_the_attention_function(tiny_qwen3):
    model = prepare_model(tiny_qwen3())
    model.model.layers[1].self_attn.sinks = nn.Parameter(torch.zeros(4))
    with pytest.raises(UserError, match=r"Qwen3Attention of layer 1 has sinks and does not hand it .* as s_aux"):
        model(**RadixCollator()(FEATURES))


class TestLayersWithoutKeywordArguments:
    """StableLM and Nemotron hand their attention no keyword arguments; the call reaches it on the mask."""

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
            radix_attention(module, query, query, query, lost)


def test_a_layer_without_an_eager_function(tiny_qwen3, monkeypatch):
    model = prepare_model(tiny_qwen3(attn_implementation="eager"))
    monkeypatch.delattr("transformers.models.qwen3.modeling_qwen3.eager_attention_forward")
    query = torch.zeros(1, 4, 2, 8)
    with pytest.raises(UserError, match="Qwen3Attention of layer 0 has no eager attention in its file"):
        radix_eager_attention(model.model.layers[0].self_attn, query, query, query, None)


def test_cascade_if_a_window_binds():
    model = prepare_model(tiny_model("MistralForCausalLM"), attention="cascade")
    message = (
        r"MistralAttention of layer 0 attends to the last 4 tokens, and this batch has a sequence of 9: "
        r"attention='cascade' cannot be used: .* attention='auto' or 'path' keeps the window"
    )
    with pytest.raises(UserError, match=message):
        model(**RadixCollator()(FEATURES))
