"""Tiny models of every family of transformers, and which tests an older transformers cannot run."""

import inspect
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, __version__

from radixtrain.versions import transformers_is_before

# Tests beside an older transformers: one that needs what it lacks skips, and says what.
#
# constraints.txt has the one that the tests were written with. `make test-versions` runs them beside older ones.


CONSTRAINTS = Path(__file__).resolve().parents[2] / "constraints.txt"
IS_OLDER = transformers_is_before(re.findall(r"^transformers==(\S+)$", CONSTRAINTS.read_text(), re.MULTILINE)[0])


def since(version: str, what: str) -> pytest.MarkDecorator:
    """The mark of a test. what: of older versions, which it cannot be right beside."""
    return pytest.mark.skipif(transformers_is_before(version), reason=f"before transformers {version}: {what}")


NEEDS_FORKS = since("5.21", "states of recurrent layers do not fork")
PASSED_ON = since("5.3", "GPT-2 and StableLM pass nothing of a radix batch on to their backbone")


def skip_missing(name: str) -> NoReturn:
    """name: a class of transformers that this test needs, and an older one does not have."""
    pytest.skip(f"transformers {__version__} has no {name}")


# Tiny models of any Hugging Face class: two layers, 32 wide, 64 tokens, random weights of order one.
#
# Each configuration class has names of its own for its sizes (`hidden_size`, `n_embd`, `d_model`). `tiny_config`
# replaces the sizes that the default has by the small ones below, in its parts too (`text_config`, `vision_config`),
# and then applies the settings of the family.


WINDOW = 4  # of every sliding window and chunk, in tokens; the sequences of a test are longer
SMALL = {
    32: """hidden_size d_model n_embd embed_dim emb_dim embedding_size word_embed_proj_dim output_dim out_hidden_size
        lru_width projection_dim attention_hidden_size intermediate_size_mlp""",
    64: """intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim dff dim_ff d_ff n_inner d_inner ffn_hidden_size
        feed_forward_size mamba_d_ssm vocab_size vocab_size_per_layer_input""",
    16: """moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size
        moe_shared_expert_intermediate_size q_lora_rank mamba_d_head mamba_head_dim mamba_headdim""",
    12: "qk_head_dim",
    8: """head_dim dim_head d_head d_kv kv_channels swa_head_dim kv_lora_rank o_lora_rank qk_nope_head_dim
        index_head_dim linear_head_dim linear_key_head_dim linear_value_head_dim mamba_d_state ssm_state_size state_size
        mamba_chunk_size chunk_size hidden_size_per_layer_input num_mel_bins""",
    6: "v_head_dim",
    4: """num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads
        swa_num_attention_heads qk_rope_head_dim rotary_dim num_experts num_local_experts n_routed_experts
        moe_num_experts index_topk mamba_n_heads mamba_num_heads time_step_rank mamba_dt_rank image_seq_length
        mm_tokens_per_image num_image_tokens""",
    2: """num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers
        num_decoder_layers depth num_key_value_heads swa_num_key_value_heads kv_n_heads num_experts_per_tok
        num_experts_per_token moe_topk moe_top_k moe_k top_k_experts n_group num_expert_group zero_expert_num o_groups
        index_n_heads linear_num_heads linear_num_key_heads linear_num_value_heads n_mamba_heads mamba_expand
        spatial_merge_size temporal_patch_size num_query_tokens""",
    1: """topk_group n_shared_experts num_shared_experts moe_num_shared_experts first_k_dense_replace num_dense_layers
        moe_layer_start_index n_groups mamba_n_groups""",
    128: """max_position_embeddings n_positions n_ctx max_seq_len model_max_length max_source_positions
        max_target_positions context_length""",
    28: "image_size",
    14: "patch_size",
    3: "num_channels in_channels",
}
NAMES_OF_WINDOWS = "sliding_window sliding_window_size attention_window_size window_size attention_chunk_size"
TINY = {name: size for size, names in SMALL.items() for name in names.split()}
TINY |= dict.fromkeys(NAMES_OF_WINDOWS.split(), WINDOW) | {"local_attention": 2 * WINDOW}  # which counts both sides
# Ids inside the vocabulary that no sequence of the test contains.
TOKENS = """bos_token_id eos_token_id decoder_start_token_id image_token_id image_token_index video_token_id
    video_token_index audio_token_id audio_token_index vision_start_token_id vision_end_token_id boi_token_id
    eoi_token_id boi_token_index eoi_token_index boa_token_id eoa_token_id eoa_token_index image_start_token_id
    image_end_token_id audio_start_token_id audio_end_token_id"""
TINY |= {"pad_token_id": 0, **{name: 40 + index for index, name in enumerate(TOKENS.split())}}
KINDS_OF_LAYERS = ("layer_types", "mlp_layer_types", "indexer_types")


def tiny_config(config_class: Any, settings: dict[str, Any]) -> PreTrainedConfig:
    """A configuration of the smallest sizes. settings: its own, those of its parts as dictionaries of their own."""
    default = _default(config_class, settings)
    alias = config_class.attribute_map
    values = {**vars(default), **{name: getattr(default, name, None) for name in alias}}
    parts = config_class.sub_configs
    chosen: dict[str, Any] = {}
    for name, value in values.items():
        if name in parts or name in alias or value is None or isinstance(value, (list, tuple, dict)):
            continue
        if re.search("drop|jitter", name) and isinstance(value, float):
            chosen[name] = 0.0
        elif name in TINY:
            chosen[name] = TINY[name]
    if "kv_lora_rank" in chosen and "num_key_value_heads" in chosen:
        chosen["num_key_value_heads"] = chosen["num_attention_heads"]
    if "head_dim" in chosen and values.get("qk_rope_head_dim"):
        chosen["head_dim"] = 4 * max(1, values["head_dim"] // values["qk_rope_head_dim"])
    chosen |= _one_layer_of_each_kind(config_class, values, settings)
    made = {name: _tiny_part(default, name, settings.get(name, {})) for name in parts}
    chosen |= {name: part and part.to_diff_dict() for name, part in made.items()}
    return config_class(**{**chosen, **{name: value for name, value in settings.items() if name not in parts}})


def tiny_model(model_class: str, seed: int = 0, **settings: Any) -> Any:
    """A model of that class in training mode, whose weights are of order one, so that every gradient is alive.

    model_class: its name in transformers. settings: what its configuration has besides the small sizes.
    """
    torch.manual_seed(seed)
    cls = getattr(transformers, model_class, None) or skip_missing(model_class)
    return order_one(cls(tiny_config(cls.config_class, settings)), seed)


def tiny_qwen3(seed: int = 0, **settings: Any) -> Any:
    """A Qwen3 of 50 tokens, with tied embeddings."""
    own = {"vocab_size": 50, "tie_word_embeddings": True, "max_position_embeddings": 512}
    return tiny_model("Qwen3ForCausalLM", seed, **{**own, **settings})


def tiny_hybrid(kind: str, seed: int = 0, **settings: Any) -> Any:
    """A layer with a recurrent state and one that attends.

    kind: "Qwen3.5" (gated delta rule), "Bamba" (state space) or "LFM2" (short convolution).
    """
    delta = {"linear_num_value_heads": 4, "layer_types": ["linear_attention", "full_attention"]}
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "Qwen3.5": ("Qwen3_5ForCausalLM", delta),
        "Bamba": ("BambaForCausalLM", {"mamba_d_head": 16, "attn_layer_indices": [1]}),
        "LFM2": ("Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention"]}),
    }
    model_class, own = kinds[kind]
    if transformers_is_before("5.21"):
        pytest.skip(NEEDS_FORKS.kwargs["reason"])
    return tiny_model(model_class, seed, **{"vocab_size": 50, **own, **settings})


def with_adapters(model: Any, kind: str = "LoraConfig", **settings: Any) -> Any:
    """Put the same adapters on it in every call. kind: of PEFT's configurations, which has these settings."""
    import peft

    torch.manual_seed(0)
    return peft.get_peft_model(model, getattr(peft, kind)(**settings))


def order_one(model: nn.Module, seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.2 if parameter.ndim < 2 else parameter.shape[-1] ** -0.5
            noise = torch.randn(parameter.shape, generator=generator) * scale
            parameter.copy_(noise + parameter if parameter.ndim < 2 else noise)
    return model


def _default(config_class: Any, settings: dict[str, Any]) -> PreTrainedConfig:
    try:
        return config_class()
    except ValueError:  # of parts that do not fit each other
        return config_class(**settings)


def _one_layer_of_each_kind(config_class: Any, values: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """`layer_types` and their like: the distinct ones of the default, at least two layers unless a number is given."""
    kinds: dict[str, list[str]] = {}
    for name in KINDS_OF_LAYERS:
        given = settings.get(name) or list(dict.fromkeys(values.get(name) or ()))
        attribute = inspect.getattr_static(config_class, config_class.attribute_map.get(name, name), None)
        if given and not isinstance(attribute, property):
            kinds[name] = given
    layers = settings.get("num_hidden_layers", max([2, *map(len, kinds.values())]))
    chosen: dict[str, Any] = {name: (given + [given[-1]] * layers)[:layers] for name, given in kinds.items()}
    return {**chosen, "num_hidden_layers": layers} if layers > 2 else chosen


def _tiny_part(default: PreTrainedConfig, name: str, settings: dict[str, Any] | None) -> PreTrainedConfig | None:
    part = getattr(default, name, None)
    if settings is None or (part is None and "model_type" not in settings):
        return None
    rest = dict(settings)
    kind = rest.pop("model_type", None)
    return tiny_config(type(transformers.AutoConfig.for_model(kind)) if kind else type(part), rest)


# The families of docs/families.md: every causal language model class of transformers, and the multimodal ones.
#
# `make test` runs `QUICK`, which has each mechanism once, and `make test-full` runs all. Whether a family is equal or
# refused is not written here: the test finds it.
#
# The tables of recipes/benchmarks/families.md, written from a run of the tests of model families.


@dataclass(frozen=True)
class Family:
    """A model class of Hugging Face, tiny.

    name: as people write it. model_class: in transformers. what: its attention and layers. settings: those that a tiny
    configuration does not have by itself. idle: pattern of the parameters whose true gradient is zero on these rows.
    """

    name: str
    model_class: str
    what: str = "full attention"
    settings: dict[str, Any] = field(default_factory=dict)
    idle: str = ""

    def build(self, seed: int = 0, **changes: Any) -> Any:
        """A tiny model in training mode."""
        return tiny_model(self.model_class, seed, **{**self.settings, **changes})


def skip_if_it_fails_by_itself(family: Family, error: Exception) -> None:
    """Skip if a tiny model of the family has the error without radixtrain: Llama 4 with images in 5.24."""
    with pytest.raises(type(error), match=re.escape(str(error))):
        family.build()(input_ids=torch.tensor([[7, 8, 9]]), use_cache=False)
    pytest.skip(f"transformers fails by itself: {error}")


LATENT = "latent attention"
LEARNED = "learned positions"
LINEAR = "linear attention"
MIXTURE = "mixture of experts"
SINKS = "sinks, sliding window"
STATES = "state-space layers"
WHOLE = "each sequence whole"  # the mixer cannot start from a state
WHOLE_STATES = f"{STATES} ({WHOLE})"
WINDOWS = "sliding window"
# Without rotary positions a bias of the keys adds the same to all scores of a query, which the softmax takes out again.
KEY_BIAS = r"(key|k_proj|Wk)\.bias"
DECODER = {"is_decoder": True}
EAGER = {"attn_implementation": "eager"}  # transformers before 5.21 chooses sdpa, which leaves a soft-cap out
TWO_KINDS = {"layer_types": ["sliding_attention", "full_attention"]}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
GEMMA_3N = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "intermediate_size": 64,
    "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
    "laurel_rank": 4,
}
DBRX = {
    "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0},
    "ffn_config": {"moe_top_k": 2, "ffn_hidden_size": 16},
}
REFORMER = {
    **DECODER,
    "attn_layers": ["local", "lsh"],
    "attention_head_size": 8,
    "axial_pos_shape": [8, 16],
    "axial_pos_embds_dim": [16, 16],
    "local_attn_chunk_length": 128,
    "lsh_attn_chunk_length": 128,
    "num_buckets": 4,
}
QWEN_4_EXP = {
    "indexer_compress_ratio": 2,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 4,
    "ngram_vocab_size_base": 64,
    "ple_embed_dim": 32,
    "hc_lowrank": 4,
    "split_ngram_parts": 2,
}
DORY = {"num_hidden_layers": 3, "n_input_layers": 1, "n_output_layers": 1, "n_recurrent_layers": 1}
# One block of attention in two layers, on the stream and the embeddings side by side.
SHARED_BLOCK = ["linear_attention", "hybrid"] * 2
ZAMBA = {"layers_block_type": SHARED_BLOCK, "layer_types": SHARED_BLOCK, "attention_hidden_size": 64}

CORE = [
    Family("AFMoE", "AfmoeForCausalLM", f"{WINDOWS}, {MIXTURE}"),
    Family("Apertus", "ApertusForCausalLM"),
    Family("Apertus 1.5", "Apertus1p5TextForCausalLM"),
    Family("BERT as a decoder", "BertLMHeadModel", LEARNED, DECODER, idle=KEY_BIAS),
    Family("BioGPT", "BioGptForCausalLM", LEARNED, idle=KEY_BIAS),
    Family("BitNet", "BitNetForCausalLM"),
    Family("Cohere", "CohereForCausalLM", "parallel blocks"),
    Family("Cohere 2", "Cohere2ForCausalLM", f"parallel blocks, {WINDOWS}"),
    Family("CTRL", "CTRLLMHeadModel", "fixed positions", idle=KEY_BIAS),
    Family("DBRX", "DbrxForCausalLM", MIXTURE, DBRX),
    Family("DeepSeek-V2", "DeepseekV2ForCausalLM", f"{LATENT}, {MIXTURE}", {"num_experts_per_tok": 2}),
    Family("DeepSeek-V3", "DeepseekV3ForCausalLM", f"{LATENT}, {MIXTURE}"),
    Family("DiffLlama", "DiffLlamaForCausalLM", "differential attention"),
    Family("ERNIE 4.5", "Ernie4_5ForCausalLM"),
    Family("ERNIE 4.5 MoE", "Ernie4_5_MoeForCausalLM", MIXTURE),
    Family("EXAONE 4", "Exaone4ForCausalLM", WINDOWS),
    Family("FlexOLMo", "FlexOlmoForCausalLM", MIXTURE),
    Family("Gemma", "GemmaForCausalLM"),
    Family("Gemma 2", "Gemma2ForCausalLM", f"soft-cap, {WINDOWS}", EAGER),
    Family("Gemma 3", "Gemma3ForCausalLM", WINDOWS),
    Family("Gemma 3n", "Gemma3nForCausalLM", f"{WINDOWS}, layers with the keys of others", GEMMA_3N),
    Family("Gemma 4", "Gemma4ForCausalLM", f"{WINDOWS}, two head sizes", {"global_head_dim": 16}),
    Family("GLM-4", "Glm4ForCausalLM"),
    Family("GLM-4.5", "Glm4MoeForCausalLM", MIXTURE),
    Family("GPT-2", "GPT2LMHeadModel", LEARNED),
    Family("GPT-BigCode", "GPTBigCodeForCausalLM", f"{LEARNED}, one key head"),
    Family("GPT-NeoX", "GPTNeoXForCausalLM", "parallel blocks"),
    Family("gpt-oss", "GptOssForCausalLM", f"{SINKS}, {MIXTURE}"),
    Family("Granite", "GraniteForCausalLM", "scaled logits", {"logits_scaling": 2.0, "attention_multiplier": 0.3}),
    Family("Granite MoE", "GraniteMoeForCausalLM", MIXTURE),
    Family("Helium", "HeliumForCausalLM"),
    Family("HRM-Text", "HrmTextForCausalLM", "layers that run several times"),
    Family("Hunyuan MoE", "HunYuanMoEV1ForCausalLM", MIXTURE, {"head_dim": 8, "num_experts": 4, "moe_topk": 2}),
    Family("JetMoE", "JetMoeForCausalLM", "mixture of experts, of attention too"),
    Family("Llama", "LlamaForCausalLM"),
    Family("Llama 4", "Llama4ForCausalLM", f"chunks longer than the rows, {MIXTURE}", {"attention_chunk_size": 64}),
    Family("LongCat-Flash", "LongcatFlashForCausalLM", f"{LATENT}, twice a layer, {MIXTURE}"),
    Family("MiMo-V2-Flash", "MiMoV2FlashForCausalLM", f"{SINKS}, {MIXTURE}"),
    Family("MiniCPM3", "MiniCPM3ForCausalLM", LATENT),
    Family("MiniMax-M2", "MiniMaxM2ForCausalLM", MIXTURE),
    Family("Mistral", "MistralForCausalLM", WINDOWS),
    Family("Mistral 4", "Mistral4ForCausalLM", f"{LATENT}, {MIXTURE}"),
    Family("Mixtral", "MixtralForCausalLM", MIXTURE),
    Family("ModernBERT decoder", "ModernBertDecoderForCausalLM", WINDOWS),
    Family("NanoChat", "NanoChatForCausalLM"),
    Family("Nemotron", "NemotronForCausalLM", settings={"head_dim": 8, "num_key_value_heads": 2}),
    Family("OLMo 2", "Olmo2ForCausalLM"),
    Family("OLMo 3", "Olmo3ForCausalLM", WINDOWS),
    Family("OLMoE", "OlmoeForCausalLM", MIXTURE),
    Family("OPT", "OPTForCausalLM", LEARNED, idle=KEY_BIAS),
    Family("Persimmon", "PersimmonForCausalLM"),
    Family("Phi", "PhiForCausalLM", "parallel blocks"),
    Family("Phi-3", "Phi3ForCausalLM", WINDOWS, {"sliding_window": WINDOW}),
    # Without its noise the two experts are chosen by a mask that leaves one: its weight is 1, whatever the router says.
    Family("Phi-3.5-MoE", "PhimoeForCausalLM", MIXTURE, idle=r"mlp\.router\.weight"),
    Family("Qwen2.5", "Qwen2ForCausalLM"),
    Family("Qwen2-MoE", "Qwen2MoeForCausalLM", MIXTURE),
    Family("Qwen3", "Qwen3ForCausalLM"),
    Family("Qwen3-MoE", "Qwen3MoeForCausalLM", MIXTURE),
    Family("Seed-OSS", "SeedOssForCausalLM"),
    Family("SmolLM3", "SmolLM3ForCausalLM", "layers without positions", {"no_rope_layers": [1, 0]}),
    Family("StableLM", "StableLmForCausalLM"),
    Family("Starcoder2", "Starcoder2ForCausalLM", WINDOWS, {"sliding_window": WINDOW}),
    Family("VaultGemma", "VaultGemmaForCausalLM", f"soft-cap, {WINDOWS}", EAGER),
    Family("BART as a decoder", "BartForCausalLM", LEARNED),
    Family("BLOOM", "BloomForCausalLM", "ALiBi"),
    Family("DeepSeek-V3.2", "DeepseekV32ForCausalLM", f"sparse attention, {LATENT}, {MIXTURE}"),
    Family("Doge", "DogeForCausalLM", "dynamic mask"),
    Family("Dory", "DoryForCausalLM", f"layers that run several times, {WINDOWS}", DORY),
    Family("Falcon-H1", "FalconH1ForCausalLM", f"{STATES} beside attention", {"ssm_multipliers": [1.0] * 5}),
    Family("GPT-J", "GPTJForCausalLM", "parallel blocks"),
    Family("Lara Mini", "LaraMiniForCausalLM", f"{LINEAR}, {WINDOWS}, {MIXTURE}"),
    Family("LFM2", "Lfm2ForCausalLM", "convolutions", {"layer_types": ["conv", "full_attention"]}),
    Family("Llama 4, long rows", "Llama4ForCausalLM", f"chunks, {MIXTURE}"),
    Family("Mamba", "MambaForCausalLM", STATES),
    Family("MPT", "MptForCausalLM", "ALiBi"),
    Family("Qwen3-Next", "Qwen3NextForCausalLM", f"{LINEAR}, {MIXTURE}"),
    Family("RoBERTa as a decoder", "RobertaForCausalLM", LEARNED, DECODER),
    Family("RWKV", "RwkvForCausalLM", "recurrent layers"),
    Family("Whisper decoder", "WhisperForCausalLM", LEARNED),
    Family("xLSTM", "xLSTMForCausalLM", "recurrent layers"),
]  # fmt: skip
REST = [
    Family("A.X K1", "AXK1ForCausalLM", f"{LATENT}, {MIXTURE}"),
    Family("A.X K2", "AXK2ForCausalLM", f"sparse attention, {LATENT}, {MIXTURE}"),
    Family("Arcee", "ArceeForCausalLM"),
    Family("Aria text", "AriaTextForCausalLM", MIXTURE),
    Family("Bailing hybrid", "BailingHybridForCausalLM", f"{LINEAR}, {LATENT}, {MIXTURE}"),
    Family("Bamba", "BambaForCausalLM", STATES, {"attn_layer_indices": [1]}),
    Family("Beam", "BeamForCausalLM", f"{WINDOWS}, {MIXTURE}"),
    Family("BERT generation", "BertGenerationDecoder", LEARNED, DECODER, idle=KEY_BIAS),
    Family("BigBird", "BigBirdForCausalLM", f"sparse attention, {LEARNED}", DECODER),
    Family("BigBird-Pegasus", "BigBirdPegasusForCausalLM", LEARNED),
    Family("Blenderbot", "BlenderbotForCausalLM", LEARNED),
    Family("Blenderbot small", "BlenderbotSmallForCausalLM", LEARNED),
    Family("BLT", "BltForCausalLM", "patches of bytes", {"encoder_hash_byte_group_vocab": 64}),
    Family("CamemBERT", "CamembertForCausalLM", LEARNED, DECODER),
    Family("CodeGen", "CodeGenForCausalLM", "parallel blocks"),
    Family("Cohere 2 MoE", "Cohere2MoeForCausalLM", f"parallel blocks, {WINDOWS}, {MIXTURE}"),
    Family("Cohere Compass", "CohereCompassForCausalLM", WINDOWS,
           {**TWO_KINDS, "rope_parameters": {"sliding_attention": ROPE, "full_attention": ROPE}}),
    Family("CPM-Ant", "CpmAntForCausalLM", "relative positions"),
    Family("CWM", "CwmForCausalLM", WINDOWS),
    Family("Data2Vec text", "Data2VecTextForCausalLM", LEARNED, DECODER),
    Family("DeepSeek-V4", "DeepseekV4ForCausalLM", f"compressed attention, sinks, {MIXTURE}"),
    Family("dots.llm1", "Dots1ForCausalLM", f"{WINDOWS}, {MIXTURE}",
           {**TWO_KINDS, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
            "first_k_dense_replace": 1}),
    Family("dots3 Note", "Dots3NoteForCausalLM", f"sparse attention, {LATENT}, {MIXTURE}",
           {"per_layer_config": {}, "shared_experts_intermediate_size": 16, "head_dim": 12}),
    Family("ELECTRA", "ElectraForCausalLM", LEARNED, DECODER, idle=KEY_BIAS),
    Family("Emu3 text", "Emu3ForCausalLM"),
    Family("ERNIE", "ErnieForCausalLM", LEARNED, DECODER, idle=KEY_BIAS),
    Family("EXAONE MoE", "ExaoneMoeForCausalLM", f"{WINDOWS}, {MIXTURE}"),
    Family("Falcon", "FalconForCausalLM", "one key head"),
    Family("Falcon Mamba", "FalconMambaForCausalLM", STATES),
    Family("Flint", "FlintForCausalLM", f"{SINKS}, {MIXTURE}", {"mlp_only_layers": [0]}),
    Family("Gemma 4 unified", "Gemma4UnifiedForCausalLM", f"{WINDOWS}, two head sizes", {"global_head_dim": 16}),
    Family("GLM", "GlmForCausalLM"),
    Family("GLM-4.7-Flash", "Glm4MoeLiteForCausalLM", f"{LATENT}, {MIXTURE}"),
    Family("GLM-5", "GlmMoeDsaForCausalLM", f"sparse attention, {LATENT}, {MIXTURE}"),
    Family("GPT-Neo", "GPTNeoForCausalLM", f"{LEARNED}, {WINDOWS}",
           {"attention_types": [[["global", "local"], 1]], "attention_layers": ["global", "local"]}),
    Family("GPT-NeoX Japanese", "GPTNeoXJapaneseForCausalLM"),
    Family("Granite SWA", "GraniteSWAForCausalLM", SINKS),
    Family("Granite MoE SWA", "GraniteMoeSWAForCausalLM", f"{SINKS}, {MIXTURE}"),
    Family("Granite MoE shared", "GraniteMoeSharedForCausalLM", MIXTURE),
    Family("Granite 4 hybrid", "GraniteMoeHybridForCausalLM", f"{STATES}, {MIXTURE}"),
    Family("Hunyuan", "HunYuanDenseV1ForCausalLM", settings={"head_dim": 8}),
    Family("HY 3", "HYV3ForCausalLM", MIXTURE),
    Family("HY 4", "HYV4ForCausalLM", f"sparse attention, {LATENT}, {MIXTURE}"),
    Family("HyperCLOVA X", "HyperCLOVAXForCausalLM", "scaled logits"),
    Family("Inkling", "InklingForCausalLM", f"{WINDOWS}, {MIXTURE}"),
    Family("Inkling 2", "Inkling2ForCausalLM", f"{SINKS}, {MIXTURE}"),
    Family("Inkling 2 loop", "Inkling2LoopForCausalLM", f"{SINKS}, {MIXTURE}"),
    Family("Jais 2", "Jais2ForCausalLM"),
    Family("Jamba", "JambaForCausalLM", f"{WHOLE_STATES}, {MIXTURE}"),
    Family("Kimi Linear", "KimiLinearForCausalLM", f"{LINEAR}, {LATENT}, {MIXTURE}"),
    Family("Kolibri 1", "Kolibri1ForCausalLM", f"{WINDOWS}, {MIXTURE}"),
    Family("Laguna", "LagunaForCausalLM", f"{WINDOWS}, {MIXTURE}", TWO_KINDS),
    Family("LFM2 MoE", "Lfm2MoeForCausalLM", f"convolutions, {MIXTURE}", {"layer_types": ["conv", "full_attention"]}),
    Family("LFM3", "Lfm3ForCausalLM", f"convolutions, {WINDOWS}"),
    Family("Mamba 2", "Mamba2ForCausalLM", STATES, {"num_heads": 8}),
    Family("Marian", "MarianForCausalLM", "fixed positions"),
    Family("mBART", "MBartForCausalLM", LEARNED),
    Family("Megatron-BERT", "MegatronBertForCausalLM", LEARNED, DECODER),
    Family("Mellum", "MellumForCausalLM", f"{WINDOWS}, {MIXTURE}", TWO_KINDS),
    Family("MiniMax", "MiniMaxForCausalLM", f"{LINEAR}, {MIXTURE}"),
    Family("MiniMax-M3, dense", "MiniMaxM3VLForCausalLM", MIXTURE),
    Family("MiniMax-M3, sparse", "MiniMaxM3VLForCausalLM", f"sparse attention, {MIXTURE}",
           {"layer_types": ["minimax_m3_sparse", "full_attention"]}),
    Family("Ministral", "MinistralForCausalLM", WINDOWS, {"head_dim": 8}),
    Family("Ministral 3", "Ministral3ForCausalLM"),
    Family("Mllama text", "MllamaForCausalLM", "layers that attend to images",
           {"num_hidden_layers": 3, "cross_attention_layers": [1]}, idle=r"cross_attn|layers\.1\."),
    Family("Moshi", "MoshiForCausalLM"),
    Family("MusicGen", "MusicgenForCausalLM", "fixed positions"),
    Family("MusicGen melody", "MusicgenMelodyForCausalLM", "fixed positions"),
    Family("MVP", "MvpForCausalLM", LEARNED),
    Family("Nemotron-H", "NemotronHForCausalLM", f"{STATES}, {MIXTURE}"),
    Family("OLMo", "OlmoForCausalLM"),
    Family("OLMo hybrid", "OlmoHybridForCausalLM", LINEAR),
    Family("OpenAI GPT", "OpenAIGPTLMHeadModel", LEARNED),
    Family("Pegasus", "PegasusForCausalLM", "fixed positions"),
    Family("PLBart", "PLBartForCausalLM", LEARNED),
    Family("ProphetNet", "ProphetNetForCausalLM", LEARNED),
    Family("Qwen3.5", "Qwen3_5ForCausalLM", LINEAR),
    Family("Qwen3.5-MoE", "Qwen3_5MoeForCausalLM", f"{LINEAR}, {MIXTURE}"),
    Family("Qwen4-Exp", "Qwen4ExpForCausalLM", f"{LINEAR}, sparse attention, {MIXTURE}", QWEN_4_EXP),
    Family("RecurrentGemma", "RecurrentGemmaForCausalLM", f"recurrent layers, {WINDOWS}", {"num_hidden_layers": 3}),
    Family("Reformer", "ReformerModelWithLMHead", "hashed attention", REFORMER),
    Family("RemBERT", "RemBertForCausalLM", LEARNED, DECODER),
    Family("RoBERTa pre-LayerNorm", "RobertaPreLayerNormForCausalLM", LEARNED, DECODER),
    Family("RoCBert", "RoCBertForCausalLM", LEARNED,
           {**DECODER, "pronunciation_embed_dim": 8, "pronunciation_vocab_size": 64, "shape_embed_dim": 8,
            "shape_vocab_size": 64}, idle=rf"{KEY_BIAS}|pronunciation|shape_embed"),
    Family("RoFormer", "RoFormerForCausalLM", settings=DECODER),
    Family("Solar Open", "SolarOpenForCausalLM", MIXTURE),
    Family("TrOCR decoder", "TrOCRForCausalLM", LEARNED),
    Family("XGLM", "XGLMForCausalLM", "fixed positions"),
    Family("XLM", "XLMWithLMHeadModel", LEARNED),
    Family("XLM-RoBERTa", "XLMRobertaForCausalLM", LEARNED, DECODER),
    Family("XLM-RoBERTa-XL", "XLMRobertaXLForCausalLM", LEARNED, DECODER),
    Family("XLNet", "XLNetLMHeadModel", "relative positions"),
    Family("X-MOD", "XmodForCausalLM", LEARNED, {**DECODER, "default_language": "en_XX"}),
    Family("Youtu", "YoutuForCausalLM", LATENT),
    Family("Zamba", "ZambaForCausalLM", f"{WHOLE_STATES}, shared attention", ZAMBA),
    Family("Zamba 2", "Zamba2ForCausalLM", f"{STATES}, shared attention",
           {**ZAMBA, "n_mamba_heads": 4, "adapter_rank": 4}),
    Family("ZAYA", "ZayaForCausalLM", f"convolutions inside attention, {MIXTURE}",
           {"num_experts_per_tok": 1, "router_hidden_size": 16}),
]  # fmt: skip


def mrope(*sections: int, **more: Any) -> dict[str, Any]:
    """Rotary positions of three axes; the sections are half a head together."""
    return {"rope_parameters": {**ROPE, "mrope_section": list(sections), **more}}


LLAMA_4_VISION = {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}
SMALL_VQ = {"base_channels": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1, "embed_dim": 8}
VISION_START = {"vision_start_token_id": 47}  # which the default configuration does not have, and a mask needs
THREE_AXES = {"text_config": mrope(2, 1, 1)}
# What only images or sounds reach gets no gradient from rows of text. `idle` names such parts inside the text model.
CORE_MULTIMODAL = [
    Family("Gemma 3", "Gemma3ForConditionalGeneration", WINDOWS),
    Family("Gemma 4", "Gemma4ForConditionalGeneration", f"{WINDOWS}, two head sizes",
           {"text_config": {"global_head_dim": 16}}),
    Family("GLM-4V", "Glm4vForConditionalGeneration", settings=THREE_AXES),
    Family("InternVL", "InternVLForConditionalGeneration"),
    Family("Kimi K2.5", "Kimi_K25ForConditionalGeneration", f"{LATENT}, {MIXTURE}"),
    Family("Llama 4", "Llama4ForConditionalGeneration", f"chunks longer than the rows, {MIXTURE}",
           {"text_config": {"attention_chunk_size": 64}, "vision_config": LLAMA_4_VISION}),
    Family("LLaVA", "LlavaForConditionalGeneration"),
    Family("Mistral 3", "Mistral3ForConditionalGeneration", WINDOWS),
    Family("Mllama", "MllamaForConditionalGeneration", "layers that attend to images",
           {"text_config": {"num_hidden_layers": 3, "cross_attention_layers": [1]}}, idle=r"cross_attn|layers\.1\."),
    Family("Nemotron-H Omni", "NemotronH_Omni_Reasoning_V3", f"{STATES}, {MIXTURE}",
           {"vision_config": {"video_temporal_patch_size": 2, "max_img_size": 56}, "projector_hidden_size": 32}),
    Family("PaliGemma", "PaliGemmaForConditionalGeneration", "attention in both directions"),
    Family("Phi-4 multimodal", "Phi4MultimodalForCausalLM", settings={
        "audio_config": {"nemo_conv_channels": 8, "ext_pw_out_channel": 32, "num_blocks": 1}
    }, idle="embed_tokens_extend"),
    Family("Qwen2-VL", "Qwen2VLForConditionalGeneration", settings=THREE_AXES),
    Family("Qwen2.5-VL", "Qwen2_5_VLForConditionalGeneration", settings=THREE_AXES),
    Family("Qwen3-VL", "Qwen3VLForConditionalGeneration"),
    Family("Qwen3-VL-MoE", "Qwen3VLMoeForConditionalGeneration", MIXTURE),
    Family("Qwen3.5", "Qwen3_5ForConditionalGeneration", LINEAR),
]  # fmt: skip
MULTIMODAL = [
    Family("Apertus 1.5", "Apertus1p5ForConditionalGeneration",
           settings={"vision_config": {**SMALL_VQ, "codebook_size": 4}, "image_token_offset": 48,
                     "audio_config": {"codebook_dim": 32, "codebook_size": 4}, "audio_token_offset": 52}),
    Family("Aria", "AriaForConditionalGeneration", MIXTURE),
    Family("Aya Vision", "AyaVisionForConditionalGeneration", WINDOWS),
    Family("Chameleon", "ChameleonForConditionalGeneration",
           settings={"vocabulary_map": {"<image>": 40}, "vq_config": {**SMALL_VQ, "num_embeddings": 16}},
           idle="vqmodel"),
    Family("Cohere 2 Vision", "Cohere2VisionForConditionalGeneration", WINDOWS, {"alignment_intermediate_size": 64}),
    Family("Cohere Compass", "CohereCompassForConditionalGeneration", WINDOWS,
           {"text_config": {**TWO_KINDS, "rope_parameters": {"sliding_attention": ROPE, "full_attention": ROPE}}}),
    Family("Cosmos 3 Edge", "Cosmos3EdgeForConditionalGeneration", settings=THREE_AXES),
    Family("Cosmos 3 Omni", "Cosmos3OmniForConditionalGeneration"),
    Family("DeepSeek-OCR 2", "DeepseekOcr2ForConditionalGeneration", MIXTURE,
           {"text_config": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2},
            "vision_config": {"sam_config": {"downsample_channels": [16, 16]}}}),
    Family("DeepSeek-VL", "DeepseekVLForConditionalGeneration"),
    Family("DeepSeek-VL hybrid", "DeepseekVLHybridForConditionalGeneration",
           settings={"high_res_vision_config": {"output_channels": 16, "downsample_channels": [16, 16]}}),
    Family("dots3 Note", "Dots3NoteForConditionalGeneration", f"sparse attention, {LATENT}, {MIXTURE}",
           {"text_config": {"per_layer_config": {}, "shared_experts_intermediate_size": 16, "head_dim": 12},
            "vision_config": {"adapter_in_dim": 32, "adapter_out_dim": 32},
            "audio_config": {"adapter_input_size": 32, "adapter_out_dim": 32}}),
    Family("Emu3", "Emu3ForConditionalGeneration",
           settings={"vocabulary_map": {"<image>": 40},
                     "vq_config": {**SMALL_VQ, "codebook_size": 16, "attn_resolutions": []}}),
    Family("ERNIE 4.5 VL MoE", "Ernie4_5_VLMoeForConditionalGeneration", MIXTURE,
           {"text_config": {"moe_intermediate_size": [16, 16], **mrope(1, 1, 2)}}, idle="vision_moe"),
    Family("Evolla", "EvollaForProteinText2Text", "layers that attend to proteins", idle="protein_encoder|adapter"),
    Family("EXAONE 4.5", "Exaone4_5_ForConditionalGeneration", WINDOWS),
    Family("FastVLM", "FastVlmForConditionalGeneration",
           settings={"vision_config": {"model_type": "siglip_vision_model"}}),
    Family("Fuyu", "FuyuForCausalLM"),
    Family("Gemma 4 unified", "Gemma4UnifiedForConditionalGeneration", f"{WINDOWS}, two head sizes",
           {"text_config": {"global_head_dim": 16}, "vision_config": {"mm_embed_dim": 32, "mm_posemb_size": 8}}),
    Family("GIT", "GitForCausalLM", LEARNED),
    Family("GLM-4.5V", "Glm4vMoeForConditionalGeneration", MIXTURE,
           {"text_config": {"head_dim": 16, **mrope(2, 1, 1, partial_rotary_factor=0.5)}}),
    Family("GLM-4.6V", "Glm46VForConditionalGeneration", settings=THREE_AXES),
    Family("GLM-5 next", "Glm5NextForConditionalGeneration", f"{LINEAR}, sparse attention, {MIXTURE}",
           {"text_config": {"index_kpool": 2, "qk_rope_head_dim": 0, "head_dim": 8}}),
    Family("GLM-OCR", "GlmOcrForConditionalGeneration", settings=THREE_AXES),
    Family("GOT-OCR 2", "GotOcr2ForConditionalGeneration"),
    Family("Granite 4 Vision", "Granite4VisionForConditionalGeneration", "scaled logits",
           {"deepstack_layer_map": [[-1, 0]], "downsample_rate": "1/2", "text_config": {"model_type": "granite"},
            "vision_config": {"hidden_size": 128}}),
    Family("Granite Docling", "GraniteDoclingForConditionalGeneration"),
    Family("HY 4-VL", "HYV4VLForConditionalGeneration", f"sparse attention, {LATENT}, {MIXTURE}",
           {"text_config": mrope(1, 1, 0)}),
    Family("Hunyuan-VL", "HunYuanVLForConditionalGeneration",
           settings={"text_config": {"head_dim": 8, **mrope(1, 1, 1, 1)}}),
    Family("HyperCLOVA X Vision 2", "HyperCLOVAXVisionV2ForConditionalGeneration", "scaled logits"),
    Family("Idefics2", "Idefics2ForConditionalGeneration", WINDOWS),
    Family("Idefics3", "Idefics3ForConditionalGeneration"),
    Family("Inkling 2", "Inkling2ForConditionalGeneration", f"{SINKS}, {MIXTURE}",
           {"vision_config": {"text_hidden_size": 32}}),
    Family("Inkling 2 loop", "Inkling2LoopForConditionalGeneration", f"{SINKS}, {MIXTURE}",
           {"vision_config": {"text_hidden_size": 32}}),
    Family("Janus", "JanusForConditionalGeneration", settings={"vq_config": {**SMALL_VQ, "num_embeddings": 16}}),
    Family("Kosmos-2.5", "Kosmos2_5ForConditionalGeneration", "fixed positions"),
    Family("LFM2-VL", "Lfm2VlForConditionalGeneration", "convolutions",
           {"text_config": {"layer_types": ["conv", "full_attention"]}}),
    Family("LFM3-VL", "Lfm3VlForConditionalGeneration", f"convolutions, {WINDOWS}"),
    Family("LightOnOCR", "LightOnOcrForConditionalGeneration"),
    Family("LLaVA around Mixtral", "LlavaForConditionalGeneration", MIXTURE,
           {"text_config": {"model_type": "mixtral"}}),
    Family("LLaVA-NeXT", "LlavaNextForConditionalGeneration"),
    Family("LLaVA-NeXT video", "LlavaNextVideoForConditionalGeneration"),
    Family("LLaVA-OneVision", "LlavaOnevisionForConditionalGeneration"),
    Family("MiniCPM-OCR", "MiniCPMOcrForConditionalGeneration", LINEAR),
    Family("MiniCPM-V 4.6", "MiniCPMV4_6ForConditionalGeneration", LINEAR),
    Family("MiniCPM-V 4.7", "MiniCPMV4_7ForConditionalGeneration", LINEAR),
    Family("MiniMax-M3, dense", "MiniMaxM3SparseForConditionalGeneration", MIXTURE),
    Family("MiniMax-M3, sparse", "MiniMaxM3SparseForConditionalGeneration", f"sparse attention, {MIXTURE}",
           {"text_config": {"layer_types": ["minimax_m3_sparse", "full_attention"]}}),
    Family("Mistral Large 4", "MistralLarge4ForConditionalGeneration", f"sparse attention, {LATENT}, {MIXTURE}"),
    Family("Moss transcribe", "MossTranscribeDiarizeForConditionalGeneration"),
    Family("Muse Glimmer", "MuseGlimmerForConditionalGeneration", WINDOWS,
           {"projector_hidden_size": 32, "out_hidden_size": 32}),
    Family("Muse Spark", "MuseSparkForConditionalGeneration", f"{WINDOWS}, {MIXTURE}",
           {"projector_hidden_size": 32, "text_config": {"moe_hidden_size": 32},
            "audio_config": {"num_hidden_layers": 4, "hidden_sizes": [16] * 4, "depths": [1] * 4}}),
    Family("Ovis 2", "Ovis2ForConditionalGeneration"),
    Family("PaddleOCR-VL", "PaddleOCRVLForConditionalGeneration", settings=THREE_AXES),
    Family("Qianfan-OCR", "QianfanOCRForConditionalGeneration"),
    Family("Qwen2.5-Omni", "Qwen2_5OmniThinkerForConditionalGeneration", settings={**THREE_AXES, **VISION_START}),
    Family("Qwen3-Omni-MoE", "Qwen3OmniMoeThinkerForConditionalGeneration", MIXTURE,
           {"audio_config": {"downsample_hidden_size": 8}, **VISION_START}),
    Family("Qwen3.5-MoE", "Qwen3_5MoeForConditionalGeneration", f"{LINEAR}, {MIXTURE}"),
    Family("Qwen4-Exp", "Qwen4ExpForConditionalGeneration", f"{LINEAR}, sparse attention, {MIXTURE}",
           {"text_config": QWEN_4_EXP}),
    Family("SmolVLM", "SmolVLMForConditionalGeneration"),
    Family("Step 3.7", "Step3p7ForConditionalGeneration", f"{WINDOWS}, {MIXTURE}",
           {"text_config": {**TWO_KINDS, "sliding_window": WINDOW}}),
    Family("T5Gemma 2", "T5Gemma2ForConditionalGeneration", WINDOWS),
    Family("Unlimited-OCR", "UnlimitedOcrForConditionalGeneration", f"sparse attention, {MIXTURE}",
           {"vision_config": {"sam_config": {"downsample_channels": [16, 16]}}}),
    Family("Video-LLaMA 3", "VideoLlama3ForConditionalGeneration"),
    Family("Video-LLaVA", "VideoLlavaForConditionalGeneration"),
    Family("VipLLaVA", "VipLlavaForConditionalGeneration"),
]  # fmt: skip
FAMILIES = [*CORE, *REST, *CORE_MULTIMODAL, *MULTIMODAL]
