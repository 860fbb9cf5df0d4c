"""What is timed: micro-batches of the user's own data in both arms, from one sequence to a whole step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from radixtrain.collators.steps import StepCollator
from radixtrain.report.counts import Counts, Features, ordinary_counts, plans_of, radix_counts
from radixtrain.tree.cost_model import StepCost

__all__ = ["ARMS", "Arm", "Case", "cases_of", "largest", "smallest"]

Arm = Literal["radix", "ordinary"]
ARMS: tuple[Arm, ...] = ("radix", "ordinary")
PARTS = (0.0, 0.125, 0.25, 0.5, 1.0)  # of a step, whose micro-batches are tried: from one sequence to all


@dataclass(frozen=True, eq=False)
class Case:
    """A micro-batch of one arm, on the host."""

    arm: Arm
    counts: Counts
    batch: dict[str, Any]
    num_labels: int


def cases_of(steps: Iterable[Features], collator: StepCollator, step_cost: StepCost | None) -> list[Case]:
    """Micro-batches of both arms, of these steps and of parts of them, from the smallest to the largest.

    collator: with `dedup`, as in training.
    """
    cases: list[Case] = []
    for number, features in enumerate(steps):
        for part in PARTS if number == 0 else PARTS[-1:]:
            some = features[: max(1, round(part * len(features)))]
            for dedup in (True, False):
                cases += _cases(some, replace(collator, dedup=dedup), step_cost)
    different = {(case.arm, case.counts): case for case in cases}
    return sorted(different.values(), key=lambda case: case.counts.rows)


def smallest(cases: Sequence[Case]) -> list[Case]:
    """The smallest case of each arm."""
    return [next(case for case in cases if case.arm == arm) for arm in ARMS]


def largest(cases: Sequence[Case]) -> list[Case]:
    """The largest case of each arm."""
    return [max((case for case in cases if case.arm == arm), key=lambda case: case.counts.rows) for arm in ARMS]


def _cases(features: Features, collator: StepCollator, step_cost: StepCost | None) -> list[Case]:
    """The first and the last micro-batch of a step."""
    step = collator(features)
    if collator.dedup:
        plans = plans_of(features, step)
        counts = [radix_counts(*each, step_cost) for each in zip(step.micro_batches, plans, strict=True)]
    else:
        counts = [ordinary_counts(batch) for batch in step.micro_batches]
    arm: Arm = "radix" if collator.dedup else "ordinary"
    found = [Case(arm, *each, step.num_labels) for each in zip(counts, step.micro_batches, strict=True)]
    return [found[0], found[-1]] if len(found) > 1 else found
