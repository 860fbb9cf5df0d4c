"""`radixtrain report`: what the rows share, how fast a step runs, what breaks sharing, and what would help.

`make_report` finds it; `print_report` shows it in a terminal, `write_page` as report.html, one file without scripts
that needs no network. The texts of the rows are not trusted: the terminal shows them without markup and control codes;
Jinja escapes them, and the page's content security policy allows no script and no request.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib.resources import files
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from radixtrain.checkpoints.atomic import writing_file
from radixtrain.data.sample import EncodeReport
from radixtrain.data.step_data import StepData
from radixtrain.data.steps import text_of_copies
from radixtrain.errors import UserError
from radixtrain.explain.breaks import Break, find_breaks
from radixtrain.explain.prediction import (
    ARMS,
    Draw,
    Epoch,
    NotPredictedError,
    RunSetup,
    SampledSteps,
    predict_seconds,
)
from radixtrain.explain.tokens import TextTree, shortened, visible
from radixtrain.screen import screen

logger = logging.getLogger(__name__)

TREE_CONVERSATIONS = 1000  # at most, at equal distances, for the picture
WORTH_A_HINT, NEARLY = 1.1, 0.95
PRICES = {  # of another value of a setting
    "max_tokens": "The steps stay as they are; micro-batches are larger, and take more memory",
    "group_by_prefix": "Rows of one prompt then meet in a step: an epoch is still every row once, but less mixed",
    "batch_size": "An epoch then has fewer optimizer steps over more rows, so the learning rate may need to change",
}
NO_GAIN = 1.05  # speed-up below which sharing does not pay


@dataclass(frozen=True, kw_only=True)
class DataReport:
    """Everything that `radixtrain report` found.

    heading: in few words. summary: sentences about an epoch. facts: of the rows, name to text.
    tree: of a sample, which tree_sample names. command: to paste; empty if `fit` would refuse the model.
    hints: sentences: what would save more.
    """

    title: str
    model: str
    heading: str
    summary: tuple[str, ...]
    facts: dict[str, str]
    tree: TextTree
    tree_sample: str
    command: str
    breaks: tuple[Break, ...]
    hints: tuple[str, ...]


def make_report(
    data: StepData, setup: RunSetup, typed: Sequence[str] = (), max_seconds: float = 45.0, refused: str = ""
) -> DataReport:
    """Report what an epoch of training on these data holds, shares and takes.

    data: after its `setup`. setup: how the model would train.
    typed: the command line after the command, for the command to paste.
    max_seconds: for timing micro-batches; 0 predicts nothing.
    refused: why `fit` refuses the model.
    """
    of_data, corpus, rows = data.settings, data.conversations["train"], data.reports["train"]
    epoch = Epoch(
        conversations=corpus,
        seed=of_data.seed,
        shuffle=of_data.shuffle_dataset,
        collator=data.step_collator(),
        weights=corpus.weights,
    )
    draw = Draw(of_data.batch_size, of_data.max_tokens, of_data.group_by_prefix)
    own = epoch.sampled(draw)
    others = {key: [epoch.sampled(other) for other in draws] for key, draws in epoch.others(draw).items()}
    speedup = None
    try:
        if refused:
            raise UserError(refused)
        if not max_seconds:
            raise NotPredictedError("max_seconds is 0")
        logger.info("timing a micro-batch, shared and ordinary")
        seconds, depths = predict_seconds(setup, epoch.timed_batches(draw), own, max_seconds)
        speedup, layers = seconds["ordinary"] / seconds["radix"], " and ".join(map(str, depths))
        speed = (
            f"A training step is predicted to run at {rounded(speedup)}x the speed of an ordinary padded one"
            f"{' on whole chats' if own.rows_r != own.r else ''} on this machine, an epoch in "
            f"{duration(own.scale * seconds['radix'])}. Timed on {layers} of {setup.num_layers} layers with random "
            f"weights."
        )
        if (load := os.getloadavg()[0]) > (os.cpu_count() or 1):
            speedup = None
            speed += f" The machine was busy (load {load:.0f}), so this is uncertain: run it again when it is idle."
    except NotPredictedError as error:
        speed = f"The speed-up on this machine was not predicted: {error}."
    except UserError as error:
        if refused or of_data.dedup:
            refused = str(error)
            speed = f"`fit` would refuse this: {refused}."
        else:  # what is not shared trains, though the shared arm of this prediction is refused
            speed = f"The speed-up on this machine was not predicted: {error}."
    tokenizer = data.encoder().tokenizer
    breaks = find_breaks(corpus, tokenizer, draw.batch_size)
    drawn = range(0, len(corpus), -(-len(corpus) // TREE_CONVERSATIONS))
    return DataReport(
        title=", ".join(part.name for part in corpus.parts),
        model=str(of_data.model_name_or_path),
        heading=f"{rounded(speedup)}x as fast" if speedup else f"r = {rounded(own.r)}",
        summary=(_sharing(own), speed),
        facts=dict(_facts(data)),
        tree=TextTree([sample.input_ids for index in drawn for sample in corpus[index]], tokenizer),
        tree_sample=f"{len(drawn):,} of the {len(corpus):,} conversations",
        command="" if refused else command_to_paste(typed),
        breaks=breaks,
        hints=(*map(fix, breaks), *hints(own, speedup, others), *_hint_at_system_prompt(rows)),
    )


def _sharing(own: SampledSteps) -> str:
    """Summarise what an epoch holds, and what the user's own settings leave to compute."""

    def in_epoch(number: int) -> str:
        return f"{number:,}" if own.scale == 1 else f"about {rounded(own.scale * number)}"

    tokens, whole = (f"{in_epoch(own.num_tokens[arm])} tokens" for arm in ARMS)
    computed = f"of which {in_epoch(own.num_rows['radix'])} are computed"
    if own.rows_r == own.r:
        return f"{tokens} in an epoch, {computed}: r = {rounded(own.r)}."
    return (
        f"{whole} as whole chats, {tokens} as their turns, {computed}: r = {rounded(own.r)} against whole chats, as "
        f"TRL trains them, {rounded(own.rows_r)} against the same rows."
    )


def _facts(data: StepData) -> Iterator[tuple[str, str]]:
    """Yield the lines about the rows, which no setting changes."""
    rows, corpus = data.reports["train"], data.conversations["train"]
    num_labels = sum(sample.num_labels for samples in corpus for sample in samples)
    yield "rows", f"{rows.num_rows:,}, {len(corpus.lengths):,} samples, {num_labels:,} tokens bear loss"
    least, half, nearly_all, most = np.quantile(corpus.lengths, [0, 0.5, 0.99, 1], method="nearest").tolist()
    over = f"; {rows.num_long_samples:,} over max_length, the longest {rows.longest:,}" if rows.num_long_samples else ""
    yield "lengths", f"{least:,} to {most:,} tokens, median {half:,}, 99 % up to {nearly_all:,}{over}"
    if copies := text_of_copies(corpus, data.settings):
        yield "copies", copies
    if unread := rows.unread():
        yield "not read", unread


def fix(each: Break) -> str:
    """Say what fixing a cause saves: by itself, and on top of the other fixes if that is much more or less."""
    saved, with_others = each.tokens_saved, each.tokens_with_others
    differs = not 0.8 * with_others <= saved <= 1.25 * with_others
    others = f"; {rounded(with_others)} once the others here are fixed" if differs else ""
    return f"{each.cause}: fixing only this saves {rounded(saved)} computed tokens of an epoch{others}. {each.advice}"


def hints(own: SampledSteps, speedup: float | None, others: Mapping[str, Sequence[SampledSteps]]) -> Iterator[str]:
    """Yield hints: nothing is gained; what another value of one setting brings, the smallest that brings most of it.

    others: by setting, from the smallest value to the largest.
    """
    if speedup is not None and speedup < NO_GAIN:
        yield (
            f"as they are, these rows gain nothing: a step takes {1 / speedup:.2f} of the ordinary time. "
            f"--dedup=false is the ordinary trainer; what follows, and fewer breaks, may change that"
        )
    for key, price in PRICES.items():
        best = max((each.r for each in others[key]), default=0.0)
        chosen = next((each for each in others[key] if each.r >= NEARLY * best), own)
        if chosen.r >= WORTH_A_HINT * own.r:
            value = str(getattr(chosen.draw, key)).lower()
            yield f"--data.{key}={value}: r = {rounded(chosen.r)} in place of {rounded(own.r)}. {price}"


def _hint_at_system_prompt(rows: EncodeReport) -> Iterator[str]:
    if rows.num_with_system and rows.num_without_system:
        yield (
            f"--data.system_prompt=TEXT: {rows.num_without_system:,} of the chats begin with no system "
            f"turn, so they share nothing with the others; it would be theirs"
        )


def command_to_paste(typed: Sequence[str]) -> str:
    """Write `python -m radixtrain fit` with what was typed after `report`, whose own key is left out."""
    return re.sub(r" --max_seconds[= ]\S+", "", shlex.join(["python", "-m", "radixtrain", "fit", *typed]))


def rounded(value: float) -> str:
    """Format three digits without an exponent: `1.84`, `21`, `1,250`, `349,000`."""
    return f"{float(f'{value:.3g}'):,.12g}"


def duration(seconds: float) -> str:
    """Format seconds as hours, minutes and seconds: `0:12:05`."""
    return str(timedelta(seconds=max(1, round(seconds))))


# The terminal

TREE_LINES, BREAKS = 4, 2
MAX_TEXT = 60  # characters of a run


def print_report(report: DataReport, console: Console | None = None) -> None:
    """Print what is saved, the rows, the top of the tree, what breaks sharing, and what would help."""
    console = console or screen(highlight=False)
    _line(console, Text(f"{report.title}, for {report.model}", style="bold"))
    console.print(Text("\n".join(report.summary)))
    facts = Table.grid(padding=(0, 2, 0, 0))
    for name, text in report.facts.items():
        facts.add_row(Text(name, style="dim"), Text(text))
    console.print("", facts)
    console.print(Text(f"\nThe prefix tree of {report.tree_sample}"))
    for line in report.tree.lines(TREE_LINES):
        size = f"{'  ' * line.depth}{line.num_sequences:,} x {line.num_tokens:,} tokens  "
        branches = f"  then {line.num_hidden:,} branches" if line.num_hidden > 1 else ""
        text = shortened(" ".join(line.text.split()), MAX_TEXT)
        _line(console, Text.assemble((size, "cyan"), text, (branches, "dim")))
    console.print(Text("\nWhat breaks sharing" if report.breaks else "\nNothing was found that breaks sharing."))
    for cause in report.breaks[:BREAKS]:
        _line(console, Text(f"  {cause.cause}, in {cause.num_sequences:,} samples"))
        for each in cause.examples[:1]:
            shown = f"{each.where}: ...{each.before[-24:]}[{shortened(each.value, MAX_TEXT)}]{each.after}"
            _line(console, Text(f"    {' '.join(shown.split())}", style="dim"))
    if report.hints:
        console.print(Text("\n".join(["\nWhat would help", *(f"- {hint}" for hint in report.hints)])))
    if report.command:
        console.print(Text("\nTo train:"))
        console.print(Text(f"  {report.command}", style="bold"), soft_wrap=True)


def _line(console: Console, text: Text) -> None:
    console.print(text, overflow="ellipsis", no_wrap=True)


# The page

ASSETS = files("radixtrain.explain") / "assets"
PAGE_LINES = 100  # of the tree
SHORT_TEXT = 160  # characters of a run that are shown before a reader opens it


def write_page(report: DataReport, path: Path) -> None:
    """Write the page, replacing a file or link that is there. A character that UTF-8 does not have becomes `?`.

    Raises OSError if it cannot be written.
    """
    with writing_file(path) as partial:
        partial.write_text(render(report), encoding="utf-8", errors="replace")


def render(report: DataReport) -> str:
    """Render the page as HTML with its style inside."""
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"shortened": shortened, "visible": visible}
    return environment.from_string((ASSETS / "page.html").read_text(encoding="utf-8")).render(
        report=report,
        short_text=SHORT_TEXT,
        lines=list(report.tree.lines(PAGE_LINES)),
        style=(ASSETS / "page.css").read_text(encoding="utf-8"),
    )
