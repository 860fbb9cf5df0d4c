"""`share_prefixes`: modifiers of attention, ordinary behaviour without a plan, no radix batch on another attention."""

import copy

import pytest
import torch
from torch import nn

import radixtrain.hf.collated
from radixtrain import RadixCollator, restore_model, share_prefixes, verify_equivalence
from radixtrain.attention import tree_attention
from radixtrain.collators.misuse_guard import end_watch
from radixtrain.collators.steps import PaddedCollator
from radixtrain.errors import UserError
from radixtrain.hf.backbone import backbone_of
from radixtrain.hf.guards.model import Verdict
from tests.support import FULL
from tests.support.models import tiny_model

FEATURES = [{"input_ids": ids, "labels": ids} for ids in ([7, 8, 9, 1, 2], [7, 8, 9, 3])]
PADDED = {
    "input_ids": torch.tensor([[5, 6, 7, 8], [0, 0, 9, 10]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]]),
}
NESTED = [
    {"input_ids": [7, 8, 9, 1, 2, 3, 4, 5, 6, 10], "labels": [7, 8, 9, 1, 2, 3, 4, 5, 6, 10]},
    {"input_ids": [7, 8, 9, 1, 2, 3, 11, 12], "labels": [7, 8, 9, 1, 2, 3, 11, 12]},
    {"input_ids": [7, 8, 9, 3, 3, 4], "labels": [-100, 8, 9, -100, 3, 4]},
    {"input_ids": [7, 8, 9, 1, 2, 3, 4, 5, 6, 12, 13], "labels": [7, 8, 9, 1, 2, 3, 4, 5, 6, 12, 13]},
    {"input_ids": [7, 8], "labels": [7, 8]},
]
BAR = 1e-12
# Families whose layers have a window only if it is switched on; others are in tests/claims/equivalence.
SLIDING = {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]}
# A soft-cap that these small scores reach. Transformers before 5.21 chooses sdpa, which would leave it out.
CAPPED = {"attn_logit_softcapping": 0.5, "attn_implementation": "eager"}
MODIFIED = {"Gemma2": CAPPED, "GptOss": {}, "VaultGemma": CAPPED, "Mistral": {}}


def windowed(family, window=4):
    """A soft-cap (Gemma 2, VaultGemma) or sinks (gpt-oss), and a window."""
    return tiny_model(f"{family}ForCausalLM", sliding_window=window, **MODIFIED[family])


def error_of(model, **options):
    """The worst relative L2 error of a gradient in float64."""
    report = verify_equivalence(model, NESTED, precisions=["float64"], **options)
    return report["float64"].worst.radix


@pytest.mark.parametrize("family", [pytest.param("Qwen2", marks=FULL), pytest.param("Qwen3", marks=FULL), "Qwen2Moe"])
def test_a_window_that_is_switched_on(family):
    """The layers of Qwen2-MoE do not hand theirs to the attention function."""
    assert error_of(tiny_model(f"{family}ForCausalLM", **SLIDING)) <= BAR


@pytest.mark.parametrize("family", ["Gemma2", pytest.param("GptOss", marks=FULL), pytest.param("Mistral", marks=FULL)])
def test_a_window_as_long_as_the_longest_sequence(family):
    for attention in ("auto", "cascade"):
        assert error_of(windowed(family, window=11), attention=attention) <= BAR


@pytest.mark.parametrize(
    ("family", "lost"), [("Gemma2", "softcap"), ("Gemma2", "window"), ("GptOss", "sinks"), ("Mistral", "window")]
)
def test_a_lost_modifier_is_caught(family, lost, monkeypatch):
    """By the probe, and by the comparison without it."""
    monkeypatch.setattr(
        radixtrain.hf.attention_interface,
        "tree_attention",
        lambda *args, **options: tree_attention(*args, **{**options, lost: None}),
    )
    with pytest.raises(UserError, match="computes a token from others"):
        error_of(windowed(family))
    monkeypatch.setattr(radixtrain.hf.collated, "verdict_of", lambda *_, **__: Verdict(None))
    assert error_of(windowed(family)) > 1e-3


def test_router_logits_asked_for_by_the_call():
    """Of each original token."""
    model = share_prefixes(tiny_model("Qwen3MoeForCausalLM"))
    output = model(**RadixCollator()(NESTED), output_router_logits=True)
    num_tokens = sum(len(feature["input_ids"]) for feature in NESTED)
    assert [x.shape for x in output.router_logits] == [(num_tokens, 4)] * 2
    assert model(**RadixCollator()(NESTED)).router_logits is None


class TestWithoutAPlan:
    @pytest.mark.parametrize("family", [*MODIFIED, "Qwen3", "Qwen3, eager"])
    def test_bit_equal(self, family, tiny_qwen3):
        """Soft-cap and sinks are beyond `sdpa`, so ordinary Hugging Face runs these models' own eager attention."""
        usual = "sdpa" if family in ("Mistral", "Qwen3") else "eager"
        model = windowed(family) if family in MODIFIED else tiny_qwen3(attn_implementation=usual)
        assert model.eval().config._attn_implementation == usual
        ordinary = {"input_ids": torch.tensor([[5, 6, 7, 8, 9, 10]])}
        options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
        before = [model(**batch).logits for batch in (PADDED, ordinary)] + [model.generate(**PADDED, **options)]
        share_prefixes(model)
        after = [model(**batch).logits for batch in (PADDED, ordinary)] + [model.generate(**PADDED, **options)]
        assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
        assert model(**RadixCollator()(FEATURES)).loss.isfinite()
        assert restore_model(model).config._attn_implementation == usual
        assert not backbone_of(model)._forward_hooks and not backbone_of(model)._forward_pre_hooks


class TestNeverOnAnotherAttention:
    def test_switched_after_preparing(self, tiny_qwen3):
        model = copy.deepcopy(share_prefixes(tiny_qwen3()))
        model.set_attn_implementation("eager")
        assert error_of(model) <= BAR

    def test_never_prepared(self, tiny_qwen3):
        """Not even without the watch for such models, whether another model was prepared or not."""
        batch = RadixCollator()(FEATURES)
        end_watch()
        with pytest.raises(RuntimeError, match=r"size of tensor a \(5\) must match the size of tensor b \(6\)"):
            tiny_qwen3()(**batch)

    @pytest.mark.usefixtures("hooks_that_may_stay")
    def test_a_layer_without_tree_attention(self, tiny_qwen3):
        model = share_prefixes(tiny_qwen3())
        attention = model.model.layers[1].self_attn

        class Other(nn.Module):
            def forward(self, hidden_states, **_):
                return attention.o_proj(attention.q_proj(hidden_states)), None

        model.model.layers[1].self_attn = Other()
        with pytest.raises(UserError, match="attention ran in 1 of 2 layers of Qwen3Model"):
            model(**RadixCollator()(FEATURES))

    def test_a_layer_that_takes_no_part(self, tiny_qwen3, monkeypatch):
        """Found after the pass, whatever the code of its class says."""
        model = share_prefixes(tiny_qwen3())
        monkeypatch.setattr(model.model.layers[1], "forward", lambda hidden_states, **_: hidden_states)
        monkeypatch.setattr("radixtrain.hf.collated.verdict_of", lambda *_, **__: Verdict(None))
        with pytest.raises(RuntimeError, match="ran in 1 of 2 layers of Qwen3Model"):
            model(**RadixCollator()(FEATURES))

    def test_a_padded_batch(self, tiny_qwen3):
        with pytest.raises(UserError, match="has no plan: give an ordinary model its input_ids"):
            share_prefixes(tiny_qwen3())(**PaddedCollator()(FEATURES))
