"""`make_report`: the data, what sharing saves by setting, the best setting, and the command to paste."""

from __future__ import annotations

import logging
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from radixtrain.data.sample import EncodeReport
from radixtrain.data.step_data import StepData
from radixtrain.data.steps import text_of_copies
from radixtrain.data.tokenized.corpus import Corpus
from radixtrain.errors import UserError, bytes_text
from radixtrain.report.breaks import find_breaks
from radixtrain.report.contents import DataReport, Setting, duration, ratio
from radixtrain.report.prediction import Prediction, free_bytes, predict_seconds, process_of_fit
from radixtrain.report.profiling import RunSetup, cases_of
from radixtrain.report.sharing import (
    Draw,
    Epoch,
    SampledSteps,
    length_quantiles,
    num_distinct_tokens,
    num_shared_prompts,
    splitting,
)
from radixtrain.report.tree import prefix_tree
from radixtrain.timing import environment
from radixtrain.tree.arrays import IntArray

logger = logging.getLogger(__name__)

TREE_SAMPLES, TREE_NODES = 2000, 300
TIMED_STEPS = 2
USABLE = 0.9  # part of the free memory that a setting may take
CLEARLY = 1.05  # a setting is better than the user's own if its r is this many times as large
ALONE = 0.9  # share of time that a process has its core if no other program competes
WORTH_A_HINT = 1.1
MEMORY = {
    "cpu": "the peak of the whole fit process; measured runs took 0.79 to 1.24 of the prediction",
    "cuda": "torch's peak allocation on the GPU; the CUDA context and what the allocator keeps come on top",
}
NO_GAIN = 1.05  # speed-up below which sharing does not pay


def make_report(data: StepData, setup: RunSetup, typed: Sequence[str] = (), max_seconds: float = 45.0) -> DataReport:
    """Report what an epoch of training on these data holds, shares and takes.

    data: after its `setup`. setup: how the model would train.
    typed: the command line after the command, for the command to paste.
    max_seconds: for timing micro-batches; 0 predicts nothing, and proposes no setting.
    """
    notes: list[str] = []
    of_data, process = data.settings, process_of_fit(setup.device)
    why_not = "" if max_seconds else "max_seconds is 0"
    epoch = _epoch(data)
    together = of_data.group_by_prefix
    own = Draw(of_data.batch_size, of_data.max_tokens, together if together is True or together > 1 else False)
    logger.info("looking for prompts that %d conversations share", len(epoch.conversations))
    grid = epoch.settings_grid(own)
    logger.info("counting what the steps of %d settings share", len(grid))
    sampled = {draw: epoch.sampled(draw) for draw in grid}
    num_steps, epoch_steps = len(sampled[own].steps), -(-epoch.size // own.batch_size)
    if num_steps < epoch_steps:
        notes.append(
            f"r is an estimate: it is counted on a sample of {num_steps:,} of the {epoch_steps:,} steps of an epoch."
        )
    prediction = None
    if not why_not:
        try:
            steps = [epoch.features(batch) for batch in epoch.batches(own)[:TIMED_STEPS]]
            cases = cases_of(steps, epoch.collator)
            logger.info("timing micro-batches of both arms, for about %.0f s", max_seconds)
            prediction = predict_seconds(setup, cases, of_data.dataloader_num_workers, max_seconds, process)
        except UserError as error:
            why_not = str(error)
    if prediction is None:
        notes.append(f"Speed and memory were not predicted: {why_not}.")
    else:
        layers = " and ".join(map(str, prediction.timed_layers))
        notes.append(
            f"Speed and memory are predicted from micro-batches of these data on {layers} of {setup.num_layers} layers "
            f"with random weights, timed here. Memory is {MEMORY[setup.device.type]}."
        )
        if prediction.cpu_share < ALONE:
            notes.append(
                f"Measured while other programs ran: they took {1 - prediction.cpu_share:.0%} of the time, so seconds "
                f"are too long and the speed-up is uncertain. Run it again when the machine is idle. r is not affected."
            )
    settings = [_setting(sampled[draw], prediction) for draw in grid]
    current, best = settings[grid.index(own)], None
    if prediction is not None:
        best = best_setting(current, settings, free_bytes(setup.device))
    about = _about_data(data, epoch, notes)
    rows, copies = data.reports["train"], text_of_copies(data.conversations["train"], of_data)
    notes += [f"{text}." for text in (rows.unread() and f"Not read: {rows.unread()}", copies) if text]
    return DataReport(
        **about,
        title=_name_of(of_data.train_file),
        model=str(of_data.model_name_or_path),
        current=current,
        settings=tuple(settings),
        best=best,
        command=command_to_paste(typed, current, best or current),
        environment={
            name: str(value)
            for name, value in environment(setup.device, str(setup.dtype).removeprefix("torch.")).items()
            if value
        },
        notes=tuple(notes),
        hints=(*hints(current, settings), *_hint_at_system_prompt(rows)),
    )


def _hint_at_system_prompt(rows: EncodeReport) -> Iterator[str]:
    if rows.num_with_system and rows.num_without_system:
        yield (
            f"--data.system_prompt=TEXT: {rows.num_without_system:,} of the chats begin with no system "
            f"turn, so they share nothing with the others; it would be theirs"
        )


def _epoch(data: StepData) -> Epoch:
    """Draw and collate an epoch as `fit` does, with deduplication."""
    settings, corpus = data.settings, data.conversations["train"]
    return Epoch(
        conversations=corpus,
        lengths=corpus.lengths,
        seed=settings.seed,
        shuffle=settings.shuffle_dataset,
        collator=replace(data.step_collator(), dedup=True),
        weights=corpus.weights,
    )


def _setting(sampled: SampledSteps, prediction: Prediction | None) -> Setting:
    draw, is_split = sampled.draw, sampled.whole_share != 1
    speedup, whole_speedup = (None, None) if prediction is None else prediction.speedups(sampled)
    return Setting(
        batch_size=draw.batch_size,
        max_tokens=draw.max_tokens,
        group_by_prefix=bool(draw.group_by_prefix),
        r=sampled.r,
        best_r=sampled.best_r * sampled.whole_share,
        whole_r=sampled.r * sampled.whole_share if is_split else None,
        speedup=speedup,
        whole_speedup=whole_speedup if is_split else None,
        seconds_per_epoch=None if prediction is None else prediction.seconds_per_epoch(sampled),
        memory_bytes=None if prediction is None else prediction.memory_bytes(sampled),
    )


def _about_data(data: StepData, epoch: Epoch, notes: list[str]) -> dict[str, Any]:
    """Return the fields of a `DataReport` that no setting changes."""
    rows, corpus, tokenizer = data.reports["train"], data.conversations["train"], data.encoder().tokenizer
    num_tokens = int(corpus.lengths.sum())
    num_sorted, num_distinct = num_distinct_tokens(epoch)
    if num_sorted < num_tokens:
        notes.append(
            f"Distinct tokens and turns are counted on {num_sorted:,} of the tokens; the former are an upper bound."
        )
    sources: Counter[str] = Counter()  # conversations of each
    for part, size in zip(corpus.parts, np.diff(corpus.bounds).tolist(), strict=True):
        sources[part.name] += size
    logger.info("looking for what breaks sharing")
    return {
        "num_rows": rows.num_rows,
        "num_samples": len(corpus.lengths),
        "num_tokens": num_tokens,
        "num_epoch_tokens": _num_epoch_tokens(corpus),
        "splitting": splitting(epoch),
        "num_unique_tokens": round(num_distinct * num_tokens / num_sorted),
        "num_labels": sum(sample.num_labels for chat in corpus for sample in chat),
        "num_prompts": num_shared_prompts(epoch.groups),
        "length_quantiles": length_quantiles(corpus.lengths),
        "max_length": data.settings.max_length,
        "num_over_length": rows.num_long_samples,
        "longest": max(rows.longest, int(corpus.lengths.max())),
        "sources": dict(sources),
        "tree": prefix_tree(_some_sequences(epoch), tokenizer, TREE_NODES),
        "breaks": find_breaks(corpus, tokenizer, data.settings.batch_size),
    }


def _num_epoch_tokens(corpus: Corpus) -> int:
    """Return the average number of tokens in an epoch; 0 without weights."""
    if corpus.weights is None:
        return 0
    return round(float(corpus.weights @ np.add.reduceat(corpus.lengths, corpus.starts[:-1])))


def _some_sequences(epoch: Epoch) -> list[IntArray]:
    """Select sequences at equal distances, as many as make a picture."""
    places = np.linspace(0, len(epoch.conversations) - 1, min(TREE_SAMPLES, len(epoch.conversations))).astype(np.int64)
    return [sample.input_ids for place in places.tolist() for sample in epoch.conversations[place]][:TREE_SAMPLES]


def _name_of(train_file: object) -> str:
    """Name the data as the configuration does, for the title."""
    listed = train_file if isinstance(train_file, list) else [train_file]
    return ", ".join(str(each["path"] if isinstance(each, dict) else each) for each in listed)


def best_setting(own: Setting, settings: Iterable[Setting], free_bytes: float) -> Setting:
    """Choose what computes least without a change of the optimization: only `max_tokens` differs from the user's own.

    The choice is the user's own unless it does not fit or another one computes clearly less; then the smallest that
    comes near the least. Seconds do not count: they vary with the load of the machine.

    free_bytes: memory that a run can have.
    """
    same = (each for each in settings if _optimization(each) == _optimization(own))
    fitting = [each for each in same if (each.memory_bytes or 0) <= USABLE * free_bytes]
    most = max((each.least_r for each in fitting), default=0.0)
    enough = [each for each in fitting if CLEARLY * each.least_r > most]
    smallest = min(enough, key=lambda each: each.max_tokens, default=own)
    return own if own in enough else smallest


def command_to_paste(typed: Sequence[str], own: Setting, best: Setting) -> str:
    """Write `python -m radixtrain fit` with what was typed, and the `max_tokens` of the best setting.

    typed: the command line after `report`, whose own key is left out. Of a repeated key the last value counts.
    """
    for_fit, words = [], iter(typed)
    for word in words:
        if word == "--max_seconds":
            next(words, None)
        elif not word.startswith("--max_seconds="):
            for_fit.append(word)
    changed = [f"--data.max_tokens={best.max_tokens}"] if best.max_tokens != own.max_tokens else []
    return shlex.join(["python", "-m", "radixtrain", "fit", *for_fit, *changed])


def hints(own: Setting, settings: Sequence[Setting]) -> Iterator[str]:
    """Yield hints: nothing is gained; what a larger batch or `group_by_prefix` brings.

    These change the steps, so none is applied.
    """
    if own.least_speedup is not None and own.least_speedup < NO_GAIN:
        yield (
            f"as they are, these rows gain nothing: a step takes {1 / own.least_speedup:.2f} of the ordinary time. "
            f"--dedup=false is the ordinary trainer; what follows, and fewer breaks, may change that"
        )
    budget = [each for each in settings if each.max_tokens == own.max_tokens]
    grouped = [each for each in budget if each.group_by_prefix and each.batch_size == own.batch_size]
    larger = [
        each for each in budget if each.group_by_prefix == own.group_by_prefix and each.batch_size > own.batch_size
    ]
    if grouped and not own.group_by_prefix and grouped[0].least_r >= WORTH_A_HINT * own.least_r:
        yield (
            f"--data.group_by_prefix=true: {_gain(own, grouped[0])}. Rows of one prompt then meet in a step; an epoch "
            f"is still every row once, but steps are less mixed"
        )
    if larger:
        most = max(larger, key=lambda each: each.least_r)
        enough = min((each for each in larger if each.least_r >= 0.9 * most.least_r), key=lambda each: each.batch_size)
        if enough.least_r >= WORTH_A_HINT * own.least_r:
            yield (
                f"--data.batch_size={enough.batch_size}: {_gain(own, enough)}. An epoch then has fewer optimizer "
                f"steps, each over more rows, so the learning rate may need to change"
            )


def _gain(own: Setting, other: Setting) -> str:
    text = f"r = {ratio(other.least_r)} in place of {ratio(own.least_r)}"
    if own.seconds_per_epoch is None or other.seconds_per_epoch is None:
        return text
    text += f", an epoch in about {duration(other.seconds_per_epoch)} in place of {duration(own.seconds_per_epoch)}"
    if (other.memory_bytes or 0) <= WORTH_A_HINT * (own.memory_bytes or 0):
        return text
    return f"{text}, {bytes_text(other.memory_bytes or 0)} of memory in place of {bytes_text(own.memory_bytes or 0)}"


def _optimization(setting: Setting) -> tuple[int, bool]:
    return setting.batch_size, setting.group_by_prefix
