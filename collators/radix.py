"""`RadixCollator`: features of any length -> one flat radix batch. NumPy until the last step, no device.

It is a `data_collator` for a Hugging Face `Trainer`, TRL's `SFTTrainer`, Lightning or a plain `DataLoader`, and runs
in their workers.

A unique row may have several next tokens, one per child: the last token of a shared prompt predicts the first token of
every completion. So the loss is a list of predictions and not a shifted copy of the input. T packed tokens, P
predictions.

    sequence 0    7  8  9         labels  -100  -100   9        row of 8 is 1
    sequence 1    7  8  5         labels  -100  -100   5        the same row
    predictions   (row 1 -> 9), (row 1 -> 5)

A label that several sequences share counts once for each of them, as an ordinary trainer sums over rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from radixtrain.collators.features import check_no_weights, packed, token_rows
from radixtrain.collators.misuse_guard import check_not_dispatched, start_watch
from radixtrain.collators.token_row import IGNORE_INDEX, FloatArray, TokenRow
from radixtrain.errors import UserError
from radixtrain.tree.arrays import IntArray
from radixtrain.tree.layout import TreeLayout
from radixtrain.tree.plan import build_prefix_plan
from radixtrain.tree.radix_inputs import RADIX, RadixInputs


@dataclass(frozen=True, kw_only=True)
class RadixCollator:
    """Collate token sequences into a batch of their unique tokens.

    min_shared_tokens: a branch point that saves fewer tokens than this gets no branch; see `build_prefix_plan`.
    pad_to_multiple_of: pad the unique tokens to a multiple of this many.
    merge_labels: False for a model that computes its own loss: one prediction per original labelled token, in a row of
        logits for each sequence. True for radixtrain's own loss: identical predictions merged and weighted, one hidden
        row per distinct predictor.
    token_loss: True vouches that a loss of your own reads only labelled tokens: a sum, or a mean for each sequence. By
        default the backward pass refuses any loss that the model did not compute itself, because all other tokens, and
        the length of a padded row, are not in the batch.
    loss_on_all: True to train every token of a feature that has neither labels nor a loss mask; otherwise such a
        feature is refused, because a trainer may have dropped its mask.

    Called with `[{"input_ids": [...], "labels": [...]}, ...]`. Of each feature it reads these lists, arrays or tensors,
    (L,), integers:

    input_ids: the tokens of one sequence. The first one is never predicted, and so bears no loss.
    labels: not shifted, -100 bears no loss. If they are given, the loss masks are not read.
    completion_mask, assistant_masks, mask: 0/1, instead of labels; a token bears loss if all that are given are 1.
    attention_mask: all 1, as tokenizers return it without padding.
    position_ids: by default they count from 0.

    and, with `merge_labels`, floats, (L,), read as float32 and aligned with the labels:

    loss_weights, or weights: a factor of each label's cross-entropy; may be negative. By default 1.

    Text, None, dicts, dates and lists of those are ignored, and so are the numbers named in
    `radixtrain.collators.features.HARMLESS`. Any other entry is refused, because a model that reads it, such as one
    with `token_type_ids` or `pixel_values`, would have a different gradient.

    Returns

    input_ids: [B, L], int64. as wide as the longest sequence, so that whoever reads the size of the batch finds that of
        an ordinary one. Read from row to row, they are the U unique tokens in depth-first order, then copies of these.
    labels: [B, P / B], int64. the labels of each sequence in a row of its own, filled up with -100, which its first and
        last entry are too. P / B never equals L: if it would, another column is added, so that a model that was not
        shared raises on the shapes instead of training on nonsense.
    shift_labels: [B, P / B], int64. the same after the shift: `labels[:, 1:] == shift_labels[:, :-1]`. The logits that
        the model returns, [B, P / B, V], predict these.
    position_ids: [1, U], int64.
    radix: a `radixtrain.tree.radix_inputs.RadixInputs`: the plan, and which unique row predicts each entry of
        `shift_labels`. It has `.to` and `.pin_memory`, as a tensor.

    There is no `attention_mask`. With `merge_labels` there are no `labels`, `input_ids` are [1, U] and `shift_labels`
    [1, P]: each of the R predictors is there once, and equal predictions of it are one entry, whose weight is the
    number of original tokens. If some feature has loss weights, only predictors are merged, so that each entry is one
    original token, `radix.label_indices` of all features back to back: by these a loss of your own finds what else
    belongs to a token, such as an advantage.

    The loss is `sum_p w_p cross_entropy_p`, to be divided by the number of labelled tokens, whatever their weights:
    those may add up to nothing. `radixtrain.loss` computes it.

    >>> first = {"input_ids": [7, 8, 9], "labels": [-100, -100, 9]}
    >>> second = {"input_ids": [7, 8, 5], "labels": [-100, -100, 5]}
    >>> batch = RadixCollator()([first, second])
    >>> batch["input_ids"].tolist(), batch["position_ids"].tolist()
    ([[7, 8, 5], [9, 7, 8]], [[0, 1, 2, 2]])
    >>> batch["labels"].tolist(), batch["shift_labels"].tolist()
    ([[-100, 9], [-100, 5]], [[9, -100], [5, -100]])
    >>> batch["radix"].predictor_indices, batch["radix"].prediction_rows
    (tensor([1]), tensor([0, 0, 0, 0]))

    Raises ValueError that names the feature and its entry for: no labels and no loss mask; an entry that it would have
    to drop; entries that are not lists of integers or differ in length; an empty sequence, and one that another packer
    has filled with several; padding; loss weights without `merge_labels`, which the model's own loss would ignore.
    """

    min_shared_tokens: int = 1
    pad_to_multiple_of: int | None = None
    merge_labels: bool = False
    loss_on_all: bool = False
    token_loss: bool = False

    def __new__(cls, *args: object, **options: object) -> RadixCollator:
        if args:
            raise UserError(
                f"RadixCollator takes options by keyword only, and no tokenizer, got {type(args[0]).__name__}: write "
                f"RadixCollator(), for rows that have input_ids"
            )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        start_watch()

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        check_not_dispatched()
        return self.collate(token_rows(features, self.loss_on_all))

    def collate(self, arrays: Sequence[TokenRow]) -> dict[str, Any]:
        """Collate features that have been read."""
        if not self.merge_labels:
            check_no_weights(arrays)
        ids, labels, cu_seqlens, positions, weights = packed(arrays)
        plan = build_prefix_plan(
            ids,
            cu_seqlens,
            positions,
            min_shared_tokens=self.min_shared_tokens,
            pad_to_multiple_of=self.pad_to_multiple_of,
        )
        predictions = list_predictions(labels, weights, cu_seqlens, plan.inverse_indices)
        layout = TreeLayout.from_plan(plan)
        if self.merge_labels:
            shape = 1, plan.num_rows
            targets, of_predictions = targets_in_one_row(predictions, is_merged=weights is None)
        else:
            shape = layout.batch_shape
            targets, of_predictions = _targets_by_sequence(predictions, cu_seqlens, shape[1])
        of_layout = {"host": layout.host, "plan": layout.rows, "cu_seqlens": layout.cu_seqlens}
        token_loss = self.token_loss or self.merge_labels
        return {
            "input_ids": torch.from_numpy(np.resize(ids[plan.gather_indices], shape)),
            **targets,
            "position_ids": torch.tensor(plan.position_ids, device="cpu")[None],
            RADIX: RadixInputs.of(**of_layout, **of_predictions, token_loss=token_loss),
        }


class Predictions(NamedTuple):
    """The prediction list.

    predictor_indices: (P,), int64. the unique row that predicts, ascending.
    labels: (P,), int64. the token to predict.
    label_indices: (P,), int64. the packed token that bears the label; of a merged entry, the first one.
    weights: (P,). how many original labelled tokens the entry stands for, int64; or its loss weight, float32.
    """

    predictor_indices: IntArray
    labels: IntArray
    label_indices: IntArray
    weights: IntArray | FloatArray


def list_predictions(
    labels: IntArray, weights: FloatArray | None, cu_seqlens: IntArray, row_of_token: IntArray
) -> Predictions:
    """List one entry per original labelled token.

    labels: (T,), int64, packed and unshifted as in Hugging Face: `labels[t]` is predicted from token t - 1 of the same
        sequence; `IGNORE_INDEX` bears no loss, and neither does the first token of a sequence.
    weights: (T,), of the same tokens; None if each counts 1.
    cu_seqlens: (B+1,), of sequences that are not empty. row_of_token: (T,), the row that each token is.
    """
    predicted = labels != IGNORE_INDEX
    predicted[cu_seqlens[:-1]] = False
    tokens = np.flatnonzero(predicted)
    predictors = row_of_token[tokens - 1]
    order = np.argsort(predictors, kind="stable")
    tokens = tokens[order]
    counted = np.ones(len(tokens), dtype=np.int64) if weights is None else weights[tokens]
    return Predictions(predictors[order], labels[tokens], tokens, counted)


def _merged(predictions: Predictions) -> Predictions:
    """Merge identical (row, label) pairs into one entry that stands for all of them."""
    order = np.lexsort((predictions.labels, predictions.predictor_indices))
    rows, labels, tokens = (array[order] for array in predictions[:3])
    is_first = np.ones(len(rows), dtype=bool)
    is_first[1:] = (rows[1:] != rows[:-1]) | (labels[1:] != labels[:-1])
    first = np.flatnonzero(is_first)
    return Predictions(rows[first], labels[first], tokens[first], np.add.reduceat(predictions.weights[order], first))


Targets = tuple[dict[str, Tensor], dict[str, Any]]  # entries of a batch; and fields of its `RadixInputs` about them


def _targets_by_sequence(predictions: Predictions, cu_seqlens: IntArray, other_width: int) -> Targets:
    """Make one prediction per original labelled token, for any head and loss of the model, in a row for each sequence.

    So a mean for each row is that of an ordinary batch. Each row ends with an ignored prediction, so that a loss that
    shifts `labels` itself sees the same pairs. other_width: which it must not have.
    """
    tokens, num_sequences = predictions.label_indices, len(cu_seqlens) - 1
    sequences = np.searchsorted(cu_seqlens, tokens, side="right") - 1
    order = np.argsort(tokens)
    counts = np.bincount(sequences, minlength=num_sequences)
    width = int(counts.max()) + 1
    width += width == other_width
    places = np.empty_like(tokens)
    places[order] = sequences[order] * width + np.arange(len(tokens)) - (counts.cumsum() - counts)[sequences[order]]

    def placed(values: IntArray | int, rest: int) -> IntArray:
        found = np.full(num_sequences * width, rest)
        found[places] = values
        return found

    predictors, rows = np.unique(predictions.predictor_indices, return_inverse=True)
    shift_labels = placed(predictions.labels, IGNORE_INDEX).reshape(num_sequences, width)
    fields = {
        "predictor_indices": predictors if len(tokens) else np.zeros(1, dtype=np.int64),
        "prediction_rows": placed(rows, 0),
        "loss_weights": placed(1, 0),
        "label_indices": placed(tokens, 0),
    }
    labels = {"labels": np.roll(shift_labels, 1, axis=1), "shift_labels": shift_labels}
    return _tensors(labels), {**_tensors(fields), "place_rows": placed(rows, -1).reshape(shift_labels.shape)}


def targets_in_one_row(predictions: Predictions, is_merged: bool) -> Targets:
    """Merge equal predictors, for `radixtrain.loss`.

    is_merged: merge equal predictions too. Not if one has a weight of its own: that would round the sum of two weights,
        which the loss adds in its own dtype. It would also save little, since the head runs once for each predictor
        anyway: 64 copies of each prediction took the loss 2 % more time (1,024 rows, V = 32,000, D = 512).
    """
    listed = _merged(predictions) if is_merged else predictions
    is_first = np.diff(listed.predictor_indices, prepend=-1) > 0
    fields = {
        "predictor_indices": listed.predictor_indices[is_first],
        "prediction_rows": is_first.cumsum() - 1,
        "loss_weights": listed.weights,  # counts stay integers, so that no trainer's precision rounds them
        **({} if is_merged else {"label_indices": listed.label_indices}),
    }
    return _tensors({"shift_labels": listed.labels[None]}), _tensors(fields)


def _tensors(arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}
