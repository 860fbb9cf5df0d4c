"""Where the time goes: kernels of one run of each arm, how long the device is busy, and the 15 longest.

Only the device is recorded: reading the events of the host would take longer than the steps. On a CPU operators stand
for kernels. What wall time has beyond the busy one, the device waits for the host.
"""

from collections.abc import Sequence

import torch
from gpu_parts.batches import Case
from gpu_parts.run import Run
from gpu_parts.steps import arms_of, built, fitting_work, prepare
from step import Arm, Work
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from radixtrain.timing import seconds_of

__all__ = ["found_kernels", "profile_steps", "recorder"]

LONGEST, LETTERS = 15, 70
TURNS = 2  # timed, after one that is not


def profile_steps(run: Run, case: Case, names: Sequence[str]) -> None:
    """A run of each arm of these names, a step or a forward pass: wall and busy time, and what takes longest."""
    if not run.has_time("profile"):
        return
    model = built(case, run.device)
    works = fitting_work(run, model, case, case.batch.features(case.shape))
    for name, (arm, work) in arms_of(run, case, *works, names).items():
        if not run.has_time(f"profile {name}", needed=5):
            return
        prepare(model, arm)

        def once(arm: Arm = arm, work: Work = work) -> float:
            model.zero_grad(set_to_none=True)
            return seconds_of(lambda: arm.run_step(model, work), run.device)

        took = [once() for _ in range(1 + TURNS)]
        with recorder(run.device) as recorded:
            once()
        found_kernels(run, f"{case}, {name}", min(took[1:]), recorded)


def recorder(device: torch.device) -> profile:
    """A profiler of what runs on the device."""
    return profile(activities=[ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU])


def found_kernels(run: Run, case: str, seconds: float, recorded: profile) -> None:
    """Add the kernels of a run to what was found. seconds: of such a run without a profiler."""
    on_gpu = run.device.type == "cuda"
    kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
    kernels = [
        (event.key, (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e3, event.count)
        for event in recorded.key_averages()
        if event.device_type == kind
    ]
    busy, number = (sum(kernel[place] for kernel in kernels) for place in (1, 2))
    run.found("profile", case, wall_milliseconds=1e3 * seconds, busy_milliseconds=busy, kernels=number)
    for name, milliseconds, count in sorted(kernels, key=lambda kernel: -kernel[1])[:LONGEST]:
        label = name.replace("|", "/")[:LETTERS]
        run.found("profile", f"{case}: {label}", milliseconds=milliseconds, count=count)
