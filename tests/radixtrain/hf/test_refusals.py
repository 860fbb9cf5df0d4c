"""What is refused, when a model is prepared and with a batch: each with the layer, the reason and the fix."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import (
    BartConfig,
    BartForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    Starcoder2Config,
    Starcoder2ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import radixtrain.hf.refusals
from radixtrain import RadixCollator, prepare_model, share_prefixes, verify_equivalence
from radixtrain.errors import UserError
from radixtrain.hf.refusals import check_choice

FEATURES = [{"input_ids": ids, "labels": ids} for ids in ([7, 8, 9, 1, 2], [7, 8, 9, 3])]
TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}


def tiny(family: str, **changes: Any) -> Any:
    """A random model of Hugging Face's own class, two layers."""
    config = getattr(transformers, f"{family}Config")(**{**TINY, **changes})
    return getattr(transformers, f"{family}ForCausalLM")(config)


class TestAttention:
    def test_attention_dropout(self, tiny_qwen3):
        with pytest.raises(UserError, match=r"attention_dropout=0\.1"):
            prepare_model(tiny_qwen3(attention_dropout=0.1))

    @pytest.mark.parametrize(
        ("family", "changes", "message"),
        [
            ("MiniMax", {"num_local_experts": 2}, "layer 1 is 'linear_attention', whose state from token to token"),
            ("RecurrentGemma", {"lru_width": 32}, "layer 0 is 'linear_attention', whose state from token to token"),
            ("Rwkv", {"attention_hidden_size": 32}, r"has a RwkvBlock \(blocks\.0\), whose state from token to token"),
        ],
    )
    def test_a_state_that_only_the_layer_knows(self, family, changes, message):
        with pytest.raises(UserError, match=f"{message} does not go through Hugging Face's cache .* cannot fork"):
            prepare_model(tiny(family, **changes))

    def test_a_mixer_that_takes_no_cache(self, tiny_hybrid):
        """It looked like a layer whose tokens do not meet."""

        class OwnMixer(torch.nn.Module):
            def forward(self, hidden_states, **kwargs):
                return hidden_states.cumsum(1)

        kinds = ["linear_attention", "linear_attention", "full_attention"]
        model = tiny_hybrid("Qwen3.5", num_hidden_layers=3, layer_types=kinds)
        model.model.layers[1].linear_attn = OwnMixer()
        with pytest.raises(UserError, match="layer 1 is 'linear_attention', whose state from token to token"):
            prepare_model(model)

    def test_attention_of_its_own_in_a_hybrid(self, tiny_hybrid):
        """Nobody counted it: it read all unique rows as one sequence."""

        class OwnAttention(torch.nn.Module):
            def forward(self, hidden_states, **kwargs):
                return hidden_states.cumsum(1), None

        model = tiny_hybrid("Qwen3.5")
        model.model.layers[1].self_attn = OwnAttention()
        with pytest.raises(UserError, match="layer 1 is 'full_attention' and does not take its attention from"):
            prepare_model(model)

    def test_state_space_layers_that_get_nothing_of_the_batch(self):
        with pytest.raises(UserError, match=r"Mamba2Model has state-space layers only, .* radix batch on to them"):
            prepare_model(tiny("Mamba2", num_heads=4, head_dim=16, state_size=8, n_groups=1))

    @pytest.mark.parametrize(
        "rope",
        [
            {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
            {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "original_max_position_embeddings": 4,
                "short_factor": [1.0] * 4,
                "long_factor": [2.0] * 4,
            },
        ],
        ids=lambda rope: rope["rope_type"],
    )
    def test_rotary_embeddings_that_follow_the_longest_sequence(self, tiny_qwen3, rope):
        """Up to the length at which they begin to, they are like any other."""
        model = prepare_model(tiny_qwen3(rope_parameters=rope, max_position_embeddings=4))
        assert torch.isfinite(model(**RadixCollator(loss_on_all=True)([{"input_ids": [7, 8, 9, 1]}])).loss)
        with pytest.raises(UserError, match=rf"has {rope['rope_type']} rotary embeddings.*set max_length to 4 or less"):
            model(**RadixCollator()(FEATURES))

    def test_chunks_without_layer_types(self, tiny_qwen3):
        model = prepare_model(tiny_qwen3(attention_chunk_size=4))
        model.config.layer_types = None
        with pytest.raises(UserError, match=r"within chunks of 4 tokens .* a sequence of 5; set max_length to 4"):
            model(**RadixCollator()(FEATURES))

    @pytest.mark.parametrize(
        ("family", "changes", "message"),
        [
            ("Doge", {}, r"DogeForCausalLM has a dynamic mask \(keep_window_size=2048\)"),
            ("DeepseekV32", {}, "DeepseekV32ForCausalLM layer 0 is 'indexed_attention'"),
            (
                "DeepseekV32",
                {"layer_types": ["full_attention"] * 2},
                r"DeepseekV32ForCausalLM has sparse attention \(an indexer picks keys\) \(index_topk=2048\)",
            ),
        ],
    )
    def test_what_the_tree_does_not_compute(self, family, changes, message):
        latent = {"kv_lora_rank": 8, "q_lora_rank": 8, "n_routed_experts": 2, "n_group": 1, "topk_group": 1}
        with pytest.raises(UserError, match=message):
            prepare_model(tiny(family, **({} if family == "Doge" else latent), **changes))

    def test_positions_that_a_model_counts_itself(self):
        sizes = {"d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 16}
        config = BartConfig(vocab_size=32, dropout=0.0, is_encoder_decoder=False, is_decoder=True, **sizes)
        with pytest.raises(UserError, match="BartDecoder does not take position_ids"):
            prepare_model(BartForCausalLM(config))

    def test_an_encoder_and_decoder(self):
        sizes = {"d_model": 16, "d_ff": 16, "d_kv": 8, "num_layers": 1, "num_heads": 2}
        with pytest.raises(UserError, match="T5ForConditionalGeneration is not a plain decoder"):
            prepare_model(T5ForConditionalGeneration(T5Config(vocab_size=32, dropout_rate=0.0, **sizes)))


class TestClass:
    """The labels of a collator are next tokens. Other heads trained on the wrong token, or raised a shape error."""

    @pytest.mark.parametrize(
        "name",
        ["LlamaForTokenClassification", "LlamaForSequenceClassification", "BertForMaskedLM", "GPT2DoubleHeadsModel"],
    )
    def test_heads_that_predict_something_else(self, name):
        config = getattr(transformers, f"{name.partition('For')[0].removesuffix('DoubleHeadsModel')}Config")
        model = getattr(transformers, name)(config(**{**TINY, "num_key_value_heads": 4}, is_decoder=True))
        with pytest.raises(UserError, match=f"{name} is not a causal language model: the labels of a RadixCollator"):
            prepare_model(model)

    def test_labels_that_are_shifted_already(self):
        sizes = {"d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 16}
        config = transformers.WhisperConfig(vocab_size=64, pad_token_id=0, **sizes)
        with pytest.raises(
            UserError, match="WhisperForCausalLM does not predict next tokens: its loss takes labels that"
        ):
            prepare_model(transformers.WhisperForCausalLM(config))

    def test_a_subclass_of_a_causal_model(self):
        class MyLlama(transformers.LlamaForCausalLM):
            pass

        assert prepare_model(MyLlama(transformers.LlamaConfig(**TINY)))(**RadixCollator()(FEATURES)).loss.isfinite()

    def test_a_bare_backbone(self, tiny_qwen3):
        """A head of the user's own comes after it."""
        backbone = prepare_model(tiny_qwen3().model)
        batch = {k: v for k, v in RadixCollator()(FEATURES).items() if k not in ("labels", "shift_labels")}
        assert backbone(**batch).last_hidden_state.shape[1] == len(batch["radix_predictor_indices"])

    def test_verify_refuses_before_it_computes(self):
        """It said `Target 11 is out of bounds`."""
        model = transformers.LlamaForTokenClassification(transformers.LlamaConfig(**TINY))
        with pytest.raises(UserError, match="LlamaForTokenClassification is not a causal language model"):
            verify_equivalence(model, FEATURES)


class TestBothDirections:
    def test_by_configuration(self):
        """It said: set max_length to None or less."""
        config = transformers.Gemma3TextConfig(**TINY, use_bidirectional_attention=True)
        with pytest.raises(UserError, match="Gemma3ForCausalLM attends in both directions"):
            prepare_model(transformers.Gemma3ForCausalLM(config))

    def test_text_layers_beside_a_vision_tower(self):
        """GIT's text layers compute their attention themselves, its vision tower does not. It was a shape error."""
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        config = transformers.GitConfig(
            vision_config=sizes, vocab_size=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **sizes
        )
        with pytest.raises(UserError, match="GitForCausalLM does not take its attention from AttentionInterface"):
            prepare_model(transformers.GitForCausalLM(config))

    def test_a_state_goes_only_forward(self, tiny_hybrid):
        """A hybrid without any attention was said to attend in both directions."""
        share_prefixes(tiny_hybrid("Qwen3.5", layer_types=["linear_attention"] * 2))


class TestChunks:
    """Chunks change nothing in a sequence that fits into one."""

    def llama4(self, **changes: Any) -> Any:
        torch.manual_seed(0)
        sizes = {"intermediate_size_mlp": 32, "head_dim": 8, "num_local_experts": 4, "attention_chunk_size": 5}
        return Llama4ForCausalLM(Llama4TextConfig(**{**TINY, **sizes, **changes}))

    @pytest.mark.parametrize("changes", [{}, {"layer_types": ["full_attention"] * 2, "attention_chunk_size": 3}])
    def test_same_gradient(self, changes):
        """Also if all layers have full attention: its backbone is not named as others are."""
        report = verify_equivalence(self.llama4(**changes), FEATURES, precisions=["float64"])
        assert report.passed and report["float64"].worst.radix <= 1e-12, str(report)

    def test_shorter_than_a_sequence(self):
        model = prepare_model(self.llama4(attention_chunk_size=4))
        with pytest.raises(UserError, match=r"Llama4TextModel attends within chunks of 4 .* set max_length to 4"):
            model(**RadixCollator()(FEATURES))


class TestSoftCap:
    """Transformers before 5.21 chooses sdpa for Gemma 2, and its sdpa leaves the soft-cap out."""

    SDPA = r"Gemma2\w* has a soft-cap \(attn_logit_softcapping=50.0\), which attn_implementation 'sdpa' leaves out"

    @pytest.mark.parametrize("prepare", [prepare_model, share_prefixes])
    def test_sdpa(self, prepare):
        model = tiny("Gemma2", head_dim=8)
        model.config._attn_implementation = "sdpa"
        with pytest.raises(UserError, match=self.SDPA):
            prepare(model)
        model.config._attn_implementation = "eager"
        prepare(model)

    def test_none_to_leave_out(self):
        model = tiny("Gemma2", head_dim=8, attn_logit_softcapping=None)
        model.config._attn_implementation = "sdpa"
        prepare_model(model)


class TestChoice:
    def test_a_kernel_without_a_soft_cap(self):
        with pytest.raises(UserError, match="kernel='torch' cannot be used: computes no soft-cap; kernel='auto'"):
            prepare_model(tiny("Gemma2", head_dim=8, attn_implementation="eager"), kernel="torch")

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"attention": "ring"}, "attention must be auto, cascade, path, expand, reference, tree; got 'ring'"),
            (
                {"kernel": "cutlass"},
                "kernel must be auto, torch, flash_attn, flash_attn_3, cudnn, eager; got 'cutlass'",
            ),
            ({"kernel": "flash_attn"}, "kernel='flash_attn' cannot be used: needs CUDA"),
        ],
    )
    def test_requests_that_cannot_be_met(self, tiny_qwen3, options, message):
        with pytest.raises(UserError, match=message.replace("(", r"\(")):
            prepare_model(tiny_qwen3(), **options)

    @pytest.mark.parametrize(
        ("family", "changes", "head_dim"),
        [
            ("Qwen3", {"head_dim": 16}, 16),
            ("Llama", {}, 8),
            ("DeepseekV3", {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}, 192),
            ("MiMoV2Flash", {"head_dim": 8, "v_head_dim": 24}, 24),
        ],
    )
    def test_the_head_dim_that_a_kernel_is_asked_for(self, family, changes, head_dim, monkeypatch):
        asked = []
        monkeypatch.setattr(radixtrain.hf.refusals, "choose_attention", lambda *given, **_: asked.append(given[4]))
        config = getattr(transformers, f"{family}Config")(**TINY, **changes)
        decoder = SimpleNamespace(config=config, parameters=lambda: iter([torch.zeros(1)]))
        check_choice(decoder, "auto", "flash_attn")
        assert asked == [head_dim]


class TestDropout:
    def test_lora_dropout_unless_allowed_by_name(self, tiny_qwen3):
        peft = pytest.importorskip("peft", reason="pip install 'radixtrain[peft]'")
        model = peft.get_peft_model(tiny_qwen3(), peft.LoraConfig(lora_dropout=0.05, target_modules=["q_proj"]))
        with pytest.raises(
            UserError, match=r"dropout p=0\.05 at '.*q_proj\.lora_dropout.*allow_dropout=\['lora_dropout'\]"
        ):
            prepare_model(model)
        assert prepare_model(model, allow_dropout=["lora_dropout"]) is model

    def test_lora_dropout_of_a_model_in_evaluation_mode(self, tiny_qwen3):
        """It draws nothing: evaluation runs, and the first batch in training mode is refused."""
        peft = pytest.importorskip("peft", reason="pip install 'radixtrain[peft]'")
        adapted = peft.get_peft_model(tiny_qwen3(), peft.LoraConfig(lora_dropout=0.05, target_modules=["q_proj"]))
        model = prepare_model(adapted.eval())
        assert model(**RadixCollator()(FEATURES)).loss.isfinite()
        with pytest.raises(UserError, match=r"dropout p=0\.05"):
            model.train()(**RadixCollator()(FEATURES))

    def test_a_setting_inside_a_setting(self):
        """DBRX: `ffn_config.moe_jitter_eps`, which drew without an error."""
        sizes = {"d_model": 32, "n_heads": 4, "n_layers": 1, "max_seq_len": 64, "vocab_size": 64}
        experts = {"ffn_hidden_size": 16, "moe_num_experts": 2, "moe_top_k": 1, "moe_jitter_eps": 0.1}
        config = transformers.DbrxConfig(
            **sizes, attn_config={"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4}, ffn_config=experts
        )
        with pytest.raises(
            UserError, match=r"has ffn_config\.moe_jitter_eps=0\.1: .*allow_dropout=\['moe_jitter_eps'\]"
        ):
            prepare_model(transformers.DbrxForCausalLM(config))

    def test_verify_compares_without_a_setting_that_was_allowed(self):
        """Also inside another setting: the draw counted as a wrong gradient."""
        sizes = {"d_model": 32, "n_heads": 4, "n_layers": 1, "max_seq_len": 64, "vocab_size": 64}
        experts = {"ffn_hidden_size": 16, "moe_num_experts": 2, "moe_top_k": 1, "moe_jitter_eps": 0.1}
        config = transformers.DbrxConfig(
            **sizes, attn_config={"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4}, ffn_config=experts
        )
        model = prepare_model(transformers.DbrxForCausalLM(config).train(), allow_dropout=["moe_jitter_eps"])
        report = verify_equivalence(model, FEATURES, precisions=["float64"])
        assert report["float64"].worst.radix <= 1e-12, str(report)

    def test_dropout_of_a_vision_tower(self):
        """Rows of text do not run through it."""
        vision = {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 8,
            "patch_size": 4,
            "attention_dropout": 0.1,
        }
        config = transformers.Gemma3Config(
            text_config={**TINY, "head_dim": 8}, vision_config=vision, mm_tokens_per_image=4
        )
        model = prepare_model(transformers.Gemma3ForConditionalGeneration(config).train())
        assert model(**RadixCollator()(FEATURES)).loss.isfinite()

    def test_dropout_that_is_not_a_module(self):
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
        config = Starcoder2Config(vocab_size=32, num_hidden_layers=1, residual_dropout=0.1, **sizes)
        with pytest.raises(UserError, match=r"residual_dropout=0\.1.*allow_dropout=\['residual_dropout'\]"):
            prepare_model(Starcoder2ForCausalLM(config))

    def test_neftune(self, tiny_qwen3):
        model = prepare_model(tiny_qwen3()).train()
        model.get_input_embeddings().neftune_noise_alpha = 5
        with pytest.raises(ValueError, match=r"NEFTune \(neftune_noise_alpha=5\)"):
            model(**RadixCollator()(FEATURES))


def with_lora(model: Any, dropout: float) -> Any:
    peft = pytest.importorskip("peft", reason="pip install 'radixtrain[peft]'")
    config = peft.LoraConfig(lora_dropout=dropout, target_modules="all-linear", init_lora_weights=False)
    return peft.get_peft_model(model, config)


class TestDropoutThatCameLater:
    """After `prepare_model` a trainer puts adapters around the model. It trained silently, with a wrong gradient."""

    REFUSED = r"dropout p=0\.5 at 'layers\.\d\..*_proj\.lora_dropout.default'.*allow_dropout=\['lora_dropout'\]"

    def test_adapters_on_a_prepared_model(self, tiny_qwen3):
        model = with_lora(prepare_model(tiny_qwen3()), 0.5).train()
        with pytest.raises(UserError, match=self.REFUSED):
            model(**RadixCollator()(FEATURES))

    def test_an_adapter_on_the_head(self, tiny_qwen3):
        peft = pytest.importorskip("peft", reason="pip install 'radixtrain[peft]'")
        config = peft.LoraConfig(lora_dropout=0.5, target_modules=["lm_head"], init_lora_weights=False)
        model = peft.get_peft_model(prepare_model(tiny_qwen3(tie_word_embeddings=False)), config).train()
        with pytest.raises(UserError, match=r"dropout p=0\.5 at 'lora_dropout\.default'"):
            model(**RadixCollator()(FEATURES))

    def test_adapters_are_born_in_training_mode(self, tiny_qwen3):
        """`from_pretrained` returns a model in evaluation mode, and a loop without `train()` draws all the same."""
        model = with_lora(prepare_model(tiny_qwen3().eval()), 0.5)
        assert not model.get_base_model().model.training
        with pytest.raises(UserError, match=self.REFUSED):
            model(**RadixCollator()(FEATURES))

    def test_evaluation_draws_nothing(self, tiny_qwen3):
        model = with_lora(prepare_model(tiny_qwen3()), 0.5).eval()
        batch = RadixCollator()(FEATURES)
        assert torch.equal(model(**batch).loss, model(**batch).loss)

    def test_ordinary_batches_may_draw(self, tiny_qwen3):
        model = with_lora(prepare_model(tiny_qwen3()), 0.5).train()
        assert model(input_ids=torch.tensor([[7, 8, 9]])).logits.isfinite().all()

    def test_a_dropout_of_zero(self, tiny_qwen3):
        assert with_lora(prepare_model(tiny_qwen3()), 0.0).train()(**RadixCollator()(FEATURES)).loss.isfinite()

    def test_allowed_by_name(self, tiny_qwen3):
        model = with_lora(prepare_model(tiny_qwen3(), allow_dropout=["lora_dropout"]), 0.5).train()
        assert model(**RadixCollator()(FEATURES)).loss.isfinite()

    def test_adapters_after_some_steps(self, tiny_qwen3):
        model, batch = prepare_model(tiny_qwen3()).train(), RadixCollator()(FEATURES)
        model(**batch).loss.backward()
        adapted = with_lora(model, 0.0).train()
        adapted(**batch).loss.backward()
        config = adapted.peft_config["default"]
        config.lora_dropout = 0.5
        adapted.add_adapter("second", config)
        adapted.set_adapter("second")
        with pytest.raises(UserError, match=self.REFUSED.replace("default", "second")):
            adapted(**batch)

    def test_no_more_modules_than_before(self, tiny_qwen3):
        model = tiny_qwen3()
        model.model.layers[1].mlp.add_module("dropout", nn.Dropout(0.0))
        batch = RadixCollator()(FEATURES)
        assert prepare_model(model.train())(**batch).loss.isfinite()
        model.model.layers[1].mlp.dropout.p = 0.5
        with pytest.raises(UserError, match=r"dropout p=0\.5 at 'layers\.1\.mlp\.dropout'"):
            model(**batch)

    @pytest.mark.parametrize("dropout", [0.0, 0.3])
    def test_sft_trainer(self, tiny_qwen3, tmp_path, dropout):
        trl = pytest.importorskip("trl", reason="pip install 'radixtrain[dev]'")
        peft = pytest.importorskip("peft", reason="pip install 'radixtrain[peft]'")
        from datasets import Dataset
        from tokenizers import Tokenizer, models

        words = Tokenizer(models.WordLevel({str(n): n for n in range(50)}, unk_token="2"))
        settings = {"max_steps": 1, "max_length": None, "report_to": "none", "use_cpu": True, "bf16": False}
        trainer = trl.SFTTrainer(
            model=prepare_model(tiny_qwen3()),
            args=trl.SFTConfig(output_dir=str(tmp_path), save_strategy="no", **settings),
            train_dataset=Dataset.from_list([{**row, "labels": row["input_ids"]} for row in FEATURES]),
            data_collator=RadixCollator(),
            processing_class=transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1"),
            peft_config=peft.LoraConfig(lora_dropout=dropout, target_modules="all-linear", task_type="CAUSAL_LM"),
        )
        if dropout:
            with pytest.raises(UserError, match=r"dropout p=0\.3 at .*allow_dropout=\['lora_dropout'\]"):
                trainer.train()
        else:
            assert trainer.train().training_loss > 0
