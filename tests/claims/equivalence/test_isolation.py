"""A token changed in one branch leaves every other branch's logits, loss and log-probabilities bit-equal.

The same operations run on the same shapes, so bits are equal on every processor unless something leaks.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from radixtrain import RadixCollator, share_prefixes
from radixtrain.attention import EVERYWHERE
from radixtrain.hf.predicting_rows import inputs_of
from tests.support.models import tiny_qwen3

SHARED = [7, 8, 9, 10]
KEPT = [[1, 2, 3], [1, 2, 4, 5], [11]]
CHANGED = [20, 21, 22, 23]
NUM_KEPT = sum(len(SHARED) + len(tail) for tail in KEPT)


def logits_and_losses(model: Any, branch: list[int]) -> list[Tensor]:
    """Logits of every token of the kept branches, losses of their labels, and losses of the branch beside them."""
    batch = RadixCollator(loss_on_all=True)([{"input_ids": SHARED + tail} for tail in [*KEPT, branch]])
    labels, places = batch["shift_labels"].flatten(), batch["radix"].label_indices
    every_row = torch.arange(batch["radix"].layout.num_rows)
    with torch.no_grad():
        logits = model(**inputs_of(batch, predictor_indices=every_row)).logits[0]
        losses = torch.nn.functional.cross_entropy(model(**batch).logits.flatten(0, 1), labels, reduction="none")
    kept = batch["radix"].layout.inverse_indices[:NUM_KEPT]
    order = places.argsort()
    losses = losses[order[labels[order] >= 0]]
    num_kept = int(((places < NUM_KEPT) & (labels >= 0)).sum())
    return [logits[kept], losses[:num_kept], losses[num_kept:]]


@pytest.mark.parametrize("attention", EVERYWHERE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_isolation(attention: str, dtype: torch.dtype) -> None:
    model = share_prefixes(tiny_qwen3().to(dtype).eval(), attention=attention)
    *before, own = logits_and_losses(model, CHANGED)
    for place in range(len(CHANGED)):
        *after, changed = logits_and_losses(model, [*CHANGED[:place], 40, *CHANGED[place + 1 :]])
        assert all(map(torch.equal, before, after))
        assert place == 3 or own[-1] != changed[-1], "what follows in the branch changes, or this would prove nothing"
