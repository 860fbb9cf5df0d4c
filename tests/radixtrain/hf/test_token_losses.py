"""Which losses may train a batch of a `RadixCollator`: a mean for each row is refused, a sum over tokens is exact."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hybrids import FEATURES
from peft import LoraConfig, get_peft_model
from tiny_models import tiny_qwen3
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.trainer_pt_utils import LabelSmoother

from radixtrain import RadixCollator, prepare_model, restore_model
from radixtrain.errors import UserError
from radixtrain.hf.hooks import BackboneHooks
from radixtrain.hf.sharing_report import SharingReport
from radixtrain.testing import relative_error
from radixtrain.tree.radix_inputs import RADIX
from radixtrain.verification.oracle import float64_throughout, float64_truth, gradients_of

BATCH = RadixCollator()(FEATURES)
UNLABELLED = {name: value for name, value in BATCH.items() if name != "labels"}  # for compute_loss_func
KNOWN = r"no loss that is known .* RadixCollator\(token_loss=True\)"


def per_row(logits: Tensor) -> Tensor:
    """Of what it takes for rows: the mean over rows of the mean over tokens."""
    losses = cross_entropy(logits.mT, BATCH["shift_labels"], reduction="none")
    return (losses.sum(1) / (BATCH["shift_labels"] >= 0).sum(1)).mean()


def only_head(model: Any) -> Tensor:
    model.model.requires_grad_(False)
    return per_row(model(**BATCH).logits)


def with_adapters(model: Any) -> Any:
    return get_peft_model(model, LoraConfig(r=2, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"))


def loss_of_ones_own(model: Any) -> Tensor:
    model.loss_function = lambda logits, labels, **_: per_row(logits)
    return model(**BATCH).loss


def added(output: Any) -> Tensor:
    return output.loss + per_row(output.logits)


def after(output: Any) -> Tensor:
    output.loss.backward(retain_graph=True)
    return per_row(output.logits)


REFUSED: dict[str, Callable[[Any], Tensor]] = {
    "of logits": lambda model: per_row(model(**BATCH).logits),
    "as compute_loss_func": lambda model: per_row(model(**UNLABELLED).logits),
    "of hidden rows": lambda model: model.model(**UNLABELLED).last_hidden_state.square().mean(-1).sum(),
    "of a head": only_head,
    "with adapters": lambda model: per_row(with_adapters(model)(**BATCH).logits),
    "a loss_function": loss_of_ones_own,
    "beside the model's": lambda model: added(model(**BATCH)),
    "after the model's": lambda model: after(model(**BATCH)),
    "beside another batch": lambda model: model(**BATCH).loss + per_row(model(**BATCH).logits),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    loss = REFUSED[case](prepare_model(tiny_qwen3(tie_word_embeddings=False)))
    with pytest.raises(UserError, match=KNOWN):
        loss.backward()


@pytest.fixture
def head_rows(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """What the head was asked for, and what it computed, by the lazy rows themselves."""
    counts: list[tuple[int, int]] = []
    monkeypatch.setattr(BackboneHooks, "_count", lambda *batch: None)
    monkeypatch.setattr(SharingReport, "count_head", lambda self, *rows: counts.append(rows))
    return counts


def summed(logits: Tensor, batch: dict[str, Any]) -> Tensor:
    count = (batch["shift_labels"] >= 0).sum()
    return cross_entropy(logits[0], batch["shift_labels"][0], reduction="sum") / count


VOUCHED = RadixCollator(token_loss=True)(FEATURES)
EXACT: dict[str, Callable[[Any], Tensor]] = {
    "the model's": lambda model: model(**BATCH).loss,
    "divided by a number": lambda model: model(**BATCH, num_items_in_batch=7).loss * 7 / sum_of_labels(),
    "vouched for": lambda model: summed(model(**VOUCHED).logits, VOUCHED),
    "label smoothing of 0": lambda model: LabelSmoother(0.0)(model(**UNLABELLED), BATCH["labels"], shift_labels=True),
}


def sum_of_labels() -> int:
    return int((BATCH["shift_labels"] >= 0).sum())


@pytest.mark.parametrize("case", EXACT)
@pytest.mark.parametrize("copied", [False, True])
def test_exact(case: str, copied: bool, head_rows: list[tuple[int, int]]) -> None:
    """The head computes each row that predicts once, and the loss has one for each of the 56 labels."""
    model = tiny_qwen3()
    truth = float64_truth(model, FEATURES)
    prepare_model(model)
    model = copy.deepcopy(model) if copied else model
    with float64_throughout(model):
        found = gradients_of(model, lambda: [EXACT[case](model)])
    flat = [torch.cat([each.flatten() for each in arm.tensors.values()]) for arm in (found, truth)]
    assert relative_error(*flat) <= 1e-12
    assert head_rows == [(57, 21)]


def test_smoothed(head_rows: list[tuple[int, int]]) -> None:
    """Trainer's function on lazy logits, and on ordinary ones."""
    arms = []
    for token_loss in (False, True):
        model = prepare_model(tiny_qwen3())
        batch = {**UNLABELLED, RADIX: RadixCollator(token_loss=token_loss)(FEATURES)[RADIX]}

        def loss_of(model: Any = model, batch: Any = batch, whole: bool = token_loss) -> list[Tensor]:
            logits = model(**batch).logits
            logits = logits.clone() if whole else logits
            return [LabelSmoother(0.1)({"logits": logits}, BATCH["labels"], shift_labels=True)]

        with float64_throughout(model):
            arms.append(gradients_of(model, loss_of))
    flat = [torch.cat([each.flatten() for each in arm.tensors.values()]) for arm in arms]
    assert relative_error(*flat) <= 1e-12 and head_rows == [(57, 21)] * 2


def test_adapters_around_the_model() -> None:
    """PEFT calls the forward method of the model, and none of its hooks."""
    model = with_adapters(prepare_model(tiny_qwen3()))
    model(**BATCH).loss.backward()
    assert all(weight.grad is not None for weight in model.parameters() if weight.requires_grad)


def test_a_restored_model_has_its_own_loss() -> None:
    assert restore_model(prepare_model(tiny_qwen3())).loss_function is ForCausalLMLoss
