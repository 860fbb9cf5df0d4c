"""The attention of one layer, as Hugging Face calls it: values of another width, and what is missing in a call."""

import copy
import functools
import gc
import re
import weakref
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
        report = verify_equivalence(model, FEATURES, precisions=["float64"])
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


class TestAttentionThatIsNotTransformersOwn:
    """It was replaced by ordinary attention, without a word."""

    @pytest.fixture(params=BROUGHT)
    def brought(self, request, tiny_qwen3, monkeypatch):
        """Two equal models, what brings their attention, and why it is not taken over."""
        name, entries, why = BROUGHT[request.param]

        def bring(*models):
            for entry in entries:
                monkeypatch.setitem(*entry)
            for model in models:
                model.config._attn_implementation_internal = name

        return tiny_qwen3(), tiny_qwen3(), bring, why

    def test_is_refused_by_name(self, brought):
        model, other, bring, why = brought
        bring(model, other)
        with pytest.raises(UserError, match=why):
            share_prefixes(model)(**RadixCollator()(FEATURES))
        with pytest.raises(UserError, match=f"{why}.*, or use model.generate"):
            generate(other, torch.tensor([[1, 2, 3]]), max_new_tokens=2)

    @pytest.mark.parametrize("is_later", [False, True])
    def test_is_left_as_it_was(self, brought, is_later):
        untouched, shared, bring, why = brought
        ordinary = untouched(input_ids=IDS, labels=IDS).loss
        if not is_later:
            bring(shared)
        share_prefixes(shared)
        bring(untouched, shared)
        losses = [model(input_ids=IDS, labels=IDS, use_cache=False).loss for model in (untouched, shared)]
        assert torch.equal(*losses) and not torch.equal(losses[0], ordinary)
        for loss in losses:
            loss.backward()
        pairs = zip(untouched.parameters(), shared.parameters(), strict=True)
        assert all(torch.equal(one.grad, other.grad) for one, other in pairs)
        answers = [model.eval().generate(IDS, max_new_tokens=6, do_sample=False) for model in (untouched, shared)]
        assert torch.equal(*answers)
        report = sharing_report(shared)
        assert report.num_shared == 0 and any(re.search(why, reason) for reason in report.not_shared), report


def own_attention(module, hidden_states, **kwargs):
    """No function of any interface."""
    return module.o_proj(module.v_proj(hidden_states).repeat(1, 1, 2).cumsum(1)), None


class Own(modeling_qwen3.Qwen3Attention):
    forward = own_attention


REPLACED = {
    "one module": lambda patch, module: setattr(module, "forward", MethodType(own_attention, module)),
    "a partial call": lambda patch, module: setattr(module, "forward", functools.partial(own_attention, module)),
    "the class": lambda patch, module: patch.setattr(type(module), "forward", own_attention),
    "a subclass": lambda patch, module: setattr(module, "__class__", Own),
}


@pytest.mark.parametrize("replace", REPLACED.values(), ids=REPLACED)
def test_a_forward_that_was_replaced(replace, tiny_qwen3, monkeypatch):
    """Before or after the model is shared."""
    model, later, prepared = tiny_qwen3(), share_prefixes(tiny_qwen3()), share_prefixes(tiny_qwen3())
    ordinary = model(input_ids=IDS).logits
    for each in (model, later, prepared):
        replace(monkeypatch, each.model.layers[0].self_attn)
    replaced = model(input_ids=IDS).logits
    assert not torch.equal(replaced, ordinary)
    assert torch.equal(later(input_ids=IDS, use_cache=False).logits, replaced)
    (reason,) = sharing_report(later).not_shared
    why = rf"\({__name__}.* would see the unique tokens"
    assert re.search(why, reason)
    for each in (prepared, share_prefixes(model)):
        with pytest.raises(UserError, match=why):
            each(**RadixCollator()(FEATURES))


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


def test_a_configuration_of_one_layer(tiny_qwen3):
    """The layer gets the mask of another implementation than it calls."""
    model, shared = tiny_qwen3(), share_prefixes(tiny_qwen3())
    for each in (model, shared):
        attention = each.model.layers[0].self_attn
        attention.config = copy.deepcopy(attention.config)
        attention.config._attn_implementation = "eager"
    logits = [each(input_ids=IDS, use_cache=False).logits for each in (model, shared)]
    assert torch.equal(*logits) and not sharing_report(shared).num_shared
    with pytest.raises(UserError, match=r"layers\.0\.self_attn has attn_implementation 'eager'"):
        share_prefixes(model)(**RadixCollator()(FEATURES))


def test_a_model_is_freed(tiny_qwen3):
    model = share_prefixes(tiny_qwen3())
    model(**RadixCollator()(FEATURES))
    parts = [weakref.ref(part) for part in (model, model.model, model.model.layers[0].self_attn)]
    del model
    gc.collect()
    assert [part() for part in parts] == [None, None, None]


WRAPPED = {
    "a wrapper": lambda forward: functools.wraps(forward)(functools.partial(lambda f, *a, **k: f(*a, **k), forward)),
    "a partial call": lambda forward: functools.partial(forward),
}


@pytest.mark.usefixtures("hooks_that_may_stay")
@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
def test_a_forward_that_was_wrapped(wrap, tiny_qwen3):
    """In what says what it wraps, as Accelerate does in a partial call of its own."""
    model = tiny_qwen3()
    for layer in model.model.layers:
        layer.self_attn.forward = wrap(layer.self_attn.forward)
    assert verify_equivalence(model, FEATURES, precisions=["float64"]).passed


@pytest.mark.usefixtures("hooks_that_may_stay")
@pytest.mark.parametrize("weights", [torch.float64, torch.float32])
def test_under_autocast_in_the_dtype_of_the_ordinary_call(tiny_qwen3, weights):
    """Autocast leaves float64 as it is. The probe asks as well."""
    model, asked = tiny_qwen3().to(weights), []
    for share in (nn.Module.train, share_prefixes):
        layer = share(model).model.layers[0].self_attn.o_proj
        handle = layer.register_forward_pre_hook(lambda module, args: asked.append(args[0].dtype))
        with torch.autocast("cpu", torch.bfloat16):
            model(input_ids=IDS, use_cache=False).logits.sum().backward()
        handle.remove()
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


def test_cascade_if_a_window_binds():
    model = share_prefixes(tiny_model("MistralForCausalLM"), attention="cascade")
    message = (
        r"MistralAttention of layer 0 attends to the last 4 tokens, and this batch has a sequence of 9: "
        r"attention='cascade' cannot be used: .* attention='auto' or 'path' keeps the window"
    )
    with pytest.raises(UserError, match=message):
        model(**RadixCollator()(FEATURES))
