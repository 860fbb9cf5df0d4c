"""`radixtrain inspect`: a micro-batch of a training run, its numbers and its prefix tree as text with its loss marked.

Everything is read from the arrays that the model receives.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text
from rich.tree import Tree

from radixtrain.collators.token_row import TokenRow
from radixtrain.data.step_data import StepData
from radixtrain.data.steps import features_of
from radixtrain.errors import UserError
from radixtrain.explain.tokens import LOSS, Run, Token, marked, run_tree, token_texts
from radixtrain.tree.arrays import IntArray
from radixtrain.tree.radix_inputs import layout_of, radix_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONTEXT = 16  # tokens around a run to decode with it: a character may lie on its border, and blanks depend on it
MOST_NAMES, MOST_CHARS, MOST_BRANCHES = 3, 240, 12
MOST_LEVELS = 8  # drawn further to the right; after them the largest branch continues at its parent's level
LEGEND = Text.assemble(
    ("\n×3 sequences that pass   ", "dim"),
    ("⟦loss⟧", LOSS),
    ("×2 that learn it, if not all   ↵ line break   ⋯ left out\n", "dim"),
)


def named_rows(wheres: Iterable[str]) -> str:
    """Name rows: `chats.jsonl:3, chats.jsonl:5 and 4 more`, without folders."""
    names = [*dict.fromkeys(map(os.path.basename, wheres))]
    more = f" and {len(names) - MOST_NAMES:,} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """What the model receives at once, and its source.

    place: its number and the optimizer step of the first epoch, counted from 0, in words.
    samples: its sequences, in the order of `cu_seqlens`.
    batch: as `RadixCollator` makes it for radixtrain's own loss.
    num_step_labels: labelled tokens of the whole step, by which its loss is divided.
    """

    place: str
    samples: Sequence[TokenRow]
    batch: dict[str, Any]
    num_step_labels: int

    @cached_property
    def paths(self) -> list[IntArray]:
        """Return the rows of each sequence, in the order of its tokens."""
        rows, bounds = layout_of(self.batch).inverse_indices.numpy(), radix_of(self.batch).cu_seqlens.tolist()
        return [rows[start:end] for start, end in pairwise(bounds)]

    @property
    def num_tokens(self) -> int:
        """Return T."""
        return sum(len(sample.input_ids) for sample in self.samples)

    @property
    def num_unique_tokens(self) -> int:
        """Return U, without padding, whose rows come last."""
        return max(int(path[-1]) + 1 for path in self.paths)

    @property
    def num_labels(self) -> int:
        """Count labelled tokens, each once for every sequence that learns it."""
        radix = radix_of(self.batch)
        return int(radix.loss_weights.sum()) if radix.label_indices is None else len(radix.loss_weights)


def micro_batches(data: StepData, step: int) -> list[MicroBatch]:
    """Collate all micro-batches of an optimizer step of the first epoch, as training does.

    data: after its `setup("inspect")`.
    step: from 0.

    Raises UserError if there is no such step, and with `dedup: false`, whose batches share nothing.
    """
    if not data.settings.dedup:
        raise UserError("inspect shows what a batch shares, which is nothing with dedup: false; leave that out")
    steps = data.train_steps()
    if not 0 <= step < len(steps):
        raise UserError(f"step: an epoch has the steps 0 to {len(steps) - 1}, got {step}")
    samples = [sample for index in steps[step] for sample in data.conversations["train"][index]]
    collated = data.step_collator()(features_of(samples))
    return [
        MicroBatch(
            place=f"step {step} of {len(steps)}, micro-batch {index} of {len(collated.members)}",
            samples=[samples[member] for member in members],
            batch=batch,
            num_step_labels=collated.num_labels,
        )
        for index, (members, batch) in enumerate(zip(collated.members, collated.micro_batches, strict=True))
    ]


def show_micro_batch(data: StepData, step: int, index: int, full: bool) -> Iterator[RenderableType]:
    """Yield a micro-batch of the first epoch. Raises UserError if there is none, or from `StepData.setup`."""
    data.setup("inspect")
    parts = micro_batches(data, step)
    if not 0 <= index < len(parts):
        raise UserError(f"micro_batch: step {step} has the micro-batches 0 to {len(parts) - 1}, got {index}")
    part = parts[index]
    yield Text(f"{part.place}, counted from 0", style="bold")
    yield numbers(part)
    yield LEGEND
    yield draw(BatchTree(part, data.tokenizer()), [sample.where for sample in part.samples], full)


class BatchTree:
    """The runs of a micro-batch, with their text and weights.

    runs: in the order of the rows. roots: indices of those that nothing precedes. tokens: one for each row; its weight
    is the sum over the sequences that learn it.
    """

    def __init__(self, part: MicroBatch, tokenizer: PreTrainedTokenizerBase):
        self.runs, self.roots = run_tree(part.paths)
        ids, radix = part.batch["input_ids"][0].numpy(), radix_of(part.batch)
        rows, labels = radix.predictor_indices[radix.prediction_rows].tolist(), part.batch["shift_labels"][0].tolist()
        weights: dict[tuple[int, int], float] = defaultdict(float)  # of a row and the token that it predicts
        for row, label, weight in zip(rows, labels, radix.loss_weights.tolist(), strict=True):
            weights[row, label] += weight
        previous = np.full(part.num_unique_tokens, -1)
        for path in part.paths:
            previous[path[1:]] = path[:-1]
        special, steps = set(tokenizer.all_special_ids), zip(previous.tolist(), ids.tolist(), strict=False)
        texts: list[str] = []
        for run in self.runs:
            own, first = part.samples[run.sequences[0]].input_ids, max(0, run.depth - CONTEXT)
            near = token_texts(own[first : run.depth + len(run) + CONTEXT], tokenizer)
            texts += near[run.depth - first :][: len(run)]
        self.tokens = [
            Token(text, step in weights, step[1] in special, weights.get(step, 1.0))
            for text, step in zip(texts, steps, strict=True)
        ]


def numbers(part: MicroBatch) -> Table:
    """Make a table with a line for each number: its name, its value, its meaning."""
    num_unique, num_lines = part.num_unique_tokens, len({sample.where for sample in part.samples})
    table = Table.grid("", Column(justify="right", style="bold"), Column(style="dim"), padding=(0, 2))
    table.add_row("sequences", f"{len(part.samples):,}", f"from {num_lines:,} rows of the file")
    table.add_row("tokens", f"{part.num_tokens:,}", "T, of all sequences")
    table.add_row("computed tokens", f"{num_unique:,}", "U, unique tokens")
    table.add_row("r", f"{part.num_tokens / num_unique:.2f}", "T / U")
    meaning = f"of {part.num_step_labels:,} in the step, which divide its loss"
    table.add_row("labelled tokens", f"{part.num_labels:,}", meaning)
    return table


def draw(tree: BatchTree, wheres: Sequence[str], full: bool = False) -> Tree:
    """Draw the runs as a tree, in the order of the rows. A run with one successor continues on its level.

    wheres: file and line of each sequence.
    full: show all tokens and all branches; otherwise long runs are shortened and late branches counted.
    """

    def add_all(node: Tree, children: Sequence[int], level: int) -> None:
        most = len(children) if full else MOST_BRANCHES
        for child in children[:most]:
            add(node, tree.runs[child], level)
        if more := len(children[most:]):
            node.add(Text(f"⋯ {more:,} more branches ⋯", style="dim"))

    def add(node: Tree, run: Run, level: int) -> None:
        """Add a run and all that follows it."""
        after = ""
        while True:
            branch = node.add(Group(*lines(run, after)))
            continues = len(run.children) == 1 or (level >= MOST_LEVELS and len(run.children) > 1)
            add_all(branch, run.children[continues:], level + 1)  # the first one is the largest
            if not continues:
                return
            after, run = f" after token {run.end - 1}", tree.runs[run.children[0]]

    def lines(run: Run, after: str) -> Iterator[Text]:
        tokens, last = tree.tokens[run.start : run.end], run.end - 1
        places = f"token {last}{after}" if len(run) == 1 else f"tokens {run.start}-{last}{after}: {len(run):,}"
        num_labelled = sum(token.bears_loss for token in tokens)
        loss = f", {num_labelled:,} with loss" if num_labelled else ""
        ends = f"; ends {named_rows(wheres[end] for end in run.ends)}" if run.ends else ""
        yield Text.assemble((f"×{len(run.sequences)}", "bold"), (f"  {places}{loss}{ends}", "dim"))
        yield marked(tokens, None if full else MOST_CHARS, len(run.sequences), breaks=False)

    root = Tree("", hide_root=True, guide_style="dim")
    add_all(root, tree.roots, level=0)
    return root
