"""`radixtrain inspect`: a micro-batch as its prefix tree with its text, drawn for a terminal, and its numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from radixtrain.data.step_data import StepData
from radixtrain.data.steps import text_of_copies
from radixtrain.errors import UserError
from radixtrain.inspection.micro_batch import MicroBatch, Prediction, Run, RunTree, micro_batches, named_rows, run_tree
from radixtrain.inspection.row import row_stages
from radixtrain.inspection.tokens import LOSS, marked, number, visible
from radixtrain.tree.plan import levels_of
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
    """Print a micro-batch of the first epoch, or one row if given. Reads the tokenizer, not the weights.

    data: its `setup` is called here, if needed. The other arguments: see `Inspect`.

    Raises UserError if there is no such step, micro-batch or row, or from `StepData.setup`.
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
    if unread := data.reports["train"].unread():
        yield Text(f"not read, of all rows: {unread}", style="dim")
    if copies := text_of_copies(data.conversations["train"], data.settings):
        yield Text(copies, style="dim")
    yield LEGEND
    yield draw(tree, [sample.where for sample in part.samples], full)
    yield from _strays(tree)


def _strays(tree: RunTree) -> Iterator[Text]:
    """Yield predictions that the picture does not show."""
    for one in tree.strays[:MOST_STRAYS]:
        yield Text(
            f"token {one.row} predicts {asked_for(one)}, which no sequence has next: labels may differ from input_ids"
        )
    if len(tree.strays) > MOST_STRAYS:
        yield Text(f"and {len(tree.strays) - MOST_STRAYS:,} more of these")


def _ratios(part: MicroBatch) -> Iterator[tuple[str, str, str]]:
    """Yield r, and if chats are split also the other r."""
    of_rows, num_whole = f"{part.num_tokens / part.num_unique_tokens:.2f}", part.num_whole_tokens
    if num_whole == part.num_tokens:
        yield "r", of_rows, "T / U"
    else:
        yield "r", f"{num_whole / part.num_unique_tokens:.2f}", f"against the {num_whole:,} tokens of whole chats"
        yield "r, same rows", of_rows, "T / U, each turn with all that precedes it"


def numbers(part: MicroBatch, tree: RunTree) -> Table:
    """Make a table with a line for each number: its name, its value, its meaning."""
    batch, layout, padding = part.batch, layout_of(part.batch), part.num_padding
    depth = levels_of(layout.segments[1].tolist()).max() + 1
    num_rows = len({sample.where for sample in part.samples})
    computed = f"U, unique tokens; and {padding} of padding" if padding else "U, unique tokens"
    lines = [
        ("sequences", f"{len(part.samples):,}", f"from {num_rows:,} rows of the file"),
        ("tokens", f"{part.num_tokens:,}", "T, of all sequences"),
        ("computed tokens", f"{part.num_unique_tokens:,}", computed),
        *_ratios(part),
        ("labelled tokens", f"{part.num_labels:,}", f"of {part.num_step_labels:,} in the step, which divide its loss"),
        ("distinct predictions", f"{batch['shift_labels'].numel():,}", "P, a token and the one to predict"),
        (
            "predicting tokens",
            f"{len(radix_of(batch).predictor_indices):,}",
            "R, rows for which the head computes logits",
        ),
        ("segments", f"{layout.subtree_ends.numel():,}", "S, runs of tokens without a branch"),
        ("depth", f"{depth:,}", "segments on the longest way through the tree"),
        ("roots", f"{len(tree.roots):,}", "different first tokens"),
    ]
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right", style="bold")
    table.add_column(style="dim")
    for line in lines:
        table.add_row(*line)
    return table


MOST_CHARS, MOST_BRANCHES = 240, 12
MOST_LEVELS = 8  # drawn further to the right; after them the longest branch continues at its parent's level
LONG = 6  # levels from which a branch is a continued conversation, if its siblings are shorter
HEADER = "bold"


def draw(tree: RunTree, wheres: Sequence[str], full: bool = False) -> Tree:
    """Draw the runs as a tree, in the order of the rows. A long branch among short ones stays on its parent's level.

    wheres: file and line of each sequence.
    full: show all tokens and all branches; otherwise long runs are shortened and late branches counted.
    """
    root = Tree("", hide_root=True, guide_style="dim")
    drawing = _Drawing(tree, wheres, full)
    drawing.add_all(root, tree.roots, level=0)
    return root


def asked_for(prediction: Prediction) -> str:
    """Write `"text" ×weight` on one line."""
    text = visible(prediction.text).replace("\n", "")
    return f'"{text}" ×{number(prediction.weight)}'


@dataclass(frozen=True)
class _Drawing:
    tree: RunTree
    wheres: Sequence[str]
    full: bool

    def add_all(self, node: Tree, children: Sequence[int], level: int) -> None:
        most = len(children) if self.full else MOST_BRANCHES
        for child in children[:most]:
            self._add(node, child, level)
        if left_out := [run for child in children[most:] for run in self._below(child)]:
            num_tokens = sum(len(self.tree.runs[run].tokens) for run in left_out)
            node.add(Text(f"⋯ {len(children) - most:,} more branches, {num_tokens:,} tokens ⋯", style="dim"))

    def _add(self, node: Tree, index: int, level: int) -> None:
        """Add a run and all that follows it."""
        before: Run | None = None
        going_on: int | None = index
        while going_on is not None:
            run = self.tree.runs[going_on]
            branch = node.add(Group(*self._lines(run, before)))
            continues = before is not None
            before, going_on = run, self._trunk(run.children, level, continues)
            self.add_all(branch, [child for child in run.children if child != going_on], level + 1)

    def _trunk(self, children: Sequence[int], level: int, continues: bool) -> int | None:
        """Choose the child that is drawn on its parent's level, so that a long conversation does not drift right.

        continues: whether the parent is such a child itself.
        """
        longest = max(children, key=self.heights.__getitem__, default=None)
        if longest is None or len(children) == 1 or level >= MOST_LEVELS:
            return longest
        long = 2 if continues else LONG
        is_long = [self.heights[child] >= long for child in children]
        return longest if sum(is_long) == 1 else None

    @cached_property
    def heights(self) -> list[int]:
        """Count the runs on the longest way down from each run, itself included."""
        heights: list[int] = []
        for run in reversed(self.tree.runs):  # children come after their parent
            below = (heights[len(self.tree.runs) - 1 - child] for child in run.children)
            heights.append(1 + max(below, default=0))
        return heights[::-1]

    def _lines(self, run: Run, before: Run | None) -> list[Text]:
        text = marked(run.tokens, None if self.full else MOST_CHARS, len(run.sequences), breaks=False)
        lines = [self._header(run, before), text]
        if len(run.children) > 1 or len(run.predictions) > 1:
            lines += _predicts(run.predictions, None if self.full else MOST_BRANCHES)
        return lines

    def _header(self, run: Run, before: Run | None) -> Text:
        first, last = run.rows[0], run.rows[1] - 1
        after = f" after token {before.rows[1] - 1}" if before is not None else ""
        places = f"token {first}{after}" if first == last else f"tokens {first}-{last}{after}: {len(run.tokens):,}"
        num_labelled = sum(token.bears_loss for token in run.tokens)
        loss = f", {num_labelled:,} with loss" if num_labelled else ""
        text = Text.assemble((f"×{len(run.sequences)}", HEADER), f"  {places}{loss}")
        if run.ends:
            text.append(f"; ends {named_rows(self.wheres[end] for end in run.ends)}")
        text.stylize("dim", 1 + len(str(len(run.sequences))))
        return text

    def _below(self, index: int) -> list[int]:
        """List a run and those that follow it, which are neighbours in the order of the rows."""
        found, waiting = [], [index]
        while waiting:
            found.append(waiting.pop())
            waiting += self.tree.runs[found[-1]].children
        return found


def _predicts(predictions: Sequence[Prediction], most: int | None) -> list[Text]:
    """Show what the last token of a run has to predict, the heaviest first."""
    if not predictions:
        return []
    heaviest = sorted(predictions, key=lambda one: -one.weight)
    words = ", ".join(map(asked_for, heaviest[:most]))
    more = f" and {len(heaviest) - most:,} more" if most is not None and len(heaviest) > most else ""
    return [Text.assemble((f"token {heaviest[0].row} predicts ", "dim"), (words + more, LOSS))]
