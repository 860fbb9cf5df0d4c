"""`generate`: answers to prompts, whose shared tokens are computed and stored once, and the result that it returns."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from radixtrain.errors import UserError
from radixtrain.generation.cache import RadixCache
from radixtrain.generation.options import max_new_tokens_of, resolve_config
from radixtrain.generation.passes import PIECE_CELLS, Request, sorted_requests
from radixtrain.generation.prefill import prefill_on
from radixtrain.generation.prompts import check_ids, check_types, padding_mask, token_ids_of
from radixtrain.generation.sampling import TokenChooser
from radixtrain.generation.scheduler import Limits, RunningBatch, finish
from radixtrain.generation.stopping import Stopper
from radixtrain.hf.backbone import model_inside, parts_of
from radixtrain.hf.refusals import check_generation
from radixtrain.tree.arrays import IntArray

# Without a batch size. A lane is a private run of slots, for what one sequence does not share.
MAX_LANES = 256
LANE_SLOTS = 65_536  # of all lanes, without a batch size and with answers of the expected length
EXPECTED_ANSWER = 1_024  # tokens; most answers are shorter than the limit
FIRST_ANSWER = 128  # tokens of an answer that a lane takes before it is made longer
# Of `str(Generated)`.
SHOWN_ANSWERS = 10
SHOWN_CHARACTERS = 60
SHOWN_TOKENS = 12


@dataclass(frozen=True)
class GenerationStats:
    """What the answers cost.

    num_prompt_tokens: of all prompts.
    num_cached_tokens: prompt tokens found in the cache.
    num_computed_tokens: computed for the prompts; what they share counts once.
    num_new_tokens: of all answers.
    seconds: of the whole call.
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    num_computed_tokens: int
    num_new_tokens: int
    seconds: float

    @property
    def r(self) -> float:
        """Return prompt tokens per computed one; inf if all were cached, nan without prompts."""
        if not self.num_computed_tokens:
            return float("inf") if self.num_prompt_tokens else float("nan")
        return self.num_prompt_tokens / self.num_computed_tokens

    def __str__(self) -> str:
        rate = f", {self.num_new_tokens / self.seconds:,.0f} a second" if self.seconds > 0 else ""
        return (
            f"{self.num_prompt_tokens:,} prompt tokens, {self.num_computed_tokens:,} computed (r {self.r:.2f}), "
            f"{self.num_cached_tokens:,} from the cache; {self.num_new_tokens:,} new tokens in "
            f"{self.seconds:.2f} s{rate}"
        )


@dataclass(frozen=True)
class Generated:
    """Answers, prompt by prompt: those of prompt i are entries [i n, (i + 1) n), n = `num_return_sequences`.

    prompt_ids: token ids, per prompt.
    token_ids: per answer, with the end-of-sequence token if there was one, without padding.
    texts: per answer, without special tokens; None without a tokenizer.
    logprobs: per answer, of every token, in nats, under the model itself: temperature 1, before processors.
    finish_reasons: per answer, "stop" (end token, stop string, criterion) or "length" (also max_time).
    """

    prompt_ids: list[list[int]]
    token_ids: list[list[int]]
    texts: list[str] | None
    logprobs: list[list[float]]
    finish_reasons: list[str]
    num_return_sequences: int
    stats: GenerationStats

    def __len__(self) -> int:
        """Count the answers."""
        return len(self.token_ids)

    def sequences(self, pad_token_id: int) -> Tensor:
        """Return what `model.generate` returns, (answers, L), int64: prompts padded on the left, answers right."""
        if not isinstance(pad_token_id, int):
            raise UserError(f"pad_token_id: expected a token id to pad with, got {pad_token_id!r}; 0 will do")
        n = self.num_return_sequences
        longest_prompt = max(map(len, self.prompt_ids), default=0)
        longest_answer = max(map(len, self.token_ids), default=0)
        sequences = torch.full((len(self), longest_prompt + longest_answer), pad_token_id, dtype=torch.int64)
        for place, answer in enumerate(self.token_ids):
            prompt = self.prompt_ids[place // n]
            sequences[place, longest_prompt - len(prompt) : longest_prompt + len(answer)] = torch.tensor(
                [*prompt, *answer], dtype=torch.int64
            )
        return sequences

    def __str__(self) -> str:
        """Show the first answers, one per line, below a line of counts."""
        shown = min(len(self), SHOWN_ANSWERS)
        lines = [f"{len(self)} answers to {len(self.prompt_ids)} prompts: {self.stats}"]
        if shown:
            lines.append("prompt  tokens  end     logprob  answer")
        lines += [self._line(place) for place in range(shown)]
        if shown < len(self):
            lines.append(f"... and {len(self) - shown} more")
        return "\n".join(lines)

    def _line(self, place: int) -> str:
        prompt, tokens = place // self.num_return_sequences, len(self.token_ids[place])
        logprob = sum(self.logprobs[place])
        return f"{prompt:>6}  {tokens:>6}  {self.finish_reasons[place]:<6}  {logprob:>7.2f}  {self._shown(place)}"

    def _shown(self, place: int) -> str:
        """Return the text of an answer on one line, or its first token ids."""
        if self.texts is None:
            ids = self.token_ids[place]
            return " ".join(map(str, ids[:SHOWN_TOKENS])) + (" ..." if len(ids) > SHOWN_TOKENS else "")
        text = " ".join(self.texts[place].split())
        return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 4] + " ..."


def generate(
    model: nn.Module,
    prompts: Any,
    tokenizer: Any = None,
    *,
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
        (B, L) tensor with its attention_mask, which is inferred from pad_token_id as `model.generate` does.
    tokenizer: for texts and conversations, for `stop_strings`, and to decode the answers.
    generation_config, options: fields of transformers' `GenerationConfig`, with its meanings and defaults:
        max_new_tokens, do_sample, temperature, top_k, top_p, num_return_sequences, stop_strings and so on.
    logits_processor, stopping_criteria: your own, as `model.generate` takes them.
    chat_template_kwargs: variables of the chat template, for conversations.
    batch_size: sequences that are decoded at once; by default as many as fit 65,536 stored tokens with
        answers of up to 1,024 each, at most 256.
    cache: a `RadixCache` that later calls continue: a conversation, an agent. It keeps prompts and answers as long as
        its budget has room, and is emptied if the weights have changed. By default nothing is kept.
    seed: of the samples. An answer depends on the seed and its place in the result, not on the rest of its batch.
        None: torch's generator, as `torch.manual_seed` set it.
    kernel: of the attention, as in `prepare_model`.

    Raises UserError for a model that cannot generate exactly this way, an option that is not supported, and prompts
    that cannot be read; CacheFull, a UserError, for a cache whose budget is too small.
    """
    started = time.perf_counter()
    parts = parts_of(model_inside(model))
    if parts.base.config.is_encoder_decoder or not parts.base.can_generate():
        check_generation(parts, 1)  # says why; the options of such a model cannot be resolved
    config = resolve_config(model, generation_config, **options)
    if attention_mask is None:
        attention_mask = padding_mask(prompts, config)
    ids = token_ids_of(prompts, tokenizer, attention_mask, **(chat_template_kwargs or {}))
    check_types(parts.backbone, prompts)
    for place, prompt in enumerate(ids):
        check_ids(prompt, f"prompt {place}", parts.decoder.config.vocab_size)
    chooser = TokenChooser(model, config, logits_processor, seed)
    if not ids:
        return _generated(ids, [], config, tokenizer, GenerationStats(0, 0, 0, 0, 0.0))
    max_new = max_new_tokens_of(config, np.array([len(prompt) for prompt in ids]))
    stopper = Stopper(model, config, tokenizer, stopping_criteria)
    longest = max(len(prompt) + int(most) for prompt, most in zip(ids, max_new, strict=True)) - 1
    with prefill_on(cache, model, parts, kernel, longest) as prefill:
        requests = sorted_requests(ids, max_new, config.num_return_sequences or 1)
        limits = _limits(requests, batch_size)
        finish(requests, RunningBatch(prefill, chooser, stopper, limits, keeps_answers=cache is not None))
    answers = sorted(requests, key=lambda request: request.index)
    counts, seconds = prefill.counts, time.perf_counter() - started
    num_new = sum(len(request.token_ids) for request in requests)
    stats = GenerationStats(counts.prompt, counts.cached, counts.computed, num_new, seconds)
    return _generated(ids, answers, config, tokenizer, stats)


def _limits(requests: Sequence[Request], batch_size: int | None) -> Limits:
    """Choose the number of lanes and their first length: the tails that they take, and the beginning of an answer."""
    if batch_size is not None and (
        isinstance(batch_size, bool) or not isinstance(batch_size, int | np.integer) or batch_size < 1
    ):
        raise UserError(f"batch_size must be a whole number of at least 1, got {batch_size!r}")
    tail = _longest_tail(np.array([len(request.prompt) - request.kept for request in requests]))
    longest = max(request.max_new for request in requests)
    number = int(batch_size or 0) or max(1, min(MAX_LANES, LANE_SLOTS // (tail + min(longest, EXPECTED_ANSWER))))
    return Limits(min(number, len(requests)), tail, tail + min(longest, FIRST_ANSWER), tail + longest)


def _longest_tail(tails: IntArray) -> int:
    """Return the tokens of a prompt that a lane should take.

    Lanes are padded to the longest, and what a lane does not take costs a product of its own: the cheapest length wins.
    """
    ordered = np.sort(np.maximum(tails, 1))
    longer = len(ordered) - 1 - np.arange(len(ordered))  # tails that are longer than each
    cells = ordered * len(ordered) + longer * PIECE_CELLS
    return int(ordered[cells.argmin()])


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
