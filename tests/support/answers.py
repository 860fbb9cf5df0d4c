"""Answers of generation on a radix cache, the logits of every step, and what the ordinary model says of these texts."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from radixtrain import generate
from radixtrain.generation.generated import Generated
from radixtrain.kernels.cascade import bundled_pieces
from radixtrain.kernels.pieces import Piece
from radixtrain.tree.cached_layout import shared_piece

__all__ = ["Answered", "answered", "finished_logits", "texts_of", "with_pieces_of", "worst_errors"]

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
    """The largest error of a logit and of a log-probability, beside ordinary forward passes over the finished texts.

    nan if one of them is.
    """
    texts = texts_of(each.generated)
    of_logits, of_logprobs = [], []
    for (prompt, answer), logprobs, truth in zip(
        texts, each.generated.logprobs, finished_logits(model, texts), strict=True
    ):
        found = torch.stack([each.logits[tuple(prompt + answer[:step])] for step in range(len(answer))])
        said = truth.log_softmax(-1).gather(-1, torch.tensor(answer)[:, None])[:, 0]
        of_logits.append((found - truth).abs().max().item())
        of_logprobs.append((torch.tensor(logprobs, dtype=said.dtype) - said).abs().max().item())
    return float(np.max(of_logits)), float(np.max(of_logprobs))


@contextmanager
def with_pieces_of(cells: int, max_rows: int = 16_384, one_call_a_run: bool = False) -> Iterator[None]:
    """Inside, a few tokens are as many calls as a real batch.

    Shared rows are kept from `cells` (query, key) pairs on, a pass of prompts has at most `max_rows` rows, and bundles
    and strips of attention have a few. one_call_a_run: shared runs are attended to one by one, as on a device.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in ("generate", "passes"):
            patch.setattr(sys.modules[f"radixtrain.generation.{name}"], "PIECE_CELLS", cells)
        patch.setattr("radixtrain.generation.prefill.MAX_ROWS", max_rows)
        patch.setattr("radixtrain.tree.layout.bundled_pieces", partial(bundled_pieces, bundle=4))
        patch.setattr("radixtrain.kernels.rectangles.STRIP", 6)
        if one_call_a_run:
            patch.setattr("radixtrain.generation.passes.shared_pieces", _one_by_one)
        yield


def _one_by_one(runs: Sequence[tuple[np.ndarray, np.ndarray]], device: torch.device) -> tuple[Piece, ...]:
    return tuple(shared_piece(*run, device) for run in runs)
