"""Where the time of a step goes: kernels of one step of each arm, how long the device is busy, and the 15 longest.

Only the device is recorded: reading the events of the host would take longer than the steps. On a CPU operators stand
for kernels.
"""

from collections.abc import Sequence
from typing import Any

from gpu_parts.batches import Case
from gpu_parts.run import Run
from gpu_parts.steps import arms_of, built, fitting_work, prepare
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from radixtrain.bench.work import Arm, Work
from radixtrain.timing import seconds_of

__all__ = ["profile_steps"]

LONGEST, LETTERS = 15, 70
TURNS = 2  # timed, after one that is not


def profile_steps(run: Run, case: Case, names: Sequence[str]) -> None:
    """A step of each arm of these names: wall and busy time, and the kernels that take longest."""
    if not run.has_time("profile"):
        return
    model = built(case, run.device)
    work = fitting_work(run, model, case, case.batch.features(case.shape))
    for name, (arm, of_arm) in arms_of(run, case, work, names).items():
        if not run.has_time(f"profile {name}", needed=5):
            return
        took = [_seconds(run, model, arm, of_arm) for _ in range(1 + TURNS)]
        kernels = _kernels(run, model, arm, of_arm)
        busy, number = sum(kernel[1] for kernel in kernels), sum(kernel[2] for kernel in kernels)
        measures = {"wall_milliseconds": 1e3 * min(took[1:]), "busy_milliseconds": busy, "kernels": number}
        run.found("profile", f"{case}, {name}", **measures)
        for kernel, milliseconds, count in kernels[:LONGEST]:
            label = kernel.replace("|", "/")[:LETTERS]
            run.found("profile", f"{case.batch.name}, {name}: {label}", milliseconds=milliseconds, count=count)


def _seconds(run: Run, model: Any, arm: Arm, work: Work) -> float:
    prepare(model, arm)
    return seconds_of(lambda: arm.run_step(model, work), run.device)


def _kernels(run: Run, model: Any, arm: Arm, work: Work) -> list[tuple[str, float, int]]:
    """Name, milliseconds in all and number of calls, the longest first."""
    on_gpu = run.device.type == "cuda"
    prepare(model, arm)
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as recorded:
        seconds_of(lambda: arm.run_step(model, work), run.device)
    kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
    events = [event for event in recorded.key_averages() if event.device_type == kind]
    took = [
        (event.key, (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e3) for event in events
    ]
    found = [(*each, event.count) for each, event in zip(took, events, strict=True)]
    return sorted(found, key=lambda each: -each[1])
