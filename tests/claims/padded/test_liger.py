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
from tests.support.models import tiny_qwen3

pytest.importorskip("liger_kernel", reason="pip install --no-deps liger-kernel")
from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss, _apply_liger_kernel_to_instance
from liger_kernel.transformers.functional import liger_cross_entropy

PROMPT = [7, 8, 9, 7, 5, 4, 3, 8, 9, 1, 2, 6]
IDS = torch.tensor([[*PROMPT, *end] for end in ([1, 2, 3, 4], [1, 2, 4, 0], [5, 6, 7, 8], [5, 9, 0, 0])])
MASK = (IDS != 0).long()
LABELS = IDS.masked_fill(MASK == 0, -100)
LABELS[:, : len(PROMPT)] = -100
BATCH = {"input_ids": IDS, "attention_mask": MASK}
LENGTHS = MASK.sum(1)
ONLY_HEAD = {"rope": False, "rms_norm": False, "swiglu": False, "fused_linear_cross_entropy": True}


def liger() -> Any:
    """As Trainer's `use_liger_kernel` does it, for the head only."""
    _apply_liger_kernel_to_instance(model=(model := tiny_qwen3()), **ONLY_HEAD)
    return model


def on_the_left(x: Tensor) -> Tensor:
    return torch.stack([row.roll(len(row) - length) for row, length in zip(x, LENGTHS.tolist(), strict=True)])


LEFT = {name: on_the_left(x) for name, x in BATCH.items()}


def of_the_model(labels: Tensor = LABELS, batch: dict[str, Tensor] = BATCH, **options: Any) -> Callable[[Any], Tensor]:
    return lambda model: model(**batch, labels=labels, use_cache=False, **options).loss


def by_hand(**options: Any) -> Callable[[Any], Tensor]:
    """Liger's module on the hidden states, in a loop of the user's own; in float64 torch's function."""

    def loss_of(model: Any) -> Tensor:
        hidden = model.model(**BATCH, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)
        labels = LABELS[:, 1:].flatten()
        if hidden.dtype == torch.float64:
            loss = torch.nn.functional.cross_entropy(model.lm_head(hidden), labels, **options)
        else:
            loss = LigerFusedLinearCrossEntropyLoss(**options)(model.lm_head.weight, hidden, labels)
        return 0.3 * loss.sum()

    return loss_of


def in_bfloat16(model: Any) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=model.dtype != torch.float64):
        return of_the_model()(model)


CASES: dict[str, Callable[[Any], Tensor]] = {
    "mean": of_the_model(),
    "padding on the left": of_the_model(on_the_left(LABELS), LEFT),
    "items of a step": of_the_model(num_items_in_batch=torch.tensor(50)),
    "bfloat16": in_bfloat16,
    "by hand": by_hand(),
    "each by hand": by_hand(reduction="none"),
    "smoothed": by_hand(label_smoothing=0.1),
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
        of_the_model(IDS)(share_prefixes(liger())).backward()


@pytest.mark.parametrize("ids", [IDS, IDS[:1].repeat(1, 2)], ids=["alike", "one row"])
def test_a_batch_of_the_collator(monkeypatch, ids):
    """It has a row for each label, and Liger's own kernel gets them."""
    from liger_kernel.ops import fused_linear_cross_entropy as module

    mask = ids != 0
    expected = gradient_of(liger(), of_the_model(ids.masked_fill(~mask, -100), {"input_ids": ids}))
    forward, rows = module.fused_linear_cross_entropy_forward, []
    monkeypatch.setattr(module, "fused_linear_cross_entropy_forward", spy(forward, rows))
    features = [{"input_ids": row[:length].tolist()} for row, length in zip(ids, mask.sum(1), strict=True)]
    collated = RadixCollator(loss_on_all=True)(features)
    found = gradient_of(share_prefixes(liger()), lambda model: model(**collated).loss)
    assert len(rows) == 1
    torch.testing.assert_close(found, expected)


def spy(forward: Callable[..., Any], rows: list[int]) -> Callable[..., Any]:
    def spied(_input: Tensor, *others: Any, **options: Any) -> Any:
        rows.append(len(_input))
        return forward(_input, *others, **options)

    return spied
