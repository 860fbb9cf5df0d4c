"""`share_prefixes` of a hybrid: padded batches with forks, equal to the stock model."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from radixtrain import share_prefixes, sharing_report
from radixtrain.tree import runs
from radixtrain.tree.runs import RunLayout
from radixtrain.verification.oracle import float64_throughout, gradients_of
from tests.claims.mistakes import plant
from tests.support.batches import padded
from tests.support.models import tiny_hybrid
from tests.support.steps import ONE_KIND, ROWS, assert_exact


@ONE_KIND
@pytest.mark.parametrize("side", ["left", "right"])
def test_pairs(monkeypatch: pytest.MonkeyPatch, kind: str, side: str) -> None:
    """Values and gradients of every kept token, with forks wherever they can be."""
    kept: list[int] = []

    def counted(real: Any, *given: Any) -> RunLayout:
        made: RunLayout = real(*given)
        kept.append(sum(group.num_runs for group in made.groups if group.is_fork))
        return made

    plant(monkeypatch, runs, "runs_of_segments", counted)
    batch = padded([row for rows in pairwise(ROWS[:4]) for row in rows], side)
    keep = batch["attention_mask"].bool()

    def loss() -> Iterator[Tensor]:
        yield model(**batch).logits[keep].log_softmax(-1)[:, 3].sin().sum()

    model = tiny_hybrid(kind)
    with float64_throughout(model):
        truth = gradients_of(model, loss)
    share_prefixes(model)
    assert_exact(model, truth, loss)
    model.gradient_checkpointing_enable()
    assert_exact(model, truth, loss)
    assert sharing_report(model).num_shared == 2 and kept.count(3) == 2  # beside those of the trial


@pytest.mark.parametrize(("kind", "bias"), [("LFM2", "conv_bias"), ("Bamba", "mamba_proj_bias")])
def test_left_padding_that_reaches_the_state(kind: str, bias: str) -> None:
    """Hugging Face's own padding does, through a bias: its values are kept, with positions given or not."""
    batch = padded(ROWS[:4], "left")
    positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    model = tiny_hybrid(kind, **{bias: True})
    calls = [batch, {**batch, "position_ids": positions}]
    expected = [model(**call, use_cache=False).logits for call in calls]
    share_prefixes(model)
    for call, logits in zip(calls, expected, strict=True):
        assert torch.equal(model(**call, use_cache=False).logits, logits)
    assert not sharing_report(model).num_shared and "reaches the state" in str(sharing_report(model))
    model(**padded(ROWS[:4], "right"), use_cache=False)
    assert sharing_report(model).num_shared == 1
