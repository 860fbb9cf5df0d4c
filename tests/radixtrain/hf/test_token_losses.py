"""Which losses may train a batch of a `RadixCollator`: what reads more than the labelled tokens is refused."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers.trainer_pt_utils import LabelSmoother
from trl.trainer.utils import add_fused_lm_head

from radixtrain import RadixCollator, share_prefixes
from radixtrain.errors import UserError
from radixtrain.tree.radix_inputs import RADIX
from radixtrain.verification.oracle import float64_throughout, float64_truth, gradients_of
from tests.support.models import tiny_qwen3, with_adapters
from tests.support.steps import FEATURES, same
from tests.support.trainers import padded_with_labels

BATCH = RadixCollator()(FEATURES)
UNLABELLED = {name: value for name, value in BATCH.items() if name != "labels"}  # for compute_loss_func
KNOWN = r"does not recognise as a sum over tokens.* a model that is not shared.* RadixCollator\(token_loss=True\)"


def per_row(logits: Tensor) -> Tensor:
    """Of what it takes for rows: the mean over rows of the mean over tokens."""
    losses = cross_entropy(logits.mT, BATCH["shift_labels"], reduction="none")
    return (losses.sum(1) / (BATCH["shift_labels"] >= 0).sum(1)).mean()


def only_head(model: Any) -> Any:
    model.model.requires_grad_(False)
    return model


def adapted(model: Any) -> Any:
    return with_adapters(model, target_modules="all-linear", init_lora_weights=False)


def smoothed(model: Any, batch: Any, factor: float) -> Any:
    """As Trainer's function has it."""
    logits = model(**{**UNLABELLED, RADIX: batch[RADIX]}).logits
    return LabelSmoother(factor)({"logits": logits}, BATCH["labels"], shift_labels=True)


def loss_of_ones_own(model: Any) -> Tensor:
    model.loss_function = lambda logits, labels, **_: per_row(logits)
    return model(**BATCH).loss


def around_the_backbone(shared: Any) -> Any:
    """A model that is not shared itself."""
    model = tiny_qwen3(seed=1, tie_word_embeddings=False)
    model.model = shared.model
    return model


def added(output: Any) -> Tensor:
    return output.loss + per_row(output.logits)


def after(output: Any) -> Tensor:
    output.loss.backward(retain_graph=True)
    return per_row(output.logits)


def in_parts(cut: Callable[[Tensor], Any]) -> Callable[[Any], Tensor]:
    """The model's own loss of parts of its logits."""

    def loss(model: Any) -> Tensor:
        logits = model(**{name: value for name, value in BATCH.items() if "labels" not in name}).logits
        pairs = zip(cut(logits), cut(BATCH["labels"]), strict=True)
        losses = torch.stack([model.loss_function(logits=x, labels=y, vocab_size=x.shape[-1]) for x, y in pairs])
        return losses.mean()

    return loss


REFUSED: dict[str, Callable[[Any], Tensor]] = {
    "of logits": lambda model: per_row(model(**BATCH).logits),
    "as compute_loss_func": lambda model: per_row(model(**UNLABELLED).logits),
    "of hidden rows": lambda model: model.model(**UNLABELLED).last_hidden_state.square().mean(-1).sum(),
    "of a head": lambda model: per_row(only_head(model)(**BATCH).logits),
    "with adapters": lambda model: per_row(adapted(model)(**BATCH).logits),
    "a loss_function": loss_of_ones_own,
    "Trainer's label smoothing": lambda model: smoothed(model, BATCH, 0.1),
    "of another model": lambda model: around_the_backbone(model)(**BATCH).loss,
    "beside the model's": lambda model: added(model(**BATCH)),
    "after the model's": lambda model: after(model(**BATCH)),
    "beside another batch": lambda model: model(**BATCH).loss + per_row(model(**BATCH).logits),
    "rows of zip": in_parts(lambda x: [each[None] for each in x]),
    "two chunks": in_parts(lambda x: [each.contiguous() for each in x.chunk(2, 1)]),
    "all, twice": in_parts(lambda x: [x, x]),
    "copied rows": in_parts(lambda x: [x[torch.tensor([0, 0])]]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    loss = REFUSED[case](share_prefixes(tiny_qwen3(tie_word_embeddings=False)))
    with pytest.raises(UserError, match=KNOWN):
        loss.backward()


def summed(logits: Tensor, batch: dict[str, Any]) -> Tensor:
    count = (batch["shift_labels"] >= 0).sum()
    return cross_entropy(logits.mT, batch["shift_labels"], reduction="sum") / count


VOUCHED = RadixCollator(token_loss=True)(FEATURES)
EXACT: dict[str, Callable[[Any], Tensor]] = {
    "the model's": lambda model: model(**BATCH).loss,
    "divided by a number": lambda model: model(**BATCH, num_items_in_batch=7).loss * 7 / sum_of_labels(),
    "of labels that were changed": lambda model: model(**{**BATCH, "shift_labels": BATCH["labels"]}).loss,
    "vouched for": lambda model: summed(model(**VOUCHED).logits, VOUCHED),
    "label smoothing of 0": lambda model: smoothed(model, VOUCHED, 0.0),
}


def sum_of_labels() -> int:
    return int((BATCH["shift_labels"] >= 0).sum())


@pytest.mark.parametrize("case", EXACT)
@pytest.mark.parametrize("copied", [False, True])
def test_exact(case: str, copied: bool) -> None:
    model = tiny_qwen3()
    truth = float64_truth(model, FEATURES)
    share_prefixes(model)
    model = copy.deepcopy(model) if copied else model
    with float64_throughout(model):
        same(truth, gradients_of(model, lambda: [EXACT[case](model)]))


PADDED = padded_with_labels(*([row[name] for row in FEATURES] for name in ("input_ids", "labels")), "right", pad=0)


Batch = dict[str, Any]


def of_trl(model: Any, batch: Batch) -> Any:
    add_fused_lm_head(model)
    return model(**batch, fused_lm_head=True)


def mean_of_rows(found: Any) -> Tensor:
    mask = found.label_mask.to(found.log_probs.dtype)
    return (-(found.log_probs * mask).sum(-1) / mask.sum(-1)).mean()


SAME: dict[str, Callable[[Any, Batch], Tensor]] = {
    "times the batch size": lambda model, batch: model(**batch).loss * batch["input_ids"].shape[0],
    "times the labels": lambda model, batch: model(**batch).loss * (batch["labels"] != -100).sum(),
    "squared": lambda model, batch: model(**batch).loss ** 2,
    "of a part of a step": lambda model, batch: model(**batch, num_items_in_batch=9).loss / 4 * 1024,
    "TRL": lambda model, batch: of_trl(model, batch).loss,
    "TRL, a mean for each row": lambda model, batch: mean_of_rows(of_trl(model, batch)),
    "TRL, the mean of DFT": lambda model, batch: (
        lambda found: -(found.log_probs * found.log_probs.exp().detach()).sum() / found.label_mask.sum()
    )(of_trl(model, batch)),
    "of a head, whose rows need no gradient": lambda model, batch: only_head(model)(**batch).loss,
    "with adapters, which call no hook of the model": lambda model, batch: adapted(model)(**batch).loss,
}


@pytest.mark.parametrize("case", SAME)
def test_the_loss_of_an_ordinary_batch(case: str) -> None:
    """A row of labels and logits is a sequence, and the ids have the shape of an ordinary batch."""
    arms = []
    for shared in (False, True):
        model = tiny_qwen3(tie_word_embeddings=False)
        batch = RadixCollator()(FEATURES) if shared else PADDED
        model = share_prefixes(model) if shared else model
        with float64_throughout(model):
            arms.append(gradients_of(model, lambda model=model, batch=batch: [SAME[case](model, dict(batch))]))
    same(*arms)
