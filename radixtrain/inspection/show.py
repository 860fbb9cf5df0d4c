"""`radixtrain inspect`: a micro-batch as a tree, its numbers, and its index arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text
from torch import Tensor

from radixtrain.data.datamodule import SFTData
from radixtrain.data.tokens.tokenization import load_tokenizer
from radixtrain.errors import UserError
from radixtrain.inspection.micro_batch import MicroBatch, micro_batch_of
from radixtrain.inspection.picture import asked_for, draw
from radixtrain.inspection.row import row_stages
from radixtrain.inspection.runs import RunTree, run_tree
from radixtrain.inspection.tokens import LOSS
from radixtrain.tree.layout import PREDICTOR_INDICES, PREFIX

__all__ = ["index_arrays", "numbers", "show"]

MOST_STRAYS = 8
AXES = (
    "T tokens of all sequences, back to back; U rows, the unique tokens; B sequences; S segments, runs of rows without "
    "a branch; P distinct predictions; R rows that predict; E sequences that bring new rows."
)
MEANINGS = {
    "input_ids": "[1, U] the token of each row, depth first",
    "position_ids": "[1, U] its place in its sequence",
    "shift_labels": "[1, P] the token that each prediction asks for",
    "radix_predictor_indices": "[R] the row that each predictor is",
    "radix_prediction_rows": "[P] which of the R predictors each prediction belongs to",
    "radix_loss_weights": "[P] what the cross-entropy of each prediction counts: how many original tokens, or a weight",
    "radix_label_indices": "[P] the original token that each prediction is, if loss weights were given",
    "radix_old_logprobs": "[P] log-probability of each label by the policy that sampled it",
    "radix_advantages": "[P] the advantage of each label",
    "radix_gather_indices": "[U] the original token that each row is: its first occurrence",
    "radix_inverse_indices": "[T] the row of each original token",
    "radix_cu_seqlens": "[B + 1] where each sequence begins among the T tokens",
    "radix_segment_starts": "[S + 1] the first row of each segment",
    "radix_subtree_ends": "[S] one past the last row below each segment; row q sees row k iff k <= q < its end",
    "radix_path_keys": "the rows of all paths, back to back, for attention along paths",
    "radix_path_cu_seqlens_q": "[E + 1] where the new rows of each path begin",
    "radix_path_cu_seqlens_k": "[E + 1] where each path begins in radix_path_keys",
    "radix_level_queries": "rows below the branches of each level that has several, for attention level by level",
    "radix_level_keys": "rows of those branches",
    "radix_level_cu_seqlens_q": "bounds of the queries of each branch, level by level",
    "radix_level_cu_seqlens_k": "bounds of the keys of each branch, level by level",
    "radix_levels": "for each level: branches, longest queries, longest keys, and where they begin",
    "radix_max_seqlen": "longest sequence, in tokens",
    "radix_max_segment": "longest segment, in rows",
    "radix_max_new_tokens": "most new rows of a path",
    "radix_max_path": "longest path",
    "radix_max_position": "largest position",
    "radix_strategy": "the attention strategy that costs least",
    "radix_min_shared_tokens": "the smallest branch that it chose",
    "radix_left_padded": "1 if positions count without the padding on the left",
}


def show(
    data: SFTData,
    console: Console,
    step: int = 0,
    micro_batch: int = 0,
    row: int | str | None = None,
    indices: bool = False,
    full: bool = False,
) -> None:
    """Print a micro-batch of the first epoch; or one row, if it is given. Reads the tokenizer, not the weights.

    data: needs no `setup`. The other arguments: see `Trainer.inspect`.

    Raises UserError if there is no such step, micro-batch or row, and as `SFTData.setup`.
    """
    for name, index in (("step", step), ("micro_batch", micro_batch)):
        if index < 0:
            raise UserError(f"{name} counts from 0, got {index}")
    shown = row_stages(data, row, full) if row is not None else _micro_batch(data, step, micro_batch, indices, full)
    for part in shown:
        console.print(part, highlight=False)


def _micro_batch(data: SFTData, step: int, index: int, indices: bool, full: bool) -> Iterator[RenderableType]:
    data.setup("inspect")
    part = micro_batch_of(data, step, index)
    tree = run_tree(part, load_tokenizer(data.hparams.model_name_or_path))
    yield _title(part)
    yield numbers(part, tree)
    if data.hparams.min_shared_tokens == "auto":
        yield Text("data.min_shared_tokens is auto: fit may leave out small branches", style="dim")
    yield _legend()
    yield draw(tree, [sample.where for sample in part.samples], full)
    yield from _strays(tree)
    if indices:
        yield Text("\narrays", style="bold")
        yield index_arrays(part.batch, full)


def _title(part: MicroBatch) -> Text:
    places = f"step {part.step} of {part.num_steps}, micro-batch {part.index} of {part.num_micro_batches}"
    return Text.assemble((places, "bold"), (", counted from 0", "dim"))


def _legend() -> Text:
    return Text.assemble(
        ("\n×3 sequences that pass   ", "dim"),
        ("⟦loss⟧", LOSS),
        ("×2 that learn it, if not all   ↵ line break   ⋯ left out\n", "dim"),
    )


def _strays(tree: RunTree) -> Iterator[Text]:
    """Predictions that the picture does not show."""
    for one in tree.strays[:MOST_STRAYS]:
        yield Text(
            f"token {one.row} predicts {asked_for(one)}, which no sequence has next: labels may differ from input_ids"
        )
    if len(tree.strays) > MOST_STRAYS:
        yield Text(f"and {len(tree.strays) - MOST_STRAYS:,} more of these")


def numbers(part: MicroBatch, tree: RunTree) -> Table:
    """A line for each number: its name, its value, its meaning."""
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right", style="bold")
    table.add_column(style="dim")
    for name, value, meaning in _lines(part, tree):
        table.add_row(name, value, meaning)
    return table


def _lines(part: MicroBatch, tree: RunTree) -> list[tuple[str, str, str]]:
    batch, padding = part.batch, part.num_padding
    num_rows = len({sample.where for sample in part.samples})
    computed = f"U, unique tokens; and {padding} of padding" if padding else "U, unique tokens"
    return [
        ("sequences", f"{len(part.samples):,}", f"from {num_rows:,} rows of the file"),
        ("tokens", f"{part.num_tokens:,}", "T, of all sequences"),
        ("computed tokens", f"{part.num_unique_tokens:,}", computed),
        ("r", f"{part.num_tokens / part.num_unique_tokens:.2f}", "T / U"),
        ("labelled tokens", f"{part.num_labels:,}", f"of {part.num_step_labels:,} in the step, which divide its loss"),
        ("distinct predictions", f"{batch['shift_labels'].numel():,}", "P, a token and the one it is asked for"),
        ("predicting tokens", f"{batch[PREDICTOR_INDICES].numel():,}", "R, those that the head computes logits for"),
        ("segments", f"{len(batch[PREFIX + 'segment_starts']) - 1:,}", "S, runs of tokens without a branch"),
        ("depth", f"{len(batch[PREFIX + 'levels']) + 1:,}", "segments on the longest way through the tree"),
        ("roots", f"{len(tree.roots):,}", "different first tokens"),
    ]


FIRST, LAST = 10, 4  # values of an array that is shortened


def index_arrays(batch: Mapping[str, Any], full: bool = False) -> Text:
    """A legend, and every entry of a batch. full: all values; otherwise the first and the last ones.

    Raises KeyError for an entry that has no line in `MEANINGS`.
    """
    text = Text.assemble((AXES, "dim"), "\n")
    for name, value in batch.items():
        text.append(f"\n{name}", style="bold").append(f"  {_kind(value)}  ").append(MEANINGS[name], style="dim")
        text.append(f"\n    {' '.join(_values(value, full))}")
    return text


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return "ints" if isinstance(value, tuple) else type(value).__name__


def _values(value: Any, full: bool) -> Iterator[str]:
    values = torch.flatten(value).tolist() if isinstance(value, Tensor) else value
    values = list(values) if isinstance(values, list | tuple) else [values]
    is_long = not full and len(values) > FIRST + LAST
    for place, each in enumerate(values):
        if is_long and place == FIRST:
            yield f"⋯ {len(values) - FIRST - LAST:,} more ⋯"
        if not is_long or place < FIRST or place >= len(values) - LAST:
            yield f"{each:.4g}" if isinstance(each, float) else str(each)
