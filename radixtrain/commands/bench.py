"""`radixtrain bench`: how much faster deduplication is on this machine, over a grid of shapes, beside the ideal.

`bench` needs only torch, transformers and NumPy; `run`, its command line, needs jsonargparse too.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Literal

import torch
from transformers.utils.logging import disable_progress_bar

from radixtrain.bench.cells import Attention, Cell, Mode, ModelShape, Tree, build_model, check_options, grid, strategies
from radixtrain.bench.environment import environment, header
from radixtrain.bench.measure import Measured, Settings, measure
from radixtrain.bench.table import draw, print_table, write_csv
from radixtrain.bench.work import make_work, with_choices
from radixtrain.hf.step_cost import step_cost_of


def bench(
    models: ModelShape | list[ModelShape] = ModelShape(),  # noqa: B008
    prompt_length: int | list[int] = 512,
    suffix_length: int | list[int] = 64,
    num_sequences: int | list[int] = 16,
    tree: Tree | list[Tree] = "flat",
    mode: Mode | list[Mode] = "step",
    attention: Attention | list[Attention] = "auto",
    kernel: Literal["auto", "torch", "flash_attn", "flash_attn_3", "flash_attn_4", "cudnn", "efficient"] = "auto",
    attn_implementation: str = "sdpa",
    device: Literal["cpu", "cuda"] = "cpu",
    dtype: Literal["float32", "bfloat16"] = "float32",
    repeats: int = 5,
    float64_truth: bool = False,
    max_teraflops: float | None = None,
    num_threads: int | None = None,
    csv: str | None = None,
    plot: str | None = None,
) -> None:
    """Time a training step, deduplicated and not, in turns in one process. A list as a value makes the grid larger.

    Args:
        models: Qwen3 shapes with random weights: num_hidden_layers, hidden_size, intermediate_size (null: 3 x
            hidden_size), num_attention_heads (null: hidden_size / head_dim), num_key_value_heads (null: half of those),
            head_dim, vocab_size, tie_word_embeddings, name, family (qwen3 or qwen3_5).
        prompt_length: tokens that sequences share; 0 for none.
        suffix_length: tokens of each after them, which bear the loss.
        num_sequences: sequences of the batch.
        tree: flat, one prompt for all; nested, half of it for every four sequences.
        mode: forward is without gradients.
        attention: strategies on unique tokens; auto is what `fit` would choose.
        kernel: of the attention on unique tokens.
        attn_implementation: of the ordinary arm: Hugging Face's sdpa, flash_attention_2, eager.
        device: where it runs.
        dtype: of weights and computation.
        repeats: turns of each arm; medians are reported.
        float64_truth: compare gradients with the ordinary model in float64, by the bars of `verify`; always so with
            recurrent layers. Otherwise float32 is compared with the ordinary arm (1e-4, relative L2 of each tensor),
            bfloat16 with float32.
        max_teraflops: leave out cells whose ordinary step takes more 1e12 floating-point operations.
        num_threads: of torch on CPU.
        csv: a file to write, a line for each cell and strategy.
        plot: a .png or .svg file: measured against ideal speed-up. Needs matplotlib.

    Raises:
        UserError: the gradient of an arm is not the ordinary one, so that times mean nothing; or a key cannot be met.
    """
    check_options(
        repeats=repeats,
        num_threads=num_threads,
        device=device,
        csv=csv,
        max_teraflops=max_teraflops,
        plot=plot,
    )
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    cells = grid(models, prompt_length, suffix_length, num_sequences, tree, mode)
    target, weights = torch.device(device), getattr(torch, dtype)
    head_dim = max(cell.model.head_dim for cell in cells)
    settings = Settings(
        attention=strategies(attention, kernel, target, weights, head_dim),
        kernel=kernel,
        repeats=repeats,
        float64_truth=float64_truth,
    )
    print(header(target, dtype, repeats), flush=True)  # noqa: T201
    results: list[Measured] = []
    try:
        for measured in _measure(cells, settings, target, weights, attn_implementation, max_teraflops):
            results += measured
            if csv is not None:
                write_csv(Path(csv), results, environment(target, dtype))
    finally:
        if results:
            print_table(results)
    if plot is not None:
        draw(results, Path(plot))


def run(argv: Sequence[str]) -> None:
    """The command line of `bench`."""
    from jsonargparse import auto_cli  # here, so that `bench` does not need it

    disable_progress_bar()
    auto_cli(bench, list(argv)[1:], as_positional=False, prog="radixtrain bench", exit_on_error=False)


def _measure(
    cells: list[Cell],
    settings: Settings,
    device: torch.device,
    dtype: torch.dtype,
    attn_implementation: str,
    max_teraflops: float | None,
) -> Iterator[list[Measured]]:
    """The results cell by cell. Progress and what is left out go to stderr."""
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
                if "auto" in settings.attention:
                    work = with_choices(work, step_cost_of(model))
                yield measure(model, work, settings)
            except torch.OutOfMemoryError:
                _say(f"{progress}: left out: the device's memory does not hold it")


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
