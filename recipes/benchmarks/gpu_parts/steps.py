"""How fast is a step? Arms take turns on the same weights, beside what a user would pick (`arms.py`, `batches.py`).

`measured` is against the fastest rival, which is named. The ideal is the ratio of floating-point operations without
padding. If memory does not hold a step, it is several micro-batches, as few as fit, cut for each arm on its own. Peaks
are beyond the weights. The clock starts after the model is prepared for its arm and has no gradients.
"""

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from gpu_parts.arms import PackedArm, arm_named, as_loaded, is_rival, packed_work, sdpa_backend
from gpu_parts.batches import Case, Features
from gpu_parts.optional import optional
from gpu_parts.run import Run
from torch import nn

from radixtrain.bench.cells import build_model
from radixtrain.bench.work import Arm, Work, with_ordinary_batch_size, work_of
from radixtrain.errors import UserError
from radixtrain.timing import peak_bytes, seconds_of

__all__ = ["Turns", "arms_of", "built", "fitting_work", "prepare", "ratio", "steps", "take_turns"]

MEMORY_SHARES = (0.8, 0.4, 0.2)  # of the free memory, for the activations of a micro-batch; then again with less
CPU_BYTES = 2**30
MAX_TURNS = 5
Arms = dict[str, tuple[Arm, Work]]


class Turns(NamedTuple):
    """Of an arm. peak: bytes beyond the weights."""

    seconds: list[float]
    peak: int


def steps(run: Run, part: str, cases: Sequence[Case], names: Sequence[str]) -> None:
    """Every case, on the arms of these names. Cases of one model that follow each other share it."""
    model, built_for = None, None
    for number, case in enumerate(cases):
        if not run.has_time(f"{part} {case}", needed=run.seconds / 40):
            continue
        try:
            if built_for != (key := (case.shape, case.recompute, case.change)):
                model, built_for = None, key  # frees the memory of the last one first
                model = built(case, run.device)
            _measure(run, part, model, case, names, run.seconds_left / (len(cases) - number))
        except (RuntimeError, UserError) as error:
            run.leave_out(f"{part} {case}", error)


def built(case: Case, device: torch.device) -> Any:
    """The model of a case, changed as it says. Raises UserError if a package for that is missing."""
    model = build_model(case.shape, device, torch.bfloat16, "sdpa")
    if case.recompute:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})  # transformers renamed it
    if case.change == "compiled":
        for layer in model.model.layers:
            layer.compile(dynamic=True, backend="inductor" if device.type == "cuda" else "eager")
    if case.change == "liger":
        patch = optional("liger_kernel.transformers").apply_liger_kernel_to_qwen3
        patch(model=model, fused_linear_cross_entropy=False)  # all arms have one of ours
    return model


def _measure(run: Run, part: str, model: Any, case: Case, names: Sequence[str], seconds: float) -> None:
    """One case, within so many seconds; once more in smaller micro-batches if the estimate of memory was wrong."""
    features = case.batch.features(case.shape)
    for share in MEMORY_SHARES:
        try:
            work = fitting_work(run, model, case, features, share)
            turns = take_turns(run, model, arms_of(run, case, work, names), seconds)
            break
        except torch.OutOfMemoryError:
            if share == MEMORY_SHARES[-1]:
                raise
        finally:
            as_loaded(model).zero_grad(set_to_none=True)
    for name, measures in _compared(turns, work.ideal_speedup(model.config)).items():
        if not is_rival(name):
            measures["r"] = work.num_tokens / work.num_unique_tokens
        run.found(part, f"{case}, {name}", **measures)


def _compared(turns: dict[str, Turns], ideal: float) -> dict[str, dict[str, Any]]:
    """Measures of each arm: times, and those of ours beside every rival."""
    found = {}
    for name, (took, peak) in turns.items():
        found[name] = {"seconds": statistics.median(took), "turns": len(took), "peak_gigabytes": peak / 1e9}
        over = {rival: ratio(turns[rival].seconds, took) for rival in turns if is_rival(rival)}
        if over and not is_rival(name):
            fastest = min(over, key=lambda rival: over[rival])
            measured = over[fastest]
            found[name] |= {"ideal": ideal, "measured": measured, "fastest_rival": fastest}
            found[name] |= {"efficiency": measured / ideal, "slowdown": 1 / measured}
            found[name] |= {f"over_{rival}": factor for rival, factor in over.items()}
    return found


def arms_of(run: Run, case: Case, work: Work, names: Sequence[str]) -> Arms:
    """The arms of these names that run here, with the work of each on the device; the others are left out by name."""
    on_device, packed = work.to(run.device), _without_padding(work).to(run.device)
    run.header["padded arm"] = f"sdpa, {sdpa_backend(case.shape, run.device)}"
    arms: Arms = {}
    for name in names:
        try:
            arm = arm_named(name, case.shape, run.device)
        except (UserError, ValueError) as error:
            run.leave_out(f"arm {name}", error)
            continue
        arms[name] = (arm, packed if isinstance(arm, PackedArm) else on_device)
        if isinstance(arm, PackedArm):
            run.header[f"{name} arm"] = arm.implementation
    return arms


def _without_padding(work: Work) -> Work:
    """The packed arm in micro-batches of about as many tokens as the padded ones have with their padding."""
    largest = max(batch["input_ids"].numel() for batch in work.ordinary.micro_batches)
    number = math.ceil(work.num_tokens / largest)
    return packed_work(with_ordinary_batch_size(work, math.ceil(len(work.features) / number)))


def take_turns(run: Run, model: Any, arms: Arms, seconds: float) -> dict[str, Turns]:
    """A B A B ..., while another turn fits into the seconds, and at least one each.

    The first turn of each is not timed and shows its memory. An arm that raises there is left out, if memory holds it.
    """
    deadline, peaks = time.perf_counter() + seconds, dict[str, int]()
    for name, (arm, work) in arms.items():
        try:
            prepare(model, arm)
            peaks[name] = peak_bytes(lambda arm=arm, work=work: arm.run_step(model, work), run.device)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            run.leave_out(f"{work.cell}, {name}", error)
    took: dict[str, list[float]] = {name: [] for name in peaks}
    for _ in range(MAX_TURNS):
        start = time.perf_counter()
        for name in took:
            arm, work = arms[name]
            prepare(model, arm)
            took[name].append(seconds_of(lambda arm=arm, work=work: arm.run_step(model, work), run.device))
        if 2 * time.perf_counter() - start > deadline:
            break
    as_loaded(model).zero_grad(set_to_none=True)
    return {name: Turns(took[name], peak) for name, peak in peaks.items()}


def prepare(model: nn.Module, arm: Arm) -> None:
    """Make the model ready for a step of the arm, without gradients."""
    arm.prepare(as_loaded(model))
    model.zero_grad(set_to_none=True)


def ratio(rival: list[float], ours: list[float]) -> float:
    """The speed-up of the median turn."""
    return statistics.median(one / other for one, other in zip(rival, ours, strict=True))


def fitting_work(run: Run, model: Any, case: Case, features: Features, share: float = MEMORY_SHARES[0]) -> Work:
    """The step in micro-batches that memory holds: the longest sequence shows how many bytes a token needs."""
    longest = max(features, key=lambda feature: len(feature["input_ids"]))
    length = len(longest["input_ids"])
    one = work_of(replace(case.cell, num_sequences=1), [longest]).to(run.device)
    most = []
    for arm in (Arm(plain_head=True), Arm(attention="cascade", plain_head=True)):
        prepare(model, arm)
        arm.run_step(model, one)  # leaves gradients, so that what is free after it is free for activations
        peak = max(1, peak_bytes(lambda arm=arm: arm.run_step(model, one), run.device))
        most.append(int(share * _free_bytes(run) * length / peak))
    size = min(max(1, most[0] // length), case.most_padded or len(features))
    size = math.ceil(len(features) / math.ceil(len(features) / size))
    return work_of(case.cell, features, size, max(length, most[1]))


def _free_bytes(run: Run) -> int:
    """Of the device; on CPU what a laptop can spare."""
    if run.device.type != "cuda":
        return CPU_BYTES
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(run.device)[0]
