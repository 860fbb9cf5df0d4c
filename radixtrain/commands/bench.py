"""`radixtrain bench`: the speed-up by deduplication on this machine, over a grid of shapes, next to the ideal."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from radixtrain.bench.cells import Cell, ModelShape, build_model, check_options, grid, strategies
from radixtrain.bench.measure import Measured, Settings, measure
from radixtrain.bench.table import draw, print_table, write_csv
from radixtrain.bench.work import make_work
from radixtrain.settings.commands import Bench
from radixtrain.timing import environment, header


def bench(settings: Bench) -> None:
    """Time a training step with and without deduplication, alternating in one process.

    Raises:
        UserError: the gradient of an arm is not the ordinary one, so that times mean nothing; or a key cannot be used.
    """
    csv, max_teraflops = settings.csv, settings.max_teraflops
    check_options(
        repeats=settings.repeats,
        num_threads=settings.num_threads,
        device=settings.device,
        csv=csv,
        max_teraflops=max_teraflops,
        plot=settings.plot,
    )
    if settings.num_threads is not None:
        torch.set_num_threads(settings.num_threads)
    models = [
        ModelShape(**vars(each))
        for each in (settings.models if isinstance(settings.models, list) else [settings.models])
    ]
    axes = settings.prompt_length, settings.suffix_length, settings.num_sequences, settings.tree, settings.mode
    cells = grid(models, *axes)
    target, weights = torch.device(settings.device), getattr(torch, settings.dtype)
    head_dim = max(cell.model.head_dim for cell in cells)
    arms = Settings(
        attention=strategies(settings.attention, settings.kernel, target, weights, head_dim),
        kernel=settings.kernel,
        repeats=settings.repeats,
        float64_truth=settings.float64_truth,
    )
    print(header(target, settings.dtype, settings.repeats), flush=True)  # noqa: T201
    results: list[Measured] = []
    try:
        for measured in _measure(cells, arms, target, weights, settings.attn_implementation, max_teraflops):
            results += measured
            if csv is not None:
                write_csv(Path(csv), results, environment(target, settings.dtype))
    finally:
        if results:
            print_table(results)
    if settings.plot is not None:
        draw(results, Path(settings.plot))


def run(settings: Bench, words: Sequence[str]) -> None:
    """Run the command line of `bench`."""
    disable_progress_bar()
    bench(settings)


def _measure(
    cells: list[Cell],
    settings: Settings,
    device: torch.device,
    dtype: torch.dtype,
    attn_implementation: str,
    max_teraflops: float | None,
) -> Iterator[list[Measured]]:
    """Yield the results cell by cell. Progress and what is left out go to stderr."""
    number = 0
    for shape, group in groupby(cells, key=lambda cell: cell.model):
        model = None
        for cell in group:
            number += 1
            progress = f"[{number}/{len(cells)}] {cell}"
            work = make_work(cell)
            teraflops = work.ordinary_teraflops(shape.config())
            if max_teraflops is not None and teraflops > max_teraflops:
                _say(f"{progress}: left out: {teraflops:.2f} teraflops are above max_teraflops")
                continue
            _say(progress)
            try:
                model = build_model(shape, device, dtype, attn_implementation) if model is None else model
                yield measure(model, work, settings)
            except torch.OutOfMemoryError:
                _say(f"{progress}: left out: the device's memory does not hold it")


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
