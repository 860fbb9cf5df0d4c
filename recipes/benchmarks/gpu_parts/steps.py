"""How fast is a training step? The shapes of Qwen3-0.6B, 4B and 8B in bfloat16 beside what a user would pick.

- step: 32 sequences of 2,048 shared and 256 own tokens; forward and backward, and only forward.
- unequal: the same prompt, own parts of 16 to 1,024 tokens, as many of each order of magnitude: few are long.
- unshared: sequences of 2,304 tokens that share nothing. The code path is the same, so it shows what it costs.
- rates: a step with what the fixed rates choose, and with what a calibration chooses; 1 if they choose the same.

All arms take turns on the same weights, and `measured` is against the faster of the two ordinary arms (`arms.py`). The
ideal is the ratio of floating-point operations without padding. 4B and 8B recompute activations in the backward pass,
in all arms. If memory does not hold a step, it is several micro-batches, as few as fit, cut for each arm on its own.
"""

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from gpu_parts.arms import PackedArm, as_loaded, packed_implementation, packed_work
from gpu_parts.calibration import calibrate
from gpu_parts.run import Run

from radixtrain.bench.cells import Cell, GivenBatch, ModelShape, build_model, features_of_cell
from radixtrain.bench.work import Arm, Work, with_choices, work_of
from radixtrain.errors import UserError
from radixtrain.hf.step_cost import step_cost_of
from radixtrain.timing import peak_bytes, seconds_of

__all__ = ["MODELS", "TINY_MODELS", "features_of_unequal_lengths", "rates", "steps", "unequal", "unshared"]

QWEN3 = {"vocab_size": 151_936, "head_dim": 128, "num_key_value_heads": 8}
MODELS = (
    ModelShape(28, 1024, 3072, 16, **QWEN3, name="Qwen3-0.6B"),
    ModelShape(36, 2560, 9728, 32, **QWEN3, name="Qwen3-4B"),
    ModelShape(36, 4096, 12288, 32, **QWEN3, tie_word_embeddings=False, name="Qwen3-8B"),
)
TINY_MODELS = (ModelShape(2, 64, head_dim=16, vocab_size=100, name="tiny"),)
RECOMPUTING = ("Qwen3-4B", "Qwen3-8B")
MEMORY_SHARES = (0.8, 0.4, 0.2)  # of the free memory, for the activations of a micro-batch; then again with less
CPU_BYTES = 2**30
MAX_TURNS = 5
Shapes = tuple[ModelShape, ...]
Features = Sequence[Mapping[str, Any]]
Step = tuple[Cell | GivenBatch, Features]
Arms = dict[str, tuple[Arm, Work]]


def steps(run: Run, models: Shapes, attention: Sequence[str], prompt: int, suffix: int, number: int) -> None:
    """A training step and a forward pass of each model, the smallest first."""
    cells = [Cell(shape, prompt, suffix, number, mode=mode) for shape in models for mode in ("step", "forward")]
    _measure_all(run, "step", [(cell, features_of_cell(cell)) for cell in cells], attention)


def unequal(run: Run, models: Shapes, attention: Sequence[str], prompt: int, own: int, number: int) -> None:
    """A step of each model. own: tokens of the longest own part, 64 times as many as of the shortest."""
    _measure_all(run, "unequal", [_unequal(shape, prompt, own, number) for shape in models], attention, most_padded=8)


def unshared(run: Run, models: Shapes, attention: Sequence[str], length: int, number: int) -> None:
    """A step of each model on sequences whose first tokens differ."""
    cells = [Cell(shape, 0, length, number) for shape in models]
    _measure_all(run, "unshared", [(cell, features_of_cell(cell)) for cell in cells], attention)


def rates(run: Run, shape: ModelShape, prompt: int, own: int, number: int) -> None:
    """What the fixed rates choose costs, over what a calibration on this device chooses."""
    if not run.has_time("rates"):
        return
    model = _built(shape, run.device)
    costs = {"fixed": step_cost_of(model), "measured": calibrate(model)}
    cell, arm = Cell(shape, prompt, own, number), Arm(attention="auto", plain_head=True)
    batches = {"equal": (cell, features_of_cell(cell)), "unequal": _unequal(shape, prompt, own, number)}
    for name, batch in batches.items():
        works = {rates: with_choices(work_of(*batch), cost) for rates, cost in costs.items()}
        choices = {f"{rates}_choice": work.choices for rates, work in works.items()}
        slowdown = 1.0
        if len({*choices.values()}) == 2:
            arms: Arms = {rates: (arm, work.to(run.device)) for rates, work in works.items()}
            turns = _take_turns(run, model, arms, run.seconds_left / 2)
            slowdown = _ratio(turns["fixed"][0], turns["measured"][0])
        run.found("rates", name, slowdown=slowdown, **choices)


def features_of_unequal_lengths(shape: ModelShape, prompt: int, own: int, number: int) -> list[dict[str, Any]]:
    """One prompt, and own parts whose lengths are evenly spread by their logarithms. The loss is on the own parts."""
    lengths = np.geomspace(max(1, own // 64), own, number).round().astype(int) + prompt
    features = features_of_cell(Cell(shape, prompt, own, number))
    pairs = zip(features, np.random.default_rng(0).permutation(lengths), strict=True)
    return [{name: column[:length] for name, column in feature.items()} for feature, length in pairs]


def _unequal(shape: ModelShape, prompt: int, own: int, number: int) -> Step:
    name = f"{number} x ({prompt} + {max(1, own // 64)} to {own})"
    return GivenBatch(shape, name, number), features_of_unequal_lengths(shape, prompt, own, number)


def _measure_all(run: Run, part: str, given: Sequence[Step], attention: Sequence[str], most_padded: int = 0) -> None:
    model, built = None, None
    for number, (cell, features) in enumerate(given):
        if not run.has_time(f"{part} {cell}", needed=run.seconds / 40):
            continue
        try:
            if built != cell.model:
                model, built = None, cell.model  # frees the memory of the last one first
                model = _built(cell.model, run.device)
            _measure(run, part, model, cell, features, attention, run.seconds_left / (len(given) - number), most_padded)
        except (RuntimeError, UserError) as error:
            run.leave_out(f"{part} {cell}", error)


def _built(shape: ModelShape, device: torch.device) -> Any:
    model = build_model(shape, device, torch.bfloat16, "sdpa")
    if str(shape) in RECOMPUTING:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})  # transformers renamed it
    return model


def _measure(
    run: Run, part: str, model: Any, cell: Cell | GivenBatch, features: Features, attention: Sequence[str],
    seconds: float, most_padded: int,
) -> None:  # fmt: skip
    """One step, within so many seconds; once more in smaller micro-batches if the estimate of memory was wrong."""
    for share in MEMORY_SHARES:
        try:
            work = _fitting_work(run, model, cell, features, share, most_padded)
            turns = _take_turns(run, model, _arms(run, work, attention), seconds)
            break
        except torch.OutOfMemoryError:
            if share == MEMORY_SHARES[-1]:
                raise
        finally:
            as_loaded(model).zero_grad(set_to_none=True)
    rivals = {name: turns.pop(name) for name in ("padded", "packed") if name in turns}
    ideal = work.ideal_speedup(model.config)
    for name, (took, peak) in turns.items():
        measures = {"r": work.num_tokens / work.num_unique_tokens("cascade"), "radix_seconds": statistics.median(took)}
        measures |= {"turns": len(took), "radix_peak_gigabytes": peak / 1e9}
        for rival, (seconds_of_rival, peak_of_rival) in rivals.items():
            measures |= {
                f"over_{rival}": _ratio(seconds_of_rival, took),
                f"{rival}_peak_gigabytes": peak_of_rival / 1e9,
            }
        if rivals:
            measured = min(measures[f"over_{rival}"] for rival in rivals)
            measures |= {"ideal": ideal, "measured": measured, "efficiency": measured / ideal, "slowdown": 1 / measured}
        run.found(part, f"{cell.model}, {cell.mode}, {name}", **measures)


def _arms(run: Run, work: Work, attention: Sequence[str]) -> Arms:
    packed = PackedArm(plain_head=True, implementation=packed_implementation(run.device))
    run.header["packed arm"] = packed.implementation
    on_device = work.to(run.device)
    ours = {name: (Arm(attention=name, plain_head=True), on_device) for name in attention}
    padded = Arm(plain_head=True)
    return {"padded": (padded, on_device), "packed": (packed, packed_work(work).to(run.device)), **ours}


def _take_turns(run: Run, model: Any, arms: Arms, seconds: float) -> dict[str, tuple[list[float], int]]:
    """A B A B ..., while another turn fits into the seconds: seconds of each turn, and bytes beyond the weights.

    The first turn of each is not timed and shows its memory. An arm that raises there is left out, if memory holds it.
    """
    deadline, peaks = time.perf_counter() + seconds, dict[str, int]()
    for name, (arm, work) in arms.items():
        try:
            peaks[name] = peak_bytes(lambda arm=arm, work=work: _run(model, arm, work), run.device)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            run.leave_out(f"{work.cell}, {name}", error)
    took: dict[str, list[float]] = {name: [] for name in peaks}
    for number in range(MAX_TURNS):
        start = time.perf_counter()
        for name in took:
            took[name].append(seconds_of(lambda name=name: _run(model, *arms[name]), run.device))
        if number and 2 * time.perf_counter() - start > deadline:
            break
    as_loaded(model).zero_grad(set_to_none=True)
    return {name: (took[name], peak) for name, peak in peaks.items()}


def _run(model: Any, arm: Arm, work: Work) -> None:
    arm.prepare(as_loaded(model))
    model.zero_grad(set_to_none=True)
    arm.run_step(model, work)


def _ratio(rival: list[float], ours: list[float]) -> float:
    """The speed-up of the median turn."""
    return statistics.median(one / other for one, other in zip(rival, ours, strict=True))


def _fitting_work(run: Run, model: Any, cell: Any, features: Features, share: float, most_padded: int) -> Work:
    """The step in micro-batches that memory holds: the longest sequence shows how many bytes a token needs.

    most_padded: sequences of an ordinary micro-batch, at most; with unequal lengths fewer have less padding. 0: any.
    """
    longest = max(features, key=lambda feature: len(feature["input_ids"]))
    length = len(longest["input_ids"])
    one = work_of(replace(cell, num_sequences=1), [longest]).to(run.device)
    most = []
    for arm in (Arm(plain_head=True), Arm(attention="cascade", plain_head=True)):
        _run(model, arm, one)  # leaves gradients, so that what is free after it is free for activations
        peak = max(1, peak_bytes(lambda arm=arm: arm.run_step(model, one), run.device))
        most.append(int(share * _free_bytes(run) * length / peak))
    size = min(max(1, most[0] // length), most_padded or len(features))
    return work_of(cell, features, math.ceil(len(features) / math.ceil(len(features) / size)), max(length, most[1]))


def _free_bytes(run: Run) -> int:
    """Of the device; on CPU what a laptop can spare."""
    if run.device.type != "cuda":
        return CPU_BYTES
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(run.device)[0]
