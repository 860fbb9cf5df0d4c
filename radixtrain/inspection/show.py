"""What `radixtrain inspect` prints: a micro-batch, or one row of a file."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.text import Text

from radixtrain.data.datamodule import SFTData
from radixtrain.data.tokens.tokenization import load_tokenizer
from radixtrain.errors import UserError
from radixtrain.inspection.indices import indices as index_arrays
from radixtrain.inspection.marks import LOSS
from radixtrain.inspection.micro_batch import MicroBatch, micro_batch_of
from radixtrain.inspection.numbers import numbers
from radixtrain.inspection.picture import asked_for, draw
from radixtrain.inspection.row import row_stages
from radixtrain.inspection.runs import RunTree, run_tree

__all__ = ["show"]

MOST_STRAYS = 8


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
            f"row {one.row} predicts {asked_for(one)}, which no sequence has next: its row has labels of its own"
        )
    if len(tree.strays) > MOST_STRAYS:
        yield Text(f"and {len(tree.strays) - MOST_STRAYS:,} more of these")
