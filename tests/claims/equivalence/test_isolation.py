"""A token changed in one branch leaves every other branch's logits, loss and log-probabilities bit-equal."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from radixtrain import RadixCollator, prepare_model
from radixtrain.attention import EVERYWHERE

SHARED = [7, 8, 9, 10]
KEPT = [[1, 2, 3], [1, 2, 4, 5], [11]]
CHANGED = [20, 21, 22, 23]


def batch_with(branch: list[int]) -> dict[str, Any]:
    """The kept branches, nested, and one more that ends the last of them or stands beside it."""
    tails = [*KEPT, branch]
    return RadixCollator(loss_on_all=True)([{"input_ids": SHARED + tail} for tail in tails])


def logits_of_kept(model: Any, branch: list[int]) -> Tensor:
    """Logits of every token of the kept branches, in packed order."""
    batch = batch_with(branch)
    kept = batch["radix_inverse_indices"][: sum(len(SHARED) + len(tail) for tail in KEPT)]
    targets = ("labels", "shift_labels", "radix_predictor_indices")
    with torch.no_grad():
        return model(**{name: value for name, value in batch.items() if name not in targets}).logits[0, kept]


def losses_of_kept(model: Any, branch: list[int]) -> Tensor:
    """The loss of every labelled token of the kept branches, by the loss list of the collator."""
    batch = batch_with(branch)
    of_kept = batch["radix_label_indices"] < sum(len(SHARED) + len(tail) for tail in KEPT)
    labels = batch["shift_labels"][0]
    with torch.no_grad():
        logits = model(**batch).logits[0]
    return torch.nn.functional.cross_entropy(logits, labels, reduction="none")[of_kept & (labels >= 0)]


@pytest.mark.parametrize("attention", EVERYWHERE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("place", range(len(CHANGED)))
def test_isolation(tiny_qwen3: Callable[..., Any], attention: str, dtype: torch.dtype, place: int) -> None:
    model = prepare_model(tiny_qwen3().to(dtype).eval(), attention=attention)
    other = [*CHANGED[:place], 40, *CHANGED[place + 1 :]]
    assert torch.equal(logits_of_kept(model, CHANGED), logits_of_kept(model, other))
    assert torch.equal(losses_of_kept(model, CHANGED), losses_of_kept(model, other))


def test_the_changed_branch_does_change(tiny_qwen3: Callable[..., Any]) -> None:
    """Or equal logits would prove nothing."""
    model = prepare_model(tiny_qwen3().eval())

    def of_changed(branch: list[int]) -> Tensor:
        batch = batch_with(branch)
        last = batch["radix_label_indices"].argmax()
        with torch.no_grad():
            return model(**batch).logits[0, last]

    assert not torch.equal(of_changed(CHANGED), of_changed([20, 40, 22, 23]))
