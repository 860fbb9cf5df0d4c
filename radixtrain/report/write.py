"""Everything that `radixtrain report` finds, put together: the data, what is predicted, and the best setting."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from radixtrain.bench.environment import environment
from radixtrain.data.datamodule import SFTData
from radixtrain.data.tokenized.corpus import Corpus
from radixtrain.errors import UserError
from radixtrain.report.best import best_setting, command_to_paste, hints
from radixtrain.report.cases import cases_of
from radixtrain.report.contents import DataReport, Setting
from radixtrain.report.divergence import find_breaks
from radixtrain.report.prediction import Prediction, free_bytes, predict_seconds, with_step_cost
from radixtrain.report.profiling import Rehearsal
from radixtrain.report.sharing import (
    Draw,
    Epoch,
    SampledSteps,
    length_quantiles,
    num_distinct_tokens,
    num_shared_prompts,
)
from radixtrain.report.tree import prefix_tree
from radixtrain.tree.arrays import IntArray
from radixtrain.tree.cost_model import StepCost

__all__ = ["make_report"]

logger = logging.getLogger(__name__)

OWN_SECONDS, OTHER_SECONDS = 4.0, 0.8  # to count steps of the user's own setting, and of each other one
TREE_SAMPLES, TREE_NODES = 2000, 300
REHEARSED_STEPS = 2


def make_report(
    data: SFTData, rehearsal: Rehearsal, typed: Sequence[str] = (), max_seconds: float = 45.0
) -> DataReport:
    """What an epoch of training on these data holds, shares and takes.

    data: after `setup`. rehearsal: how the model would train.
    typed: the command line after the command, for the command to paste.
    max_seconds: for timing micro-batches; 0 predicts nothing.
    """
    notes: list[str] = []
    rehearsal, step_cost = _costed(rehearsal, max_seconds, notes)
    epoch = _epoch(data, step_cost)
    together = data.hparams.group_by_prefix
    own = Draw(
        data.hparams.batch_size, data.hparams.max_tokens, together if together is True or together > 1 else False
    )
    sampled = _sampled(epoch, own, data.hparams.max_length)
    prediction = None
    if max_seconds and rehearsal.row_seconds is not None:
        prediction = _predicted(rehearsal, epoch, own, data, max_seconds, notes)
    settings = {draw: _setting(sampled[draw], prediction) for draw in sorted(sampled)}
    best = best_setting(settings[own], settings.values(), free_bytes(rehearsal.device))
    return DataReport(
        **_about_data(data, epoch, notes),
        title=_name_of(data.hparams.train_file),
        model=str(data.hparams.model_name_or_path),
        current=settings[own],
        settings=tuple(settings.values()),
        best=best,
        command=command_to_paste(typed, settings[own], best),
        environment=_environment(rehearsal),
        notes=tuple(notes),
        hints=tuple(hints(settings[own], list(settings.values()))),
    )


def _costed(rehearsal: Rehearsal, max_seconds: float, notes: list[str]) -> tuple[Rehearsal, StepCost | None]:
    """With what a row of a layer takes here, and the costs that the collator chooses by; or a note why not."""
    if not max_seconds:
        notes.append("Speed and memory were not predicted: max_seconds is 0.")
        return rehearsal, None
    try:
        return with_step_cost(rehearsal)
    except UserError as error:
        notes.append(f"Speed and memory were not predicted: {error}.")
        return rehearsal, None


def _epoch(data: SFTData, step_cost: StepCost | None) -> Epoch:
    """As `fit` draws and collates it, with deduplication."""
    hparams = data.hparams
    data.step_cost = None if step_cost is None else lambda: step_cost
    dedup, hparams.dedup = hparams.dedup, True
    try:
        collator = data.step_collator()
    finally:
        hparams.dedup = dedup
    corpus = data.conversations["train"]
    return Epoch(
        conversations=corpus,
        lengths=corpus.lengths,
        seed=hparams.seed,
        shuffle=hparams.shuffle_dataset,
        collator=collator,
        step_cost=step_cost,
        weights=corpus.weights,
    )


def _sampled(epoch: Epoch, own: Draw, max_length: int | None) -> dict[Draw, SampledSteps]:
    """Some steps of the user's own setting and of others."""
    longest = max_length or int(epoch.lengths.max())
    grid = epoch.settings_grid(own, longest)
    logger.info("counting what the steps of %d settings share", len(grid))
    return {draw: epoch.sampled(draw, OWN_SECONDS if draw == own else OTHER_SECONDS) for draw in grid}


def _predicted(
    rehearsal: Rehearsal, epoch: Epoch, own: Draw, data: SFTData, max_seconds: float, notes: list[str]
) -> Prediction | None:
    steps = [epoch.features(batch) for batch in epoch.first_batches(own, REHEARSED_STEPS)]
    cases = cases_of(steps, epoch.collator, epoch.step_cost)
    logger.info("timing micro-batches of both arms, for about %.0f s", max_seconds)
    try:
        found = predict_seconds(rehearsal, cases, data.hparams.dataloader_num_workers, max_seconds)
    except UserError as error:
        notes.append(f"Speed and memory were not predicted: {error}.")
        return None
    layers = " and ".join(map(str, found.timed_layers))
    notes.append(
        f"Speed and memory are predicted from micro-batches of these data on {layers} of {rehearsal.num_layers} layers "
        f"with random weights, timed here."
    )
    return found


def _setting(sampled: SampledSteps, prediction: Prediction | None) -> Setting:
    draw = sampled.draw
    return Setting(
        batch_size=draw.batch_size,
        max_tokens=draw.max_tokens,
        group_by_prefix=bool(draw.group_by_prefix),
        r=sampled.r,
        best_r=sampled.best_r,
        speedup=None if prediction is None else prediction.speedup(sampled),
        seconds_per_epoch=None if prediction is None else prediction.seconds_per_epoch(sampled),
        memory_bytes=None if prediction is None else prediction.memory_bytes(sampled),
    )


def _about_data(data: SFTData, epoch: Epoch, notes: list[str]) -> dict[str, Any]:
    """The fields of a `DataReport` that no setting changes."""
    rows, corpus, tokenizer = data.reports["train"], data.conversations["train"], data.encoder().tokenizer
    num_tokens = int(corpus.lengths.sum())
    num_sorted, num_distinct = num_distinct_tokens(epoch)
    if num_sorted < num_tokens:
        notes.append(f"Distinct tokens are those of a sample of {num_sorted:,} tokens, and so an upper bound.")
    logger.info("looking for what breaks sharing")
    return {
        "num_rows": rows.num_rows,
        "num_samples": len(corpus.lengths),
        "num_tokens": num_tokens,
        "num_epoch_tokens": _num_epoch_tokens(corpus),
        "num_unique_tokens": round(num_distinct * num_tokens / num_sorted),
        "num_labels": round(rows.num_labels * num_tokens / rows.num_tokens),  # less what `val_size` took out
        "num_prompts": num_shared_prompts(epoch.groups),
        "length_quantiles": length_quantiles(corpus.lengths),
        "max_length": data.hparams.max_length,
        "num_over_length": rows.num_long_samples,
        "longest": max(rows.longest, int(corpus.lengths.max())),
        "sources": _sources(corpus),
        "tree": prefix_tree(_some_sequences(epoch), tokenizer, TREE_NODES),
        "breaks": find_breaks(corpus, tokenizer, data.hparams.batch_size),
    }


def _num_epoch_tokens(corpus: Corpus) -> int:
    """On average; 0 without weights."""
    if corpus.weights is None:
        return 0
    return round(float(corpus.weights @ np.add.reduceat(corpus.lengths, corpus.starts[:-1])))


def _some_sequences(epoch: Epoch) -> list[IntArray]:
    """Of conversations at equal distances, as many as make a picture."""
    places = np.linspace(0, len(epoch.conversations) - 1, min(TREE_SAMPLES, len(epoch.conversations))).astype(np.int64)
    return [sample.input_ids for place in places.tolist() for sample in epoch.conversations[place]][:TREE_SAMPLES]


def _sources(corpus: Any) -> dict[str, int]:
    """Conversations of each source that is named."""
    counts: dict[str, int] = {}
    for part, size in zip(corpus.parts, np.diff(corpus.bounds).tolist(), strict=True):
        counts[part.name] = counts.get(part.name, 0) + size
    return counts


def _name_of(train_file: Any) -> str:
    """What the configuration says, for the title."""
    listed = train_file if isinstance(train_file, list) else [train_file]
    return ", ".join(str(each["path"] if isinstance(each, dict) else each) for each in listed)


def _environment(rehearsal: Rehearsal) -> dict[str, str]:
    """Machine and versions, those that are known."""
    found = environment(rehearsal.device, str(rehearsal.dtype).removeprefix("torch."))
    return {name: str(value) for name, value in found.items() if value}
