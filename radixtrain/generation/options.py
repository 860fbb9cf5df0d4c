"""Generation options: Hugging Face's own, resolved as `model.generate` resolves them.

Every field of `GenerationConfig` is in one of three tables. USED has the same effect as there. WITHOUT_EFFECT is
ignored there too, in greedy decoding and sampling without an assistant. REFUSED requests something that generation on a
radix cache does not do; a neutral value passes.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import nn
from transformers import GenerationConfig, WatermarkingConfig

from radixtrain.errors import UserError, did_you_mean, first_line
from radixtrain.hf.backbone import model_inside
from radixtrain.versions import transformers_is_before

if TYPE_CHECKING:
    from transformers import PreTrainedModel

USED = frozenset(
    {
        *("max_length", "max_new_tokens", "min_length", "min_new_tokens", "max_time", "stop_strings"),
        *("do_sample", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"),
        *("repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "sequence_bias", "suppress_tokens"),
        *("begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"),
        *("remove_invalid_values", "renormalize_logits", "watermarking_config", "num_return_sequences"),
        *("pad_token_id", "bos_token_id", "eos_token_id"),
    }
)
WITHOUT_EFFECT = frozenset(
    {
        "use_cache",  # changes no token
        *("early_stopping", "length_penalty", "diversity_penalty"),  # read by beam search
        "decoder_start_token_id",  # read by encoder-decoder models
        *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
        *("max_matching_ngram_size", "assistant_lookbehind", "target_lookbehind"),
        *("disable_compile", "low_memory", "transformers_version"),
    }
)


class Refusal(NamedTuple):
    """An option that is refused. neutral: the values that request nothing. reason: why any other is refused."""

    neutral: tuple[Any, ...]
    reason: str


BEAMS = "an answer is decoded greedily or sampled, not by beam search"
ASSISTANT = "no other model or rule proposes tokens"
CACHE = "keys and values are kept in a radix cache (the argument `cache`)"
ENCODER = "it is for models with an encoder; repetition_penalty and no_repeat_ngram_size are supported"
OUTPUTS = "the result holds token ids, texts and log-probabilities"
GONE = "transformers has moved it out of the library"
REFUSED = {
    "num_beams": Refusal((1, None), BEAMS),
    "num_beam_groups": Refusal((1, None), BEAMS),
    "constraints": Refusal((None,), BEAMS),
    "force_words_ids": Refusal((None,), BEAMS),
    "penalty_alpha": Refusal((None, 0, 0.0), f"contrastive search: {GONE}"),
    "dola_layers": Refusal((None,), f"DoLa decoding: {GONE}"),
    "use_mtp": Refusal((None, False), ASSISTANT),
    "is_assistant": Refusal((None, False), ASSISTANT),
    "prompt_lookup_num_tokens": Refusal((None,), ASSISTANT),
    "assistant_early_exit": Refusal((None,), ASSISTANT),
    "assistant_ensemble_weight": Refusal((None,), ASSISTANT),
    "speculation_type": Refusal((None,), ASSISTANT),
    "guidance_scale": Refusal((None, 1, 1.0), "guidance runs the model a second time for every token"),
    "token_healing": Refusal((None, False), "it replaces the end of a prompt"),
    "encoder_repetition_penalty": Refusal((1.0, 1, None), ENCODER),
    "encoder_no_repeat_ngram_size": Refusal((0, None), ENCODER),
    "cache_implementation": Refusal((None, "hybrid"), CACHE),  # transformers takes "hybrid" for None too
    "cache_config": Refusal((None,), CACHE),
    "max_cache_len": Refusal((None,), CACHE),
    "prefill_chunk_size": Refusal((None,), "prompts are computed in batches of `batch_size`"),
    "compile_config": Refusal((None,), "the forward pass is not compiled"),
    "continuous_batching_config": Refusal((None,), "waiting prompts join automatically (the argument `batch_size`)"),
    "output_attentions": Refusal((None, False), OUTPUTS),
    "output_hidden_states": Refusal((None, False), OUTPUTS),
    "output_scores": Refusal((False, None), OUTPUTS),
    "output_logits": Refusal((None, False), OUTPUTS),
    "return_dict_in_generate": Refusal((False, None), OUTPUTS),
}
# What `model.generate` takes beside the fields, and what to do here instead.
INSTEAD = {
    "prefix_allowed_tokens_fn": "it knows a prompt by its place in the batch; write it as a logits_processor",
    "inputs": "give the prompts as the second argument",
    "input_ids": "give the prompts as the second argument",
    "inputs_embeds": "give the prompts as token ids",
    "past_key_values": "give a RadixCache as `cache`",
    "position_ids": "give each prompt separately; positions count from 0",
    "streamer": "the answers come when all are finished",
    "assistant_model": ASSISTANT,
    "assistant_tokenizer": ASSISTANT,
    "custom_generate": "call model.generate for another decoding loop",
    "negative_prompt_ids": "there is no guidance",
    "negative_prompt_attention_mask": "there is no guidance",
    "synced_gpus": "each process generates its own answers",
}


def resolve_config(model: nn.Module, generation_config: GenerationConfig | None, **kwargs: object) -> GenerationConfig:
    """Merge the options of one call: `kwargs`, then `generation_config`, the model's own, and transformers' defaults.

    model: a `PreTrainedModel` or a PEFT model around one.
    generation_config: is copied; a field that is None in it takes the model's value.
    kwargs: fields of `GenerationConfig`. None means what it means to `model.generate`: `top_k=None` keeps all tokens,
        `eos_token_id=None` has no end token.

    In the result both `max_new_tokens` and `max_length` apply if both are set: the tighter one counts.

    Raises UserError for an unknown name, a field that is not supported, or a value that transformers refuses.
    """
    base = model_inside(model)
    defaults: Any = getattr(model, "generation_config", None) or base.generation_config or GenerationConfig()
    if not isinstance(generation_config, GenerationConfig | None):
        raise UserError(f"generation_config: expected a GenerationConfig, got {type(generation_config).__name__}")
    for name in kwargs:
        _check_name(name)
    try:
        config = copy.deepcopy(generation_config) if generation_config is not None else GenerationConfig()
        config.update(**defaults.to_dict(), defaults_only=True, allow_custom_entries=True)
        counts_prompt = generation_config if transformers_is_before("5.3") else config
        has_length = getattr(counts_prompt, "max_length", None) is not None
        config.update(**config._get_default_generation_params(), defaults_only=True)
        missing = config.update(**kwargs)
    except (AttributeError, TypeError, ValueError) as error:
        raise UserError(f"generation options: {first_line(error)}") from error
    set_by_caller = set(kwargs) | {
        name for name, value in vars(generation_config or object).items() if value is not None
    }
    _refuse_unsupported(config, set_by_caller, missing)
    _settle_lengths(config, base, has_length or kwargs.get("max_length") is not None)
    _check_values(config)
    return config


def max_length_of(config: GenerationConfig, prompt_lengths: np.ndarray) -> np.ndarray:
    """Return the length at which each sequence ends, prompt included.

    config: from `resolve_config`. prompt_lengths: (n,), int64. Returns (n,), int64; shorter than the prompt if
        `max_length` is.
    """
    lengths = np.asarray(prompt_lengths, dtype=np.int64)
    ends = np.full_like(lengths, np.iinfo(np.int64).max)
    if config.max_new_tokens is not None:
        ends = lengths + config.max_new_tokens
    return ends if config.max_length is None else np.minimum(ends, config.max_length)


def max_new_tokens_of(config: GenerationConfig, prompt_lengths: np.ndarray) -> np.ndarray:
    """Return how many tokens each answer may have, (n,), int64, all at least 1.

    config: from `resolve_config`. prompt_lengths: (n,), int64.

    Raises UserError if a prompt leaves no room.
    """
    lengths = np.asarray(prompt_lengths, dtype=np.int64)
    room = max_length_of(config, lengths) - lengths
    if (full := np.flatnonzero(room < 1)).size:
        first = int(full[0])
        raise UserError(
            f"prompt {first} has {lengths[first]} tokens, and max_length={config.max_length} counts prompt and answer "
            f"together, so there is no room for an answer; set max_new_tokens, which counts the answer only"
        )
    return room


def _check_name(name: str) -> None:
    if name in INSTEAD:
        raise UserError(f"generation option {name!r} is not supported: {INSTEAD[name]}")
    known = {*USED, *WITHOUT_EFFECT, *REFUSED}
    if name not in known:
        variables = "variables of the chat template go into chat_template_kwargs"
        expected = f"; expected a field of transformers' GenerationConfig; {variables}"
        hint = did_you_mean(name, sorted(known), expected)
        raise UserError(f"unknown generation option {name!r}{hint}")


def _refuse_unsupported(config: GenerationConfig, set_by_caller: set[str], missing: dict[str, Any]) -> None:
    """Refuse unsupported fields. set_by_caller: names of fields. missing: fields that this transformers lacks."""
    for name, refusal in REFUSED.items():
        value = getattr(config, name, missing.get(name))
        if not any(value is each or value == each for each in refusal.neutral):
            origin = "" if name in set_by_caller else " (in the model's generation_config)"
            fix = "leave it out" if name in set_by_caller else f"pass {name}={refusal.neutral[0]!r}"
            raise UserError(
                f"{name}={value!r}{origin} is not supported: {refusal.reason}; {fix}, or call model.generate"
            )
    watermark = config.watermarking_config
    if watermark is not None and not isinstance(watermark, WatermarkingConfig):
        raise UserError(
            f"watermarking_config: {type(watermark).__name__} is not supported, because it keeps a state for each "
            f"place of a fixed batch, and answers join and leave; use WatermarkingConfig, or call model.generate"
        )


def _settle_lengths(config: GenerationConfig, base: PreTrainedModel, has_length: bool) -> None:
    """Choose the length as `model.generate`: `max_new_tokens`, else `max_length`, else 20 tokens if positions allow."""
    if config.max_new_tokens is not None:
        config.max_length = None
    elif not has_length or config.max_length is None:
        own = config._get_default_generation_params()["max_length"]  # 20, without the prompt
        config.max_new_tokens = config.max_length or own
        config.max_length = getattr(base.config, "max_position_embeddings", None)


def _check_values(config: GenerationConfig) -> None:
    """Check values that transformers leaves to its decoding loop."""
    if config.num_return_sequences is None:
        config.num_return_sequences = 1
    for name in ("max_new_tokens", "max_length", "num_return_sequences"):
        value = getattr(config, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1):
            raise UserError(f"{name}: expected a whole number of at least 1, got {value!r}")
    if config.exponential_decay_length_penalty is not None and config.eos_token_id is None:
        raise UserError("exponential_decay_length_penalty raises the score of the end token: set eos_token_id")
