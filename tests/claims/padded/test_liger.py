"""Liger's fused head and loss after `share_prefixes`: it gets every place of a shared call.

On a CPU Triton interprets Liger's kernels (TRITON_INTERPRET=1); weights of tokens and softcaps it cannot.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from radixtrain import RadixCollator, share_prefixes, sharing_report
from radixtrain.errors import UserError
from radixtrain.testing import assert_within_reference_error, relative_error
from radixtrain.verification.oracle import float64_arithmetic
from tests.claims.mistakes import plant
from tests.support.models import tiny_qwen3
from tests.support.trainers import padded_with_labels

pytest.importorskip("liger_kernel", reason="pip install --no-deps liger-kernel")
from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss, _apply_liger_kernel_to_instance
from liger_kernel.transformers.functional import liger_cross_entropy

PROMPT = [7, 8, 9, 7, 5, 4, 3, 8, 9, 1, 2, 6]
ENDS = [[1, 2, 3, 4], [1, 2, 4], [5, 6, 7, 8], [5, 9]]
ROWS = [[*PROMPT, *end] for end in ENDS]
RIGHT, LEFT = (
    padded_with_labels(ROWS, [[-100] * len(PROMPT) + end for end in ENDS], side, 0) for side in ("right", "left")
)
ONLY_HEAD = {"rope": False, "rms_norm": False, "swiglu": False, "fused_linear_cross_entropy": True}


def liger() -> Any:
    """As Trainer's `use_liger_kernel` does it, for the head only."""
    _apply_liger_kernel_to_instance(model=(model := tiny_qwen3()), **ONLY_HEAD)
    return model


def of_the_model(batch: dict[str, Tensor] = RIGHT, **options: Any) -> Callable[[Any], Tensor]:
    return lambda model: model(**batch, use_cache=False, **options).loss


def by_hand(model: Any) -> Tensor:
    """Liger's module on the hidden states, in a loop of the user's own; in float64 torch's function."""
    inputs = {name: x for name, x in RIGHT.items() if name != "labels"}
    hidden = model.model(**inputs, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)
    labels = RIGHT["labels"][:, 1:].flatten()
    if hidden.dtype == torch.float64:
        return 0.3 * torch.nn.functional.cross_entropy(model.lm_head(hidden), labels)
    return 0.3 * LigerFusedLinearCrossEntropyLoss()(model.lm_head.weight, hidden, labels)


def in_bfloat16(model: Any) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=model.dtype != torch.float64):
        return of_the_model()(model)


CASES: dict[str, Callable[[Any], Tensor]] = {
    "mean": of_the_model(),
    "padding on the left": of_the_model(LEFT),
    "items of a step": of_the_model(num_items_in_batch=torch.tensor(50)),
    "bfloat16": in_bfloat16,
    "by hand": by_hand,
}


def gradient_of(model: Any, loss_of: Callable[[Any], Tensor]) -> list[Tensor]:
    loss = loss_of(model)
    loss.backward()
    return [loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])]


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient(name):
    """As near to torch's in float64 as on the untouched model."""
    loss_of = CASES[name]
    ordinary, shared = gradient_of(liger(), loss_of), gradient_of(model := share_prefixes(liger()), loss_of)
    assert sharing_report(model).num_shared == 1
    exact = tiny_qwen3().double()
    with float64_arithmetic():
        truth = gradient_of(exact, loss_of)
    assert relative_error(ordinary[1], truth[1]) < (0.1 if name == "bfloat16" else 1e-5)
    assert_within_reference_error(shared[1], ordinary[1], truth[1], names=name)
    torch.testing.assert_close(shared[0], ordinary[0], rtol=1e-2 if name == "bfloat16" else 1e-6, atol=0)


def test_only_its_cross_entropy(monkeypatch):
    """Liger puts it in the place of torch's. It overwrites the logits that it gets with their gradient."""
    monkeypatch.setattr(torch.nn.functional, "cross_entropy", liger_cross_entropy)
    expected, found = (gradient_of(share(tiny_qwen3()), of_the_model()) for share in (lambda x: x, share_prefixes))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_a_label_of_padding_is_refused():
    with pytest.raises(UserError, match="places that attention_mask hides"):
        of_the_model({**RIGHT, "labels": RIGHT["input_ids"]})(share_prefixes(liger())).backward()


@pytest.mark.parametrize("rows", [ROWS, [ROWS[0] * 2]], ids=["alike", "one row"])
def test_a_batch_of_the_collator(monkeypatch, rows):
    """It has a row for each label, and Liger's own kernel gets them."""
    from liger_kernel.ops import fused_linear_cross_entropy as module

    expected, calls = gradient_of(liger(), of_the_model(padded_with_labels(rows, rows, "right", 0))), []
    counted = lambda real, *args, **options: (calls.append(real), real(*args, **options))[1]  # noqa: E731
    plant(monkeypatch, module, "fused_linear_cross_entropy_forward", counted)
    collated = RadixCollator(loss_on_all=True)([{"input_ids": row} for row in rows])
    found = gradient_of(share_prefixes(liger()), lambda model: model(**collated).loss)
    assert len(calls) == 1
    torch.testing.assert_close(found, expected)
