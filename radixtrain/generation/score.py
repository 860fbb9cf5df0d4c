"""`score_completions`: how likely a model finds some answers, computing their prompt only once."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from radixtrain.errors import UserError
from radixtrain.generation.cache import CacheFull, RadixCache
from radixtrain.generation.passes import LaneRange, Request, sorted_requests
from radixtrain.generation.prefill import Prefill, number_that_fits, prefill_on
from radixtrain.generation.prompts import check_ids, check_types, padding_mask, token_ids_of
from radixtrain.hf.backbone import model_inside, parts_of
from radixtrain.tree.arrays import IntArray

MAX_SEQUENCES = 256  # of a pass
MAX_LOGITS = 2**27  # of a pass, in numbers: 512 MiB in float32


@dataclass(frozen=True)
class CompletionScore:
    """The score of a completion. token_ids: its own. logprobs: of each token given those before, in nats."""

    token_ids: list[int]
    logprobs: list[float]

    @property
    def logprob(self) -> float:
        """Sum the log-probabilities of the whole completion."""
        return float(np.sum(self.logprobs))

    @property
    def mean_logprob(self) -> float:
        """Average over tokens, which compares completions of different lengths."""
        return self.logprob / len(self.logprobs)


def score_completions(
    model: nn.Module,
    prompts: Any,
    completions: Sequence[Any],
    *,
    tokenizer: Any = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    cache: RadixCache | None = None,
    kernel: str = "auto",
) -> list[list[CompletionScore]]:
    """Score completions by their log-probabilities, for multiple choice and reranking. Each prompt is computed once.

    model, prompts, cache, kernel: as in `generate`.
    completions: texts or lists of token ids; the same for every prompt, or a list of them for each prompt. A text is
        tokenised separately, without special tokens.

    Returns, for each prompt, the scores of its completions in their order.
    Raises UserError as `generate` does, and for an empty completion.
    """
    parts = parts_of(model_inside(model))
    mask = padding_mask(prompts, parts.base.generation_config)
    prompt_ids = token_ids_of(prompts, tokenizer, mask, **(chat_template_kwargs or {}))
    check_types(parts.backbone, prompts)
    of_prompts = _of_each_prompt(completions, len(prompt_ids))
    vocabulary = parts.decoder.config.vocab_size
    for place, prompt in enumerate(prompt_ids):
        check_ids(prompt, f"prompt {place}", vocabulary)
    pairs = [
        (prompt, _completion_ids(completion, f"completion {place}", tokenizer, vocabulary))
        for prompt, of_prompt in zip(prompt_ids, of_prompts, strict=True)
        for place, completion in enumerate(of_prompt)
    ]
    if not pairs:
        return [[] for _ in prompt_ids]
    longest = max(len(prompt) + len(completion) for prompt, completion in pairs) - 1
    with prefill_on(cache, model, parts, kernel, longest) as prefill:
        scores = _Scoring(prefill, pairs).run()
    in_order = iter(scores)
    return [[next(in_order) for _ in of_prompt] for of_prompt in of_prompts]


@dataclass(eq=False)
class _Scoring:
    """Scores completions, as many in a pass as fit. pairs: prompt and completion, token ids each."""

    prefill: Prefill
    pairs: Sequence[tuple[IntArray, IntArray]]

    def run(self) -> list[CompletionScore]:
        """Score each pair."""
        scores: dict[int, CompletionScore] = {}
        waiting, longest = deque(self._requests()), max(len(completion) for _, completion in self.pairs)
        cache = self.prefill.cache
        number = min(MAX_SEQUENCES, len(waiting))
        slots = cache.pool.allocate(number * longest, contiguous=True)
        lanes = LaneRange(int(slots[0]), longest, number)
        try:
            while waiting:
                requests = self._next(waiting, number)
                try:
                    scores.update(self._scored(requests, lanes, longest))
                except CacheFull:
                    if len(requests) == 1:
                        raise
                    number = len(requests) // 2
                    continue
                for _ in requests:
                    waiting.popleft()
        finally:
            cache.pool.release(slots)
        return [scores[index] for index in range(len(self.pairs))]

    def _requests(self) -> list[Request]:
        """Make a request of each pair without its last token, which predicts nothing; sorted."""
        sequences = [np.concatenate([prompt, completion[:-1]]) for prompt, completion in self.pairs]
        return sorted_requests(sequences, np.zeros(len(sequences), dtype=np.int64))

    def _next(self, waiting: Sequence[Request], most: int) -> list[Request]:
        """Return the requests of the next pass, whose rows and logits are bounded."""
        vocabulary: int = self.prefill.passes.parts.decoder.config.vocab_size
        requests: list[Request] = []
        predictions = 0
        for place in range(number_that_fits(waiting, most)):
            predictions += len(self.pairs[waiting[place].index][1])
            if requests and predictions * vocabulary > MAX_LOGITS:
                break
            requests.append(waiting[place])
        return requests

    def _scored(self, requests: Sequence[Request], lanes: LaneRange, longest: int) -> dict[int, CompletionScore]:
        """Score the pairs of one pass, by their index. longest: tokens of the longest completion, as long as a lane."""
        prompts = [len(self.pairs[request.index][0]) for request in requests]
        places = [np.arange(length - 1, len(request.prompt)) for length, request in zip(prompts, requests, strict=True)]
        try:
            logits, _ = self.prefill.start(requests, lanes, 0, longest, places)
        finally:
            for request in requests:
                request.release(self.prefill.cache)
        completions = [self.pairs[request.index][1] for request in requests]
        logprobs = iter(_logprobs(logits, np.concatenate(completions)))
        return {
            request.index: CompletionScore(completion.tolist(), [next(logprobs) for _ in completion])
            for request, completion in zip(requests, completions, strict=True)
        }


def _logprobs(logits: Tensor, token_ids: IntArray) -> list[float]:
    """Return the log-probability of each token at its row, in float32, or float64 for float64 logits."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    ids = torch.from_numpy(token_ids).to(logits.device, non_blocking=True)[:, None]
    chosen = logits.gather(1, ids)[:, 0].to(wide) - logits.to(wide).logsumexp(1)
    return cast(list[float], chosen.tolist())


def _of_each_prompt(completions: Sequence[Any], num_prompts: int) -> list[Sequence[Any]]:
    """Return the completions of each prompt."""
    if isinstance(completions, str) or not isinstance(completions, Sequence):
        raise UserError(f"completions must be a list, got {type(completions).__name__}")
    is_of_prompts = bool(completions) and all(_is_list_of_completions(each) for each in completions)
    if not is_of_prompts:
        return [completions] * num_prompts
    if len(completions) != num_prompts:
        raise UserError(f"completions: {len(completions)} lists for {num_prompts} prompts; give one for each")
    return list(completions)


def _is_list_of_completions(each: Any) -> bool:
    """Return whether it is a list of texts or of token ids, and not one completion as token ids."""
    is_list = isinstance(each, Sequence) and not isinstance(each, str)
    return is_list and all(not isinstance(inner, int | np.integer) for inner in each)


def _completion_ids(completion: Any, name: str, tokenizer: Any, vocabulary: int) -> IntArray:
    """Return the token ids, (n,), int64, at least one. name: of the completion, for errors."""
    if isinstance(completion, str):
        if tokenizer is None:
            raise UserError(f"{name} is a text: give the tokenizer, or token ids")
        completion = tokenizer(completion, add_special_tokens=False)["input_ids"]
    ids = np.asarray(completion)
    if ids.ndim == 1 and not len(ids):
        raise UserError(f"{name} must have at least one token, got {completion!r}")
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise UserError(f"{name}: expected a text or a list of token ids, got {completion!r}"[:200])
    ids = ids.astype(np.int64)
    check_ids(ids, name, vocabulary)
    return ids
