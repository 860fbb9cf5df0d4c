"""`score_completions`: how likely a model finds some answers, computing their prompt only once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from radixtrain.errors import UserError
from radixtrain.generation.cache import Match, RadixCache
from radixtrain.generation.prefill import MAX_ROWS, Continuation, PromptCall, passes_of
from radixtrain.hf.attention_interface import Heads
from radixtrain.hf.backbone import Parts, model_inside, parts_of
from radixtrain.hf.generating import device_of, generating
from radixtrain.tree.arrays import IntArray
from radixtrain.tree.movable import on_device

MAX_LOGITS = 2**27  # of a pass, in numbers: 512 MiB in float32


@dataclass(frozen=True)
class CompletionScore:
    """The score of a completion.

    token_ids: its tokens.
    logprobs: the log-probability of each token given those before it, in nats.
    """

    token_ids: list[int]
    logprobs: list[float]

    @property
    def logprob(self) -> float:
        """Return the log-probability of the whole completion: the sum of `logprobs`."""
        return float(np.sum(self.logprobs))

    @property
    def mean_logprob(self) -> float:
        """Return the mean of `logprobs`, which compares completions of different lengths."""
        return self.logprob / len(self.logprobs)


def score_completions(
    model: nn.Module, prompts: Sequence[Any], completions: Sequence[Any]
) -> list[list[CompletionScore]]:
    """Score completions by their log-probabilities, for multiple choice and reranking. Each prompt is computed once.

    model: as in `generate`.
    prompts: lists of token ids.
    completions: lists of token ids; the same for every prompt, or a list of them for each prompt.

    Returns, for each prompt, a `CompletionScore` for each of its completions, in their order.
    Raises UserError for a model that `generate` refuses, and for anything but at least one token id.

    >>> [scores] = score_completions(model, [[7, 8]], [[9], [5, 6]])
    >>> best = max(scores, key=lambda score: score.mean_logprob)
    >>> [score.token_ids for score in scores]
    [[9], [5, 6]]
    """
    parts = parts_of(model_inside(model))
    of_prompts = list(zip(prompts, _of_each_prompt(completions, len(prompts)), strict=True))
    vocabulary = parts.decoder.config.vocab_size
    pairs = [
        (ids, _token_ids(completion, f"completion {place} of prompt {number}", vocabulary))
        for number, (prompt, of_prompt) in enumerate(of_prompts)
        for ids in [_token_ids(prompt, f"prompt {number}", vocabulary)]
        for place, completion in enumerate(of_prompt)
    ]
    sequences = [np.append(prompt, completion[:-1]) for prompt, completion in pairs]
    scores: dict[int, CompletionScore] = {}
    with generating(model, parts, max(map(len, sequences), default=1)):
        for members in _passes(sequences, [len(completion) * vocabulary for _, completion in pairs]):
            scores.update(_scored(parts, {member: pairs[member] for member in members}))
    in_order = iter([scores[place] for place in range(len(pairs))])
    return [[next(in_order) for _ in of_prompt] for _, of_prompt in of_prompts]


def _passes(sequences: Sequence[IntArray], num_logits: Sequence[int]) -> Iterator[list[int]]:
    """Divide sequences into passes whose rows and logits are bounded. num_logits: of each sequence."""
    for members in passes_of(sequences, MAX_ROWS):
        passed: list[int] = []
        for member in members:
            if passed and sum(num_logits[each] for each in passed) + num_logits[member] > MAX_LOGITS:
                yield passed
                passed = []
            passed.append(member)
        yield passed


def _scored(parts: Parts, pairs: Mapping[int, tuple[IntArray, IntArray]]) -> dict[int, CompletionScore]:
    """Score prompts and completions in one pass, by their number."""
    sequences = [np.append(prompt, completion[:-1]) for prompt, completion in pairs.values()]
    plan = Continuation.of(sequences, [Match(RadixCache().root, 0)] * len(sequences))
    tokens = np.split(plan.plan.inverse_indices, plan.plan.cu_seqlens[1:-1])
    rows = [each[-len(completion) :] for each, (_, completion) in zip(tokens, pairs.values(), strict=True)]
    device = device_of(parts)
    logits = ScoringCall(parts, plan).logits(on_device(plan.ids, device), on_device(np.concatenate(rows), device))
    completions = [completion for _, completion in pairs.values()]
    logprobs = iter(_logprobs(logits, np.concatenate(completions)))
    return {
        number: CompletionScore(completion.tolist(), [next(logprobs) for _ in completion])
        for number, completion in zip(pairs, completions, strict=True)
    }


class ScoringCall(PromptCall):
    """A pass whose keys and values no one needs later."""

    def attend(self, heads: Heads, window: int | None, **scoring: Any) -> Tensor:
        """Attend as a prompt does."""
        attended = super().attend(heads, window, **scoring)
        self.stored.clear()
        return attended


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
    """Return whether it is a list of completions, and not one completion as token ids."""
    is_list = isinstance(each, Sequence) and not isinstance(each, str)
    return is_list and all(not isinstance(inner, int | np.integer) for inner in each)


def _token_ids(given: Any, name: str, vocabulary: int) -> IntArray:
    """Return token ids, (n,), int64, at least one. name: whose, for errors."""
    ids = np.asarray(given)
    if ids.ndim != 1 or not len(ids) or ids.dtype.kind not in "iu":
        raise UserError(f"{name}: expected a list of at least one token id, got {given!r}"[:200])
    if len(wrong := ids[(ids < 0) | (ids >= vocabulary)]):
        raise UserError(
            f"{name} has the token id {wrong[0]}, and the model has embeddings for ids from 0 to {vocabulary - 1}: is "
            f"it the tokenizer of this model?"
        )
    return ids.astype(np.int64)
