"""`radixtrain report`: what the rows share, how fast a step runs, what breaks sharing, and what would help.

`make_report` finds it; `print_report` shows it in a terminal, `write_page` as report.html, one file without scripts
that needs no network. The texts of the rows are not trusted: the terminal shows them without markup and control codes;
Jinja escapes them, and the page's content security policy allows no script and no request.
"""

from __future__ import annotations

import logging
import os
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from radixtrain.checkpoints.atomic import writing_file
from radixtrain.data.sample import EncodeReport
from radixtrain.data.step_data import StepData
from radixtrain.data.steps import is_split, text_of_copies
from radixtrain.data.tokens.corpus import Corpus
from radixtrain.data.tokens.decode import shortened
from radixtrain.errors import UserError
from radixtrain.explain.breaks import Break, find_breaks
from radixtrain.explain.prediction import (
    Draw,
    Epoch,
    RunSetup,
    SampledSteps,
    StepPrediction,
    length_quantiles,
    num_shared_prompts,
    predict_steps,
)
from radixtrain.explain.tokens import visible
from radixtrain.explain.tree import TextTree
from radixtrain.screen import screen
from radixtrain.timing import environment

logger = logging.getLogger(__name__)

TREE_CONVERSATIONS = 1000  # at equal distances, for the picture
WORTH_A_HINT, NEARLY = 1.1, 0.95
PRICES = {  # of another value of a setting
    "max_tokens": "The steps stay as they are; micro-batches are larger, and take more memory",
    "group_by_prefix": "Rows of one prompt then meet in a step: an epoch is still every row once, but less mixed",
    "batch_size": "An epoch then has fewer optimizer steps over more rows, so the learning rate may need to change",
}
NO_GAIN = 1.05  # speed-up below which sharing does not pay
MINUTE, HOUR = 60, 3600


@dataclass(frozen=True, kw_only=True)
class DataReport:
    """Everything that `radixtrain report` found.

    heading: in few words. summary: sentences about an epoch. facts: of the rows, name to text.
    tree: of the sequences, or of a sample, which tree_sample says. command: to paste.
    hints: sentences: what would save more. notes: sentences: what was not predicted and why, what is estimated.
    environment: machine and versions, for the foot of the page.
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
    notes: tuple[str, ...]
    environment: str


def make_report(data: StepData, setup: RunSetup, typed: Sequence[str] = (), max_seconds: float = 45.0) -> DataReport:
    """Report what an epoch of training on these data holds, shares and takes.

    data: after its `setup`. setup: how the model would train.
    typed: the command line after the command, for the command to paste.
    max_seconds: for timing micro-batches; 0 predicts nothing.
    """
    of_data, corpus, rows = data.settings, data.conversations["train"], data.reports["train"]
    epoch = Epoch(
        conversations=corpus,
        seed=of_data.seed,
        shuffle=of_data.shuffle_dataset,
        collator=data.step_collator(),
        weights=corpus.weights,
    )
    together = of_data.group_by_prefix
    draw = Draw(of_data.batch_size, of_data.max_tokens, together if together is True or together > 1 else False)
    logger.info("counting what the steps of an epoch share")
    own = epoch.sampled(draw)
    others = {key: [epoch.sampled(other) for other in draws] for key, draws in epoch.others(draw).items()}
    notes, prediction = [], None
    if own.num_steps < (epoch_steps := -(-epoch.size // draw.batch_size)):
        notes.append(f"r is counted on a sample of {own.num_steps:,} of the {epoch_steps:,} steps of an epoch.")
    try:
        if not max_seconds:
            raise UserError("max_seconds is 0")
        logger.info("timing a micro-batch, shared and ordinary, for about %.0f s", max_seconds)
        prediction = predict_steps(setup, epoch.timed_batches(draw), max_seconds)
        layers = " and ".join(map(str, prediction.timed_layers))
        notes.append(
            f"Speed is predicted from a micro-batch of these data on {layers} of {setup.num_layers} layers with random "
            f"weights, timed here."
        )
    except UserError as error:
        notes.append(f"Speed was not predicted: {error}.")
    speedup = prediction and prediction.seconds(own, "ordinary") / prediction.seconds(own, "radix")
    logger.info("looking for what breaks sharing")
    tokenizer = data.encoder().tokenizer
    breaks = find_breaks(corpus, tokenizer, draw.batch_size)
    places = np.linspace(0, len(corpus) - 1, min(TREE_CONVERSATIONS, len(corpus))).astype(np.int64).tolist()
    is_sample = len(places) < len(corpus)
    facts = environment(setup.device, str(setup.dtype).removeprefix("torch."))
    return DataReport(
        title=", ".join(part.name for part in corpus.parts),
        model=str(of_data.model_name_or_path),
        heading=f"{ratio(speedup)}x as fast" if speedup else f"r = {ratio(own.r)}",
        summary=(_sharing(corpus, own), _speed(own, prediction, speedup), *_splitting(corpus)),
        facts=dict(_facts(data, epoch)),
        tree=TextTree([sample.input_ids for place in places for sample in corpus[place]], tokenizer),
        tree_sample=f" of {len(places):,} of the {len(corpus):,} conversations" if is_sample else "",
        command=command_to_paste(typed),
        breaks=breaks,
        hints=(*map(fix, breaks), *hints(own, speedup, others), *_hint_at_system_prompt(rows)),
        notes=tuple(notes),
        environment=", ".join(f"{name} {value}" for name, value in facts.items() if value),
    )


def _sharing(corpus: Corpus, own: SampledSteps) -> str:
    """Summarise what an epoch holds, and what the user's own settings leave to compute."""
    num_tokens, weights = int(corpus.lengths.sum()), corpus.weights
    if weights is not None:
        num_tokens = round(float(weights @ np.add.reduceat(corpus.lengths, corpus.starts[:-1])))
    tokens = f"{num_tokens:,} tokens{' in an epoch' if weights is not None else ''}"
    computed = f"about {rounded(num_tokens * own.radix / own.num_tokens)} are computed"
    if own.rows_r is not None:
        about = "" if own.scale == 1 else "about "
        whole = f"{about}{round(num_tokens * own.num_whole_tokens / own.num_tokens):,} tokens as whole chats"
        return (
            f"{whole}, {tokens} as their {len(corpus.lengths):,} turns, of which {computed}: "
            f"r = {ratio(own.r)} against whole chats, as TRL trains them, {ratio(own.rows_r)} against the same rows."
        )
    if own.r < 1.005:
        return f"{tokens}, none of them shared within a micro-batch: r = 1."
    return f"{tokens}, of which {computed}: r = {ratio(own.r)}."


def _speed(own: SampledSteps, prediction: StepPrediction | None, speedup: float | None) -> str:
    """Summarise the prediction for the user's own settings."""
    if prediction is None or speedup is None:
        return "The speed-up on this machine was not predicted."
    baseline = "an ordinary padded one" if own.rows_r is None else "an ordinary padded one on whole chats"
    return (
        f"A training step is predicted to run at {ratio(speedup)}x the speed of {baseline} on this machine, an epoch "
        f"in {duration(own.scale * prediction.seconds(own, 'radix'))}."
    )


def _splitting(corpus: Corpus) -> Iterator[str]:
    """Describe the effect of splitting chats into their turns, if any is split."""
    turns = [samples for samples in corpus if is_split(samples)]
    changed = sum(
        not np.array_equal(turn.input_ids, samples[-1].input_ids[: len(turn.input_ids)])
        for samples in turns
        for turn in samples
    )
    if turns:
        differ = f"{changed:,} of {len(corpus.lengths):,} turns have" if changed else "No turn has"
        yield (
            f"Chats are split, so each turn is what the model sees at inference. {differ} other tokens in the whole "
            f"chat."
        )


def _facts(data: StepData, epoch: Epoch) -> Iterator[tuple[str, str]]:
    """Yield the lines about the rows, which no setting changes."""
    rows, corpus = data.reports["train"], data.conversations["train"]
    num_labels = sum(sample.num_labels for samples in corpus for sample in samples)
    samples = f"{len(corpus.lengths):,} samples, {num_labels:,} tokens bear loss"
    yield "rows", f"{rows.num_rows:,}, {samples}; shared prompts: {num_shared_prompts(epoch.groups):,}"
    quantiles = ", ".join(f"{name} {tokens:,}" for name, tokens in length_quantiles(corpus.lengths).items())
    limit = data.settings.max_length
    over = f"; {rows.num_long_samples:,} over max_length {limit:,}, the longest {rows.longest:,}"
    yield "lengths", f"{quantiles} tokens{over if limit and rows.num_long_samples else ''}"
    sources: Counter[str] = Counter()  # conversations of each
    for part, size in zip(corpus.parts, np.diff(corpus.bounds).tolist(), strict=True):
        sources[os.path.basename(part.name)] += size
    if len(sources) > 1:
        yield "sources", ", ".join(f"{name}: {count:,}" for name, count in sources.items())
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
            yield f"--data.{key}={value}: r = {ratio(chosen.r)} in place of {ratio(own.r)}. {price}"


def _hint_at_system_prompt(rows: EncodeReport) -> Iterator[str]:
    if rows.num_with_system and rows.num_without_system:
        yield (
            f"--data.system_prompt=TEXT: {rows.num_without_system:,} of the chats begin with no system "
            f"turn, so they share nothing with the others; it would be theirs"
        )


def command_to_paste(typed: Sequence[str]) -> str:
    """Write `python -m radixtrain fit` with what was typed after `report`, whose own key is left out."""
    for_fit, words = [], iter(typed)
    for word in words:
        if word == "--max_seconds":
            next(words, None)
        elif not word.startswith("--max_seconds="):
            for_fit.append(word)
    return shlex.join(["python", "-m", "radixtrain", "fit", *for_fit])


def ratio(value: float) -> str:
    """Format three digits without an exponent: `1.84`, `21`, `19.9`, `1,250`."""
    digits = f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"
    return digits if "." not in digits else digits.rstrip("0").rstrip(".")


def rounded(value: float) -> str:
    """Format an estimated count with three significant digits: `349,000`; an integer below 1,000 stays exact."""
    return f"{round(float(f'{value:.3g}')):,}"


def duration(seconds: float) -> str:
    """Format seconds: `< 1 s`, `1.4 s`, `45 s`, `12 min 5 s`, `3 h 20 min`, `30 h`."""
    if seconds < 1:
        return "< 1 s"
    if seconds < 9.95:
        return f"{seconds:.2g} s"
    if seconds < HOUR - 0.5:
        large, small, names = *divmod(round(seconds), MINUTE), ("min", "s")
    else:
        large, small, names = *divmod(round(seconds / MINUTE), 60), ("h", "min")
    parts = [f"{number:,} {name}" for number, name in zip((large, small), names, strict=True) if number]
    return " ".join(parts)


# The terminal

TREE_LINES, BREAKS = 4, 2
MAX_TEXT = 60  # characters of a run


def print_report(report: DataReport, console: Console | None = None) -> None:
    """Print what is saved, the rows, the top of the tree, what breaks sharing, and what would help."""
    console = console or screen(highlight=False)
    _line(console, Text(f"{report.title}, for {report.model}", style="bold"))
    for sentence in report.summary:
        console.print(Text(sentence))
    facts = Table.grid(padding=(0, 2, 0, 0))
    for name, text in report.facts.items():
        facts.add_row(Text(name, style="dim"), Text(text))
    console.print("", facts)
    console.print(Text(f"\nThe prefix tree{report.tree_sample}"))
    for line in report.tree.lines(TREE_LINES):
        title = f"{'  ' * line.depth}{line.num_sequences:,} x {line.num_tokens:,} tokens"
        branches = f"  then {line.num_hidden:,} branches" if line.num_hidden > 1 else ""
        text = shortened(" ".join(line.text.split()), MAX_TEXT)
        _line(console, Text.assemble((f"{title}  ", "cyan"), text, (branches, "dim")))
    console.print(Text("\nWhat breaks sharing" if report.breaks else "\nNothing was found that breaks sharing."))
    for cause in report.breaks[:BREAKS]:
        _line(console, Text(f"  {cause.cause}, in {cause.num_sequences:,} samples"))
        for each in cause.examples[:1]:
            shown = f"{each.where}: ...{each.before[-24:]}[{shortened(each.value, MAX_TEXT)}]{each.after}"
            _line(console, Text(f"    {' '.join(shown.split())}", style="dim"))
    for title, sentences in (("What would help", report.hints), ("Notes", report.notes)):
        if sentences:
            console.print(Text("\n".join([f"\n{title}", *(f"- {sentence}" for sentence in sentences)])))
    console.print(Text("\nTo train:"))
    console.print(Text(f"  {report.command}", style="bold"), soft_wrap=True)


def _line(console: Console, text: Text) -> None:
    console.print(text, overflow="ellipsis", no_wrap=True)


# The page

ASSETS = files("radixtrain.explain") / "assets"
PAGE_LINES = 100  # of the tree
SHORT_TEXT = 160  # characters of a run that are shown before a reader opens it


def write_page(report: DataReport, path: str | Path) -> None:
    """Write the page, replacing a file or link that is there. A character that UTF-8 does not have becomes `?`.

    Raises OSError if it cannot be written.
    """
    with writing_file(Path(path)) as partial:
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
