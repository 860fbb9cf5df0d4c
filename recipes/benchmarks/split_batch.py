"""Measure a batch that is split over several ranks (sequence parallelism): time of a step, and peak memory of a rank.

    export OMP_NUM_THREADS=1
    torchrun --nproc_per_node 2 recipes/benchmarks/split_batch.py time --file banking77_train.jsonl
    torchrun --nproc_per_node 4 recipes/benchmarks/split_batch.py memory

`time`: 32 conversations of the file, if one is given, and 32 sequences in a tree of three levels. These alternate: one
process, while the others wait; data parallelism, divided as `fit` divides a step; and the split of
`share_prefixes(sp_group=...)`. The last two average their gradients with DDP. The gradients of all three are compared
before a time is taken. The table has the median, lowest and highest ratio of a turn, for the slowest rank: in
wall-clock time, which needs an idle machine with a core for each rank, and in CPU time, in which waiting does not
count. The ideal is the ratio of the floating-point operations of the busiest rank: communication costs nothing in it.

`memory`: one row of `--length` tokens, all of them trained, or only the last 1,024; on 1, 2, 4 ... ranks. The peak is
that of the rank that holds most, without weights and with their gradients.

The model is a Qwen3 with random weights, four query heads and two key heads, on a CPU with gloo.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from flops import costs_of, unique_flops
from step import ModelShape, build_model, random_rows, work_of
from torch.nn.parallel import DistributedDataParallel

from radixtrain import RadixCollator, share_prefixes
from radixtrain.collators.steps import StepCollator
from radixtrain.collators.token_row import IGNORE_INDEX
from radixtrain.data.chat import ChatEncoder
from radixtrain.data.files.sources import read_rows
from radixtrain.testing import relative_error
from radixtrain.timing import header, peak_bytes

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import banking77

Rows = list[dict[str, Any]]
CPU = torch.device("cpu")
NUM_SEQUENCES = 32
BAR = 1e-4  # between rounding, 1e-6, and a missing label, 1e-2: relative L2 of a gradient
LAST = 1024  # trained tokens of the second row of `memory`


class Arm(NamedTuple):
    """A way to compute a step. run: what a rank does; it ends when all ranks have done it. flops: of the busiest."""

    model: Any
    run: Callable[[], None]
    flops: float


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["time", "memory"])
    parser.add_argument("--file", type=Path, help="chats, for `time`")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args(argv)
    dist.init_process_group("gloo")
    shape = ModelShape(options.layers, options.hidden, head_dim=options.hidden // 4)
    lines = time_lines(shape, options) if options.what == "time" else memory_lines(shape, options.length)
    for line in (header(CPU, "float32", options.repeats), "", *lines):
        if dist.get_rank() == 0:
            print(line, flush=True)
    dist.destroy_process_group()


def time_lines(shape: ModelShape, options: argparse.Namespace) -> Iterator[str]:
    yield "| step | seconds | split / data parallel | ideal | split / one process | ideal | split |"
    yield "|---|---|---|---|---|---|---|"
    model = build_model(shape, CPU, torch.float32)
    for name, rows in steps(shape, options.file):
        arms = arms_of(model, shape, rows)
        check_gradients(arms)
        turns = [turn(arms) for _ in range(options.repeats)]
        for number, clock in enumerate(("of the wall", "of the processor")):
            seconds = {way: [found[way][number] for found in turns] for way in arms}
            cells = []
            for other in ("data parallel", "one process"):
                ratios = [split / rest for split, rest in zip(seconds["split"], seconds[other], strict=True)]
                cells.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
                cells.append(f"{arms['split'].flops / arms[other].flops:.2f}")
            yield f"| {name} | {clock} | {' | '.join(cells)} | {statistics.median(seconds['split']):.3f} |"


def turn(arms: dict[str, Arm]) -> dict[str, list[float]]:
    """Seconds of a step in each way, on the wall and of the processor, of the rank that takes most."""
    found = {}
    for way, arm in arms.items():
        arm.model.zero_grad()
        dist.barrier()
        began = time.perf_counter(), time.process_time()
        arm.run()
        seconds = torch.tensor([time.perf_counter() - began[0], time.process_time() - began[1]])
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        found[way] = seconds.tolist()
    return found


def steps(shape: ModelShape, file: Path | None) -> Iterator[tuple[str, Rows]]:
    if file is not None:
        encoder, chats = ChatEncoder(banking77.learnt_tokenizer(file)), list(read_rows(file))
        drawn = [chats[index] for index in np.random.default_rng(0).permutation(len(chats))[:NUM_SEQUENCES]]
        samples = [sample for samples in encoder.encode_all(drawn) for sample in samples]
        yield f"{NUM_SEQUENCES} of {file.stem}", [{"input_ids": x.input_ids, "labels": x.labels} for x in samples]
    yield f"{NUM_SEQUENCES} x (512 + 64), three levels", random_rows(shape.vocab_size, 512, 64, NUM_SEQUENCES, "nested")


def arms_of(model: Any, shape: ModelShape, rows: Rows) -> dict[str, Arm]:
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = StepCollator(merge_labels=False, min_shared_tokens=4)(rows)
    share = StepCollator(merge_labels=False, min_shared_tokens=4, rank=rank, num_ranks=size)(rows)
    one = share_prefixes(deepcopy(model))
    split = DistributedDataParallel(share_prefixes(deepcopy(model), sp_group=dist.group.WORLD))
    data_parallel = DistributedDataParallel(share_prefixes(deepcopy(model)))

    def run(model: Any, step: Any, num_items: float) -> None:
        (batch,) = step.micro_batches
        model(**batch, num_items_in_batch=num_items).loss.backward()
        dist.barrier()

    def run_one() -> None:
        run(one, whole, whole.num_labels) if rank == 0 else dist.barrier()

    flops = flops_of(shape, rows)
    busiest = torch.tensor(flops_of(shape, [rows[index] for index in share.members[0]]))
    dist.all_reduce(busiest, dist.ReduceOp.MAX)
    return {
        "one process": Arm(one, run_one, flops),
        "data parallel": Arm(data_parallel, lambda: run(data_parallel, share, share.num_labels / size), busiest.item()),
        "split": Arm(split, lambda: run(split, whole, whole.num_labels), flops / size),
    }


def flops_of(shape: ModelShape, rows: Rows) -> float:
    work = work_of("rows", rows)
    return unique_flops(costs_of(shape.config()), work.plans[0], work.radix.num_labels).total


def check_gradients(arms: dict[str, Arm]) -> None:
    for arm in arms.values():
        arm.run()
    for way in ("data parallel", "split") if dist.get_rank() == 0 else ():
        pairs = zip(arms[way].model.parameters(), arms["one process"].model.parameters(), strict=True)
        worst = max(relative_error(x.grad, truth.grad) for x, truth in pairs)
        assert worst <= BAR, f"the gradients of {way} and of one process differ by {worst:.1e}"


def memory_lines(shape: ModelShape, length: int) -> Iterator[str]:
    yield "| row | ranks | peak of a rank, MiB | of one process |"
    yield "|---|---|---|---|"
    ids = np.random.default_rng(0).integers(0, shape.vocab_size, length)
    for num_labels in (length, min(LAST, length)):
        labels = np.where(np.arange(length) < length - num_labels, IGNORE_INDEX, ids)
        batch = RadixCollator()([{"input_ids": ids, "labels": labels}])
        peaks: list[float] = []
        for size in (2**power for power in range(dist.get_world_size().bit_length())):
            peaks.append(peak_of(shape, batch, size))
            row = f"{length:,} tokens, {num_labels:,} trained"
            yield f"| {row} | {size} | {peaks[-1] / 2**20:,.0f} | {peaks[-1] / peaks[0]:.3f} |"


def peak_of(shape: ModelShape, batch: dict[str, Any], size: int) -> float:
    """Most bytes that one of `size` ranks holds; the others wait."""
    group, peak = dist.new_group(list(range(size))), torch.zeros(())
    if dist.get_rank() < size:
        model = build_model(shape, CPU, torch.float32)
        share_prefixes(model, sp_group=group if size > 1 else None)
        peak += peak_bytes(lambda: model(**batch).loss.backward(), CPU)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    return peak.item()


if __name__ == "__main__":
    main(sys.argv[1:])
