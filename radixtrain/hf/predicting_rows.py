"""A batch -> the rows that predict, and what they predict: the one loss of training, `verify` and the benchmarks.

R rows that predict, P predictions, D hidden, V vocabulary. A row may predict several tokens: the last token of a shared
prompt predicts the first token of every completion.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from radixtrain.collators.misuse_guard import SHARED
from radixtrain.collators.steps import Step
from radixtrain.errors import TRAIN_WITHOUT_SHARING, UserError
from radixtrain.hf.backbone import Parts, parts_of, pretrained_model_of
from radixtrain.hf.guards.batch import check_only_cross_entropy
from radixtrain.hf.guards.code import code_in, is_hooked
from radixtrain.hf.head import has_plain_head, hidden_rows, is_padded, logits_rows
from radixtrain.loss import linear_cross_entropy, linear_logprobs, logits_cross_entropy, logits_logprobs
from radixtrain.tree.layout import sequences_of
from radixtrain.tree.radix_inputs import radix_of, with_radix


class Targets(NamedTuple):
    """What the rows predict.

    labels: (P,), int64. the tokens.
    rows: (P,), int64. which of the R rows predicts each.
    weights: (P,). how many original tokens each stands for, int64; or its loss weight, float32; 0 without loss.
    """

    labels: Tensor
    rows: Tensor
    weights: Tensor

    @classmethod
    def of(cls, batch: Mapping[str, Any]) -> Targets:
        """Read the targets of a batch of a `RadixCollator`, merged or not, or of a `PaddedCollator`."""
        radix = radix_of(batch)
        return cls(batch["shift_labels"].flatten().clamp(min=0), radix.prediction_rows, radix.loss_weights)


class PredictingRows(NamedTuple):
    """The rows that predict, and what they should predict.

    rows: (R, D), hidden rows for `head`; or (R, V), their logits.
    head: the matrix that is fused with the loss; None if `rows` are logits.
    """

    rows: Tensor
    head: nn.Linear | None
    targets: Targets

    def loss_sum(self) -> Tensor:
        """Sum the weighted cross-entropy over the labelled original tokens; float32 (float64 for a float64 model)."""
        if self.head is None:
            return logits_cross_entropy(self.rows, *self.targets)
        return linear_cross_entropy(self.rows, self.head.weight, *self.targets, self.head.bias)

    def logprobs(self) -> Tensor:
        """Return the log-probability of each prediction, (P,), whatever its weight; differentiable."""
        labels, rows, _ = self.targets
        if self.head is None:
            return logits_logprobs(self.rows, labels, rows)
        return linear_logprobs(self.rows, self.head.weight, labels, rows, self.head.bias)


def forward_rows(model: nn.Module, batch: Mapping[str, Any], plain_head: bool) -> PredictingRows:
    """Run the model on a batch.

    model: shared for a batch of a `RadixCollator`, untouched for one of a `PaddedCollator`.
    batch: on the device of the model.
    plain_head: `has_plain_head(model)`, computed once for each model.
    """
    inputs = inputs_of(batch, token_loss=True)
    parts = parts_of(model)
    if not is_padded(batch) and not hasattr(parts.backbone, SHARED):  # it would attend from row to row
        raise UserError(f"{parts.name} got a radix batch, but it is not shared: call radixtrain.share_prefixes(model)")
    check_around(model, parts)
    if plain_head:
        return PredictingRows(hidden_rows(parts, inputs), parts.head, Targets.of(batch))
    return PredictingRows(logits_rows(parts, inputs), None, Targets.of(batch))


def check_around(model: nn.Module, parts: Parts) -> None:
    """Refuse what a model or its wrapper does besides the parts: it would see the rows that predict, or nothing.

    That is code of a third party, unless it is declared `position_wise`, and the learned prompts of PEFT.

    model: as the user gave it, maybe a module around the Hugging Face model.
    """
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise UserError(
            f"{type(model).__name__} puts learned rows or keys before the tokens, and its {parts.name} is called "
            f"without them; {TRAIN_WITHOUT_SHARING}"
        )
    hooked = [each for each in (model, parts.base) if is_hooked(each)]
    reason = code_in(parts.base, parts.decoder, parts.head, [*hooked, parts.backbone]).refused if hooked else None
    if reason is not None:
        raise UserError(f"{parts.name}: {reason}; leave it out, or {TRAIN_WITHOUT_SHARING}")


def inputs_of(batch: Mapping[str, Any], **known: object) -> dict[str, Any]:
    """Return the model's inputs from a batch, for a loss computed outside the model. known: of `RadixInputs`."""
    labels = ("shift_labels", "labels")
    return with_radix({name: value for name, value in batch.items() if name not in labels}, place_rows=None, **known)


def labelled_logprobs(batch: Mapping[str, Any], logprobs: Tensor) -> list[tuple[int, int, float]]:
    """Return (sequence of the batch, label, log-probability) of every labelled token, in the order of the tokens.

    batch: not merged. logprobs: (P,), as `PredictingRows.logprobs` returns them.
    """
    labels, radix = batch["shift_labels"].flatten(), radix_of(batch)
    tokens = radix.label_indices
    assert tokens is not None, "merged"
    labelled = labels >= 0
    order = tokens[labelled].argsort(stable=True)
    columns = (
        column[labelled][order].tolist() for column in (sequences_of(tokens, radix.cu_seqlens), labels, logprobs)
    )
    return list(zip(*columns, strict=True))


def step_losses(model: nn.Module, step: Step) -> Iterator[Tensor]:
    """Yield the terms of the mean loss of an optimizer step; the gradient of the step is the sum of theirs.

    model: of `share_prefixes`, on the device of the step.
    step: what a `StepCollator` returned, with `merge_labels`.

    The loss is the cross-entropy. It is averaged over no ranks: with several, give this the model inside the wrapper of
    DDP, and average each `.grad` after the last `backward`.

    Call `backward` on each term before the next one is drawn, which frees its activations.
    Raises UserError for a model that adds to the cross-entropy or replaces it, as `output_router_logits` does, for
    hooks on a wrapper of the model, which is not called, for those of a third party on the model, and for the learned
    prompts of PEFT.

    >>> for loss in step_losses(share_prefixes(model), StepCollator(max_tokens=4096)(rows)):
    ...     loss.backward()
    """
    _check_model(model)
    plain_head = has_plain_head(model)
    for batch in step.micro_batches:
        yield forward_rows(model, batch, plain_head).loss_sum() / step.num_labels


def _check_model(model: nn.Module) -> None:
    try:
        base = pretrained_model_of(model)
    except TypeError:
        raise TypeError(
            f"step_losses takes a shared model, got {type(model).__name__}: give it the model inside (such as "
            f"ddp.module), and average each .grad over the ranks after the last backward"
        ) from None
    if model is not base and is_hooked(model):
        raise UserError(
            f"step_losses calls the {type(base).__name__} inside of {type(model).__name__}, so hooks on that one would "
            f"not run: register them on get_base_model(), and put torch.autocast around step_losses"
        )
    check_only_cross_entropy(model)
