"""`generate`: transformers' own `model.generate`, with prompts computed and stored once on their unique tokens.

A radix cache is of no use once the model has changed. Nothing announces a change (an optimizer's step,
`load_state_dict`, `p.data.add_(...)`, another adapter), so `fingerprint` reads all weights. That costs little beside a
generation, which reads them once for every token.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from functools import cache as cached
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from transformers.generation import GenerateDecoderOnlyOutput

from radixtrain.errors import UserError
from radixtrain.generation.cache import RadixCache
from radixtrain.generation.prefill import generating
from radixtrain.generation.prompt_cache import PromptCache, serving
from radixtrain.hf.backbone import CACHE, model_inside, parts_of
from radixtrain.hf.guards.code import code_in, has_third_party_code, has_third_party_code_around

# Options of `model.generate` that do not go with this cache, and why.
REFUSED = {
    "cache_implementation": "the cache is radixtrain's",
    "output_attentions": "shared attention has no weights for each row",
    "output_hidden_states": "the rows of a step run through the layers as one sequence",
    "custom_generate": "another decoding loop may read the cache itself",
    "trust_remote_code": "contrastive search and other loops from the Hub may read the cache themselves",
    "use_mtp": "it has a cache of its own",
    **dict.fromkeys(
        ("assistant_model", "assistant_early_exit", "prompt_lookup_num_tokens"),
        "proposed tokens are for a single prompt, of which nothing is shared",
    ),
}
NEUTRAL = (None, False, "dynamic", "hybrid")  # values of them that request nothing
OF_TEXT = ("input_ids", "attention_mask", "negative_prompt_ids", "negative_prompt_attention_mask")
MOST_TOKENS = 2**20  # of an answer whose length nothing limits but its end tokens and criteria
ARGUMENT = next(name for name in CACHE if hasattr(GenerateDecoderOnlyOutput, name))  # as in what it returns


def generate(model: nn.Module, inputs: Tensor | None = None, *, cache: RadixCache | None = None, **kwargs: Any) -> Any:
    """Generate as `model.generate` does, with its arguments and its result. Prompts are computed and stored once.

    model: a `PreTrainedModel` for causal language modelling, one wrapped by PEFT, shared or not. It runs
        in evaluation mode and without gradients, and is left as it was.
    inputs: or `input_ids`, (B, L), token ids, padded on the left as `attention_mask` says.
    cache: a `RadixCache` that later calls continue: a conversation, an agent. It keeps prompts as long as its budget
        has room, and is emptied if the model has changed. By default nothing is kept.
    kwargs: of `model.generate`: `max_new_tokens`, `do_sample`, `num_return_sequences`, `num_beams`, `logits_processor`,
        `stopping_criteria`, `streamer`, `generation_config`, `tokenizer` and so on. `prefill_chunk_size` has no effect.

    Tokens that prompts have in common, from the first on, are computed once, stored once, and attended to in one
    product for all that read them. Greedy answers are those of `model.generate`; draws are drawn as it draws them.

    Raises UserError for a model that cannot generate exactly this way, for images, and for arguments that need another
    cache.

    >>> cache = RadixCache(max_tokens=100_000)
    >>> prompts = torch.tensor([[7, 8, 9], [7, 8, 5]])
    >>> answers = generate(model, prompts, cache=cache, max_new_tokens=4)
    >>> cache.match_prefix([7, 8, 5, 4]).length  # a later prompt that begins like the second one
    2
    """
    parts = parts_of(model_inside(model))
    check_arguments(model, cache, kwargs)
    ids = kwargs.pop("input_ids", inputs)
    if not isinstance(ids, Tensor) or ids.ndim != 2 or not ids.numel() or ids.is_floating_point() or ids.min() < 0:
        came = f"{ids.dtype} {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise UserError(f"input_ids: expected a tensor (B, L) of token ids from 0 on, as tokenizers return, got {came}")
    mask = kwargs.get("attention_mask")
    shape = getattr(mask, "shape", None)
    if mask is not None and shape != ids.shape:  # `model.generate` would cut the prompts to the length of the mask
        came = type(mask).__name__ if shape is None else str(tuple(shape))
        raise UserError(f"attention_mask: expected a tensor of the shape of the ids, {tuple(ids.shape)}, got {came}")
    num_new = _setting(parts.base, kwargs, "max_new_tokens")
    num_checked = ids.shape[1] - 1 + (num_new or 1)
    with generating(model, parts, num_checked):
        stored = RadixCache() if cache is None else cache
        if cache is not None:
            cache.belong_to(fingerprint(model))
        longest = ids.shape[1] + (num_new or _setting(parts.base, kwargs, "max_length") or MOST_TOKENS)
        past = PromptCache(parts, stored, longest, num_checked, frees=cache is None)
        own = {ARGUMENT: past, "use_cache": True, "cache_implementation": None, "prefill_chunk_size": None}
        try:
            with serving(past):
                return model.generate(input_ids=ids, **{**kwargs, **own})  # type: ignore[operator]
        finally:
            stored.evict_to_budget()


def check_arguments(model: nn.Module, cache: object, kwargs: Mapping[str, Any]) -> None:
    """Refuse what this cache cannot do, and inputs other than text."""
    if cache is not None and not isinstance(cache, RadixCache):
        raise UserError(f"cache: expected a RadixCache, or None to keep nothing, got {type(cache).__name__}")
    for name, value in kwargs.items():
        if name in CACHE:
            raise UserError(f"{name}: prompts are computed into radixtrain's own cache; give a RadixCache as cache=")
        if isinstance(value, Tensor) and name not in OF_TEXT:
            raise UserError(f"{name}: prompts are token ids of text; leave it out, or use model.generate")
    base = model_inside(model)
    for name, reason in REFUSED.items():
        if (value := _setting(base, kwargs, name)) not in NEUTRAL:
            came = repr(value) if isinstance(value, bool | int | str) else type(value).__name__  # not a model's tree
            raise UserError(f"{name}={came} is not supported, because {reason}; leave it out, or use model.generate")


def _setting(model: nn.Module, kwargs: Mapping[str, Any], name: str) -> Any:
    """Return an option of a call: from its arguments, None too, its generation_config, or the model's."""
    configs = kwargs.get("generation_config"), getattr(model, "generation_config", None)
    values = (getattr(config, name, None) for config in configs)
    return kwargs[name] if name in kwargs else next((value for value in values if value is not None), None)


PLAIN = (bool, int, float, str, dict, list, tuple, set)
OF_EVERY_MODULE = frozenset(vars(nn.Module()))  # `training`, hooks and the like, which change no weight
WORDS = 1 << 20  # of a tensor that are multiplied at once: 8 MiB of products


def fingerprint(model: nn.Module) -> Hashable:
    """Return what equals another fingerprint unless something changed on which the model's keys and values depend.

    It contains: sums of the weights and other tensors, their shapes, dtypes and devices; the code of the modules and
    its settings, as the guards see it (`code_in`); attributes of modules that are numbers, text or collections (LoRA's
    scaling, which adapters are active or merged); and autocast. It does not depend on gradients. What code of a third
    party reads is not known: a model with a hook or a `forward` of one never has the same fingerprint again.

    Waits for the device once, at the end. Takes 0.5 s for 0.6 billion parameters in float32, on one CPU thread: a
    generation reads them once for every token.
    """
    parts = parts_of(model_inside(model))
    device = parts.base.device
    modules = parts.decoder.named_modules()  # around it some note positions of the last call (`rope_deltas`)
    others = ((f"{path}.{name}", x) for path, each in modules for name, x in vars(each).items())
    named = chain(model.named_parameters(), model.named_buffers(), others)
    tensors = {name: x for name, x in named if isinstance(x, Tensor)}
    code = code_in(parts.base, parts.decoder, parts.head, outer=[parts.backbone])
    is_unknown = has_third_party_code_around() or any(has_third_party_code(each, code.own) for each in model.modules())
    sums = [each.to(device) for tensor in tensors.values() for each in word_sums(tensor)]
    return (
        tuple((name, tensor.shape, tensor.dtype, tensor.device) for name, tensor in tensors.items()),
        tuple(torch.stack(sums).tolist()),
        code.state,
        tuple((name, _settings(each)) for name, each in model.named_modules()),
        object() if is_unknown else None,
        torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type),
    )


def word_sums(tensor: Tensor) -> Iterator[Tensor]:
    """Yield for every WORDS words of 8 bytes two sums of word times factor modulo 2^64, (), int64, on its device.

    One changed word always changes a sum, because odd factors are invertible. Several, such as two swapped words, or
    all signs, leave both unchanged with a probability of at most 2^-32 (multilinear hashing). The second sum is of the
    upper halves of words: modulo 2^64 the first would lose an even number of changes by 2^63, which signs are.
    """
    data = tensor.detach().reshape(-1).contiguous().view(torch.uint8)
    if len(data) % 8 or data.storage_offset() % 8:
        data = nn.functional.pad(data, (0, -len(data) % 8))  # in memory of its own
    factors = _factors(tensor.device)
    for words in data.view(torch.int64).split(WORDS):
        for each in (words, words.view(torch.int32)[1::2].long()):  # in a quarter of the time of `words >> 32`
            yield (each * factors[: len(words)]).sum()


@cached  # 11 ms of one core
def _factors(device: torch.device) -> Tensor:
    """Draw an odd random factor for each place, (WORDS,), int64, the same in every call."""
    factors = torch.randint(-(2**63), 2**63 - 1, (WORDS,), generator=torch.Generator().manual_seed(0)) | 1
    return factors.to(device, non_blocking=True)


def _settings(module: nn.Module) -> str:
    """Show the attributes of a module itself that are plain values, or collections."""
    return repr({name: x for name, x in vars(module).items() if isinstance(x, PLAIN) and name not in OF_EVERY_MODULE})
