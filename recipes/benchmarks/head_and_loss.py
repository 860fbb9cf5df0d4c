"""Measure the time and peak memory of head and cross-entropy, fused (`radixtrain.loss`) and in plain PyTorch.

    python recipes/benchmarks/head_and_loss.py
    python recipes/benchmarks/head_and_loss.py --vocab_size 4096 --hidden_size 256 --chunk_rows 32 64 128 256

Plain is `torch.nn.functional.linear` and `cross_entropy`. Forward and backward of both alternate in one process;
the table has medians, and the median of the paired ratios. Each prediction has its own row, so that both compute the
same products: sharing prompts saves more. Before a time is printed, loss and gradients are compared.

Memory is the highest point of a forward and backward pass, beyond its start and one gradient of the head, which both
need. So it contains the gradient of the hidden states. If the head has a `.grad` from an earlier micro-batch, the one
gradient is the one that autograd adds to it. The gradient of a 16-bit head counts 2 bytes.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from radixtrain import loss as fused
from radixtrain.timing import header, peak_bytes

CPU = torch.device("cpu")
Samples = Sequence[tuple[float, float]]


class Shape(NamedTuple):
    """P predictions from rows of D numbers, V tokens."""

    num_predictions: int
    hidden_size: int
    vocab_size: int


class Arm(NamedTuple):
    name: str
    loss: Callable[[Tensor, Tensor, Tensor], Tensor]
    chunk_rows: int | None = None


def plain_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(linear(hidden, weight).float(), labels)


def fused_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    rows, ones = torch.arange(len(labels)), torch.ones(len(labels))
    return fused.linear_cross_entropy(hidden, weight, labels, rows, ones) / len(labels)


def inputs(shape: Shape, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden rows and a head that make logits of order one, and labels."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(shape.num_predictions, shape.hidden_size, generator=generator)
    weight = torch.randn(shape.vocab_size, shape.hidden_size, generator=generator) * shape.hidden_size**-0.5
    labels = torch.randint(0, shape.vocab_size, (shape.num_predictions,), generator=generator)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels


def step(arm: Arm, given: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """One forward and backward pass; gradients are added to earlier ones."""
    with chunks_of(arm.chunk_rows):
        loss = arm.loss(*given)
    loss.backward()
    return loss.detach()


@contextmanager
def chunks_of(num_rows: int | None) -> Iterator[None]:
    """Chunks of about so many rows, whatever the vocabulary; None leaves it to the library."""
    before = fused.CHUNK_ROWS, fused.MIN_CHUNK_ELEMENTS
    if num_rows is not None:
        fused.CHUNK_ROWS, fused.MIN_CHUNK_ELEMENTS = (num_rows, num_rows), {"cpu": 1, "other": 1}
    try:
        yield
    finally:
        fused.CHUNK_ROWS, fused.MIN_CHUNK_ELEMENTS = before


def forget(given: tuple[Tensor, Tensor, Tensor]) -> None:
    for x in given:
        x.grad = None


def check(arms: list[Arm], given: tuple[Tensor, Tensor, Tensor]) -> None:
    """RuntimeError unless all arms have one loss and one gradient, up to rounding; the first is the reference."""
    bar = 100 * torch.finfo(given[0].dtype).eps
    expected: list[Tensor] = []
    for arm in arms:
        forget(given)
        actual = [step(arm, given), given[0].grad, given[1].grad]
        expected = expected or actual
        for name, one, reference in zip(("loss", "d_hidden", "d_weight"), actual, expected, strict=True):
            if not (one - reference).norm() <= bar * reference.norm():
                raise RuntimeError(f"{arm.name} and {arms[0].name} differ in {name}")


def seconds(arm: Arm, given: tuple[Tensor, Tensor, Tensor]) -> tuple[float, float]:
    """By the clock, and of the processor: only the first contains what other programs take from a shared machine."""
    forget(given)
    start = time.perf_counter(), time.process_time()
    step(arm, given)
    return time.perf_counter() - start[0], time.process_time() - start[1]


def peaks(arm: Arm, given: tuple[Tensor, Tensor, Tensor]) -> list[float]:
    """MB beyond one gradient of the head: before it has a `.grad`, and after."""
    forget(given)
    found = []
    for _ in range(2):
        given[0].grad = None
        found.append((peak_bytes(lambda: step(arm, given), CPU) - given[1].nbytes) / 1e6)
    return found


def run(shape: Shape, dtype: torch.dtype, repeats: int, chunk_rows: list[int]) -> list[float]:
    """Prints a table with a line per arm and returns the ratios of the fused ones, by the clock."""
    rows = fused._rows_per_chunk(shape.num_predictions, shape.vocab_size, shape.hidden_size, CPU)
    arms = [Arm("plain", plain_loss), Arm(f"fused, {rows} rows a chunk", fused_loss)]
    arms += [Arm(f"fused, about {num}", fused_loss, num) for num in chunk_rows]
    given = inputs(shape, dtype)
    check(arms, given)
    samples = [[seconds(arm, given) for arm in arms] for _ in range(repeats)]
    by_arm = list(zip(*samples, strict=True))
    print("\n| head and loss | ms | time / plain | processor time / plain | MB beyond one gradient | with a `.grad` |")
    print("|---|---|---|---|---|---|")
    for arm, taken in zip(arms, by_arm, strict=True):
        clock, processor = ratios(taken, by_arm[0])
        memory = " | ".join(f"{peak:,.1f}" for peak in peaks(arm, given))
        took = statistics.median(sample[0] for sample in taken) * 1e3
        print(f"| {arm.name} | {took:,.1f} | **{clock:.2f}** | {processor:.2f} | {memory} |", flush=True)
    return [ratios(taken, by_arm[0])[0] for taken in by_arm[1:]]


def ratios(taken: Samples, plain: Samples) -> list[float]:
    """Medians of the paired ratios, by the clock and of the processor."""
    return [statistics.median(x[i] / y[i] for x, y in zip(taken, plain, strict=True)) for i in range(2)]


def described(shape: Shape, dtype: torch.dtype) -> str:
    num_predictions, hidden_size, vocab_size = shape
    return (
        f"V = {vocab_size:,}, D = {hidden_size:,}, P = {num_predictions:,}: the logits are "
        f"{num_predictions * vocab_size * 4 / 1e6:,.1f} MB in float32, the head's gradient is "
        f"{vocab_size * hidden_size * dtype.itemsize / 1e6:,.1f} MB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab_size", type=int, default=151_936, help="Qwen3's")
    parser.add_argument("--hidden_size", type=int, default=1024)
    parser.add_argument("--predictions", type=int, default=4096)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--repeats", type=int, default=3, help="samples of each arm; an odd number")
    parser.add_argument("--chunk_rows", type=int, nargs="*", default=[], help="other sizes of a chunk to measure")
    args = parser.parse_args()
    shape, dtype = Shape(args.predictions, args.hidden_size, args.vocab_size), getattr(torch, args.dtype)
    print(header(CPU, args.dtype, args.repeats), described(shape, dtype), sep="\n")
    run(shape, dtype, args.repeats, args.chunk_rows)


if __name__ == "__main__":
    main()
