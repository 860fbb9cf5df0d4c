"""What a prepared model does with a radix batch that was changed on the way, and what it cannot return."""

import copy
import gc
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import pytest
import torch
from transformers import AttentionMaskInterface, DynamicCache
from transformers.masking_utils import eager_mask

from radixtrain import RadixCollator, share_prefixes, sharing_report
from radixtrain.errors import UserError
from radixtrain.hf.backbone import CACHE
from radixtrain.verification.oracle import Gradients, float64_throughout, gradients_of
from tests.support.models import DECODER, tiny_model
from tests.support.steps import same
from tests.support.trainers import padded_with_labels

IDS = [[7, 8, 9, 1, 2, 5], [7, 8, 9, 3], [7, 8, 9, 3, 4]]  # 8 unique tokens
PADDED = padded_with_labels(IDS, IDS, "right", pad=0)


def collated() -> dict[str, Any]:
    return RadixCollator(loss_on_all=True)([{"input_ids": ids} for ids in IDS])


@pytest.fixture
def model(tiny_qwen3):
    return share_prefixes(tiny_qwen3())


# What is changed in a batch, or left out by None, and what is said.
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"position_ids": None}, r"needs its position_ids \[1, 8\], got None: without them a token after"),
    ({"position_ids": torch.arange(4)[None]}, r"needs its position_ids \[1, 8\], got \(1, 4\)"),
    ({"input_ids": torch.tensor([[1, 2, 3]])}, r"needs input_ids \[1, 8\], got \(1, 3\)"),
    ({"attention_mask": torch.ones(1, 8, dtype=torch.int64)}, "a radix batch came with attention_mask; "),
    ({"pixel_values": torch.ones(1, 3, 4, 4)}, "came with pixel_values; a radix batch has text only"),
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
    batch = {name: value for name, value in {**collated(), **changes}.items() if value is not None}
    with pytest.raises(UserError, match=message):
        model(**batch)


def test_inputs_by_position(model):
    """A backbone that is called with ids and mask as positional arguments."""
    batch = collated()
    ids, positions = batch.pop("input_ids"), batch.pop("position_ids")
    named = model.model(ids, position_ids=positions, **batch).last_hidden_state
    assert torch.equal(model.model(ids, None, positions, **batch).last_hidden_state, named)


def test_a_copy_of_a_part_does_not_copy_the_model(model):
    """It held a second model in memory."""
    gc.collect()
    before = sum(isinstance(each, type(model)) for each in gc.get_objects())
    copied = copy.deepcopy(model.model)
    assert copied and sum(isinstance(each, type(model)) for each in gc.get_objects()) == before


GEMMA_3: dict[str, Any] = {"layer_types": ["full_attention"] * 2}
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
    model.model.layers = model.model.layers[:1]


def add(model):
    model.model.layers.append(copy.deepcopy(model.model.layers[1]))
    model.config.num_hidden_layers += 1


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
    "cut, but not in the configuration": ("Qwen3ForCausalLM", {}, cut, None),
    "added": ("LlamaForCausalLM", {}, add, None),
    "added to GPT-2": ("GPT2LMHeadModel", {}, add_to_gpt2, None),
}


def gradients(model: Any, batch: dict[str, Any]) -> Gradients:
    torch.manual_seed(0)
    with float64_throughout(model):
        return gradients_of(model, lambda: [model(**batch, use_cache=False).loss])


@pytest.mark.parametrize(("model_class", "settings", "change", "reason"), CHANGES.values(), ids=CHANGES.keys())
def test_what_was_changed_afterwards(model_class, settings, change, reason):
    """Hugging Face reads most settings in every call, and runs the layers that it finds then."""
    untouched, shared, prepared = (tiny_model(model_class, **settings) for _ in range(3))
    share_prefixes(shared), share_prefixes(prepared)
    for model, batch in ((untouched, PADDED), (shared, PADDED), (prepared, collated())):
        with float64_throughout(model):
            model(**batch, use_cache=False)
        change(model)
    truth = gradients(untouched, PADDED)
    same(truth, gradients(shared, PADDED))
    report = sharing_report(shared)
    assert report.num_shared == 1 + (reason is None)
    if reason is None:
        same(truth, gradients(prepared, collated()))
    else:
        assert reason in next(iter(report.not_shared))
        with pytest.raises(UserError, match=reason):
            prepared(**collated())


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


def test_an_attention_of_later_is_taken_over_before_a_backbone_makes_its_masks():
    """In a process in which no other model had it."""
    model = share_prefixes(tiny_model("Gemma3ForConditionalGeneration"))
    AttentionMaskInterface.register("eager", eager_mask)
    model.set_attn_implementation("eager")
    model(**PADDED, use_cache=False)
    assert sharing_report(model).num_shared == 1
