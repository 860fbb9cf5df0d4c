"""`generate`: answers to prompts, what they share computed and stored once."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn
from transformers import GenerationConfig

from radixtrain.errors import UserError
from radixtrain.generation.cache import RadixCache
from radixtrain.generation.engine import Engine, Limits
from radixtrain.generation.generated import Generated, GenerationStats
from radixtrain.generation.options import max_new_tokens_of, resolve_config
from radixtrain.generation.passes import PIECE_CELLS, worth_keeping
from radixtrain.generation.prefill import Prefill
from radixtrain.generation.prompts import token_ids_of
from radixtrain.generation.requests import Request
from radixtrain.generation.sampling import TokenChooser
from radixtrain.generation.stopping import Stopper
from radixtrain.generation.weights import fingerprint
from radixtrain.hf.backbone import model_inside, parts_of
from radixtrain.hf.cached_pass import on_stored_rows
from radixtrain.tree.arrays import IntArray, cumulative
from radixtrain.tree.sorting import sort_sequences

__all__ = ["check_ids", "generate"]

MAX_LANES = 256
LANE_SLOTS = 65_536  # of all lanes, if no batch size is given


def generate(
    model: nn.Module,
    prompts: Any,
    *,
    tokenizer: Any = None,
    attention_mask: Tensor | None = None,
    generation_config: GenerationConfig | None = None,
    logits_processor: Any = None,
    stopping_criteria: Any = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    batch_size: int | None = None,
    cache: RadixCache | None = None,
    seed: int | None = None,
    kernel: str = "auto",
    **options: Any,
) -> Generated:
    """Generate answers. Tokens that prompts share are computed and stored once, and attended to in one product.

    model: a `PreTrainedModel` for causal language modelling, one wrapped by PEFT, prepared for training or not. It runs
        in evaluation mode and without gradients, and is left as it was.
    prompts: texts, conversations (lists of messages, rendered with the chat template), lists of token ids, or a padded
        (B, L) tensor with its attention_mask.
    tokenizer: for texts and conversations, for `stop_strings`, and to decode the answers.
    generation_config, options: fields of transformers' `GenerationConfig`, with its meanings and defaults:
        max_new_tokens, do_sample, temperature, top_k, top_p, num_return_sequences, stop_strings and so on.
    logits_processor, stopping_criteria: your own, as `model.generate` takes them.
    batch_size: sequences that are decoded at once; by default as many as fit 65,536 slots, at most 256.
    cache: a `RadixCache` that later calls go on with: a conversation, an agent. It keeps prompts and answers as long as
        its budget has room, and is emptied if the weights have changed. By default nothing is kept.
    seed: of the samples. An answer depends on the seed and its place in the result, not on what is computed beside it.
        None: torch's generator, as `torch.manual_seed` set it.
    kernel: of the attention, as in `prepare_model`.

    Raises UserError for a model that cannot generate exactly this way, an option that is not supported, and prompts
    that cannot be read; CacheFull, a UserError, for a cache whose budget is too small.
    """
    started = time.perf_counter()
    parts = parts_of(model_inside(model))
    config = resolve_config(model, generation_config, **options)
    ids = token_ids_of(prompts, tokenizer, attention_mask, **(chat_template_kwargs or {}))
    check_ids(ids, parts.decoder.config.vocab_size)
    chooser = TokenChooser(model, config, logits_processor, seed)
    requests = _requests(ids, config, chooser)
    if not requests:
        return _generated(ids, [], config, tokenizer, GenerationStats(0, 0, 0, 0, 0.0))
    stopper = Stopper(model, config, tokenizer, stopping_criteria)
    limits = _limits(requests, batch_size)
    keeps_answers, cache = cache is not None, RadixCache() if cache is None else cache
    longest = max(len(request.prompt) + request.max_new for request in requests) - 1
    with cache.exclusive(), on_stored_rows(model, parts, kernel, longest):
        if keeps_answers:
            cache.of_weights(fingerprint(model))
        prefill = Prefill(parts, cache, kernel)
        Engine(prefill, chooser, stopper, limits, keeps_answers).run(requests)
    answers = sorted(requests, key=lambda request: request.index)
    counts, seconds = prefill.counts, time.perf_counter() - started
    num_new = sum(len(request.token_ids) for request in requests)
    stats = GenerationStats(counts.prompt, counts.cached, counts.computed, num_new, seconds)
    return _generated(ids, answers, config, tokenizer, stats)


def _requests(ids: Sequence[IntArray], config: GenerationConfig, chooser: TokenChooser) -> list[Request]:
    """One for each answer, sorted by the prompts."""
    if not ids:
        return []
    samples = config.num_return_sequences or 1
    max_new = max_new_tokens_of(config, np.array([len(prompt) for prompt in ids]))
    by_order = sort_sequences(np.concatenate(ids), cumulative(np.array([len(prompt) for prompt in ids])))
    lengths = by_order.lengths.repeat(samples)
    lcp = np.where(np.arange(len(lengths)) % samples, lengths, by_order.lcp.repeat(samples))  # samples share it all
    requests = []
    for rank, (prompt, kept) in enumerate(
        zip(by_order.order.repeat(samples).tolist(), worth_keeping(lcp), strict=True)
    ):
        index, most = prompt * samples + rank % samples, int(max_new[prompt])
        draws = chooser.draws(index, most) if chooser.samples else np.zeros(0)
        requests.append(Request(index, ids[prompt], most, draws, rank, int(lcp[rank]), int(kept)))
    return requests


def _limits(requests: Sequence[Request], batch_size: int | None) -> Limits:
    """How many lanes, and how long they are: the tails that they take and the longest answer."""
    if batch_size is not None and (type(batch_size) is not int or batch_size < 1):
        raise UserError(f"batch_size must be a whole number of at least 1, got {batch_size!r}")
    tail = _longest_tail(np.array([len(request.prompt) - request.kept for request in requests]))
    length = tail + max(request.max_new for request in requests)
    number = batch_size or max(1, min(MAX_LANES, LANE_SLOTS // length))
    return Limits(min(number, len(requests)), tail, length)


def _longest_tail(tails: IntArray) -> int:
    """Tokens of a prompt that a lane should take.

    Lanes are padded to the longest, and what a lane does not take costs a product of its own: the cheapest is taken.
    """
    ordered = np.sort(np.maximum(tails, 1))
    longer = len(ordered) - 1 - np.arange(len(ordered))  # tails that are longer than each
    cells = ordered * len(ordered) + longer * PIECE_CELLS
    return int(ordered[cells.argmin()])


def check_ids(ids: Sequence[IntArray], vocabulary: int) -> None:
    """UserError for a token id that is not in the vocabulary of the model."""
    for place, prompt in enumerate(ids):
        wrong = prompt[(prompt < 0) | (prompt >= vocabulary)]
        if len(wrong):
            raise UserError(
                f"prompt {place} has the token id {wrong[0]}, and the model has embeddings for ids from 0 to "
                f"{vocabulary - 1}: is it the tokenizer of this model?"
            )


def _generated(
    ids: Sequence[IntArray],
    answers: Sequence[Request],
    config: GenerationConfig,
    tokenizer: Any,
    stats: GenerationStats,
) -> Generated:
    token_ids = [request.token_ids for request in answers]
    return Generated(
        prompt_ids=[prompt.tolist() for prompt in ids],
        token_ids=token_ids,
        texts=None if tokenizer is None else tokenizer.batch_decode(token_ids, skip_special_tokens=True),
        logprobs=[request.logprobs for request in answers],
        finish_reasons=[request.finish_reason for request in answers],
        num_return_sequences=config.num_return_sequences or 1,
        stats=stats,
    )
