"""One training step, ordinary and on unique tokens: is it the same, how long does it take, and how much memory?

Both arms run the same weights on the same sequences in one process, and take turns (A B A B ...), so that a machine
that slows down slows both. The ordinary arm is the best that a user has: Hugging Face's own attention on padded rows
without any padding (all sequences of a cell are equally long, so its causal kernel needs no mask), the head on labelled
tokens alone, and the same fused loss. Batches lie on the device before the clock starts: plans are made in a trainer's
DataLoader workers.

A cell is measured only if both arms compute the same (`_check`). Untimed passes come first: that check, then memory.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from radixtrain.collators.padded import PaddedCollator
from radixtrain.collators.radix import RadixCollator
from radixtrain.cost import ideal_speedup, ordinary_flops
from radixtrain.equivalence import EquivalenceReport, compare_gradients
from radixtrain.equivalence_report import Rung
from radixtrain.errors import UserError, first_line
from radixtrain.loss import linear_cross_entropy
from radixtrain.model import backbone_of, prepare_model, restore_model
from radixtrain.oracle import Gradients, float64_throughout, gradients_of, ordinary_alone, weights_in
from radixtrain.peak_memory import peak_bytes
from radixtrain.plan import PrefixPlan, build_prefix_plan

__all__ = [
    "Cell",
    "Measured",
    "ModelShape",
    "Settings",
    "Work",
    "build_model",
    "make_work",
    "measure",
    "sequences_of_cell",
]

TARGET_KEYS = ("shift_labels", "radix_prediction_rows", "radix_loss_weights")
ORDINARY_KEYS = ("input_ids", "attention_mask", "position_ids")
DIRECT_BAR = 1e-5  # float32 against float32; two orders of summation are 1e-6 apart, a missing branch label 1e-2
SEQUENCES_IN_A_GROUP = 4  # of a nested tree
OUTPUT = "last_hidden_state"


@dataclass(frozen=True)
class ModelShape:
    """A Qwen3 with random weights.

    Args:
        num_hidden_layers: layers.
        hidden_size: width.
        intermediate_size: width of the MLP; null is 3 x hidden_size, as in the small Qwen3.
        num_attention_heads: query heads; null is hidden_size / head_dim.
        num_key_value_heads: key and value heads; null is half of the query heads.
        head_dim: width of a head.
        vocab_size: tokens of the vocabulary.
        tie_word_embeddings: whether the head is the embedding.
        name: what the table calls it; null is layers x width.
    """

    num_hidden_layers: int = 4
    hidden_size: int = 256
    intermediate_size: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int = 64
    vocab_size: int = 4096
    tie_word_embeddings: bool = True
    name: str | None = None

    def __str__(self) -> str:
        return self.name or f"{self.num_hidden_layers}x{self.hidden_size}"

    def config(self) -> Qwen3Config:
        heads = self.num_attention_heads or max(1, self.hidden_size // self.head_dim)
        return Qwen3Config(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size or 3 * self.hidden_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=heads,
            num_key_value_heads=self.num_key_value_heads or max(1, heads // 2),
            head_dim=self.head_dim,
            tie_word_embeddings=self.tie_word_embeddings,
        )


@dataclass(frozen=True)
class Cell:
    """One point of the grid.

    prompt_length, suffix_length: tokens of a sequence that others share, and its own, which bear the loss.
    tree: `flat`, one prompt for all; or `nested`, three levels: all sequences share the first half of the prompt, every
        four of them the second half, and each has a suffix of its own.
    mode: `step`, forward and backward; or `forward` alone, without gradients.
    """

    model: ModelShape
    prompt_length: int
    suffix_length: int
    num_sequences: int
    tree: Literal["flat", "nested"] = "flat"
    mode: Literal["step", "forward"] = "step"

    def __str__(self) -> str:
        size = f"{self.num_sequences} x ({self.prompt_length} + {self.suffix_length})"
        return f"{self.model}, {size}, {self.tree}, {self.mode}"


@dataclass(frozen=True)
class Settings:
    """How a cell is measured; see the command's keys of the same names."""

    attention: tuple[str, ...] = ("auto",)
    kernel: str = "auto"
    repeats: int = 5
    float64_truth: bool = False


@dataclass(frozen=True)
class Measured:
    """One attention strategy in one cell, beside the ordinary arm.

    r, ideal_speedup: tokens per unique token, and the ratio of floating-point operations (`radixtrain.cost`).
    measured_speedup: median over the repeats of ordinary seconds / radix seconds, each of one turn.
    lowest_speedup, highest_speedup: of those ratios. Far apart, the machine was busy with something else.
    *_seconds: medians. *_peak_bytes: see `_peak`.
    error: the worst relative L2 distance of a gradient (or of the outputs) to what it was checked against.
    """

    cell: Cell
    attention: str
    num_tokens: int
    r: float
    ideal_speedup: float
    measured_speedup: float
    lowest_speedup: float
    highest_speedup: float
    ordinary_seconds: float
    radix_seconds: float
    ordinary_peak_bytes: int
    radix_peak_bytes: int
    error: float

    @property
    def efficiency(self) -> float:
        return self.measured_speedup / self.ideal_speedup

    @property
    def ordinary_tokens_per_second(self) -> float:
        return self.num_tokens / self.ordinary_seconds

    @property
    def radix_tokens_per_second(self) -> float:
        """Effective: original tokens, not computed ones."""
        return self.num_tokens / self.radix_seconds


@dataclass(frozen=True, eq=False)
class Work:
    """The sequences of a cell and their batches for both arms."""

    cell: Cell
    features: list[dict[str, np.ndarray]]
    plan: PrefixPlan
    ordinary: dict[str, Tensor]
    radix: dict[str, Tensor]

    @property
    def num_labels(self) -> int:
        return len(self.ordinary["predictor_indices"])

    @property
    def ideal_speedup(self) -> float:
        num_predictors = len(self.radix["radix_predictor_indices"])
        return ideal_speedup(self.cell.model.config(), self.plan, self.num_labels, num_predictors)

    @property
    def ordinary_teraflops(self) -> float:
        """1e12 floating-point operations of the ordinary arm's forward pass, or of its step: three times as many."""
        forward = ordinary_flops(self.cell.model.config(), self.plan, self.num_labels).total
        return forward * (3 if self.cell.mode == "step" else 1) / 1e12


def build_model(shape: ModelShape, device: torch.device, dtype: torch.dtype, attn_implementation: str) -> Any:
    """Random weights, the same ones every time."""
    torch.manual_seed(0)
    options = {"dtype": dtype, "attn_implementation": attn_implementation}
    try:
        with device:
            model: Any = Qwen3ForCausalLM._from_config(shape.config(), **options)
    except (ValueError, ImportError) as error:
        raise UserError(f"attn_implementation: {first_line(error)}") from None
    return model.train()


def sequences_of_cell(cell: Cell) -> list[np.ndarray]:
    """Token ids, random but the same every time. Branches differ from their first token on."""
    rng = np.random.default_rng(0)

    def branches(number: int, length: int) -> list[np.ndarray]:
        ids = rng.integers(0, cell.model.vocab_size, (number, length))
        ids[:, :1] = (ids[:1, :1] + np.arange(number)[:, None]) % cell.model.vocab_size
        return list(ids)

    suffixes = branches(cell.num_sequences, cell.suffix_length)
    trunk_length = cell.prompt_length if cell.tree == "flat" else cell.prompt_length // 2
    (trunk,) = branches(1, trunk_length)
    groups = branches(-(-cell.num_sequences // SEQUENCES_IN_A_GROUP), cell.prompt_length - trunk_length)
    return [np.concatenate([trunk, groups[n // SEQUENCES_IN_A_GROUP], ids]) for n, ids in enumerate(suffixes)]


def make_work(cell: Cell) -> Work:
    """Collate a cell, on the host. The loss is on the suffixes."""
    sequences = sequences_of_cell(cell)
    features = [
        {"input_ids": ids, "labels": np.where(np.arange(len(ids)) < cell.prompt_length, -100, ids)} for ids in sequences
    ]
    plan = build_prefix_plan(np.concatenate(sequences), np.cumsum([0] + [len(ids) for ids in sequences]))
    return Work(cell, features, plan, PaddedCollator()(features), RadixCollator(merge_labels=True)(features))


def measure(model: PreTrainedModel, work: Work, settings: Settings) -> list[Measured]:
    """Check a cell, then measure it: one result for each of `settings.attention`. The model comes back restored.

    Raises UserError that names the parameter if an arm does not compute what the ordinary one does.
    """
    device = next(model.parameters()).device
    work = Work(work.cell, work.features, work.plan, _on(work.ordinary, device), _on(work.radix, device))
    try:
        errors = _check(model, work, settings)
        peaks = {arm: _peak(model, work, arm, settings.kernel) for arm in (None, *settings.attention)}
        seconds = _time(model, work, settings)
    finally:
        restore_model(model)
        model.zero_grad(set_to_none=True)
    return [_result(work, attention, errors[attention], peaks, seconds) for attention in settings.attention]


def mean_loss(model: PreTrainedModel, work: Work, attention: str | None) -> Tensor:
    """Mean cross-entropy over the labelled tokens; attention None is the ordinary arm."""
    hidden, batch = _hidden_rows(model, work, attention)
    prefix = "" if attention is None else "radix_"
    rows, weights = batch[f"{prefix}prediction_rows"], batch[f"{prefix}loss_weights"]
    weight = model.get_output_embeddings().weight
    return linear_cross_entropy(hidden, weight, batch["shift_labels"][0], rows, weights) / work.num_labels


def _hidden_rows(model: PreTrainedModel, work: Work, attention: str | None) -> tuple[Tensor, dict[str, Tensor]]:
    """(R, D), the rows that predict, and the batch of the arm."""
    backbone = backbone_of(model)
    if attention is not None:
        inputs = {name: value for name, value in work.radix.items() if name not in TARGET_KEYS}
        return backbone(**inputs).last_hidden_state[0], work.radix
    hidden = backbone(**{name: work.ordinary[name] for name in ORDINARY_KEYS}, use_cache=False).last_hidden_state
    return hidden.flatten(0, 1).index_select(0, work.ordinary["predictor_indices"]), work.ordinary


def _set_arm(model: PreTrainedModel, attention: str | None, kernel: str) -> None:
    if attention is None:
        restore_model(model)
    else:
        prepare_model(model, attention=attention, kernel=kernel)


def _run(model: PreTrainedModel, work: Work, attention: str | None) -> None:
    """What is timed."""
    with nullcontext() if work.cell.mode == "step" else torch.no_grad():
        loss = mean_loss(model, work, attention)
    if work.cell.mode == "step":
        loss.backward()


def _time(model: PreTrainedModel, work: Work, settings: Settings) -> dict[str | None, list[float]]:
    """Seconds of every arm, in turns. Every step finds the parameters without gradients."""
    device = next(model.parameters()).device
    seconds: dict[str | None, list[float]] = {arm: [] for arm in (None, *settings.attention)}
    for _ in range(settings.repeats):
        for arm, times in seconds.items():
            _set_arm(model, arm, settings.kernel)
            model.zero_grad(set_to_none=True)
            _wait_for(device)
            start = time.perf_counter()
            _run(model, work, arm)
            _wait_for(device)
            times.append(time.perf_counter() - start)
    return seconds


def _peak(model: PreTrainedModel, work: Work, arm: str | None, kernel: str) -> int:
    """Most bytes that a step adds to what is there before it: weights, batch and, in a `step`, every gradient.

    The gradients are there as in the second micro-batch of an optimizer step, so what is counted is activations, the
    fused loss with its gradient of the head, and the one gradient at a time that is about to be added.
    """
    _set_arm(model, arm, kernel)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if work.cell.mode == "step" else None
    return peak_bytes(lambda: _run(model, work, arm), next(model.parameters()).device)


def _check(model: PreTrainedModel, work: Work, settings: Settings) -> dict[str, float]:
    """The worst error of each strategy, or UserError. Of a `step` the loss and every parameter's gradient are compared,
    of a `forward` the loss and the last hidden state of every token.

    - float32: directly with the ordinary arm, at most `DIRECT_BAR` apart in relative L2;
    - bfloat16: both arms with the ordinary model on the same weights in float32, one sequence at a time;
    - `float64_truth`: both arms with the same in float64.

    The last two are held to the bars of `radixtrain verify`, which follow from the ordinary arm's own rounding.
    """
    restore_model(model)
    ordinary = _answer(model, work, None)
    truth = _truth(model, work, settings.float64_truth) or ordinary
    errors = {}
    for attention in settings.attention:
        prepare_model(model, attention=attention, kernel=settings.kernel)
        precision = str(model.dtype).removeprefix("torch.")
        rung = compare_gradients(precision, truth, ordinary, _answer(model, work, attention))
        reason = _apart(rung) if truth is ordinary else EquivalenceReport((rung,)).reason
        if reason:
            raise UserError(f"{work.cell}, {attention}: {reason}. Its times would compare different things")
        errors[attention] = rung.worst.radix
    return errors


def _apart(rung: Rung) -> str:
    """Why two float32 runs are not the same, naming the tensor; empty where they are."""
    worst = rung.worst
    if not worst.radix <= DIRECT_BAR:
        radix, ordinary, _ = worst.values
        return (
            f"{rung.precision}: NOT EQUAL: {worst.name} is {worst.radix:.1e} from the ordinary arm's, at most "
            f"{DIRECT_BAR:.0e} is rounding; worst element {list(worst.place)}: radix {radix:.9g}, ordinary "
            f"{ordinary:.9g}"
        )
    if not rung.loss_error <= DIRECT_BAR:
        return (
            f"{rung.precision}: NOT EQUAL: the loss is {rung.radix_loss:.9g}, the ordinary arm's {rung.truth_loss:.9g}"
        )
    return ""


def _truth(model: PreTrainedModel, work: Work, in_float64: bool) -> Gradients | None:
    """The answer of the ordinary model in a wider dtype; None for float32, unless it is to be float64."""
    if not in_float64 and model.dtype == torch.float32:
        return None
    with float64_throughout(model) if in_float64 else weights_in(model, torch.float32):
        if work.cell.mode == "forward":
            return _answer(model, work, None)
        return _on_host(gradients_of(model, lambda: ordinary_alone(model, work.features)))


def _answer(model: PreTrainedModel, work: Work, attention: str | None) -> Gradients:
    """Loss and gradients, or loss and hidden states, of an arm; on the host, where two more sets of them find room."""

    def terms() -> Iterator[Tensor]:
        yield mean_loss(model, work, attention)

    if work.cell.mode == "step":
        return _on_host(gradients_of(model, terms))
    with torch.no_grad():
        loss = mean_loss(model, work, attention).item()
        return _on_host(Gradients(loss, {OUTPUT: _all_hidden_rows(model, work, attention)}))


def _all_hidden_rows(model: PreTrainedModel, work: Work, attention: str | None) -> Tensor:
    """(T, D), of every original token in the order of the sequences."""
    if attention is None:
        inputs = {name: work.ordinary[name] for name in ORDINARY_KEYS}
        return backbone_of(model)(**inputs, use_cache=False).last_hidden_state.flatten(0, 1)
    left_out = (*TARGET_KEYS, "radix_predictor_indices")
    inputs = {name: value for name, value in work.radix.items() if name not in left_out}
    unique = backbone_of(model)(**inputs).last_hidden_state[0]
    return unique[torch.tensor(work.plan.inverse_indices, device=unique.device)]


def _result(
    work: Work, attention: str, error: float, peaks: dict[str | None, int], seconds: dict[str | None, list[float]]
) -> Measured:
    paired = [ordinary / radix for ordinary, radix in zip(seconds[None], seconds[attention], strict=True)]
    return Measured(
        cell=work.cell,
        attention=attention,
        num_tokens=work.plan.num_tokens,
        r=work.plan.compression_ratio,
        ideal_speedup=work.ideal_speedup,
        measured_speedup=statistics.median(paired),
        lowest_speedup=min(paired),
        highest_speedup=max(paired),
        ordinary_seconds=statistics.median(seconds[None]),
        radix_seconds=statistics.median(seconds[attention]),
        ordinary_peak_bytes=peaks[None],
        radix_peak_bytes=peaks[attention],
        error=error,
    )


def _on(batch: dict[str, Tensor], device: torch.device) -> dict[str, Any]:
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}


def _on_host(answer: Gradients) -> Gradients:
    return Gradients(answer.loss, {name: tensor.cpu() for name, tensor in answer.tensors.items()})


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
