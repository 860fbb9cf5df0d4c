"""`make_report`: the data, what sharing saves by setting, the best setting, and the command to paste."""

from __future__ import annotations

import logging
import os
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from radixtrain.data.sample import EncodeReport
from radixtrain.data.step_data import StepData
from radixtrain.data.steps import is_split, text_of_copies
from radixtrain.data.tokens.store import Corpus
from radixtrain.errors import UserError, bytes_text
from radixtrain.explain.breaks import Break, find_breaks
from radixtrain.explain.contents import DataReport, Setting, duration, ratio, rounded
from radixtrain.explain.sharing import Draw, Epoch, SampledSteps, length_quantiles, num_shared_prompts
from radixtrain.explain.speed import RunSetup, StepPrediction, cases_of, predict_steps
from radixtrain.explain.tree import TextTree
from radixtrain.timing import environment

logger = logging.getLogger(__name__)

TREE_CONVERSATIONS = 1000  # at equal distances, for the picture
TIMED_STEPS = 2
CLEARLY = 1.05  # a setting is listed if its r is this many times as large as that of another one
ALONE = 0.9  # share of time that a process has its core if no other program competes
WORTH_A_HINT, NEARLY = 1.1, 0.95
PRICES = {  # of another value of a setting
    "max_tokens": "The steps stay as they are; micro-batches are larger",
    "group_by_prefix": "Rows of one prompt then meet in a step: an epoch is still every row once, but less mixed",
    "batch_size": "An epoch then has fewer optimizer steps over more rows, so the learning rate may need to change",
}
NO_GAIN = 1.05  # speed-up below which sharing does not pay


def make_report(data: StepData, setup: RunSetup, typed: Sequence[str] = (), max_seconds: float = 45.0) -> DataReport:
    """Report what an epoch of training on these data holds, shares and takes.

    data: after its `setup`. setup: how the model would train.
    typed: the command line after the command, for the command to paste.
    max_seconds: for timing micro-batches; 0 predicts nothing, and proposes no setting.
    """
    of_data, corpus, rows = data.settings, data.conversations["train"], data.reports["train"]
    epoch = Epoch(
        conversations=corpus,
        lengths=corpus.lengths,
        seed=of_data.seed,
        shuffle=of_data.shuffle_dataset,
        collator=replace(data.step_collator(), dedup=True),
        weights=corpus.weights,
    )
    together = of_data.group_by_prefix
    own = Draw(of_data.batch_size, of_data.max_tokens, together if together is True or together > 1 else False)
    logger.info("looking for prompts that %d conversations share", len(corpus))
    grid = epoch.settings_grid(own)
    logger.info("counting what the steps of %d settings share", len(grid))
    sampled = {draw: epoch.sampled(draw) for draw in grid}
    notes, prediction = [], None
    if (num_steps := sampled[own].num_steps) < (epoch_steps := -(-epoch.size // own.batch_size)):
        notes.append(f"r is counted on a sample of {num_steps:,} of the {epoch_steps:,} steps of an epoch.")
    try:
        if not max_seconds:
            raise UserError("max_seconds is 0")
        batches = epoch.batches(own)[:TIMED_STEPS]
        cases = [
            *cases_of("radix", [*map(epoch.features, batches)], epoch.collator),
            *cases_of("ordinary", [*map(epoch.whole_chats, batches)], replace(epoch.collator, dedup=False)),
        ]
        logger.info("timing micro-batches of both arms, for about %.0f s", max_seconds)
        prediction = predict_steps(setup, cases, of_data.dataloader_num_workers, max_seconds)
        layers = " and ".join(map(str, prediction.timed_layers))
        notes.append(
            f"Speed and memory are predicted from micro-batches of these data on {layers} of {setup.num_layers} layers "
            f"with random weights, timed here. Memory is that of tensors; the process itself comes on top."
        )
    except UserError as error:
        notes.append(f"Speed and memory were not predicted: {error}.")
    settings = {draw: _setting(each, prediction) for draw, each in sampled.items()}
    current, tokenizer = settings[own], data.encoder().tokenizer
    is_certain = prediction is not None and prediction.cpu_share >= ALONE
    logger.info("looking for what breaks sharing")
    breaks = find_breaks(corpus, tokenizer, of_data.batch_size)
    places = np.linspace(0, len(corpus) - 1, min(TREE_CONVERSATIONS, len(corpus))).astype(np.int64).tolist()
    is_sample = len(places) < len(corpus)
    return DataReport(
        title=", ".join(part.name for part in corpus.parts),
        model=str(of_data.model_name_or_path),
        heading=f"{ratio(current.speedup)}x as fast" if is_certain and current.speedup else f"r = {ratio(current.r)}",
        summary=(_sharing(corpus, sampled[own], current), _speed(current, prediction), *_splitting(corpus)),
        facts=dict(_facts(data, epoch)),
        tree=TextTree([sample.input_ids for place in places for sample in corpus[place]], tokenizer),
        tree_sample=f" of {len(places):,} of the {len(corpus):,} conversations" if is_sample else "",
        settings=tuple(_different(current, settings.values())),
        command=command_to_paste(typed),
        breaks=breaks,
        hints=(*map(fix, breaks), *hints(current, [*settings.values()]), *_hint_at_system_prompt(rows)),
        notes=tuple(notes),
        environment={
            name: str(value)
            for name, value in environment(setup.device, str(setup.dtype).removeprefix("torch.")).items()
            if value
        },
    )


def _setting(sampled: SampledSteps, prediction: StepPrediction | None) -> Setting:
    tokens, whole = sampled.num_tokens, sampled.num_whole_tokens
    setting = Setting(
        draw=sampled.draw,
        r=whole / sampled.num_rows,
        best_r=whole / sampled.num_unique_tokens,
        rows_r=tokens / sampled.num_rows if tokens != whole else None,
    )
    if prediction is None:
        return setting
    seconds = prediction.seconds(sampled)
    return replace(
        setting,
        speedup=prediction.seconds(sampled, "ordinary") / seconds,
        seconds_per_epoch=sampled.scale * seconds,
        memory_bytes=prediction.memory_bytes(sampled),
    )


def _different(own: Setting, settings: Iterable[Setting]) -> Iterator[Setting]:
    """Yield the user's settings, and those that share clearly more or less than these and than each other."""
    shown = [own]
    for each in (own, *settings):
        if each is own or all(abs(each.r / other.r - 1) >= CLEARLY - 1 for other in shown):
            shown.append(each)
            yield each


def _sharing(corpus: Corpus, sampled: SampledSteps, own: Setting) -> str:
    """Summarise what an epoch holds, and what the user's own settings leave to compute."""
    num_tokens, weights = int(corpus.lengths.sum()), corpus.weights
    if weights is not None:
        num_tokens = round(float(weights @ np.add.reduceat(corpus.lengths, corpus.starts[:-1])))
    tokens = f"{num_tokens:,} tokens{' in an epoch' if weights is not None else ''}"
    computed = f"about {rounded(num_tokens * sampled.num_rows / sampled.num_tokens)} are computed"
    if own.rows_r is not None:
        about = "" if sampled.scale == 1 else "about "
        whole = f"{about}{round(num_tokens * sampled.num_whole_tokens / sampled.num_tokens):,} tokens as whole chats"
        return (
            f"{whole}, {tokens} as their {len(corpus.lengths):,} turns, of which {computed}: "
            f"r = {ratio(own.r)} against whole chats, as TRL trains them, {ratio(own.rows_r)} against the same rows."
        )
    if own.r < 1.005:
        return f"{tokens}, none of them shared within a micro-batch: r = 1."
    return f"{tokens}, of which {computed}: r = {ratio(own.r)}."


def _speed(own: Setting, prediction: StepPrediction | None) -> str:
    """Summarise the prediction for the user's own settings."""
    if prediction is None or own.speedup is None:
        return "The speed-up on this machine was not predicted."
    baseline = "an ordinary padded one" if own.rows_r is None else "an ordinary padded one on whole chats"
    text = (
        f"A training step is predicted to run at {ratio(own.speedup)}x the speed of {baseline} on this machine, "
        f"an epoch in {duration(own.seconds_per_epoch or 0)} with {bytes_text(own.memory_bytes or 0)} of memory."
    )
    if prediction.cpu_share < ALONE:
        text += f" Other programs took {1 - prediction.cpu_share:.0%} of the time, so this is less certain."
    return text


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


def hints(own: Setting, settings: Sequence[Setting]) -> Iterator[str]:
    """Yield hints: nothing is gained; what another value of one setting brings, the smallest that brings most of it.

    Seconds do not count: they vary with the load of the machine.
    """
    if own.speedup is not None and own.speedup < NO_GAIN:
        yield (
            f"as they are, these rows gain nothing: a step takes {1 / own.speedup:.2f} of the ordinary time. "
            f"--dedup=false is the ordinary trainer; what follows, and fewer breaks, may change that"
        )
    for key, price in PRICES.items():
        value = getattr(own.draw, key)
        same = [each for each in settings if replace(each.draw, **{key: value}) == own.draw]
        enough = [each for each in same if each.r >= NEARLY * max(each.r for each in same)]
        chosen = min(enough, key=lambda each: getattr(each.draw, key), default=own)
        if chosen.r >= WORTH_A_HINT * own.r:
            shown = str(getattr(chosen.draw, key)).lower()
            yield f"--data.{key}={shown}: {_gain(own, chosen)}. {price}"


def _gain(own: Setting, other: Setting) -> str:
    text = f"r = {ratio(other.r)} in place of {ratio(own.r)}"
    if own.seconds_per_epoch is None or other.seconds_per_epoch is None:
        return text
    text += f", an epoch in about {duration(other.seconds_per_epoch)} in place of {duration(own.seconds_per_epoch)}"
    if (other.memory_bytes or 0) <= WORTH_A_HINT * (own.memory_bytes or 0):
        return text
    return f"{text}, {bytes_text(other.memory_bytes or 0)} of memory in place of {bytes_text(own.memory_bytes or 0)}"
