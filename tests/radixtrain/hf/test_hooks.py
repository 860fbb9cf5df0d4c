"""What a prepared model does with a radix batch that was changed on the way, and what it cannot return."""

import copy
import gc
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from radixtrain import RadixCollator, share_prefixes, sharing_report
from radixtrain.errors import UserError
from radixtrain.hf.backbone import CACHE
from radixtrain.verification.oracle import float64_throughout, float64_truth, gradients_of
from tests.support.models import tiny_model
from tests.support.steps import same

N = -100
FEATURES = [
    {"input_ids": [7, 8, 9, 1, 2], "labels": [N, N, N, 1, 2]},
    {"input_ids": [7, 8, 9, 3], "labels": [N] * 3 + [3]},
]


@pytest.fixture
def model(tiny_qwen3):
    return share_prefixes(tiny_qwen3())


def changed(**changes):
    """A batch of 6 unique tokens; an entry that is None is left out."""
    batch = {**RadixCollator()(FEATURES), **changes}
    return {name: value for name, value in batch.items() if value is not None}


# What is changed in a batch of 6 unique tokens, and what is said.
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"position_ids": None}, r"needs its position_ids \[1, 6\], got None: without them a token after"),
    ({"position_ids": torch.arange(4)[None]}, r"needs its position_ids \[1, 6\], got \(1, 4\)"),
    ({"input_ids": torch.tensor([[1, 2, 3]])}, r"needs input_ids \[1, 6\], got \(1, 3\)"),
    ({"attention_mask": torch.ones(1, 6, dtype=torch.int64)}, "a radix batch came with attention_mask; "),
    *(  # a cache under any name, which the model may replace by its own name
        ({name: DynamicCache()}, f"a radix batch came with ({'|'.join([name, *CACHE])}); ")
        for name in (*CACHE, "kept_states")
    ),
    *(
        ({name: True}, f"{name} would hold unique tokens, not those of each sequence")
        for name in ("output_hidden_states", "output_attentions")
    ),
    *(({"logits_to_keep": n}, "logits_to_keep cannot be used with a radix batch") for n in (1, torch.tensor([0, 1]))),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_what_a_batch_may_not_have(model, changes, message):
    """Without positions Hugging Face counts them by row: a gradient 0.87 off, and no error."""
    with pytest.raises(UserError, match=message):
        model(**changed(**changes))


def test_inputs_by_position(model):
    """A backbone that is called with ids and mask as positional arguments."""
    batch = changed()
    ids, positions = batch.pop("input_ids"), batch.pop("position_ids")
    named = model.model(ids, position_ids=positions, **batch).last_hidden_state
    assert torch.equal(model.model(ids, None, positions, **batch).last_hidden_state, named)


def test_a_backbone_that_is_prepared_twice(model):
    with pytest.raises(UserError, match="Qwen3Model is shared already, alone or inside another model"):
        share_prefixes(model.model)


def test_a_copy_of_a_part_does_not_copy_the_model(model):
    """It held a second model in memory."""
    gc.collect()
    before = sum(isinstance(each, type(model)) for each in gc.get_objects())
    copied = copy.deepcopy(model.model)
    assert copied and sum(isinstance(each, type(model)) for each in gc.get_objects()) == before


GEMMA_3: dict[str, Any] = {"layer_types": ["full_attention"] * 2}
DECODER: dict[str, Any] = {"is_decoder": True, "vocab_size": 50}
BOTH_WAYS = "computes a token from others"


def set_later(path: str, value: object) -> Any:
    """What sets an attribute of a model. path: with its parts."""
    owner, _, name = path.rpartition(".")
    return lambda model: setattr(attrgetter(owner)(model) if owner else model, name, value)


def another_attention(model):
    attention = model.model.layers[1].self_attn
    attention.config = copy.deepcopy(attention.config)
    attention.config._attn_implementation = "eager"


def drop_in_gpt2(model):
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.2


def cut(model):
    model.model.layers, model.config.num_hidden_layers = model.model.layers[:1], 1


def cut_the_list_only(model):
    model.model.layers = model.model.layers[:1]


def add(model, also=True):
    model.model.layers.append(copy.deepcopy(model.model.layers[1]))
    model.config.num_hidden_layers += also


def add_to_gpt2(model):
    """Which runs every layer of its list, however many the configuration names."""
    model.transformer.h.append(copy.deepcopy(model.transformer.h[1]))


# Class, settings, what a program does after it has shared the model, why its calls are not shared then.
CHANGES: dict[str, tuple[str, dict[str, Any], Callable[[Any], Any], str | None]] = {
    "Gemma 3": ("Gemma3ForCausalLM", GEMMA_3, set_later("config.use_bidirectional_attention", True), BOTH_WAYS),
    "BERT": ("BertLMHeadModel", DECODER, set_later("config.is_decoder", False), BOTH_WAYS),
    "all": ("Qwen3ForCausalLM", {}, set_later("config.is_causal", False), "is not causal"),
    "one layer": (
        "Qwen3ForCausalLM",
        {},
        set_later("model.layers.0.self_attn.is_causal", False),
        "Qwen3Attention of layer 0 is not causal",
    ),
    "another attention in one layer": (
        "Qwen3ForCausalLM",
        {},
        another_attention,
        "layers.1.self_attn has attn_implementation 'eager', and its decoder 'sdpa'",
    ),
    "another attention": ("Qwen3ForCausalLM", {}, lambda model: model.set_attn_implementation("eager"), None),
    "dropout in one layer": (
        "Qwen3ForCausalLM",
        {},
        set_later("model.layers.1.self_attn.attention_dropout", 0.1),
        "Qwen3Attention of layer 1 requests attention dropout 0.1",
    ),
    "dropout": ("GPT2LMHeadModel", {}, drop_in_gpt2, "GPT2Attention of layer 0 requests attention dropout 0.2"),
    "another scale": ("Qwen3ForCausalLM", {}, set_later("model.layers.0.self_attn.scaling", 0.7), None),
    "sinks": ("GptOssForCausalLM", {}, set_later("config._attn_implementation", "sdpa"), "has sinks"),
    "an indexer": ("Qwen3ForCausalLM", {}, set_later("config.index_topk", 2), "has sparse attention"),
    "chunks": ("BertLMHeadModel", DECODER, set_later("bert.encoder.layer.0.chunk_size_feed_forward", 6), "=6, into"),
    "a compiled script": (  # whose class has no `forward` to be judged
        "LlamaForCausalLM",
        {},
        lambda model: setattr(model.model.layers[0].mlp, "act_fn", torch.jit.script(torch.nn.SiLU())),
        "layers.0.mlp.act_fn.forward",
    ),
    "cut": ("Qwen3ForCausalLM", {}, cut, None),
    "cut, but not in the configuration": ("Qwen3ForCausalLM", {}, cut_the_list_only, None),
    "added": ("LlamaForCausalLM", {}, add, None),
    "added to GPT-2": ("GPT2LMHeadModel", {}, add_to_gpt2, None),
}
PADDED = {
    "input_ids": torch.tensor([[7, 8, 9, 1, 2, 5], [7, 8, 9, 3, 0, 0], [7, 8, 9, 3, 4, 0]]),
    "attention_mask": torch.tensor([[1] * 6, [1] * 4 + [0] * 2, [1] * 5 + [0]]),
    "labels": torch.tensor([[N, 8, 9, 1, 2, 5], [N, 8, 9, 3, N, N], [N, 8, 9, 3, 4, N]]),
}
ROWS = [{"input_ids": row[row > 0].tolist(), "labels": row[row > 0].tolist()} for row in PADDED["input_ids"]]


@pytest.mark.parametrize(("model_class", "settings", "change", "reason"), CHANGES.values(), ids=CHANGES.keys())
class TestChangedAfterwards:
    """Hugging Face reads most settings in every call, and runs the layers that it finds then."""

    def test_ordinary_batches(self, model_class, settings, change, reason):
        untouched, shared = tiny_model(model_class, **settings), share_prefixes(tiny_model(model_class, **settings))
        found = []
        for model in (untouched, shared):
            with float64_throughout(model):
                model(**PADDED, use_cache=False)
                change(model)
                torch.manual_seed(0)
                found.append(gradients_of(model, lambda model=model: [model(**PADDED, use_cache=False).loss]))
        same(*found)
        report = sharing_report(shared)
        assert report.num_shared == 1 + (reason is None)
        assert reason is None or reason in next(iter(report.not_shared))

    def test_radix_batches(self, model_class, settings, change, reason):
        untouched, prepared = tiny_model(model_class, **settings), share_prefixes(tiny_model(model_class, **settings))
        prepared(**RadixCollator()(ROWS))
        change(untouched)
        change(prepared)
        if reason is not None:
            with pytest.raises(UserError, match=reason):
                prepared(**RadixCollator()(ROWS))
            return
        truth = float64_truth(untouched, ROWS)
        with float64_throughout(prepared):
            same(truth, gradients_of(prepared, lambda: [prepared(**RadixCollator()(ROWS)).loss]))


def test_a_recurrent_layer_that_was_added(tiny_hybrid):
    """Its state would run from one row into the next."""
    model, other = share_prefixes(tiny_hybrid("LFM2")), tiny_hybrid("LFM2", 1)
    model.model.layers[1], model.config.layer_types = other.model.layers[0], ["conv", "conv"]
    model(**PADDED, use_cache=False)
    assert "has got further recurrent layers" in next(iter(sharing_report(model).not_shared))


def test_what_was_put_back(tiny_qwen3):
    model = share_prefixes(tiny_qwen3())
    for value in (False, True):
        model.config.is_causal = value
        model(**PADDED)
    assert sharing_report(model).num_shared == 1
    copied = copy.deepcopy(model)
    copied.config.is_causal = False
    copied(**PADDED)
    model(**PADDED)
    assert "is not causal" in next(iter(sharing_report(copied).not_shared))
    assert sharing_report(model).num_shared == 2
