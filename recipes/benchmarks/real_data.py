"""Time a training step on real conversations, ordinary and on unique tokens, as `step.py` does on random rows.

    python recipes/benchmarks/real_data.py path/to/banking77_train.jsonl path/to/gsm8k_many_prompts_train.jsonl
    python recipes/benchmarks/real_data.py train.jsonl --tokenizer Qwen/Qwen3-0.6B --num_rows 32 --layers 4 --hidden 512

Each file holds rows as `radixtrain fit` takes them. One optimizer batch is drawn: `--num_rows` of a seeded shuffle.
The radix arm computes it in micro-batches of at most `--max_tokens` unique tokens, split as `fit` splits them; all of
them are the step. The ordinary arm is sorted by length, padded and split into 8, 16, 32 or all rows, whichever is
fastest here; the seconds of each are printed. The ideal counts no padding. The gradients of both arms are compared
before a time is taken. Peak memory is that of the micro-batches as they are: fewer rows hold less, in either arm.

Without `--tokenizer` one of 4,096 entries is learnt from the messages of the file. The model has random weights.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from step import (
    Arm,
    Measured,
    ModelShape,
    Work,
    build_model,
    measure,
    print_table,
    step_seconds,
    with_ordinary_batch_size,
    work_of,
)
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from radixtrain.data.chat import ChatEncoder, load_tokenizer
from radixtrain.data.files.sources import Row, read_rows
from radixtrain.errors import UserError
from radixtrain.hf.head import has_plain_head
from radixtrain.timing import header

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import banking77

ALL = 0  # rows of an ordinary micro-batch, as a flag


def main(argv: list[str]) -> int:
    options = parse(argv)
    disable_progress_bar()
    try:
        compare(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--tokenizer", help="a folder or a name on the hub")
    parser.add_argument("--num_rows", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max_tokens", type=int, default=16384)
    parser.add_argument("--ordinary_rows", type=int, nargs="+", default=[8, 16, 32, ALL], help="to try; 0 for all")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--head_dim", type=int, default=64)
    parser.add_argument("--attention", nargs="+", default=["auto"])
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--attn_implementation", default="sdpa")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--repeats", type=int, default=5)
    return parser.parse_args(argv)


def compare(options: argparse.Namespace) -> None:
    """Measure the files one by one, then print one table."""
    device = torch.device(options.device)
    print(header(device, options.dtype, options.repeats), flush=True)
    print_table([measured for file in options.files for measured in measure_file(file, options, device)])


def measure_file(file: Path, options: argparse.Namespace, device: torch.device) -> list[Measured]:
    rows = list(read_rows(file))
    tokenizer = load_tokenizer(options.tokenizer) if options.tokenizer else learnt_tokenizer(file, rows)
    shape = ModelShape(
        options.layers, options.hidden, head_dim=options.head_dim, vocab_size=-(-len(tokenizer) // 64) * 64
    )
    drawn = [rows[index] for index in np.random.default_rng(options.seed).permutation(len(rows))[: options.num_rows]]
    samples = [sample for samples in ChatEncoder(tokenizer).encode_all(drawn) for sample in samples]
    features = [{"input_ids": sample.input_ids, "labels": sample.labels} for sample in samples]
    work = work_of(f"{shape}, {len(samples)} of {file.name}", features, None, options.max_tokens, min_shared_tokens=4)
    print(described(work), flush=True)
    model = build_model(shape, device, getattr(torch, options.dtype), options.attn_implementation)
    work, seconds = fastest_ordinary(model, work, [size or None for size in options.ordinary_rows])
    tried = ", ".join(f"{size} rows {time:.3f} s" for size, time in seconds.items())
    print(f"  ordinary step in micro-batches of {tried}; the fastest is measured", flush=True)
    return measure(model, work, options.attention, options.kernel, options.repeats)


def fastest_ordinary(
    model: PreTrainedModel, work: Work, batch_sizes: Sequence[int | None]
) -> tuple[Work, dict[int, float]]:
    """The work with its ordinary arm cut the fastest way, and the seconds of a step for each size of a micro-batch.

    Few sequences have little padding, many keep the cores busy: a user would try several. The median of two turns.

    batch_sizes: numbers of sequences to try; None for all in one batch. The seconds of a number that memory does not
        hold are infinite.

    Raises UserError if memory holds none of them.
    """
    device = next(model.parameters()).device
    # sdpa is fastest without a mask; other kernels skip the padding that a mask shows them
    keep_mask = model.config._attn_implementation != "sdpa"
    sizes = dict.fromkeys(min(size or len(work.features), len(work.features)) for size in batch_sizes)
    works = {size: with_ordinary_batch_size(work, size, keep_mask).to(device) for size in sizes}
    arm = Arm(plain_head=has_plain_head(model))
    runs = {size: (arm, each) for size, each in works.items() if fits(model, arm, each)}
    if not runs:
        raise UserError(f"{work.name}: the device's memory holds no ordinary micro-batch of {list(sizes)} sequences")
    turns = step_seconds(model, runs, repeats=2)
    seconds = {size: statistics.median(turns[size]) if size in turns else math.inf for size in sizes}
    return works[min(seconds, key=lambda size: seconds[size])], seconds


def fits(model: PreTrainedModel, arm: Arm, work: Work) -> bool:
    """The turn that is not timed."""
    arm.prepare(model)
    try:
        arm.run_step(model, work)
    except torch.OutOfMemoryError:
        return False
    finally:
        model.zero_grad(set_to_none=True)
    return True


def learnt_tokenizer(file: Path, rows: list[Row]) -> Any:
    """The same as in recipes/banking77.py."""
    for row in rows:
        if "messages" not in row.fields:
            raise UserError(f"{row.where}: a tokenizer is learnt from messages, and there are none; give --tokenizer")
    return banking77.learnt_tokenizer(file)


def described(work: Work) -> str:
    lengths, num_unique = sorted(len(row["input_ids"]) for row in work.features), work.num_unique_tokens
    return (
        f"{work.name}: {work.num_tokens:,} tokens, {num_unique:,} unique, {work.radix.num_labels:,} "
        f"labelled; {lengths[0]} to {lengths[-1]} long, median {lengths[len(lengths) // 2]}; radix micro-batches: "
        f"{len(work.radix.micro_batches)}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
