"""Tiny models with recurrent layers against the stock model: rows that fork, and what equal means.

The truth is the stock model on each row by itself, in float64 with every cast lifted; forks are forced, because rows as
short as these pay for none (the fixture `free_forks`).
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from same_step import same
from tiers import cases
from torch import Tensor, nn

from radixtrain import RadixCollator
from radixtrain.hf.recurrent import Mixer
from radixtrain.tree.radix_inputs import layout_of
from radixtrain.tree.runs import cheapest_runs
from radixtrain.verification.oracle import float64_throughout, gradients_of, radix_batch

Build = Callable[..., Any]
KINDS = ["Qwen3.5", "Bamba", "LFM2"]
ONE_KIND = pytest.mark.parametrize("kind", cases(KINDS, ["Qwen3.5"]))  # `make test` runs only that
PROMPT = [7, 8, 9, 1, 2, 3, 11, 4, 6, 5]
ROWS = [
    [*PROMPT, 4, 5, 6, 10, 21],
    [*PROMPT, 4, 5, 12, 13],
    [*PROMPT, 31],
    [*PROMPT[:6], 17, 18, 19, 20],
    [*PROMPT[:6], 17, 22],
    [30, 33, 36, 39],
]
FEATURES = [{"input_ids": ids, "labels": [-100, *ids[1:]]} for ids in ROWS]
OTHERS = [{"input_ids": ids, "labels": [-100, *ids[1:]]} for ids in ([5, 4, 3, 2, 7, 1], [5, 4, 3, 2, 7, 9, 9], [5, 6])]


def batch_of(features: Any = FEATURES) -> dict[str, Any]:
    batch = RadixCollator()(features)
    assert cheapest_runs(*layout_of(batch).segments).num_forks, "these rows do not fork"
    return batch


def assert_exact(model: Any, truth: Any, arm: Callable[[], Iterator[Tensor]] | None = None) -> None:
    """A prepared model has the true gradient. arm: the terms of its loss, by default of one batch with forks."""
    with float64_throughout(model):
        found = gradients_of(model, arm or (lambda: radix_batch(model, batch_of())))
    same(truth, found)


def padded(rows: list[list[int]], side: str) -> dict[str, Tensor]:
    longest = max(map(len, rows))
    pads = [[0] * (longest - len(row)) for row in rows]
    ids = [row + pad if side == "right" else pad + row for row, pad in zip(rows, pads, strict=True)]
    input_ids = torch.tensor(ids)
    return {"input_ids": input_ids, "attention_mask": (input_ids != 0).long()}


def mixers_in(model: nn.Module) -> list[Mixer]:
    found = [getattr(module.__dict__.get("forward"), "__self__", None) for module in model.modules()]
    return [each for each in found if isinstance(each, Mixer)]
