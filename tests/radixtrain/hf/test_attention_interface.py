"""The attention of one layer, as Hugging Face calls it: values of another width, and what is missing in a call."""

import functools
import re
from contextlib import nullcontext
from types import MethodType

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3 import modeling_qwen3

from radixtrain import RadixCollator, generate, position_wise, share_prefixes, sharing_report, verify_equivalence
from radixtrain.attention import EVERYWHERE
from radixtrain.errors import UserError
from radixtrain.hf.attention_interface import radix_attention
from radixtrain.hf.windows import no_mask
from tests.support import FULL, cases
from tests.support.models import PASSED_ON, tiny_model
from tests.support.steps import FEATURES, same_step


@pytest.mark.parametrize("v_head_dim", cases([1, 3, 12, 13, 20], quick=[3, 20]))
@pytest.mark.parametrize("attention", cases(EVERYWHERE, quick=["path"]))
def test_values_of_another_head_dim(attention, v_head_dim):
    """Queries have 12: scores are scaled by theirs, whatever is padded. Other families: tests/claims/equivalence."""
    model = tiny_model("DeepseekV3ForCausalLM", v_head_dim=v_head_dim)
    same_step(model, FEATURES, lambda model: [model(**RadixCollator()(FEATURES)).loss], attention=attention)


def test_sinks_that_do_not_reach_the_attention_function(tiny_qwen3):
    model = share_prefixes(tiny_qwen3(attn_implementation="eager"))
    model.model.layers[1].self_attn.sinks = nn.Parameter(torch.zeros(4))
    with pytest.raises(UserError, match=r"Qwen3Attention of layer 1 has sinks and does not pass it .* as s_aux"):
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
        report = verify_equivalence(model, FEATURES)
        assert report["float64"].worst.radix <= 1e-12, str(report)

    def test_a_layer_that_loses_its_mask_too(self):
        module = tiny_model("MistralForCausalLM").model.layers[0].self_attn
        query = torch.zeros(1, 4, 2, 8)
        lost = no_mask(False, query.device)
        with pytest.raises(UserError, match="MistralAttention of layer 0 receives neither the keyword arguments"):
            radix_attention(sdpa_attention_forward)(module, query, query, query, lost)


ATTENTION, MASKS, FILE = (
    AttentionInterface._global_mapping,
    AttentionMaskInterface._global_mapping,
    vars(modeling_qwen3),
)
EAGER = FILE["eager_attention_forward"]
FUNCTIONAL = vars(torch.nn.functional)
SDPA = FUNCTIONAL["scaled_dot_product_attention"]
IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11], [5, 6, 7, 8, 9, 12, 13]])


def half(*args, scaling, **kwargs):
    """Another formula."""
    return sdpa_attention_forward(*args, scaling=0.5 * scaling, **kwargs)


@functools.wraps(EAGER)
def half_eager(*args, scaling, **kwargs):
    return EAGER(*args, scaling=0.5 * scaling, **kwargs)


def half_of_torch(query, *args, **kwargs):
    """As context parallelism puts a function of all its ranks there."""
    return SDPA(0.5 * query, *args, **kwargs)


def one_token(**kwargs):
    """A mask by which a token sees only itself."""
    mask = sdpa_mask(**{**kwargs, "allow_is_causal_skip": False})
    return mask & torch.eye(*mask.shape[-2:], dtype=torch.bool)


BROUGHT = {  # the name of the attention, what somebody puts where, and why it is not taken over
    "registered": ("half", [(ATTENTION, "half", half), (MASKS, "half", sdpa_mask)], "'half' is not one of"),
    "a kernel": ("org/kernel", [(ATTENTION, "org/kernel", half), (MASKS, "org/kernel", sdpa_mask)], "'org/kernel'"),
    "in the place of sdpa": ("sdpa", [(ATTENTION, "sdpa", half)], r"\.half replaces transformers' own"),
    "in one mapping": ("sdpa", [(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", half)], r"\.half replaces"),
    "a mask": ("sdpa", [(MASKS, "sdpa", one_token)], r"\.one_token replaces transformers' own 'sdpa'"),
    "in torch": ("sdpa", [(FUNCTIONAL, SDPA.__name__, half_of_torch)], r"half_of_torch replaces torch's own"),
    "eager": ("eager", [(FILE, "eager_attention_forward", half_eager)], r"eager_attention_forward replaces"),
}


@pytest.mark.parametrize("name", BROUGHT)
class TestAttentionThatIsNotTransformersOwn:
    """It was replaced by ordinary attention, without a word."""

    @pytest.fixture
    def bring(self, name, monkeypatch):
        """Gives models their attention."""
        attention, entries, _ = BROUGHT[name]

        def bring(*models):
            for entry in entries:
                monkeypatch.setitem(*entry)
            for model in models:
                model.config._attn_implementation_internal = attention

        return bring

    def test_is_refused_by_name(self, name, bring, tiny_qwen3):
        model, other, why = tiny_qwen3(), tiny_qwen3(), BROUGHT[name][2]
        bring(model, other)
        with pytest.raises(UserError, match=why):
            share_prefixes(model)(**RadixCollator()(FEATURES))
        with pytest.raises(UserError, match=f"{why}.*, or use model.generate"):
            generate(other, torch.tensor([[1, 2, 3]]), max_new_tokens=2)

    @pytest.mark.parametrize("is_later", [False, True])
    def test_is_left_as_it_was(self, name, bring, tiny_qwen3, is_later):
        untouched, shared = tiny_qwen3(), tiny_qwen3()
        ordinary = untouched(input_ids=IDS, labels=IDS).loss
        if not is_later:
            bring(shared)
        share_prefixes(shared)
        bring(untouched, shared)
        found = []
        for model in (untouched, shared):
            loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
            loss.backward()
            found.append([loss, *(parameter.grad for parameter in model.parameters())])
        assert all(map(torch.equal, *found)) and not torch.equal(found[0][0], ordinary)
        report = sharing_report(shared)
        assert report.num_shared == 0 and re.search(BROUGHT[name][2], str(report))


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_forward_of_transformers_that_does_not_attend(is_whole, tiny_qwen3, monkeypatch):
    """The trial finds it; where nothing can be tried, the count of layers does."""
    monkeypatch.setattr("radixtrain.hf.guards.model._is_whole", lambda decoder: is_whole)
    model = share_prefixes(tiny_qwen3())
    attention = model.model.layers[0].self_attn
    attention.forward = MethodType(lambda self, hidden_states, **given: (self.o_proj(hidden_states), None), attention)
    position_wise(attention.forward.__func__)
    reason = "in 1 of 2 layers of Qwen3Model: the others attended without the tree"
    with pytest.raises(UserError if is_whole else RuntimeError, match=reason):
        model(**RadixCollator()(FEATURES))


@pytest.mark.usefixtures("hooks_that_may_stay")
@pytest.mark.parametrize("weights", [torch.float64, torch.float32])
def test_under_autocast_in_the_dtype_of_the_ordinary_call(tiny_qwen3, weights):
    """Autocast leaves float64 as it is. The probe asks as well."""
    model, asked = tiny_qwen3().to(weights), []
    layer = model.model.layers[0].self_attn.o_proj
    layer.register_forward_pre_hook(lambda module, args: asked.append(args[0].dtype))
    for share in (nn.Module.train, share_prefixes):
        with torch.autocast("cpu", torch.bfloat16):
            share(model)(input_ids=IDS, use_cache=False).logits.sum().backward()
    assert len(asked) == 5 and {*asked} == {torch.float64 if weights == torch.float64 else torch.bfloat16}


class TestTransformersOwn:
    def test_flash_attention_runs_what_is_not_shared(self, tiny_qwen3, monkeypatch):
        """Under its own name, by which it chooses a kernel. It is not installed here."""
        names = []

        def flash(query, key, value, mask, attn_implementation, **_):
            names.append(attn_implementation)
            heads = (x.transpose(1, 2) for x in (query, key, value))
            attended = nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
            return attended.transpose(1, 2)

        monkeypatch.setattr("transformers.integrations.flash_attention._flash_attention_forward", flash)
        expected = tiny_qwen3()(input_ids=IDS, use_cache=False).logits
        model = tiny_qwen3()
        model.config._attn_implementation_internal = "flash_attention_2"
        logits = share_prefixes(model)(input_ids=IDS, use_cache=False).logits
        torch.testing.assert_close(logits, expected)
        assert sharing_report(model).num_shared == 1 and len(names) == 4, "the probe ran it twice in two layers"
        names.clear()
        model(input_ids=IDS, use_cache=True)
        assert names == ["flash_attention_2"] * 2

    def test_gets_what_a_layer_gives_it(self):
        """Flex attention: a BlockMask, which is no tensor. Others: more by position, or no mask at all."""
        mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 128, 128, device="cpu")
        ran = radix_attention(lambda *given, **options: (given, options))
        assert ran(1, 2, 3, 4, mask, 5, scaling=6) == ((1, 2, 3, 4, mask, 5), {"scaling": 6})
        assert ran(1, 2, 3, 4, dropout=0.0) == ((1, 2, 3, 4, None), {"dropout": 0.0})


@pytest.mark.parametrize("window", [14, 15])
def test_cascade_if_a_window_binds(window):
    """One as long as the longest sequence does not."""
    model = share_prefixes(tiny_model("MistralForCausalLM", sliding_window=window), attention="cascade")
    message = (
        r"MistralAttention of layer 0 attends to the last 14 tokens, and this batch has a sequence of 15: "
        r"attention='cascade' cannot be used: .* attention='auto' or 'path' keeps the window"
    )
    with pytest.raises(UserError, match=message) if window == 14 else nullcontext():
        model(**RadixCollator()(FEATURES))
