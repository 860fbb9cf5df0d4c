"""The numbers of a micro-batch, with what each of them is."""

from __future__ import annotations

from rich.table import Table

from radixtrain.inspection.micro_batch import MicroBatch
from radixtrain.inspection.runs import RunTree
from radixtrain.tree.layout import PREDICTOR_INDICES, PREFIX

__all__ = ["numbers"]


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
    computed = f"U, rows of the model; and {padding} of padding" if padding else "U, rows that the model computes"
    return [
        ("sequences", f"{len(part.samples):,}", f"from {num_rows:,} rows of the file"),
        ("tokens", f"{part.num_tokens:,}", "T, of all sequences"),
        ("computed tokens", f"{part.num_unique_tokens:,}", computed),
        ("r", f"{part.num_tokens / part.num_unique_tokens:.2f}", "T / U"),
        ("labelled tokens", f"{part.num_labels:,}", f"of {part.num_step_labels:,} in the step, which divide its loss"),
        ("distinct predictions", f"{batch['shift_labels'].numel():,}", "P, a row and the token it is asked for"),
        ("predicting rows", f"{batch[PREDICTOR_INDICES].numel():,}", "R, rows for which the head computes logits"),
        ("segments", f"{len(batch[PREFIX + 'segment_starts']) - 1:,}", "S, runs of rows without a branch"),
        ("depth", f"{len(batch[PREFIX + 'levels']) + 1:,}", "segments on the longest way through the tree"),
        ("roots", f"{len(tree.roots):,}", "different first tokens"),
    ]
