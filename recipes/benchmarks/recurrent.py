"""Measure training steps of models with a recurrent state, ordinary and on unique tokens: time, memory, and the ideal.

    OMP_NUM_THREADS=1 python recipes/benchmarks/recurrent.py            # some minutes
    python recipes/benchmarks/recurrent.py --models Qwen3.5 --hidden 256 --repeats 9

Each model has random weights and the layer mix of its family: Qwen3.5 three layers of the gated delta rule and one of
attention, Bamba the same with Mamba 2, LFM2 with short convolutions. The batches: one prompt of 512 tokens before 16
answers of 64; three levels of sharing; and rows that share nothing, which show what the code for sharing costs. Both
arms are those of `step.py`: the same weights in turns, and gradients are compared before anything is timed. The ideal
is the ratio of floating-point operations. The cost of a layer chooses the runs; *forks* are the states that they keep
in a layer.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from step import Measured, Work, measure, random_rows, work_of
from transformers import BambaConfig, Lfm2Config, PreTrainedConfig, Qwen3_5TextConfig
from transformers.models.auto import AutoModelForCausalLM

from radixtrain.errors import UserError
from radixtrain.timing import header
from radixtrain.tree.radix_inputs import layout_of
from radixtrain.tree.runs import cheapest_runs

LAYERS = 4
HEAD_DIM = 64
VOCAB = 4096


class Batch(NamedTuple):
    """Rows of one step. tree: as for `random_rows`; rows of `apart` share nothing."""

    rows: int
    prompt: int
    suffix: int
    tree: str

    def __str__(self) -> str:
        shared = {"flat": "one prompt", "nested": "three levels", "apart": "nothing shared"}[self.tree]
        return f"{self.rows} x ({self.prompt} + {self.suffix}), {shared}"


BATCHES = (
    Batch(16, 512, 64, "flat"),
    Batch(16, 512, 64, "nested"),
    Batch(4, 512, 64, "apart"),
)


def qwen3_5(hidden: int) -> PreTrainedConfig:
    heads = hidden // HEAD_DIM
    return Qwen3_5TextConfig(
        **common(hidden),
        head_dim=HEAD_DIM,
        linear_num_key_heads=heads,
        linear_num_value_heads=heads,
        linear_key_head_dim=HEAD_DIM,
        linear_value_head_dim=HEAD_DIM,
    )


def bamba(hidden: int) -> PreTrainedConfig:
    heads = hidden // HEAD_DIM
    return BambaConfig(
        **common(hidden),
        attn_layer_indices=[LAYERS - 1],
        mamba_n_heads=2 * heads,
        mamba_d_head=HEAD_DIM,
        mamba_d_state=128,
    )


def lfm2(hidden: int) -> PreTrainedConfig:
    return Lfm2Config(
        **common(hidden),
        layer_types=["conv"] * (LAYERS - 1) + ["full_attention"],
        block_auto_adjust_ff_dim=False,
    )


def common(hidden: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": hidden // HEAD_DIM,
        "num_key_value_heads": max(1, hidden // HEAD_DIM // 4),
        "vocab_size": VOCAB,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


MODELS: dict[str, Callable[[int], PreTrainedConfig]] = {"Qwen3.5": qwen3_5, "Bamba": bamba, "LFM2": lfm2}


def main(argv: list[str]) -> int:
    options = parse(argv)
    print(header(torch.device("cpu"), "float32", options.repeats), flush=True)
    try:
        print_table(results(options))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--hidden", type=int, default=512, help="width; heads are 64 wide")
    parser.add_argument("--repeats", type=int, default=5)
    return parser.parse_args(argv)


def results(options: argparse.Namespace) -> Iterator[tuple[str, Batch, int, Measured]]:
    for name in options.models:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(MODELS[name](options.hidden), attn_implementation="sdpa").train()
        for batch in BATCHES:
            work = work_of(str(batch), rows_of(batch))
            (result,) = measure(model, work, repeats=options.repeats)
            yield name, batch, num_forks(work), result


def rows_of(batch: Batch) -> list[dict[str, Any]]:
    """`input_ids` and `labels` of each row; the loss is on the suffixes."""
    if batch.tree != "apart":
        return random_rows(VOCAB, batch.prompt, batch.suffix, batch.rows, batch.tree)
    rows = random_rows(VOCAB, 0, batch.prompt + batch.suffix, batch.rows)
    for row in rows:
        row["labels"][: batch.prompt] = -100
    return rows


def num_forks(work: Work) -> int:
    """States that a recurrent layer keeps in a step."""
    layouts = map(layout_of, work.radix.micro_batches)
    return sum(cheapest_runs(*layout.segments).num_forks for layout in layouts)


def print_table(lines: Iterable[tuple[str, Batch, int, Measured]]) -> None:
    print("\n| model | batch | r | forks | ideal | speed-up | of the ideal | peak memory, MiB | error |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    for name, batch, forks, found in lines:
        peaks = (f"{peak / 2**20:,.0f}" for peak in found.peaks)
        print(
            f"| {name} | {batch} | {found.r:.2f} | {forks} | {found.ideal:.2f} "
            f"| {found.speedup:.2f} ({min(found.speedups):.2f} to {max(found.speedups):.2f}) "
            f"| {found.speedup / found.ideal:.2f} | {' -> '.join(peaks)} | {found.error:.1e} |",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
