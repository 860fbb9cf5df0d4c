"""`radixtrain bench`: what deduplication is worth on this machine, over a grid of shapes, beside what it could be."""

from __future__ import annotations

import csv
import importlib.util
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, product
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import transformers
from jsonargparse import ArgumentParser, set_parsing_settings
from rich.console import Console
from rich.table import Table
from transformers.utils.logging import disable_progress_bar

from radixtrain.attention import choose_attention
from radixtrain.benchmark import Cell, Measured, ModelShape, Settings, build_model, make_work, measure
from radixtrain.errors import UserError

__all__ = ["bench", "run"]

Attention = Literal["auto", "cascade", "path", "expand"]
Tree = Literal["flat", "nested"]
Mode = Literal["step", "forward"]
T = TypeVar("T")

# What the CSV says of a result; `COLUMNS` is what the table says, and how.
SHAPE_FIELDS = (
    "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size",
)  # fmt: skip
CELL_FIELDS = ("prompt_length", "suffix_length", "num_sequences", "tree", "mode")
RESULT_FIELDS = (
    "attention", "r", "ideal_speedup", "measured_speedup", "lowest_speedup", "highest_speedup", "efficiency",
    "ordinary_seconds", "radix_seconds",
    "ordinary_tokens_per_second", "radix_tokens_per_second", "ordinary_peak_bytes", "radix_peak_bytes", "error",
)  # fmt: skip
COLUMNS: dict[str, Any] = {
    "model": lambda m: str(m.cell.model),
    "sequences": lambda m: f"{m.cell.num_sequences} x ({m.cell.prompt_length} + {m.cell.suffix_length})",
    "tree": lambda m: m.cell.tree,
    "mode": lambda m: m.cell.mode,
    "attention": lambda m: m.attention,
    "r": lambda m: f"{m.r:.2f}",
    "ideal\nspeed-up": lambda m: f"{m.ideal_speedup:.2f}",
    "measured\nspeed-up": lambda m: f"{m.measured_speedup:.2f}",
    "lowest -\nhighest": lambda m: f"{m.lowest_speedup:.2f} - {m.highest_speedup:.2f}",
    "effi-\nciency": lambda m: f"{m.efficiency:.2f}",
    "tokens/s\nordinary": lambda m: f"{m.ordinary_tokens_per_second:,.0f}",
    "tokens/s\nradix": lambda m: f"{m.radix_tokens_per_second:,.0f}",
    "peak MiB\nordinary": lambda m: _mebibytes(m.ordinary_peak_bytes),
    "peak MiB\nradix": lambda m: _mebibytes(m.radix_peak_bytes),
    "worst\nerror": lambda m: f"{m.error:.1e}",
}
NUM_TEXT_COLUMNS = 5


def bench(
    models: ModelShape | list[ModelShape] = ModelShape(),  # noqa: B008
    prompt_length: int | list[int] = 512,
    suffix_length: int | list[int] = 64,
    num_sequences: int | list[int] = 16,
    tree: Tree | list[Tree] = "flat",
    mode: Mode | list[Mode] = "step",
    attention: Attention | list[Attention] = "auto",
    kernel: Literal["auto", "torch", "flash_attn"] = "auto",
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
    """Time a training step, deduplicated and not, in turns in one process. What is a list makes the grid larger.

    Args:
        models: Qwen3 shapes with random weights: num_hidden_layers, hidden_size, intermediate_size (null: 3 x
            hidden_size), num_attention_heads (null: hidden_size / head_dim), num_key_value_heads (null: half of those),
            head_dim, vocab_size, tie_word_embeddings, name (in the table).
        prompt_length: tokens that sequences share.
        suffix_length: tokens of each sequence's own; these bear the loss.
        num_sequences: sequences of the batch; 1 has nothing to share.
        tree: flat, one prompt for all; nested, three levels: half of the prompt shared by all, the other half by every
            four sequences, then the suffixes.
        mode: step, forward and backward; forward, without gradients.
        attention: strategies on unique tokens, timed in turns with the ordinary arm and one another.
        kernel: of the attention on unique tokens.
        attn_implementation: of the ordinary arm: Hugging Face's sdpa, flash_attention_2, eager.
        device: where it runs.
        dtype: of weights and computation.
        repeats: turns of each arm; medians are reported.
        float64_truth: compare gradients with a float64 run of the ordinary model, one sequence at a time, to the bars
            of `radixtrain verify`; several steps' time. Without it float32 is compared with the ordinary arm itself
            (at most 1e-5 apart, relative L2 of each tensor), bfloat16 with the ordinary model in float32.
        max_teraflops: leave out cells whose ordinary step (or forward) takes more than so many 1e12 floating-point
            operations; a desktop core does about 0.1 of them in a second.
        num_threads: of torch on CPU; null leaves torch's choice.
        csv: a file to write, a row for each cell and strategy, as soon as it is measured.
        plot: a .png or .svg file to write: measured against ideal speed-up. Needs matplotlib.

    Raises:
        UserError: an arm's gradient is not the ordinary one's, so that times mean nothing; or a key cannot be met.
    """
    _check_options(repeats, max_teraflops, num_threads, device, csv, plot)
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    cells = _cells(models, prompt_length, suffix_length, num_sequences, tree, mode)
    target, weights = torch.device(device), getattr(torch, dtype)
    strategies = _strategies(_listed(attention), kernel, target, weights, cells)
    settings = Settings(strategies, kernel, repeats, float64_truth)
    print(_header(target, dtype, repeats), flush=True)  # noqa: T201
    results: list[Measured] = []
    try:
        for measured in _measure(cells, settings, target, weights, attn_implementation, max_teraflops):
            results += measured
            if csv is not None:
                _write_csv(Path(csv), results, _environment(target, dtype))
    finally:
        if results:
            _print_table(results)
    if plot is not None:
        _draw(results, Path(plot))


def run(argv: Sequence[str]) -> None:
    """The command line of `bench`."""
    set_parsing_settings(import_path_denylist=["*"], import_path_allowlist=["radixtrain"])
    disable_progress_bar()
    parser = ArgumentParser(prog="radixtrain bench", exit_on_error=False)
    parser.add_argument("--config", action="config", help="A YAML file with these keys; later keys override it.")
    parser.add_function_arguments(bench)
    options = parser.instantiate(parser.parse_args(list(argv))).as_dict()
    bench(**{name: value for name, value in options.items() if name != "config"})


def _check_options(
    repeats: int, max_teraflops: float | None, num_threads: int | None, device: str, csv: str | None, plot: str | None
) -> None:
    """What would otherwise fail after minutes of measuring, or in a way that names no key."""
    for name, number in (("repeats", repeats), ("num_threads", num_threads), ("max_teraflops", max_teraflops)):
        if number is not None and number <= 0:
            raise UserError(f"{name} must be above 0, got {number}")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("device cuda: torch sees no CUDA device; set device to cpu")
    for name, path in (("csv", csv), ("plot", plot)):
        if path is not None and not Path(path).absolute().parent.is_dir():
            raise UserError(f"{name}: no such folder: {Path(path).parent}")
    if plot is not None and Path(plot).suffix not in (".png", ".svg"):
        raise UserError(f"plot must end in .png or .svg, got {plot}")
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise UserError("plot needs matplotlib: pip install 'radixtrain[bench]'")


def _cells(models: Any, prompt_length: Any, suffix_length: Any, num_sequences: Any, tree: Any, mode: Any) -> list[Cell]:
    """The grid, a model at a time."""
    for shape in _listed(models):
        _check_shape(shape)
    axes = {
        "prompt_length": (prompt_length, 0),
        "suffix_length": (suffix_length, 2),
        "num_sequences": (num_sequences, 1),
    }
    for name, (values, minimum) in axes.items():
        _check_at_least(minimum, name, _listed(values))
    return [
        Cell(*point)
        for point in product(*map(_listed, (models, prompt_length, suffix_length, num_sequences, tree, mode)))
    ]


def _check_shape(shape: ModelShape) -> None:
    for name, value in vars(shape).items():
        if isinstance(value, int) and not isinstance(value, bool):
            _check_at_least(1, f"models: {name}", [value])
    config = shape.config()
    if config.num_attention_heads % (config.num_key_value_heads or 1):
        raise UserError(
            f"models: num_attention_heads ({config.num_attention_heads}) must be a multiple of num_key_value_heads "
            f"({config.num_key_value_heads})"
        )


def _check_at_least(minimum: int, name: str, values: list[int]) -> None:
    for value in values:
        if value < minimum:
            raise UserError(f"{name} must be at least {minimum}, got {value}")


def _strategies(
    wanted: list[Any], kernel: str, device: torch.device, dtype: torch.dtype, cells: list[Cell]
) -> tuple[str, ...]:
    """The strategies by the names of what runs, `auto` resolved, each once."""
    head_dim = max(cell.model.head_dim for cell in cells)
    try:
        chosen = [choose_attention(name, kernel, device, dtype, head_dim).strategy for name in wanted]
    except ValueError as error:
        raise UserError(str(error)) from None
    return tuple(dict.fromkeys(chosen))


def _measure(
    cells: list[Cell], settings: Settings, device: torch.device, dtype: torch.dtype, attn_implementation: str,
    max_teraflops: float | None,
) -> Iterator[list[Measured]]:  # fmt: skip
    """The results cell by cell; what is left out is said, on stderr as the progress is."""
    number = 0
    for shape, group in groupby(cells, key=lambda cell: cell.model):
        model = None
        for cell in group:
            number += 1
            where = f"[{number}/{len(cells)}] {cell}"
            work = make_work(cell)
            if max_teraflops is not None and work.ordinary_teraflops > max_teraflops:
                _say(f"{where}: left out: {work.ordinary_teraflops:.2f} teraflops are above max_teraflops")
                continue
            _say(where)
            try:
                model = build_model(shape, device, dtype, attn_implementation) if model is None else model
                yield measure(model, work, settings)
            except torch.OutOfMemoryError:
                _say(f"{where}: left out: the device's memory does not hold it")


def _environment(device: torch.device, dtype: str) -> dict[str, Any]:
    """What a number depends on beside the shapes. No names of hosts, no paths."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": _commit(),
        "machine": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "num_cores": os.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "dtype": dtype,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _header(device: torch.device, dtype: str, repeats: int) -> str:
    facts = _environment(device, dtype)
    commit = f", commit {facts['commit']}" if facts["commit"] else ""
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return (
        f"{facts['date']}{commit}, {facts['machine']}, {facts['num_cores']} cores, {facts['num_threads']} threads"
        f"{load}, {dtype}, torch {facts['torch']}, transformers {facts['transformers']}, medians of {repeats} "
        f"alternating runs"
    )


def _processor() -> str:
    """The CPU's model, or its architecture alone."""
    described = Path("/proc/cpuinfo").read_text(errors="replace") if Path("/proc/cpuinfo").exists() else ""
    models = [line.partition(":")[2].strip() for line in described.splitlines() if line.startswith("model name")]
    return f"{models[0]} ({platform.machine()})" if models else platform.processor() or platform.machine()


def _commit() -> str:
    """Of the repository that this file is in, `-dirty` where it was changed; empty for an installed package."""
    for command in (["ls-files", "--error-unmatch", __file__], ["describe", "--always", "--dirty", "--exclude=*"]):
        try:
            done = subprocess.run(
                ["git", *command], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
            )
        except (OSError, subprocess.CalledProcessError):
            return ""
    return done.stdout.strip()


def _print_table(results: Sequence[Measured]) -> None:
    """A table, or where the terminal is too narrow for it a block for each result: no number is ever cut."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for number, name in enumerate(COLUMNS):
        table.add_column(name, justify="left" if number < NUM_TEXT_COLUMNS else "right", no_wrap=True)
    for measured in results:
        table.add_row(*(show(measured) for show in COLUMNS.values()))
    terminal = Console(highlight=False)
    wide = Console(highlight=False, width=10_000)
    needed = wide.measure(table).maximum
    if not terminal.is_terminal or needed <= terminal.width:
        Console(highlight=False, width=needed).print(table)
        return
    for measured in results:
        lines = [
            f"{name.replace('-' + chr(10), '').replace(chr(10), ' ')}: {show(measured)}"
            for name, show in COLUMNS.items()
        ]
        terminal.print("\n".join(lines), "\n", soft_wrap=True)


def _write_csv(path: Path, results: Iterable[Measured], environment: dict[str, Any]) -> None:
    rows = [{**_row(measured), **environment} for measured in results]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def _row(measured: Measured) -> dict[str, Any]:
    cell = measured.cell
    fields = ((cell.model.config(), SHAPE_FIELDS), (cell, CELL_FIELDS), (measured, RESULT_FIELDS))
    return {"model": str(cell.model), **{name: getattr(of, name) for of, names in fields for name in names}}


def _draw(results: Sequence[Measured], path: Path) -> None:
    """Measured against ideal, a point for each result, on the diagonal where all that the arithmetic allows is had."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter

    figure = Figure(figsize=(6, 6), layout="constrained")
    axes = figure.subplots()
    ends = [min((min(m.ideal_speedup, m.measured_speedup) for m in results), default=1.0) / 1.2]
    ends.append(max((max(m.ideal_speedup, m.measured_speedup) for m in results), default=2.0) * 1.2)
    axes.plot(ends, ends, color="grey", linewidth=1, label="ideal", zorder=0)
    for strategy in dict.fromkeys(m.attention for m in results):
        points = [(m.ideal_speedup, m.measured_speedup) for m in results if m.attention == strategy]
        axes.scatter(*zip(*points, strict=True), label=strategy)
    for axis, scale in ((axes.xaxis, axes.set_xscale), (axes.yaxis, axes.set_yscale)):
        scale("log", base=2)
        axis.set_major_locator(LogLocator(base=2, subs=(1.0, 1.5)))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(ScalarFormatter())
    axes.set(xlabel="ideal speed-up (floating-point operations)", ylabel="measured speed-up", xlim=ends, ylim=ends)
    axes.legend()
    figure.savefig(path)


def _listed(value: T | list[T]) -> list[T]:
    return value if isinstance(value, list) else [value]


def _mebibytes(number: int) -> str:
    return f"{number / 2**20:,.1f}"


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
