"""`generate`: transformers' own `model.generate`, with prompts computed and stored once on their unique tokens."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.generation import GenerateDecoderOnlyOutput

from radixtrain.errors import UserError
from radixtrain.generation.cache import Node, RadixCache, nodes_below
from radixtrain.generation.fingerprint import fingerprint
from radixtrain.generation.prefill import Continued, prefill
from radixtrain.generation.prompt_cache import PromptCache, serving
from radixtrain.hf.backbone import Parts, model_inside, parts_of
from radixtrain.hf.generating import device_of, generating
from radixtrain.hf.names import CACHE
from radixtrain.hf.windows import window_may_bind
from radixtrain.tree.arrays import IntArray

# Options of `model.generate` that do not go with this cache: values that request nothing, and why others are refused.
REFUSED = {
    "cache_implementation": ((None, "dynamic", "hybrid"), "the cache is radixtrain's"),
    "output_attentions": ((False, None), "shared attention has no weights for each row"),
    "output_hidden_states": ((False, None), "the rows of a step run through the layers as one sequence"),
    "custom_generate": ((None,), "another decoding loop may read the cache itself"),
    "use_mtp": ((False, None), "it has a cache of its own"),
}
OF_TEXT = ("input_ids", "attention_mask", "negative_prompt_ids", "negative_prompt_attention_mask")
ARGUMENT = next(name for name in CACHE if hasattr(GenerateDecoderOnlyOutput, name))  # and of what it returns


def generate(model: nn.Module, inputs: Tensor | None = None, *, cache: RadixCache | None = None, **kwargs: Any) -> Any:
    """Generate as `model.generate` does, with its arguments and its result. Prompts are computed and stored once.

    model: a `PreTrainedModel` for causal language modelling, one wrapped by PEFT, shared or not. It runs
        in evaluation mode and without gradients, and is left as it was.
    inputs: or `input_ids`, (B, L), token ids, padded on the left as `attention_mask` says.
    cache: a `RadixCache` that later calls continue: a conversation, an agent. It keeps prompts and answers as long as
        its budget has room, and is emptied if the weights have changed. By default nothing is kept.
    kwargs: of `model.generate`: `max_new_tokens`, `do_sample`, `num_return_sequences`, `num_beams`, `logits_processor`,
        `stopping_criteria`, `streamer`, `generation_config`, `tokenizer` and so on.

    Tokens that prompts have in common, from the first on, are computed once, stored once, and attended to in one
    product for all that read them. Greedy answers are those of `model.generate`; draws are drawn as it draws them.

    Raises UserError for a model that cannot generate exactly this way, for images, and for arguments that need another
    cache.

    >>> cache = RadixCache(max_tokens=100_000)
    >>> prompts = torch.tensor([[7, 8, 9], [7, 8, 5]])
    >>> answers = generate(model, prompts, cache=cache, max_new_tokens=4)
    >>> cache.match_prefix([7, 8, 5, 4]).length  # a later prompt that begins like the second one
    3
    """
    parts = parts_of(model_inside(model))
    check_arguments(model, cache, kwargs)
    ids, mask = _padded_prompts(model, parts, inputs, kwargs)
    prompts = [row[kept] for row, kept in zip(ids.cpu().numpy(), mask.cpu().numpy(), strict=True)]
    beginnings = [prompt[:-1] for prompt in prompts]  # without the first token that `model.generate` computes
    stored = RadixCache() if cache is None else cache
    longest = max(map(len, beginnings)) + (_setting(model, kwargs, "max_new_tokens") or 1)
    with stored.exclusive(), generating(model, parts, longest):
        if cache is not None:
            cache.belong_to(fingerprint(model))
        ids, mask = (x.to(device_of(parts)) for x in (ids, mask))
        keeps = cache is not None or window_may_bind(parts.decoder.config, sys.maxsize)
        with prefilled(parts, stored, beginnings) as ends:
            past = PromptCache(ends, ids.shape[1] - 1, ids.device, keeps)
            with serving(parts, past):
                own = {ARGUMENT: past, "attention_mask": mask.to(ids.dtype), "use_cache": True}
                generated = model.generate(input_ids=ids, **{**kwargs, **own})  # type: ignore[operator]
            if cache is not None and past.in_order:
                _store_answers(cache, past, beginnings, getattr(generated, "sequences", generated))
        if cache is not None:
            for _, node in nodes_below(cache.root):  # so that what was evicted is freed
                node.rows = node.rows.alone()
    return generated


def check_arguments(model: nn.Module, cache: object, kwargs: Mapping[str, Any]) -> None:
    """Refuse what this cache cannot do, and inputs other than text."""
    if cache is not None and not isinstance(cache, RadixCache):
        raise UserError(f"cache: expected a RadixCache, or None to keep nothing, got {type(cache).__name__}")
    for name, value in kwargs.items():
        if name in CACHE:
            raise UserError(f"{name}: prompts are computed into radixtrain's own cache; give a RadixCache as cache=")
        if isinstance(value, Tensor) and name not in OF_TEXT:
            raise UserError(f"{name}: prompts are token ids of text; leave it out, or use model.generate")
    for name, (neutral, reason) in REFUSED.items():
        if (value := _setting(model, kwargs, name)) not in neutral:
            raise UserError(f"{name}={value!r} is not supported, because {reason}; leave it out, or use model.generate")


def _setting(model: nn.Module, kwargs: Mapping[str, Any], name: str) -> Any:
    """Return an option of a call: from its arguments, its generation_config, or the model's."""
    configs = kwargs.get("generation_config"), getattr(model_inside(model), "generation_config", None)
    values = (kwargs.get(name), *(getattr(config, name, None) for config in configs))
    return next((value for value in values if value is not None), None)


def _padded_prompts(
    model: nn.Module, parts: Parts, inputs: Tensor | None, kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Return token ids and their mask, bool, (B, L) each; takes them out of `kwargs`.

    Without a mask, `pad_token_id` is padding unless it ends answers too, as in `model.generate`.
    """
    given, mask = kwargs.pop("input_ids", inputs), kwargs.pop("attention_mask", None)
    if not isinstance(given, Tensor) or given.ndim != 2 or not given.numel() or given.is_floating_point():
        came = f"{given.dtype} {tuple(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
        raise UserError(f"input_ids: expected a tensor (B, L) of token ids, as tokenizers return, got {came}")
    ids: Tensor = given
    if mask is None:
        pad, eos = (_setting(model, kwargs, name) for name in ("pad_token_id", "eos_token_id"))
        ends = eos if isinstance(eos, list) else [eos]
        mask = torch.ones_like(ids) if pad is None or pad in ends else ids != pad
    mask = mask.to(ids.device) != 0
    if mask.shape != ids.shape or not mask[:, -1].all() or (mask[:, 1:] < mask[:, :-1]).any():
        raise UserError(
            "attention_mask: expected padding on the left only, and at least one token in each row: set "
            "tokenizer.padding_side = 'left'"
        )
    vocabulary = parts.decoder.config.vocab_size
    if (wrong := ids[mask & ((ids < 0) | (ids >= vocabulary))]).numel():
        raise UserError(
            f"input_ids has the token {wrong[0]}, and the model has embeddings for ids from 0 to {vocabulary - 1}: is "
            f"it the tokenizer of this model?"
        )
    return ids, mask


@contextmanager
def prefilled(parts: Parts, cache: RadixCache, prompts: Sequence[IntArray]) -> Iterator[list[Node]]:
    """Compute prompts into a cache, and yield where each ends; afterwards the cache keeps what it has room for."""
    ends = prefill(parts, cache, prompts)
    try:
        yield ends
    finally:
        for end in ends:
            cache.unlock(end)
        cache.evict_to_budget()


def _store_answers(cache: RadixCache, past: PromptCache, prompts: Sequence[IntArray], sequences: Tensor) -> None:
    """Store what was generated, too."""
    for tokens, rows in past.answers(prompts, sequences):
        cache.insert(tokens, Continued(rows, len(tokens) - len(rows)).from_place)
