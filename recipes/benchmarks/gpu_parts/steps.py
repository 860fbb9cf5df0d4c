"""How fast is a training step? The shapes of Qwen3-0.6B, 4B and 8B in bfloat16 beside what a user would pick.

- step: 32 sequences of 2,048 shared and 256 own tokens; forward and backward, and only forward.
- unequal: the same prompt, own parts of 16 to 1,024 tokens, as many of each order of magnitude: few are long, as in
  real data.
- unshared: sequences of 2,304 tokens that share nothing. The code path is the same, so it shows what it costs.

All arms take turns on the same weights (`turns.py`), and `measured` is against the faster of the two ordinary arms
(`arms.py`). The ideal is the ratio of floating-point operations without padding. 4B and 8B recompute activations in
the backward pass, in all arms, because with so many layers memory would otherwise hold few sequences. Losses are
compared here; gradients are in the part `equivalence`, because 8B of them in float32 take minutes.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gpu_parts.arms import PackedArm, as_loaded, packed_implementation, packed_work
from gpu_parts.run import Run
from gpu_parts.turns import Features, Turns, against, fitting_work, take_turns

from radixtrain.bench.arms import Arm, OrdinaryArm, RadixArm
from radixtrain.bench.cells import Cell, GivenBatch, ModelShape, build_model, features_of_cell
from radixtrain.bench.work import Work
from radixtrain.errors import UserError

__all__ = ["MODELS", "TINY_MODELS", "steps", "unequal", "unshared"]

QWEN3 = {"vocab_size": 151_936, "head_dim": 128, "num_key_value_heads": 8}
MODELS = (
    ModelShape(28, 1024, 3072, 16, **QWEN3, name="Qwen3-0.6B"),
    ModelShape(36, 2560, 9728, 32, **QWEN3, name="Qwen3-4B"),
    ModelShape(36, 4096, 12288, 32, **QWEN3, tie_word_embeddings=False, name="Qwen3-8B"),
)
TINY_MODELS = (ModelShape(2, 64, head_dim=16, vocab_size=100, name="tiny"),)
RECOMPUTING = ("Qwen3-4B", "Qwen3-8B")
MEMORY_SHARES = (0.8, 0.4, 0.2)
MAX_TURNS = 5
Shapes = tuple[ModelShape, ...]
Steps = Sequence[tuple[Cell | GivenBatch, Features]]


def steps(run: Run, models: Shapes, attention: tuple[str, ...], prompt: int, suffix: int, num_sequences: int) -> None:
    """A training step and a forward pass of each model, the smallest first."""
    modes = ("step", "forward")
    cells = [Cell(shape, prompt, suffix, num_sequences, mode=mode) for shape in models for mode in modes]
    _measure_all(run, "step", [(cell, features_of_cell(cell)) for cell in cells], attention)


def unequal(run: Run, models: Shapes, attention: tuple[str, ...], prompt: int, own: int, num_sequences: int) -> None:
    """A step of each model. own: tokens of the longest own part, 64 times as many as of the shortest."""
    given = []
    for shape in models:
        features = features_of_unequal_lengths(shape, prompt, own, num_sequences)
        name = f"{num_sequences} x ({prompt} + {max(1, own // 64)} to {own})"
        given.append((GivenBatch(shape, name, num_sequences), features))
    _measure_all(run, "unequal", given, attention, most_padded=8)


def unshared(run: Run, models: Shapes, attention: tuple[str, ...], length: int, num_sequences: int) -> None:
    """A step of each model on sequences whose first tokens differ."""
    cells = [Cell(shape, 0, length, num_sequences) for shape in models]
    _measure_all(run, "unshared", [(cell, features_of_cell(cell)) for cell in cells], attention)


def features_of_unequal_lengths(shape: ModelShape, prompt: int, own: int, num_sequences: int) -> list[dict[str, Any]]:
    """One prompt, and own parts whose lengths are evenly spread by their logarithms. The loss is on the own parts."""
    cell = Cell(shape, prompt, own, num_sequences)
    lengths = np.geomspace(max(1, own // 64), own, num_sequences).round().astype(int) + prompt
    return [
        {name: column[:length] for name, column in feature.items()}
        for feature, length in zip(features_of_cell(cell), np.random.default_rng(0).permutation(lengths), strict=True)
    ]


def _measure_all(run: Run, part: str, given: Steps, attention: tuple[str, ...], most_padded: int | None = None) -> None:
    model, built = None, None
    for number, (cell, features) in enumerate(given):
        if not run.has_time(f"{part} {cell}", needed=run.seconds / 40):
            continue
        try:
            if built != cell.model:
                model, built = None, cell.model  # frees the memory of the last one first
                model = _built(cell.model, run.device)
            share = run.seconds_left / (len(given) - number)
            _measure_what_fits(run, part, model, cell, features, attention, share, most_padded)
        except (RuntimeError, UserError) as error:
            run.leave_out(f"{part} {cell}", error)


def _built(shape: ModelShape, device: torch.device) -> Any:
    model = build_model(shape, device, torch.bfloat16, "sdpa")
    if str(shape) in RECOMPUTING:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})  # transformers renamed it
    return model


def _measure_what_fits(run: Run, part: str, model: Any, *rest: Any) -> None:
    """Once more in smaller micro-batches if the estimate was wrong."""
    for share in MEMORY_SHARES:
        try:
            return _measure(run, part, model, *rest, share)
        except torch.OutOfMemoryError:
            if share == MEMORY_SHARES[-1]:
                raise
        finally:
            as_loaded(model).zero_grad(set_to_none=True)


def _measure(
    run: Run,
    part: str,
    model: Any,
    cell: Cell | GivenBatch,
    features: Features,
    attention: tuple[str, ...],
    seconds: float,
    most_padded: int | None,
    memory_share: float,
) -> None:
    """One step, within so many seconds."""
    padded = OrdinaryArm(plain_head=True)
    radix = {name: RadixArm(attention=name, plain_head=True) for name in attention}
    first = next(iter(radix.values()))
    work = fitting_work(run, model, cell, features, memory_share, padded, first, most_padded)
    packed = PackedArm(plain_head=True, implementation=packed_implementation(run.device))
    run.header["packed arm"] = packed.implementation
    on_device = work.to(run.device)
    runs: dict[str, tuple[Arm, Work]] = {
        "padded": (padded, on_device),
        "packed": (packed, packed_work(work).to(run.device)),
        **{name: (arm, on_device) for name, arm in radix.items()},
    }
    turns = take_turns(run, model, runs, seconds, MAX_TURNS)
    rivals = {name: turns.pop(name) for name in ("padded", "packed") if name in turns}
    for name, of_arm in turns.items():
        case = f"{cell.model}, {cell.mode}, {name}"
        run.found(part, case, **_described(cell, work), **_beside(rivals, of_arm, work, model.config))


def _described(cell: Cell | GivenBatch, work: Work) -> dict[str, Any]:
    return {
        "sequences": cell.sequences,
        "recomputing": str(cell.model) in RECOMPUTING,
        "r": work.num_tokens / work.num_unique_tokens("cascade"),
        "ordinary_micro_batches": len(work.ordinary),
        "radix_micro_batches": len(work.radix),
    }


def _beside(rivals: dict[str, Turns], radix: Turns, work: Work, config: Any) -> dict[str, Any]:
    """The measures of a radix arm beside the ordinary ones; the faster of these counts."""
    measures: dict[str, Any] = {"turns": len(radix.seconds), "radix_seconds": radix.median}
    measures["radix_peak_gigabytes"] = radix.peak_bytes / 1e9
    for name, rival in rivals.items():
        measures |= {f"over_{name}": against(rival, radix), f"{name}_seconds": rival.median}
        measures |= {f"{name}_peak_gigabytes": rival.peak_bytes / 1e9}
        measures |= {f"{name}_loss_difference": abs(radix.loss - rival.loss) / abs(rival.loss)}
    if not rivals:
        return measures
    fastest = min(rivals, key=lambda name: rivals[name].median)
    measured, ideal = measures[f"over_{fastest}"], work.ideal_speedup(config)
    measures |= {"ideal": ideal, "measured": measured, "efficiency": measured / ideal, "slowdown": 1 / measured}
    measures["rival_teraflops_per_second"] = work.ordinary_teraflops(config) / rivals[fastest].median
    return measures
