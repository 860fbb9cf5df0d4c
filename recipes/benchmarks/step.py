"""Time a training step on this machine, ordinary and on unique tokens, and measure its peak memory: `make bench`.

    python recipes/benchmarks/step.py --attention auto cascade path expand
    python recipes/benchmarks/step.py --prompt 512 2048 --own 64 256 --sequences 16 32 --layers 2 --tree nested
    python recipes/benchmarks/step.py --model Qwen3.5 --hidden 512        # three recurrent layers of four

The model has random weights, the rows are random tokens after a shared prompt. Both arms run the same
weights on the same rows in one process and take turns (A B A B ...), so that a machine that slows down slows both. The
ordinary arm is the best that a user has: Hugging Face's `sdpa` on batches padded on the right, sorted by length, the
head only on tokens that predict, and the same loss. `sdpa` does not receive the padding mask: causal attention never
looks to the right, and without a mask it has its fastest kernel. Batches are on the device before the clock starts,
because a trainer makes plans in its DataLoader workers.

Before anything is timed, the loss and every gradient of both arms are compared with the ordinary model in float64, one
row at a time, by the bars of `radixtrain verify`. *r* is tokens per unique token, *ideal* the ratio of floating-point
operations (`flops.py`), and peak memory is what a step adds to weights and gradients.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
import transformers
from flops import costs_of, ordinary_flops, unique_flops
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, Qwen3_5TextConfig, Qwen3Config

from radixtrain.collators.features import packed, token_rows
from radixtrain.collators.steps import PaddedCollator, Step, StepCollator
from radixtrain.collators.token_row import IGNORE_INDEX, TokenRow
from radixtrain.cores import processor
from radixtrain.errors import UserError
from radixtrain.hf.head import has_plain_head
from radixtrain.hf.predicting_rows import forward_rows
from radixtrain.hf.share import restore_model, share_prefixes
from radixtrain.timing import peak_bytes, seconds_of
from radixtrain.tree.plan import PrefixPlan, build_prefix_plan
from radixtrain.tree.radix_inputs import radix_of
from radixtrain.verification.equivalence import EquivalenceReport, compare_gradients
from radixtrain.verification.oracle import Gradients, float64_throughout, gradients_of, ordinary_one_by_one

K = TypeVar("K")
Mode = Literal["step", "forward"]
Tree = Literal["flat", "nested"]
Features = Sequence[Mapping[str, Any]]
ROWS_IN_A_GROUP = 4  # of a nested tree


@dataclass(frozen=True)
class ModelShape:
    """A Qwen3, or a Qwen3.5 with a gated delta rule. What is None follows from the width, as in the small Qwen3."""

    num_hidden_layers: int = 4
    hidden_size: int = 256
    intermediate_size: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int = 64
    vocab_size: int = 4096
    tie_word_embeddings: bool = True
    name: str = ""
    model: Literal["Qwen3", "Qwen3.5"] = "Qwen3"

    def __str__(self) -> str:
        size = f"{self.num_hidden_layers}x{self.hidden_size}"
        return self.name or (size if self.model == "Qwen3" else f"{self.model} {size}")

    def config(self) -> PreTrainedConfig:
        heads = self.num_attention_heads or max(1, self.hidden_size // self.head_dim)
        linear = {f"linear_num_{each}_heads": heads for each in ("key", "value")}
        linear |= {f"linear_{each}_head_dim": self.head_dim for each in ("key", "value")}
        recurrent = self.model == "Qwen3.5"
        return (partial(Qwen3_5TextConfig, **linear) if recurrent else Qwen3Config)(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size or 3 * self.hidden_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=heads,
            num_key_value_heads=self.num_key_value_heads or max(1, heads // 2),
            head_dim=self.head_dim,
            tie_word_embeddings=self.tie_word_embeddings,
        )


def build_model(shape: ModelShape, device: torch.device, dtype: torch.dtype, attn_implementation: str = "sdpa") -> Any:
    """A model with random weights, the same ones every time."""
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(shape.config(), dtype=dtype, attn_implementation=attn_implementation)
    return model.train()


def random_rows(vocab_size: int, prompt: int, own: int, number: int, tree: Tree = "flat") -> list[dict[str, Any]]:
    """`input_ids` and `labels` of each row, (L,), int64: random, the same every time. The loss is on the own tokens.

    tree: `flat`, one prompt for all rows; or `nested`, three levels: all rows share the first half of the prompt, every
        four of them the second half, and each has tokens of its own. Branches differ in their first token.
    """
    rng = np.random.default_rng(0)

    def branches(count: int, length: int) -> np.ndarray:
        ids = rng.integers(0, vocab_size, (count, length))
        ids[:, :1] = (ids[:1, :1] + np.arange(count)[:, None]) % vocab_size
        return ids

    suffixes = branches(number, own)
    trunk_length = prompt if tree == "flat" else prompt // 2
    (trunk,) = branches(1, trunk_length)
    groups = branches(-(-number // ROWS_IN_A_GROUP), prompt - trunk_length)
    prompts = [np.concatenate([trunk, groups[row // ROWS_IN_A_GROUP]]) for row in range(number)]
    return [
        {
            "input_ids": np.concatenate([ids, suffix]),
            "labels": np.concatenate([np.full_like(ids, IGNORE_INDEX), suffix]),
        }
        for ids, suffix in zip(prompts, suffixes, strict=True)
    ]


@dataclass(frozen=True, eq=False, kw_only=True)
class Work:
    """One step, cut into micro-batches for both arms, on the host until `to`.

    name: for people. features: the rows, as a collator takes them. plans: of each micro-batch of `radix`.
    """

    name: str
    mode: Mode
    features: Features
    ordinary: Step
    radix: Step
    plans: list[PrefixPlan]

    def to(self, device: torch.device) -> Work:
        return replace(self, ordinary=self.ordinary.to(device), radix=self.radix.to(device))

    @property
    def num_tokens(self) -> int:
        """T, without padding."""
        return self.radix.num_tokens

    @property
    def num_unique_tokens(self) -> int:
        """The U that a radix arm computes; a prefix in two micro-batches counts twice."""
        return self.radix.num_computed_tokens

    def ideal_speedup(self, config: PreTrainedConfig) -> float:
        """Floating-point operations of the ordinary arm, without padding, over those of the radix arm."""
        costs, before, after = costs_of(config), 0.0, 0.0
        for plan, batch in zip(self.plans, self.radix.micro_batches, strict=True):
            radix = radix_of(batch)
            before += ordinary_flops(costs, plan, int(radix.loss_weights.sum())).total
            after += unique_flops(costs, plan, len(radix.predictor_indices)).total
        return before / after


def work_of(
    name: str,
    features: Features,
    batch_size: int | None = None,
    max_tokens: int | None = None,
    mode: Mode = "step",
) -> Work:
    """Collate rows.

    batch_size: rows of an ordinary micro-batch. max_tokens: most unique tokens of a radix micro-batch. None for a
    single micro-batch.
    """
    step = StepCollator(max_tokens=max_tokens)(features)
    if not step.num_labels:
        raise UserError(f"{name}: no token bears loss, so there is no step to measure")
    arrays = token_rows(features)
    plans = [_plan([arrays[index] for index in members]) for members in step.members]
    return Work(name=name, mode=mode, features=features, ordinary=_padded(arrays, batch_size), radix=step, plans=plans)


def _plan(arrays: Sequence[TokenRow]) -> PrefixPlan:
    together = packed(arrays)
    return build_prefix_plan(together.input_ids, together.cu_seqlens, together.position_ids)


def _padded(arrays: Sequence[TokenRow], batch_size: int | None) -> Step:
    """Padded batches of that many rows, the longest first."""
    order = sorted(range(len(arrays)), key=lambda index: -len(arrays[index].input_ids))
    size = batch_size or len(order)
    members = [order[start : start + size] for start in range(0, len(order), size)]
    batches = [PaddedCollator().collate([arrays[index] for index in group]) for group in members]
    for batch in batches:
        batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
    return Step(
        micro_batches=batches,
        members=members,
        num_labels=sum(len(radix_of(batch).predictor_indices) for batch in batches),
        num_tokens=sum(len(row.input_ids) for row in arrays),
        num_computed_tokens=sum(batch["input_ids"].numel() for batch in batches),
    )


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to compute a step, with the loss of `radixtrain fit`, fused with the head if that is one matrix.

    attention, kernel: of the prepared model on unique tokens; None for Hugging Face's unchanged model on padded
    batches. plain_head: `has_plain_head(model)`.
    """

    plain_head: bool
    attention: str | None = None
    kernel: str = "auto"

    def prepare(self, model: PreTrainedModel) -> None:
        """Make the model ready for the batches of this arm."""
        if self.attention is None:
            restore_model(model)
        else:
            share_prefixes(model, attention=self.attention, kernel=self.kernel)

    def step(self, work: Work) -> Step:
        return work.ordinary if self.attention is None else work.radix

    def loss_terms(self, model: PreTrainedModel, work: Work) -> Iterator[Tensor]:
        """Yield a term per micro-batch; their sum is the mean cross-entropy over the labelled tokens of the step."""
        for batch in self.step(work).micro_batches:
            yield forward_rows(model, batch, self.plain_head).loss_sum() / work.radix.num_labels

    def run_step(self, model: PreTrainedModel, work: Work) -> None:
        """What is timed: every micro-batch forward and, in a `step`, backward."""
        with nullcontext() if work.mode == "step" else torch.no_grad():
            for term in self.loss_terms(model, work):
                if work.mode == "step":
                    term.backward()


def seconds_in_turns(
    runs: Mapping[K, Callable[[], object]],
    device: torch.device,
    repeats: int,
    before: Callable[[K], object],
) -> dict[K, list[float]]:
    """Time `repeats` runs of each function, alternating between the functions; returns seconds.

    before: called with the name of a run before each of its turns, untimed.
    """
    seconds: dict[K, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            before(name)
            seconds[name].append(seconds_of(run, device))
    return seconds


def step_seconds(model: PreTrainedModel, runs: Mapping[K, tuple[Arm, Work]], repeats: int) -> dict[K, list[float]]:
    """Time the runs in turns; every step starts without gradients."""

    def before(name: K) -> None:
        runs[name][0].prepare(model)
        model.zero_grad(set_to_none=True)

    steps = {name: partial(arm.run_step, model, work) for name, (arm, work) in runs.items()}
    return seconds_in_turns(steps, next(model.parameters()).device, repeats, before)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """An attention strategy beside the ordinary arm. Turn i of both ran consecutively.

    ideal: speed-up. peaks: bytes of the ordinary arm and of this one. error: the worst relative L2 of a gradient.
    """

    name: str
    attention: str
    num_tokens: int
    num_unique_tokens: int
    ideal: float
    ordinary_turns: list[float]
    turns: list[float]
    peaks: tuple[int, int]
    error: float

    @property
    def r(self) -> float:
        return self.num_tokens / self.num_unique_tokens

    @property
    def speedups(self) -> list[float]:
        """Of each turn. If they differ much, the machine was busy."""
        return [ordinary / radix for ordinary, radix in zip(self.ordinary_turns, self.turns, strict=True)]

    @property
    def speedup(self) -> float:
        """Of the median turn."""
        return statistics.median(self.speedups)


def measure(
    model: PreTrainedModel, work: Work, attention: Sequence[str] = ("auto",), kernel: str = "auto", repeats: int = 5
) -> list[Measured]:
    """Compare gradients, then measure: a result for each strategy. Restores the model.

    Raises UserError that names the parameter if an arm does not compute the ordinary gradient.
    """
    work = work.to(next(model.parameters()).device)
    ordinary = Arm(plain_head=has_plain_head(model))
    arms = [ordinary, *(replace(ordinary, attention=name, kernel=kernel) for name in attention)]
    try:
        errors = _errors(model, work, arms)
        peaks = [_peak(model, work, arm) for arm in arms]
        turns = step_seconds(model, {number: (arm, work) for number, arm in enumerate(arms)}, repeats)
    finally:
        restore_model(model)
        model.zero_grad(set_to_none=True)
    return [
        Measured(
            name=f"{work.name}, {work.mode}",
            attention=name,
            num_tokens=work.num_tokens,
            num_unique_tokens=work.num_unique_tokens,
            ideal=work.ideal_speedup(model.config),
            ordinary_turns=turns[0],
            turns=turns[number],
            peaks=(peaks[0], peaks[number]),
            error=errors[number],
        )
        for number, name in enumerate(attention, start=1)
    ]


def _errors(model: PreTrainedModel, work: Work, arms: Sequence[Arm]) -> list[float]:
    """The worst error of each arm; the first is the ordinary one. Raises UserError if one is too large."""
    arms[0].prepare(model)
    with float64_throughout(model):
        truth = _gradients(model, lambda: ordinary_one_by_one(model, work.features))
    found: list[Gradients] = []
    errors = []
    for arm in arms:
        arm.prepare(model)
        found.append(_gradients(model, partial(arm.loss_terms, model, work)))
        rung = compare_gradients(str(model.dtype).removeprefix("torch."), truth, found[0], found[-1])
        if reason := EquivalenceReport((rung,)).reason:
            raise UserError(f"{work.name}, {arm.attention}: {reason}. Its times would compare different things")
        errors.append(rung.worst.radix)
    return errors


def _gradients(model: PreTrainedModel, terms: Callable[[], Iterator[Tensor]]) -> Gradients:
    """Loss and gradients on the host, which has room for two more copies."""
    found = gradients_of(model, terms)
    return Gradients(found.loss, {name: tensor.cpu() for name, tensor in found.tensors.items()})


def _peak(model: PreTrainedModel, work: Work, arm: Arm) -> int:
    """Return the peak bytes that a step adds to weights, batch and, if it trains, gradients.

    The gradients exist already, as in the second micro-batch of an optimizer step. So this counts activations, the loss
    with its gradient of the head, and the one gradient at a time that autograd is about to add.
    """
    arm.prepare(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if work.mode == "step" and parameter.requires_grad else None
    return peak_bytes(partial(arm.run_step, model, work), next(model.parameters()).device)


TITLES = "| step | attention | unique tokens | r | ideal | speed-up (range) | of the ideal | ms | peak MiB | error |"


def print_table(results: Sequence[Measured]) -> None:
    """In Markdown. Times and peaks: of the ordinary arm -> of this one."""
    print(f"\n{TITLES}\n|{'---|' * (TITLES.count('|') - 1)}")
    for found in results:
        times = (f"{1e3 * statistics.median(turns):.1f}" for turns in (found.ordinary_turns, found.turns))
        cells = (
            found.name,
            found.attention,
            f"{found.num_unique_tokens:,}",
            f"{found.r:.2f}",
            f"{found.ideal:.2f}",
            f"{found.speedup:.2f} ({min(found.speedups):.2f} to {max(found.speedups):.2f})",
            f"{found.speedup / found.ideal:.2f}",
            " -> ".join(times),
            " -> ".join(f"{peak / 2**20:,.1f}" for peak in found.peaks),
            f"{found.error:.1e}",
        )
        print(f"| {' | '.join(cells)} |")


def environment(device: torch.device, dtype: str) -> dict[str, Any]:
    """Describe the conditions of a measurement, column to value. Names no host and no path."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": _commit(),
        "machine": torch.cuda.get_device_name(device) if device.type == "cuda" else processor(),
        "num_cores": os.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "dtype": dtype,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def header(device: torch.device, dtype: str, repeats: int) -> str:
    """Describe the conditions of a measurement in one line, with the present load of the machine."""
    facts = environment(device, dtype)
    commit = f", commit {facts['commit']}" if facts["commit"] else ""
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return (
        f"{facts['date']}{commit}, {facts['machine']}, {facts['num_cores']} cores, {facts['num_threads']} threads"
        f"{load}, {dtype}, torch {facts['torch']}, transformers {facts['transformers']}, medians of {repeats} "
        f"alternating runs"
    )


def _commit() -> str:
    """Return the commit of the repository that holds this file, `-dirty` if changed; empty for an installed package."""
    for command in (["ls-files", "--error-unmatch", __file__], ["describe", "--always", "--dirty", "--exclude=*"]):
        try:
            done = subprocess.run(
                ["git", *command], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
            )
        except (OSError, subprocess.CalledProcessError):
            return ""
    return done.stdout.strip()


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["Qwen3", "Qwen3.5"], default="Qwen3")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256, help="width; heads are 64 wide")
    parser.add_argument("--prompt", type=int, nargs="+", default=[512], help="tokens that the rows share; 0 for none")
    parser.add_argument("--own", type=int, nargs="+", default=[64], help="tokens of each row, which bear the loss")
    parser.add_argument("--sequences", type=int, nargs="+", default=[16])
    parser.add_argument("--tree", choices=["flat", "nested"], default="flat")
    parser.add_argument("--mode", choices=["step", "forward"], default="step", help="forward: without gradients")
    parser.add_argument("--attention", nargs="+", default=["auto"], help="auto is what `fit` chooses")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--repeats", type=int, default=5)
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    options = parse(argv)
    device, shape = torch.device(options.device), ModelShape(options.layers, options.hidden, model=options.model)
    print(header(device, options.dtype, options.repeats), flush=True)
    results: list[Measured] = []
    try:
        model = build_model(shape, device, getattr(torch, options.dtype))
        for prompt, own, number in product(options.prompt, options.own, options.sequences):
            name = f"{shape}, {number} x ({prompt} + {own}), {options.tree}"
            print(name, file=sys.stderr, flush=True)
            rows = random_rows(shape.vocab_size, prompt, own, number, options.tree)
            work = work_of(name, rows, mode=options.mode)
            results += measure(model, work, options.attention, repeats=options.repeats)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        if results:
            print_table(results)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
