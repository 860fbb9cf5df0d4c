"""Time `build_prefix_plan` and the Rust package `radix-mlp` on the shapes of the RadixMLP paper's Table 5.

    pip install radix-mlp==0.0.2
    python recipes/benchmarks/plan.py

One process and one thread; calls alternate, and the fastest of each counts. Before a time is printed, both results are
compared: U, and the maps between packed and unique tokens (`scatter_indices` and `fold_gather` there). The times are
of these maps with the unique ids and their positions, uint32 there and int64 here. The last column is all that a
training step needs: the plan, and then the tree of segments and root paths as the tensors of a `TreeLayout`.

Prompts and tails are random tokens of a vocabulary of 151,936, the sequences come in random order. Without `radix-mlp`
only our columns are printed.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np
import torch

from radixtrain.timing import environment
from radixtrain.tree.layout import TreeLayout
from radixtrain.tree.plan import PrefixPlan, build_prefix_plan

try:
    from radix_mlp import compute_fold_and_scatter
except ImportError:
    compute_fold_and_scatter = None

VOCAB_SIZE = 151_936
LONG_ENOUGH = 0.001  # seconds; shorter calls are repeated until a sample takes as long
Sequences = list[np.ndarray]


class Row(NamedTuple):
    group: str
    name: str
    sequences: Sequences


class Batch(NamedTuple):
    """The arguments of both: packed int64 for us, and uint32 with positions for `radix-mlp`."""

    ids: np.ndarray
    cu_seqlens: np.ndarray
    theirs: tuple[np.ndarray, np.ndarray, np.ndarray]


class Timing(NamedTuple):
    """Seconds of the fastest call: the plan with the unique ids, `radix-mlp`, the plan with the `TreeLayout`."""

    ours: float
    theirs: float | None
    layout: float

    @property
    def ratio(self) -> float | None:
        return None if self.theirs is None else self.theirs / self.ours


def table5(rng: np.random.Generator) -> Iterator[Row]:
    """The rows of the paper's Table 5, in its order."""
    for batch_size in (4, 8, 16, 32, 64, 256, 2048):
        yield Row("Table 5, 512 tokens, prefix ratio 0.25", f"batch {batch_size}", shared(rng, batch_size, 512, 0.25))
    for length in (128, 256, 512, 1024, 2048):
        yield Row("Table 5, batch 32, prefix ratio 0.25", f"length {length}", shared(rng, 32, length, 0.25))
    for ratio in (0.0, 0.25, 0.5, 0.75, 1.0):
        yield Row("Table 5, batch 32, 512 tokens", f"prefix ratio {ratio}", shared(rng, 32, 512, ratio))
    yield Row("Table 5, edge cases", "single sequence, 512", shared(rng, 1, 512, 0.0))
    yield Row("Table 5, edge cases", "identical, 32 x 512", shared(rng, 32, 512, 1.0))
    yield Row("Table 5, edge cases", "no overlap, 32 x 512", shared(rng, 32, 512, 0.0))


def larger(rng: np.random.Generator) -> Iterator[Row]:
    """Up to a million tokens, very many sequences, and deep trees: not in the paper."""
    for num_tokens in (10_000, 30_000, 100_000, 300_000, 1_000_000):
        yield Row(
            "growing T, 500 tokens, prefix ratio 0.5", f"T {num_tokens:,}", shared(rng, num_tokens // 500, 500, 0.5)
        )
    for num_sequences in (4_096, 16_384, 65_536):
        tokens = rng.integers(0, VOCAB_SIZE, (num_sequences, 1))
        yield Row("sequences of one token", f"{num_sequences:,} of any token", list(tokens))
    yield Row("sequences of one token", "65,536 of 4 tokens", list(rng.integers(0, 4, (65_536, 1))))
    for depth in (100, 1_000):
        yield Row("deep trees", f"{depth} branches, one below another", comb(rng, depth))
        yield Row("deep trees", f"{depth} prefixes of one sequence", prefixes(rng, depth))


def shared(rng: np.random.Generator, num_sequences: int, length: int, prefix_ratio: float) -> Sequences:
    """One prompt, and after it a tail of its own in every sequence."""
    prompt = rng.integers(0, VOCAB_SIZE, int(length * prefix_ratio))
    tails = rng.integers(0, VOCAB_SIZE, (num_sequences, length - len(prompt)))
    return [np.concatenate([prompt, tail]) for tail in tails]


def comb(rng: np.random.Generator, depth: int) -> Sequences:
    """Every sequence leaves the same trunk one token further down."""
    trunk = rng.integers(0, VOCAB_SIZE, depth)
    return [np.append(trunk[:place], VOCAB_SIZE + place) for place in rng.permutation(depth)]


def prefixes(rng: np.random.Generator, depth: int) -> Sequences:
    trunk = rng.integers(0, VOCAB_SIZE, depth)
    return [trunk[: place + 1] for place in rng.permutation(depth)]


def pack(sequences: Sequences) -> Batch:
    ids, cu_seqlens = np.concatenate(sequences), np.cumsum([0, *map(len, sequences)])
    positions = np.concatenate([np.arange(len(sequence)) for sequence in sequences])
    return Batch(ids, cu_seqlens, (ids.astype(np.uint32), positions.astype(np.uint32), cu_seqlens.astype(np.uint32)))


def check(plan: PrefixPlan, theirs: tuple[np.ndarray, ...]) -> None:
    """RuntimeError unless both fold the same tokens. They number rows as they come, we number them in tree order.

    theirs: compact ids and positions, scatter, fold. The first token of their row n is in our row `row[n]`.
    """
    _, positions, scatter, fold = theirs
    if len(fold) != plan.num_unique_tokens:
        raise RuntimeError(f"U differs: {plan.num_unique_tokens} here, {len(fold)} there")
    row = plan.inverse_indices[fold]
    if not (
        np.array_equal(row[scatter], plan.inverse_indices)
        and np.array_equal(plan.gather_indices[row], fold)
        and np.array_equal(plan.position_ids[row], positions)
    ):
        raise RuntimeError("U is the same, but the maps between packed and unique tokens differ")


def measure(batch: Batch, repeats: int, rust: Callable[..., Any] | None) -> Timing:
    arms: list[Callable[[], Any]] = [lambda: plan_and_unique_ids(batch), lambda: plan_and_layout(batch)]
    if rust is not None:
        arms.append(lambda: rust(*batch.theirs))
    calls = [max(1, min(1000, int(LONG_ENOUGH / seconds(arm, 1)))) for arm in arms]
    samples = [[seconds(arm, num) for arm, num in zip(arms, calls, strict=True)] for _ in range(repeats)]
    ours, layout, *theirs = (min(times) for times in zip(*samples, strict=True))
    return Timing(ours, theirs[0] if theirs else None, layout)


def plan_and_unique_ids(batch: Batch) -> tuple[np.ndarray, ...]:
    """The four arrays of `compute_fold_and_scatter`."""
    plan = build_prefix_plan(batch.ids, batch.cu_seqlens)
    return batch.ids.take(plan.gather_indices), plan.position_ids, plan.inverse_indices, plan.gather_indices


def plan_and_layout(batch: Batch) -> TreeLayout:
    return TreeLayout.from_plan(build_prefix_plan(batch.ids, batch.cu_seqlens))


def seconds(call: Callable[[], Any], num_calls: int) -> float:
    start = time.perf_counter()
    for _ in range(num_calls):
        call()
    return (time.perf_counter() - start) / num_calls


def run(rows: Iterator[Row], repeats: int) -> list[float]:
    """Prints a table with a line per row and returns the ratios."""
    ratios, group = [], ""
    print("\n| batch | T | U | r | ms | tokens/s | `radix-mlp` ms | tokens/s | its time / ours | with layout, ms |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        batch = pack(row.sequences)
        plan = build_prefix_plan(batch.ids, batch.cu_seqlens)
        if compute_fold_and_scatter is not None:
            check(plan, compute_fold_and_scatter(*batch.theirs))
        timing = measure(batch, repeats, compute_fold_and_scatter)
        if row.group != group:
            print(f"| *{row.group}* | | | | | | | | | |")
        group = row.group
        print(f"| {row.name} | {line(plan, timing)} |", flush=True)
        ratios += [] if timing.ratio is None else [timing.ratio]
    return ratios


def line(plan: PrefixPlan, timing: Timing) -> str:
    cells = [f"{plan.num_tokens:,}", f"{plan.num_unique_tokens:,}", f"{plan.compression_ratio:.2f}"]
    for took in (timing.ours, timing.theirs):
        cells += ["", ""] if took is None else [f"{took * 1e3:.3g}", f"{plan.num_tokens / took / 1e6:.3g} M"]
    cells += ["" if timing.ratio is None else f"**{timing.ratio:.2f}**", f"{timing.layout * 1e3:.3g}"]
    return " | ".join(cells)


def header() -> None:
    rust = "not installed" if compute_fold_and_scatter is None else version("radix-mlp")
    facts = environment(torch.device("cpu"), "int64") | {"numpy": np.__version__, "radix-mlp": rust}
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    if compute_fold_and_scatter is None:
        print("radix-mlp is not installed, so its columns are empty: pip install radix-mlp==0.0.2")


def settle_the_allocator() -> None:
    """As in a worker that has run for a while: glibc keeps freed memory once a large block was freed, 32 MiB at most.

    Before that, each array above 128 KiB is returned and faulted in again, which takes longer than filling it.
    """
    large = np.ones(31 << 17)
    del large


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=51, help="samples of each arm")
    repeats = parser.parse_args().repeats
    rng = np.random.default_rng(0)
    header()
    settle_the_allocator()
    ratios = run(table5(rng), repeats)
    if ratios:
        below = sum(ratio < 1 for ratio in ratios)
        print(
            f"\nMedian ratio of the {len(ratios)} rows of Table 5: {statistics.median(ratios):.2f}; below 1: {below}."
        )
    run(larger(rng), max(3, repeats // 5))


if __name__ == "__main__":
    main()
