"""`share_prefixes` of a hybrid: padded batches with forks, equal to the stock model."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from hybrids import KINDS, PROMPT, ROWS, Build, assert_exact, mixers_in, padded
from torch import Tensor

from radixtrain import share_prefixes, sharing_report
from radixtrain.hf.padded.sharing import PaddedSharing
from radixtrain.testing import FREE_FORKS
from radixtrain.tree.run_layout import RunLayout
from radixtrain.verification.oracle import (
    float64_throughout,
    gradients_of,
)


def preference_pairs(side: str) -> dict[str, Tensor]:
    return padded([row for rows in pairwise(ROWS[:4]) for row in rows], side)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_pairs(tiny_hybrid: Build, monkeypatch: pytest.MonkeyPatch, kind: str, side: str, checkpointing: bool) -> None:
    """Values and gradients of every kept token, with forks wherever they can be."""
    kept: list[int] = []

    def counted(runs: RunLayout) -> RunLayout:
        kept.append(runs.num_forks)
        return runs

    make = RunLayout.from_segments
    monkeypatch.setattr(PaddedSharing, "_run_cost", lambda *_: FREE_FORKS)
    monkeypatch.setattr(RunLayout, "from_segments", lambda *segments: counted(make(*segments)))
    batch = preference_pairs(side)
    keep = batch["attention_mask"].bool()

    def loss() -> Iterator[Tensor]:
        yield model(**batch).logits[keep].log_softmax(-1)[:, 3].sin().sum()

    model = tiny_hybrid(kind)
    with float64_throughout(model):
        truth = gradients_of(model, loss)
    share_prefixes(model)
    if checkpointing:
        model.gradient_checkpointing_enable()
    assert_exact(model, truth, loss)
    assert sharing_report(model).num_shared == 1 and kept == [3]


def test_without_a_mask_and_below_the_ratio(tiny_hybrid: Build) -> None:
    ids = torch.tensor([[*PROMPT, 4, 5], [*PROMPT, 6, 7], [*PROMPT, 6, 8]])
    stock = tiny_hybrid("Qwen3.5")
    for least, bits in ((1.1, False), (99.0, True)):
        model = share_prefixes(tiny_hybrid("Qwen3.5"), min_ratio=least)
        logits, expected = model(input_ids=ids).logits, stock(input_ids=ids).logits
        assert torch.equal(logits, expected) if bits else (logits - expected).norm() <= 1e-5 * expected.norm()
        assert mixers_in(model)[0].call is None


def test_generation(tiny_hybrid: Build) -> None:
    stock, model = (tiny_hybrid("Qwen3.5").eval() for _ in range(2))
    batch = preference_pairs("left")
    texts = [x.generate(**batch, max_new_tokens=6, do_sample=False) for x in (stock, share_prefixes(model))]
    assert torch.equal(*texts)
