"""`prepare_model`: ordinary behaviour without a plan, refusals with a reason, no radix batch on another attention."""

import copy

import pytest
import torch
import transformers
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import radixtrain.model
from radixtrain import RadixCollator, prepare_model, restore_model
from radixtrain.errors import UserError
from radixtrain.model import backbone_of

FEATURES = [{"input_ids": [7, 8, 9, 1, 2]}, {"input_ids": [7, 8, 9, 3]}]
PADDED = {
    "input_ids": torch.tensor([[5, 6, 7, 8], [0, 0, 9, 10]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]]),
}


class TestWithoutAPlan:
    def test_padded_logits_are_bit_equal(self, tiny_qwen3):
        model = tiny_qwen3().eval()
        before = model(**PADDED).logits
        after = prepare_model(model)(**PADDED).logits
        assert torch.equal(before, after)

    def test_generation_is_the_same(self, tiny_qwen3):
        model = tiny_qwen3().eval()
        options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
        before = model.generate(**PADDED, **options)
        assert torch.equal(before, prepare_model(model).generate(**PADDED, **options))

    def test_restore_undoes_it(self, tiny_qwen3):
        model = restore_model(prepare_model(tiny_qwen3()))
        assert model.config._attn_implementation == "sdpa"
        assert not backbone_of(model)._forward_hooks
        assert not backbone_of(model)._forward_pre_hooks

    def test_restore_leaves_a_model_alone_that_was_never_prepared(self, tiny_qwen3):
        model = tiny_qwen3()
        assert restore_model(model) is model

    def test_preparing_twice_counts_once(self, tiny_qwen3):
        model = prepare_model(prepare_model(tiny_qwen3()), attention="path")
        assert len(backbone_of(model)._forward_hooks) == 1
        assert torch.isfinite(model(**RadixCollator()(FEATURES)).loss)

    def test_what_is_saved_is_an_ordinary_model(self, tiny_qwen3, tmp_path):
        prepare_model(tiny_qwen3()).save_pretrained(tmp_path)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert loaded.config._attn_implementation == "sdpa"

    def test_a_copy_of_a_prepared_model_still_trains(self, tiny_qwen3):
        model = copy.deepcopy(prepare_model(tiny_qwen3()))
        assert torch.isfinite(model(**RadixCollator()(FEATURES)).loss)


class TestNeverOnAnotherAttention:
    def test_switched_after_preparing(self, tiny_qwen3):
        model = prepare_model(tiny_qwen3())
        model.set_attn_implementation("sdpa")
        with pytest.raises(ValueError, match="needs attn_implementation='radix', but it is now 'sdpa'"):
            model(**RadixCollator()(FEATURES))

    def test_never_prepared(self, tiny_qwen3):
        with pytest.raises(ValueError, match=r"batch_size \(6\).*batch_size \(7\)"):
            tiny_qwen3()(**RadixCollator()(FEATURES))

    def test_a_layer_that_does_not_come_by(self, tiny_qwen3):
        model = prepare_model(tiny_qwen3())
        attention = model.model.layers[1].self_attn

        class Other(nn.Module):
            def forward(self, hidden_states, **_):
                return attention.o_proj(attention.q_proj(hidden_states)), None

        model.model.layers[1].self_attn = Other()
        with pytest.raises(RuntimeError, match="ran in 1 of 2 layers of Qwen3Model"):
            model(**RadixCollator()(FEATURES))

    def test_a_lost_key(self, tiny_qwen3):
        batch = RadixCollator()(FEATURES)
        del batch["radix_subtree_ends"]
        with pytest.raises(ValueError, match="lost its entry 'radix_subtree_ends'"):
            prepare_model(tiny_qwen3())(**batch)

    def test_rows_of_another_batch(self, tiny_qwen3):
        batch = {**RadixCollator()(FEATURES), "input_ids": torch.tensor([[1, 2, 3]])}
        with pytest.raises(ValueError, match=r"needs input_ids \[1, 6\], got \(1, 3\)"):
            prepare_model(tiny_qwen3())(**batch)

    def test_no_square_mask_is_built(self, tiny_qwen3):
        seen = []
        model = prepare_model(tiny_qwen3())
        model.model.layers[0].register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(kwargs["attention_mask"]), with_kwargs=True
        )
        model(**RadixCollator()(FEATURES))
        assert seen[0].numel() == 0


class TestRefusals:
    def test_attention_dropout(self, tiny_qwen3):
        with pytest.raises(UserError, match=r"attention_dropout=0\.1"):
            prepare_model(tiny_qwen3(attention_dropout=0.1))

    def test_lora_dropout_unless_allowed_by_name(self, tiny_qwen3):
        peft = pytest.importorskip("peft", reason="pip install 'radixtrain[peft]'")
        model = peft.get_peft_model(tiny_qwen3(), peft.LoraConfig(lora_dropout=0.05, target_modules=["q_proj"]))
        with pytest.raises(
            UserError, match=r"dropout p=0\.05 at '.*q_proj\.lora_dropout.*allow_dropout=\['lora_dropout'\]"
        ):
            prepare_model(model)
        assert prepare_model(model, allow_dropout=["lora_dropout"]) is model

    def test_neftune(self, tiny_qwen3):
        model = prepare_model(tiny_qwen3()).train()
        model.get_input_embeddings().neftune_noise_alpha = 5
        with pytest.raises(ValueError, match=r"NEFTune \(neftune_noise_alpha=5\)"):
            model(**RadixCollator()(FEATURES))

    def test_linear_attention(self):
        config = Qwen3NextConfig(
            vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=4, num_attention_heads=2,
            num_key_value_heads=1, head_dim=8, linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8,
            linear_value_head_dim=8, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8,
            shared_expert_intermediate_size=8,
        )  # fmt: skip
        with pytest.raises(UserError, match="Qwen3NextForCausalLM layer 0 is 'linear_attention'"):
            prepare_model(Qwen3NextForCausalLM(config))

    def test_a_window_that_bites(self, tiny_qwen3):
        changes = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
        model = prepare_model(tiny_qwen3(**changes))
        with pytest.raises(ValueError, match="attends to the last 4 tokens only, and this batch has a sequence of 5"):
            model(**RadixCollator()(FEATURES))

    def test_a_window_that_only_the_mask_knows(self):
        torch.manual_seed(0)
        config = Qwen2MoeConfig(
            vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8,
            shared_expert_intermediate_size=8, use_sliding_window=True, sliding_window=4,
            layer_types=["full_attention", "sliding_attention"],
        )  # fmt: skip
        model = prepare_model(Qwen2MoeForCausalLM(config))
        with pytest.raises(ValueError, match="attends to the last 4 tokens only"):
            model(**RadixCollator()(FEATURES))

    def test_dropout_that_is_no_module(self):
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
        config = Starcoder2Config(vocab_size=32, num_hidden_layers=1, residual_dropout=0.1, **sizes)
        with pytest.raises(UserError, match=r"residual_dropout=0\.1.*allow_dropout=\['residual_dropout'\]"):
            prepare_model(Starcoder2ForCausalLM(config))

    def test_a_router_loss(self):
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
        config = MixtralConfig(
            vocab_size=32, num_hidden_layers=1, num_local_experts=2, output_router_logits=True, **sizes
        )
        with pytest.raises(UserError, match="adds a router loss"):
            prepare_model(MixtralForCausalLM(config))

    def test_an_encoder_and_decoder(self):
        sizes = {"d_model": 16, "d_ff": 16, "d_kv": 8, "num_layers": 1, "num_heads": 2}
        with pytest.raises(UserError, match="T5ForConditionalGeneration is not a plain decoder"):
            prepare_model(T5ForConditionalGeneration(T5Config(vocab_size=32, dropout_rate=0.0, **sizes)))

    def test_something_that_is_no_model(self):
        with pytest.raises(TypeError, match=r"expected a transformers PreTrainedModel.*got Linear"):
            prepare_model(nn.Linear(2, 2))

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"attention": "ring"}, "attention must be auto, cascade, path, expand, reference; got 'ring'"),
            ({"kernel": "cutlass"}, "kernel must be auto, torch, flash_attn, eager; got 'cutlass'"),
            ({"kernel": "flash_attn"}, "kernel='flash_attn' cannot be used: needs CUDA"),
        ],
    )
    def test_requests_that_cannot_be_met(self, tiny_qwen3, options, message):
        with pytest.raises(UserError, match=message.replace("(", r"\(")):
            prepare_model(tiny_qwen3(), **options)


FAMILIES = {
    "Qwen2": {},
    "Qwen3Moe": {"head_dim": 8, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16},
    "Llama": {},
    "Mistral": {},
    "Mixtral": {"num_local_experts": 2},
    "Gemma3": {"head_dim": 8},
    "Phi3": {},
    "Olmo2": {},
    "SmolLM3": {},
    "Granite": {},
    "Glm4": {"head_dim": 8},
    "Cohere2": {},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_other_families(family):
    """Nothing in the library knows Qwen3: tiny random models of Hugging Face's own classes, within any window."""
    names = {"Gemma3": "Gemma3TextConfig"}
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0}
    config = getattr(transformers, names.get(family, f"{family}Config"))(**sizes, **heads, **FAMILIES[family])
    torch.manual_seed(0)
    report = radixtrain.verify_equivalence(getattr(transformers, f"{family}ForCausalLM")(config), FEATURES)
    assert report.passed and report.conclusive, str(report)
