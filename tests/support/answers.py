"""Prompts of token ids as a padded batch, and what `model.generate` answers to each by itself."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

GREEDY = {"do_sample": False, "pad_token_id": 0}
WITH_LOGITS = {"output_logits": True, "return_dict_in_generate": True}


def batch_of(prompts: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """`input_ids` and `attention_mask`, (B, L), padded on the left."""
    longest = max(map(len, prompts))
    ids = [[0] * (longest - len(prompt)) + [*prompt] for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def generated(model: Any, prompts: Sequence[Sequence[int]], **options: Any) -> Any:
    """What `radixtrain.generate` returns for a batch of prompts, greedily and with logits unless told otherwise."""
    from radixtrain import generate

    return generate(model, **batch_of(prompts), **{**GREEDY, **WITH_LOGITS, **options})


def by_generate(model: Any, prompts: Sequence[Sequence[int]], **options: Any) -> list[Any]:
    """What `model.generate` returns for each prompt by itself."""
    return [model.generate(**batch_of([prompt]), **{**GREEDY, **WITH_LOGITS, **options}) for prompt in prompts]


def answers_of(sequences: Tensor, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """The columns after the prompts."""
    return sequences[:, max(map(len, prompts)) :].tolist()  # type: ignore[no-any-return]


def worst_logit(found: Any, expected: Sequence[Any]) -> float:
    """The largest difference of a logit, for each size of the largest one, but at least of 1."""
    pairs = [
        (torch.stack([step[row] for step in found.logits]), torch.cat(each.logits)) for row, each in enumerate(expected)
    ]
    largest = max(1.0, *(theirs.abs().max().item() for _, theirs in pairs))
    return max((ours - theirs).abs().max().item() for ours, theirs in pairs) / largest


def logits_by_the_model(model: Any, ids: Sequence[int]) -> Tensor:
    """(length, V), by an ordinary forward pass."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]  # type: ignore[no-any-return]


@contextmanager
def with_pieces_of(cells: int, max_rows: int = 16_384) -> Iterator[None]:
    """Inside, a few tokens are as many calls as a real batch.

    Tokens are shared from `cells` (query, key) pairs on, a pass of prompts has at most `max_rows` rows, and groups
    and strips of attention have a few.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("radixtrain.generation.prompt_cache.PIECE_CELLS", cells)
        patch.setattr("radixtrain.generation.prompt_cache.SPARE", 2)
        patch.setattr("radixtrain.generation.prefill.MAX_ROWS", max_rows)
        patch.setattr("radixtrain.tree.layout.GROUP", 4)
        patch.setattr("radixtrain.kernels.cpu_loops.STRIP", 6)
        yield
