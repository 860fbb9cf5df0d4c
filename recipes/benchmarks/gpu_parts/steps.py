"""How fast is a step? Arms take turns on the same weights, beside what a user would pick (`arms.py`, `batches.py`).

`measured` is against the fastest rival, which is named. The ideal is the ratio of floating-point operations without
padding. If memory does not hold a step, it is several micro-batches, as few as fit, cut for each arm on its own: so
peaks, which are beyond the weights, compare as bytes a computed token (padding is computed too). The clock starts after
a run of the arm, without gradients.

`profile_steps` says where the time goes: how long the device is busy in a run, and its 15 longest kernels. Only the
device is recorded: reading the events of the host would take longer than the steps. What wall time has beyond the busy
one, the device waits for the host. On a CPU operators stand for kernels.
"""

import math
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from gpu_parts.arms import PackedArm, arm_named, as_loaded, compiled, is_rival, packed_work
from gpu_parts.batches import Case, Features
from gpu_parts.run import Run, optional
from step import Arm, Work, build_model, work_of
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from radixtrain.collators.misuse_guard import end_watch
from radixtrain.errors import UserError
from radixtrain.timing import peak_bytes, seconds_of

__all__ = ["TURNS", "arms_of", "built", "fitting_work", "prepare", "profile_steps", "steps", "take_turns"]

MEMORY_SHARES = (0.8, 0.4, 0.2)  # of the free memory, for the activations of a micro-batch; then again with less
CPU_BYTES = 2**30
TURNS = 3
LONGEST, LETTERS = 15, 70  # kernels of a profile, and of their names
Arms = dict[str, tuple[Arm, Work]]


class Turns(NamedTuple):
    """Of an arm. peak: bytes beyond the weights. batches: computed tokens of each micro-batch."""

    seconds: list[float]
    peak: int
    batches: list[int]


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
    model = build_model(case.shape, device, torch.bfloat16)
    if case.recompute:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})  # transformers renamed it
    if case.change == "liger":
        patch = optional("liger_kernel.transformers").apply_liger_kernel_to_qwen3
        patch(model=model, fused_linear_cross_entropy=False)  # all arms have one of ours
    return model


def _measure(run: Run, part: str, model: Any, case: Case, names: Sequence[str], seconds: float) -> None:
    """One case, within so many seconds; once more in smaller micro-batches if the estimate of memory was wrong."""
    features = case.batch.features(case.shape)
    for share in MEMORY_SHARES:
        try:
            work, packed = fitting_work(run, model, case, features, share)
            turns = take_turns(run, model, arms_of(run, case, work, packed, names), seconds)
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
    for name, (took, peak, batches) in turns.items():
        found[name] = {"seconds": statistics.median(took), "slowest_over_fastest": max(took) / min(took)}
        found[name] |= {"peak_gigabytes": peak / 1e9, "micro_batches": len(batches)}
        found[name]["peak_megabytes_a_token"] = peak / 1e6 / max(batches)
        over = {rival: ratio(turns[rival].seconds, took) for rival in turns if is_rival(rival)}
        if over and not is_rival(name):
            fastest = min(over, key=lambda rival: over[rival])
            measured = over[fastest]
            found[name] |= {"ideal": ideal, "measured": measured, "fastest_rival": fastest}
            found[name] |= {"efficiency": measured / ideal, "slowdown": 1 / measured}
            found[name] |= {f"over_{rival}": factor for rival, factor in over.items()}
    return found


def arms_of(run: Run, case: Case, work: Work, packed: Work, names: Sequence[str]) -> Arms:
    """The arms of these names that run here, with their work on the device; the others are left out by name."""
    on_device, packed = work.to(run.device), packed.to(run.device)
    arms: Arms = {}
    for name in names:
        try:
            arm = arm_named(name, case.shape, run.device)
        except (UserError, ValueError) as error:
            run.leave_out(f"arm {name}", error)
            continue
        of_arm = packed if isinstance(arm, PackedArm) else on_device
        arms[name] = (compiled(name, arm, run.device) if case.change == "compiled" else arm, of_arm)
    return arms


def take_turns(run: Run, model: Any, arms: Arms, seconds: float) -> dict[str, Turns]:
    """A B C A B C A B C: three turns of each arm that the seconds have room for, the first arm in any case.

    An arm begins only if the other turns of those before it fit after its first one, which may compile: it is expected
    to take as long as the longest so far. An arm that raises there is left out, if memory holds it.
    """
    deadline, longest, reserved = time.perf_counter() + seconds, 0.0, 0.0
    found: dict[str, Turns] = {}
    for name, (arm, work) in arms.items():
        start = time.perf_counter()
        left = deadline - start - reserved
        if found and left < longest:
            run.leave_out(f"{work.name}, {name}", f"{max(0.0, left):.0f} of {seconds:.0f} seconds were left for it")
            continue
        try:
            took, peak = _turn(model, arm, work, run.device)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            run.leave_out(f"{work.name}, {name}", error)
            continue
        longest, reserved = max(longest, time.perf_counter() - start), reserved + (TURNS - 1) * 2 * took
        batches = [batch["input_ids"].numel() for batch in arm.step(work).micro_batches]
        found[name] = Turns([took], peak, batches)
    for _ in range(TURNS - 1):
        for name, turns in found.items():
            turns.seconds.append(_turn(model, *arms[name], run.device)[0])
    as_loaded(model).zero_grad(set_to_none=True)
    return found


def _turn(model: Any, arm: Arm, work: Work, device: torch.device) -> tuple[float, int]:
    """Seconds and peak. The first run after `prepare` shows the peak: what it does only once is in no later step."""
    prepare(model, arm)
    peak = peak_bytes(lambda: arm.run_step(model, work), device)
    model.zero_grad(set_to_none=True)
    return seconds_of(lambda: arm.run_step(model, work), device), peak


def prepare(model: nn.Module, arm: Arm) -> None:
    """Make the model ready for a step of the arm, without gradients."""
    arm.prepare(as_loaded(model))
    model.zero_grad(set_to_none=True)


def ratio(rival: list[float], ours: list[float]) -> float:
    """The speed-up of the median turn."""
    return statistics.median(one / other for one, other in zip(rival, ours, strict=True))


def fitting_work(
    run: Run, model: Any, case: Case, features: Features, share: float = MEMORY_SHARES[0]
) -> tuple[Work, Work]:
    """The step in micro-batches that memory holds, and without padding. The longest sequence shows what a token takes.

    A padded micro-batch has as many sequences, a packed one as many tokens, ours as many unique tokens as fit.
    """
    longest = max(features, key=lambda feature: len(feature["input_ids"]))
    length = len(longest["input_ids"])
    one = work_of(f"{case}", [longest], mode=case.mode).to(run.device)
    most = []
    for arm in (Arm(plain_head=True), Arm(attention="cascade", kernel="torch", plain_head=True)):
        prepare(model, arm)
        arm.run_step(model, one)  # leaves gradients, so that what is free after it is free for activations
        peak = max(1, peak_bytes(lambda arm=arm: arm.run_step(model, one), run.device))
        most.append(max(length, int(share * _free_bytes(run) * length / peak)))
    size = min(most[0] // length, len(features))
    size = math.ceil(len(features) / math.ceil(len(features) / size))
    work = work_of(f"{case.shape}, {case.batch.name}, {case.mode}", features, size, most[1], case.mode)
    packed = packed_work(work, most[0])
    end_watch()  # of our collator: a hook on all modules, which would slow the rivals and compile them twice
    return work, packed


def _free_bytes(run: Run) -> int:
    """Of the device; on CPU what a laptop can spare."""
    if run.device.type != "cuda":
        return CPU_BYTES
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(run.device)[0]


def profile_steps(run: Run, case: Case, names: Sequence[str]) -> None:
    """A run of each arm of these names, a step or a forward pass: wall and busy time, and what takes longest."""
    if not run.has_time("profile"):
        return
    model, on_gpu = built(case, run.device), run.device.type == "cuda"
    works = fitting_work(run, model, case, case.batch.features(case.shape))
    for name, (arm, work) in arms_of(run, case, *works, names).items():
        if not run.has_time(f"profile {name}", needed=5):
            return
        prepare(model, arm)

        def once(arm: Arm = arm, work: Work = work) -> float:
            model.zero_grad(set_to_none=True)
            return seconds_of(lambda: arm.run_step(model, work), run.device)

        took = [once() for _ in range(3)]  # the first is not counted
        with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as recorded:
            once()
        kernels = [
            (event.key, (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e3, event.count)
            for event in recorded.key_averages()
            if event.device_type == (DeviceType.CUDA if on_gpu else DeviceType.CPU)
        ]
        busy, number = (sum(kernel[place] for kernel in kernels) for place in (1, 2))
        found = {"wall_milliseconds": 1e3 * min(took[1:]), "busy_milliseconds": busy, "kernels": number}
        run.found("profile", f"{case}, {name}", **found)
        for kernel, milliseconds, count in sorted(kernels, key=lambda each: -each[1])[:LONGEST]:
            label = f"{case}, {name}: {kernel.replace('|', '/')[:LETTERS]}"
            run.found("profile", label, milliseconds=milliseconds, count=count)
