"""What the fixed rates of a device choose, beside what a calibration on it chooses (`calibration.py`)."""

from gpu_parts.batches import Case
from gpu_parts.calibration import calibrate
from gpu_parts.run import Run
from gpu_parts.steps import Arms, built, ratio, take_turns

from radixtrain.bench.work import Arm, with_choices, work_of
from radixtrain.hf.step_cost import step_cost_of

__all__ = ["rates"]

FITTED = ("call", "rectangle", "pair", "element", "flop")


def rates(run: Run, cases: list[Case]) -> None:
    """Both sets of rates, and the time of a step by the fixed ones over that by the measured ones."""
    if not run.has_time("rates"):
        return
    model = built(cases[0], run.device)
    costs = {"fixed": step_cost_of(model), "measured": calibrate(model)}
    for name, cost in costs.items():
        run.found("rates", name, **{rate: getattr(cost.rates, rate) for rate in FITTED})
    arm = Arm(attention="auto", plain_head=True)
    for case in cases:
        work = work_of(case.cell, case.batch.features(case.shape))
        works = {name: with_choices(work, cost) for name, cost in costs.items()}
        choices = {f"{name}_choice": chosen.choices for name, chosen in works.items()}
        slowdown = 1.0
        if len({*choices.values()}) == 2:
            arms: Arms = {name: (arm, chosen.to(run.device)) for name, chosen in works.items()}
            turns = take_turns(run, model, arms, run.seconds_left / 2)
            slowdown = ratio(turns["fixed"].seconds, turns["measured"].seconds)
        run.found("rates", f"{case}", slowdown=slowdown, **choices)
