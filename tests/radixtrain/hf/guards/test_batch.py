"""What is refused, when a model is shared and with a batch: each with the layer, the reason and the fix."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.integrations.neftune import neftune_post_forward_hook

from radixtrain import RadixCollator, generate, share_prefixes, verify_equivalence
from radixtrain.errors import UserError
from radixtrain.hf.backbone import pretrained_model_of
from radixtrain.hf.guards import rules
from radixtrain.hf.share import check_takes_collated
from tests.support import FULL
from tests.support.models import IS_OLDER, since, tiny_model

FEATURES = [{"input_ids": ids, "labels": ids} for ids in ([7, 8, 9, 1, 2], [7, 8, 9, 3])]
MIXES = "computes a token from others, or from its place among them"
NO_POSITIONS = "does not take position_ids, so a token after a shared prefix would get the position of its row"
NO_NEXT_TOKENS = r"is not a causal language model, .* or share_prefixes\(model\)"
FROM_PADDING = r"counts positions from padding_idx \+ 1 = 1 .* a radix batch counts from 0"
EXPERTS = {"ffn_hidden_size": 16, "moe_num_experts": 2, "moe_top_k": 1, "moe_jitter_eps": 0.1}
DBRX = {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4}, "ffn_config": EXPERTS}
DECODER = {"is_decoder": True}

# Class, settings, message: of a rule when the model is shared, or of the probe in its first call. Of other families:
# tests/claims/equivalence/test_families.py.
MODELS: list[tuple[str, dict[str, Any], str]] = [
    ("Qwen3ForCausalLM", {"attention_dropout": 0.1}, r"attention_dropout=0\.1"),
    (
        "Starcoder2ForCausalLM",
        {"residual_dropout": 0.1},
        r"residual_dropout=0\.1.*allow_dropout=\['residual_dropout'\]",
    ),
    ("DbrxForCausalLM", DBRX, r"ffn\.router\.moe_jitter_eps=0\.1\): .*allow_dropout=\['moe_jitter_eps'\]"),
    # A state that only the layer knows, or that gets nothing of the batch.
    ("MiniMaxForCausalLM", {}, rf"MiniMaxModel {MIXES}, first in layer [01] \(MiniMaxDecoderLayer\)"),
    ("Mamba2ForCausalLM", {"head_dim": 16}, "does not pass the entries of a radix batch on to its Mamba2Model"),
    # Attention that the tree does not compute.
    ("DogeForCausalLM", {}, r"DogeForCausalLM has a dynamic mask \(keep_window_size=2048\)"),
    (
        "DeepseekV32ForCausalLM",
        {},
        r"DeepseekV32ForCausalLM has sparse attention \(an indexer picks keys\) \(index_topk=4\)",
    ),
    ("BloomForCausalLM", {}, NO_POSITIONS),
    (
        "BigBirdForCausalLM",
        {**DECODER, "attention_type": "original_full"},
        "BigBirdModel cannot be tried on a few tokens",
    ),
    (
        "Gemma3ForCausalLM",
        {"use_bidirectional_attention": True},
        "Gemma3TextModel is refused: the model of Gemma3TextConfig adds a mask of its own to a sliding window",
    ),
    ("BertLMHeadModel", {"is_decoder": False}, "BertModel is refused: BertSelfAttention of layer 0 is not causal"),
    ("BertLMHeadModel", {**DECODER, "chunk_size_feed_forward": 4}, "has layers with chunk_size_feed_forward=4"),
    ("T5ForConditionalGeneration", {}, "T5ForConditionalGeneration is not a plain decoder"),
    ("BltForCausalLM", {"encoder_hash_byte_group_vocab": 64}, "one stack of num_hidden_layers"),
    # Positions that a model counts itself.
    ("RobertaForCausalLM", {**DECODER, "pad_token_id": 0}, FROM_PADDING),
    # Labels that are no next tokens.
    ("LlamaForTokenClassification", {}, f"LlamaForTokenClassification {NO_NEXT_TOKENS}"),
    ("BertForMaskedLM", DECODER, f"BertForMaskedLM {NO_NEXT_TOKENS}"),
    ("GPT2DoubleHeadsModel", {}, f"GPT2DoubleHeadsModel {NO_NEXT_TOKENS}"),
    ("WhisperForCausalLM", {}, "WhisperForCausalLM does not predict next tokens: its loss takes labels that"),
]


@pytest.mark.parametrize(("model_class", "settings", "message"), MODELS)
def test_a_model(model_class: str, settings: dict[str, Any], message: str) -> None:
    """By `share_prefixes`, or before the batch of a `RadixCollator`. An older transformers may give another reason."""
    with pytest.raises(UserError, match=None if IS_OLDER else message):
        share_prefixes(tiny_model(model_class, **settings))(**RadixCollator()(FEATURES))


CHANGED: dict[str, tuple[str, Callable[[Any], object], str]] = {
    "its layers in another module": (
        "LlavaForConditionalGeneration",
        lambda model: setattr(model.model, "language_model", nn.Sequential(model.model.language_model)),
        "has its layers in a Sequential, which is not a PreTrainedModel",
    ),
    "weights elsewhere": (
        "Qwen3ForCausalLM",
        lambda model: model.to("meta"),
        "has weights on meta, .* load it without a device_map",
    ),
    "windows by another name": (
        "Qwen3ForCausalLM",
        lambda model: setattr(model.config, "_attn_implementation_internal", "flash_attention_2"),
        "has flash_attention_2, which no longer takes its window as `sliding_window`",
    ),
}


@pytest.mark.parametrize(("model_class", "change", "message"), CHANGED.values(), ids=CHANGED)
def test_generation_of_a_model_that_was_changed(
    monkeypatch: pytest.MonkeyPatch, model_class: str, change: Callable[[Any], object], message: str
) -> None:
    monkeypatch.setattr(rules, "flash_attention_forward", lambda window: None)
    model = tiny_model(model_class)
    change(model)
    with pytest.raises(UserError, match=message):
        generate(model, torch.tensor([[7, 8, 9]]), max_new_tokens=1)


class Cumulative(nn.Module):
    """In place of a layer's attention or mixer: it takes neither a function nor a cache of Hugging Face."""

    def forward(self, hidden_states, **kwargs):
        return hidden_states.cumsum(1), None


@pytest.mark.parametrize(("layer", "name"), [(1, "linear_attn"), (2, "self_attn")])
@pytest.mark.usefixtures("hooks_that_may_stay")
def test_a_layer_of_ones_own_in_a_hybrid(tiny_hybrid, layer, name):
    """Nobody counted it: it read all unique rows as one sequence."""
    kinds = ["linear_attention", "linear_attention", "full_attention"]
    model = tiny_hybrid("Qwen3.5", num_hidden_layers=3, layer_types=kinds)
    setattr(model.model.layers[layer], name, Cumulative())
    with pytest.raises(UserError, match=rf"{MIXES}, first in layer {layer} |cannot be tried on a few tokens"):
        share_prefixes(model)(**RadixCollator()(FEATURES))


class TestNotRefused:
    """What looks like something that is."""

    def test_a_bare_backbone(self, tiny_qwen3):
        """A head of the user's own comes after it."""
        backbone = share_prefixes(tiny_qwen3().model)
        batch = {k: v for k, v in RadixCollator()(FEATURES).items() if k not in ("labels", "shift_labels")}
        assert backbone(**batch).last_hidden_state.shape[:2].numel() == len(batch["radix"].prediction_rows)

    def test_chunks_as_long_as_the_sequences(self):
        """All layers have full attention here, so its backbone is not named as others are."""
        model = tiny_model("Llama4ForCausalLM", layer_types=["full_attention"] * 2, attention_chunk_size=3)
        report = verify_equivalence(model, FEATURES)
        assert report.passed and report["float64"].worst.radix <= 1e-12, str(report)

    @since("5.6", "Gemma 3 asks for token_type_ids in training")
    def test_dropout_of_a_vision_tower(self):
        """Rows of text do not run through it."""
        model = tiny_model("Gemma3ForConditionalGeneration", vision_config={"attention_dropout": 0.1})
        assert share_prefixes(model)(**RadixCollator()(FEATURES)).loss.isfinite()


class KeepsToItself(transformers.Qwen3ForCausalLM):
    """Its backbone would compute the unique tokens of all rows as one row."""

    def forward(self, input_ids, labels=None, **kwargs):
        return super().forward(input_ids, labels=labels)


def test_a_model_that_keeps_a_radix_batch_to_itself(tiny_qwen3, monkeypatch):
    model = KeepsToItself(tiny_qwen3().config)
    monkeypatch.setattr("radixtrain.versions.installed", lambda name: "5.2.0")
    message = (
        r"KeepsToItself does not pass .* on to its Qwen3Model \(transformers 5\.2\.0 has no .*pip install -U '.*>=5\.3'"
    )
    share_prefixes(model)
    with pytest.raises(UserError, match=message):
        check_takes_collated(model)
    with pytest.raises(UserError, match=message):
        model(**RadixCollator()(FEATURES))


def test_verify_refuses_before_it_computes() -> None:
    """It said `Target 11 is out of bounds`."""
    with pytest.raises(UserError, match="LlamaForTokenClassification is not a causal language model"):
        verify_equivalence(tiny_model("LlamaForTokenClassification"), FEATURES)


@FULL
def test_verify_compares_without_a_setting_that_was_allowed() -> None:
    """Also inside another setting: the draw counted as a wrong gradient."""
    model = share_prefixes(tiny_model("DbrxForCausalLM", **DBRX), allow_dropout=["moe_jitter_eps"])
    report = verify_equivalence(model, FEATURES)
    assert report["float64"].worst.radix <= 1e-12, str(report)


@pytest.mark.parametrize("layer_types", [["chunked_attention"] * 2, None])
def test_chunks_shorter_than_a_sequence(layer_types):
    """None: a configuration that does not say the kinds of its layers."""
    model = share_prefixes(tiny_model("Llama4ForCausalLM", layer_types=["chunked_attention"] * 2))
    model.config.layer_types = layer_types
    with pytest.raises(UserError, match=r"Llama4TextModel has attention within chunks of 4 .* set max_length to 4"):
        model(**RadixCollator()(FEATURES))


class TestSoftCap:
    """Transformers before 5.21 chooses sdpa for Gemma 2, and its sdpa leaves the soft-cap out."""

    SDPA = r"Gemma2\w* has a soft-cap \(attn_logit_softcapping=50.0\), which attn_implementation 'sdpa' leaves out"

    def test_sdpa(self):
        model = tiny_model("Gemma2ForCausalLM", attn_implementation="eager")
        model.config._attn_implementation = "sdpa"
        with pytest.raises(UserError, match=self.SDPA):
            share_prefixes(model)
        model.config._attn_implementation = "eager"
        share_prefixes(model)

    def test_a_kernel_without_a_soft_cap(self):
        with pytest.raises(UserError, match="kernel='torch' cannot be used: computes no soft-cap; kernel='auto'"):
            share_prefixes(tiny_model("Gemma2ForCausalLM", attn_implementation="eager"), kernel="torch")


def with_lora(model: Any, dropout: float, **settings: Any) -> Any:
    peft = pytest.importorskip("peft", reason="pip install peft")
    settings = {"target_modules": "all-linear", **settings}
    return peft.get_peft_model(model, peft.LoraConfig(lora_dropout=dropout, init_lora_weights=False, **settings))


def dropout(model: Any) -> Any:
    model.model.layers[1].mlp.act_fn = nn.Sequential(model.model.layers[1].mlp.act_fn, nn.Dropout(0.5))
    return model


def noise(model: Any) -> Any:
    embedding = model.get_input_embeddings()
    embedding.neftune_noise_alpha = 5
    embedding.register_forward_hook(neftune_post_forward_hook)
    return model


DRAWS: dict[str, tuple[Callable[[Any], Any], str]] = {  # what draws; its number and the name by which it is allowed
    "an adapter": (lambda model: with_lora(model, 0.5), r"q_proj\.lora_dropout\.default\.p=0\.5.*\['lora_dropout'\]"),
    "on the head": (
        lambda model: with_lora(model, 0.5, target_modules=["lm_head"]),
        r"the head draws .*lora_dropout\.default\.p=0\.5.*\['lora_dropout'\]",
    ),
    "a module": (dropout, r"layers\.1\.mlp\.act_fn\.1\.p=0\.5.*\['1'\]"),
    "noise": (noise, r"embed_tokens\.neftune_noise_alpha=5.*\['neftune_noise_alpha'\]"),
}


@pytest.mark.parametrize("is_early", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("name", DRAWS)
def test_draws(tiny_qwen3: Callable[..., Any], name: str, is_early: bool) -> None:
    """Put in before a model is shared, or after: nothing draws in evaluation, and training needs leave by name."""
    change, refused = DRAWS[name]
    model = tiny_qwen3(tie_word_embeddings=False)
    model = change(model) if is_early else change(share_prefixes(model))
    allowed = refused.rpartition("['")[2].partition("'")[0]
    batch, padded = RadixCollator()(FEATURES), {"input_ids": torch.tensor([[7, 8, 9, 1], [7, 8, 9, 3]])}
    share_prefixes(model.eval())
    assert torch.equal(model(**batch).loss, model(**batch).loss)
    with pytest.raises(UserError, match=refused):
        model.train()(**batch)
    if name == "on the head":  # which draws at every place of an ordinary batch
        assert model(**padded).logits.isfinite().all()
    else:
        with pytest.raises(UserError, match=refused):
            model(**padded)
    assert model(input_ids=torch.tensor([[7, 8, 9]])).logits.isfinite().all(), "ordinary batches may draw"
    for _ in range(2):
        assert share_prefixes(model, allow_dropout=[allowed])(**batch).loss.isfinite()
    dropout(pretrained_model_of(model))
    if name != "a module":
        with pytest.raises(UserError, match=r"act_fn\.1\.p=0\.5"):
            model(**batch)
