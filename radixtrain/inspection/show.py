"""`radixtrain inspect`: a micro-batch as a tree, and its numbers."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from radixtrain.data.step_data import StepData
from radixtrain.errors import UserError
from radixtrain.inspection.picture import asked_for, draw
from radixtrain.inspection.row import row_stages
from radixtrain.inspection.runs import MicroBatch, RunTree, micro_batches, run_tree
from radixtrain.inspection.tokens import LOSS
from radixtrain.tree.radix_inputs import layout_of, radix_of

MOST_STRAYS = 8
LEGEND = Text.assemble(
    ("\n×3 sequences that pass   ", "dim"),
    ("⟦loss⟧", LOSS),
    ("×2 that learn it, if not all   ↵ line break   ⋯ left out\n", "dim"),
)


def show(
    data: StepData,
    console: Console,
    step: int = 0,
    micro_batch: int = 0,
    row: int | str | None = None,
    full: bool = False,
) -> None:
    """Print a micro-batch of the first epoch; or one row, if it is given. Reads the tokenizer, not the weights.

    data: needs no `setup`. The other arguments: see `Inspect`.

    Raises UserError if there is no such step, micro-batch or row, and as `StepData.setup`.
    """
    for name, index in (("step", step), ("micro_batch", micro_batch)):
        if index < 0:
            raise UserError(f"{name} counts from 0, got {index}")
    shown = row_stages(data, row, full) if row is not None else _micro_batch(data, step, micro_batch, full)
    for part in shown:
        console.print(part, highlight=False)


def _micro_batch(data: StepData, step: int, index: int, full: bool) -> Iterator[RenderableType]:
    data.setup("inspect")
    parts = micro_batches(data, step)
    if index >= len(parts):
        raise UserError(f"micro_batch: step {step} has the micro-batches 0 to {len(parts) - 1}, got {index}")
    part = parts[index]
    tree = run_tree(part, data.tokenizer())
    yield Text.assemble((part.place, "bold"), (", counted from 0", "dim"))
    yield numbers(part, tree)
    if data.settings.min_shared_tokens == "auto":
        yield Text("data.min_shared_tokens is auto: fit may leave out small branches", style="dim")
    is_one = len(parts) == 1 and part.batch["input_ids"].numel() <= data.settings.max_tokens
    if data.settings.share_across_micro_batches and not is_one:
        yield Text("data.share_across_micro_batches: fit may compute shared prefixes once, in other parts", style="dim")
    yield LEGEND
    yield draw(tree, [sample.where for sample in part.samples], full)
    yield from _strays(tree)


def _strays(tree: RunTree) -> Iterator[Text]:
    """Predictions that the picture does not show."""
    for one in tree.strays[:MOST_STRAYS]:
        yield Text(
            f"token {one.row} predicts {asked_for(one)}, which no sequence has next: labels may differ from input_ids"
        )
    if len(tree.strays) > MOST_STRAYS:
        yield Text(f"and {len(tree.strays) - MOST_STRAYS:,} more of these")


def _ratios(part: MicroBatch) -> Iterator[tuple[str, str, str]]:
    """r, and if chats are split the other one."""
    of_rows, num_whole = f"{part.num_tokens / part.num_unique_tokens:.2f}", part.num_whole_tokens
    if num_whole == part.num_tokens:
        yield "r", of_rows, "T / U"
    else:
        yield "r", f"{num_whole / part.num_unique_tokens:.2f}", f"against the {num_whole:,} tokens of whole chats"
        yield "r, same rows", of_rows, "T / U, each turn with all that precedes it"


def numbers(part: MicroBatch, tree: RunTree) -> Table:
    """A line for each number: its name, its value, its meaning."""
    batch, layout, padding = part.batch, layout_of(part.batch), part.num_padding
    num_rows = len({sample.where for sample in part.samples})
    computed = f"U, unique tokens; and {padding} of padding" if padding else "U, unique tokens"
    lines = [
        ("sequences", f"{len(part.samples):,}", f"from {num_rows:,} rows of the file"),
        ("tokens", f"{part.num_tokens:,}", "T, of all sequences"),
        ("computed tokens", f"{part.num_unique_tokens:,}", computed),
        *_ratios(part),
        ("labelled tokens", f"{part.num_labels:,}", f"of {part.num_step_labels:,} in the step, which divide its loss"),
        ("distinct predictions", f"{batch['shift_labels'].numel():,}", "P, a token and the one it is asked for"),
        (
            "predicting tokens",
            f"{len(radix_of(batch).predictor_indices):,}",
            "R, those that the head computes logits for",
        ),
        ("segments", f"{layout.subtree_ends.numel():,}", "S, runs of tokens without a branch"),
        ("depth", f"{len(layout.levels) + 1:,}", "segments on the longest way through the tree"),
        ("roots", f"{len(tree.roots):,}", "different first tokens"),
    ]
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right", style="bold")
    table.add_column(style="dim")
    for line in lines:
        table.add_row(*line)
    return table
