"""Answers of generation on a radix cache, the logits of every step, and what the ordinary model says of these texts."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from radixtrain import RadixCache, generate
from radixtrain.generation.generate import Generated
from radixtrain.generation.store import KeyValueStore
from radixtrain.kernels.merge_attention import Piece
from radixtrain.tree.shared_pieces import shared_piece

__all__ = [
    *("Answered", "answered", "finished_logits", "greedy_by_the_model", "is_idle", "logprobs_by_the_model"),
    *("failing", "logits_by_the_model", "one_by_one", "texts_of", "with_pieces_of", "worst_errors"),
]

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


def logits_by_the_model(model: Any, ids: Sequence[int]) -> Tensor:
    """(length, V), by an ordinary forward pass."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]  # type: ignore[no-any-return]


def finished_logits(model: Any, texts: Sequence[tuple[list[int], list[int]]]) -> list[Tensor]:
    """The logits of each answer's tokens, (length, V), by an ordinary forward pass over each finished text."""
    return [logits_by_the_model(model, prompt + answer)[len(prompt) - 1 : -1] for prompt, answer in texts]


def logprobs_by_the_model(model: Any, prompt: list[int], answer: list[int]) -> list[float]:
    """Of each token of an answer, by an ordinary forward pass over the finished text."""
    (logits,) = finished_logits(model, [(prompt, answer)])
    return logits.log_softmax(-1).gather(-1, torch.tensor(answer)[:, None])[:, 0].tolist()  # type: ignore[no-any-return]


def greedy_by_the_model(model: Any, prompts: Sequence[Sequence[int]], num_new: int) -> list[list[int]]:
    """The answer to each prompt by itself, by an ordinary forward pass for every token."""
    texts = [list(prompt) for prompt in prompts]
    for ids in texts:
        for _ in range(num_new):
            ids.append(int(logits_by_the_model(model, ids)[-1].argmax()))
    return [ids[len(prompt) :] for ids, prompt in zip(texts, prompts, strict=True)]


def is_idle(cache: RadixCache) -> bool:
    """Nothing is locked or reserved, every slot is either free or the tree's, and the budget is kept."""
    in_tree = cache.pool.capacity - cache.pool.num_free
    within = cache.max_tokens is None or cache.num_tokens <= cache.max_tokens
    return (cache.root.locks, cache.num_reserved) == (0, 0) and in_tree == cache.num_tokens and within


def worst_errors(model: Any, each: Answered) -> tuple[float, float]:
    """The largest error of a logit and of a log-probability, beside ordinary forward passes over the finished texts.

    nan if one of them is.
    """
    texts = texts_of(each.generated)
    of_logits, of_logprobs = [], []
    for place, ((prompt, answer), truth) in enumerate(zip(texts, finished_logits(model, texts), strict=True)):
        found = torch.stack([each.logits[tuple(prompt + answer[:step])] for step in range(len(answer))])
        logprobs = each.generated.logprobs[place]
        said = truth.log_softmax(-1).gather(-1, torch.tensor(answer)[:, None])[:, 0]
        of_logits.append((found - truth).abs().max().item())
        of_logprobs.append((torch.tensor(logprobs, dtype=said.dtype) - said).abs().max().item())
    return float(np.max(of_logits)), float(np.max(of_logprobs))


@contextmanager
def with_pieces_of(cells: int, max_rows: int = 16_384, one_call_a_run: bool = False) -> Iterator[None]:
    """Inside, a few tokens are as many calls as a real batch.

    Shared rows are kept from `cells` (query, key) pairs on, a pass of prompts has at most `max_rows` rows, and
    groups and strips of attention have a few. one_call_a_run: shared runs are attended to one by one, as on a device.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in ("generate", "passes"):
            patch.setattr(sys.modules[f"radixtrain.generation.{name}"], "PIECE_CELLS", cells)
        patch.setattr("radixtrain.generation.prefill.MAX_ROWS", max_rows)
        patch.setattr("radixtrain.tree.layout.GROUP", 4)
        patch.setattr("radixtrain.kernels.cpu_loops.STRIP", 6)
        if one_call_a_run:
            patch.setattr("radixtrain.tree.cached_layout.shared_pieces", one_by_one)
        yield


@contextmanager
def failing(model: Any, where: str, at: int = 3) -> Iterator[dict[str, Any]]:
    """Inside, the call of that number is a KeyboardInterrupt. Yields options for `generate`.

    where: "processor", the user's; "layer", the second one; "copy", of the rows of an answer that is kept or moved.
    """
    calls = 0

    def fail(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            raise KeyboardInterrupt
        return arguments[-1] if where == "processor" else None

    layer = next(module for name, module in model.named_modules() if name.endswith("layers.1.mlp"))
    with pytest.MonkeyPatch.context() as patch:
        if where == "copy":
            patch.setattr(KeyValueStore, "copy", fail)
        handle = layer.register_forward_pre_hook(fail) if where == "layer" else None
        try:
            yield {"logits_processor": [fail]} if where == "processor" else {}
        finally:
            if handle is not None:
                handle.remove()


def one_by_one(runs: Sequence[tuple[np.ndarray, np.ndarray]], device: torch.device) -> tuple[Piece, ...]:
    return tuple(shared_piece(*run) for run in runs)
