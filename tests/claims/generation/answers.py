"""Answers of generation on a radix cache, the logits of every step, and what the ordinary model says of the same texts."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import radixtrain.generation.generate
from radixtrain import generate
from radixtrain.generation.generated import Generated

__all__ = ["Answered", "answered", "finished_logits", "greedy_choice", "texts_of", "with_pieces_of", "worst_errors"]

Tokens = tuple[int, ...]


class Answered(NamedTuple):
    """generated: what `generate` returned. logits: (V,), of the token after each text, before any processor."""

    generated: Generated
    logits: dict[Tokens, Tensor]


def answered(model: Any, prompts: Sequence[Sequence[int]], **options: Any) -> Answered:
    """Answers to prompts of token ids, by `generate`."""
    logits: dict[Tokens, Tensor] = {}

    def capture(token_ids: Tensor, scores: Tensor) -> Tensor:
        logits.update(zip(map(tuple, token_ids.tolist()), scores.clone(), strict=True))
        return scores

    return Answered(generate(model, prompts, logits_processor=[capture], **options), logits)


def texts_of(generated: Generated) -> list[tuple[list[int], list[int]]]:
    """Prompt and answer of each answer."""
    n = generated.num_return_sequences
    return [(generated.prompt_ids[place // n], answer) for place, answer in enumerate(generated.token_ids)]


def finished_logits(model: Any, texts: Sequence[tuple[list[int], list[int]]]) -> list[Tensor]:
    """The logits of each answer's tokens, (length, V), by an ordinary forward pass over each finished text."""
    with torch.no_grad():
        return [
            model(input_ids=torch.tensor([prompt + answer]), use_cache=False).logits[0, len(prompt) - 1 : -1]
            for prompt, answer in texts
        ]


def worst_errors(model: Any, each: Answered) -> tuple[float, float]:
    """The largest error of a logit and of a log-probability, beside ordinary forward passes over the finished texts."""
    texts = texts_of(each.generated)
    of_logits = of_logprobs = 0.0
    for (prompt, answer), logprobs, truth in zip(
        texts, each.generated.logprobs, finished_logits(model, texts), strict=True
    ):
        found = torch.stack([each.logits[tuple(prompt + answer[:step])] for step in range(len(answer))])
        said = truth.log_softmax(-1).gather(-1, torch.tensor(answer)[:, None])[:, 0]
        of_logits = max(of_logits, (found - truth).abs().max().item())
        of_logprobs = max(of_logprobs, (torch.tensor(logprobs, dtype=said.dtype) - said).abs().max().item())
    return of_logits, of_logprobs


def greedy_choice(logits: Tensor, token: int) -> float:
    """By how much the best logit is above that of a chosen token."""
    return (logits.max() - logits[token]).item()


@contextmanager
def with_pieces_of(cells: int) -> Iterator[None]:
    """Inside, shared rows are kept from `cells` (query, key) pairs on, so that a few tokens are worth a product."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("generate", "passes"):
            patch.setattr(sys.modules[f"radixtrain.generation.{name}"], "PIECE_CELLS", cells)
        yield
