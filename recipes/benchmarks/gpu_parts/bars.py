"""What is asked of a GPU, and whether the figures of a run meet it: pass, fail, or left out.

The forward speed-ups are those that the RadixMLP paper reached on an H100, at a prefix of 2,048 and a suffix of 256
tokens. Nothing is tuned here: a bar that fails says so beside its figure and the case that was worst.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

__all__ = ["BARS", "Bar", "Verdict", "verdicts"]

LEFT_OUT = "left out"


class Bar(NamedTuple):
    """Every case of a part must meet the limit.

    asked: in words.
    cases: a regular expression; only those that it finds count.
    at_least: whether the measure must be at least the limit, or at most.
    among_arms: the best arm of a shape counts. A case ends with its arm, after the last comma.
    is_speed: whether it says nothing about shapes that are not those of a GPU.
    """

    asked: str
    part: str
    measure: str
    limit: float
    at_least: bool = True
    cases: str = ""
    among_arms: bool = False
    is_speed: bool = True


class Verdict(NamedTuple):
    """found: the worst figure, None if there is none. case: its own."""

    bar: Bar
    verdict: str
    found: float | None = None
    case: str = ""


BARS = (
    Bar("gradients in bfloat16: every tensor within its bar", "equivalence", "passed", 1, is_speed=False),
    Bar("gradients in bfloat16: median error over ordinary", "equivalence", "median_ratio", 2, False, is_speed=False),
    Bar("a step waits for the device", "sync", "waits", 0, False, is_speed=False),
    *(
        Bar(f"{name}: share of the ideal of a step", "step", "efficiency", 0.85, cases=f"^{name}, step")
        for name in ("Qwen3-0.6B", "Qwen3-4B", "Qwen3-8B")
    ),
    Bar("Qwen3-0.6B: speed-up of the forward pass", "step", "measured", 2.74, cases="^Qwen3-0.6B, forward"),
    Bar("Qwen3-8B: speed-up of the forward pass", "step", "measured", 4.98, cases="^Qwen3-8B, forward"),
    Bar("gather: share of a copy's bandwidth", "rows", "share_of_copy", 0.8, cases="^gather", among_arms=True),
    Bar(
        "segment sum in float32: share of a copy's bandwidth",
        "rows",
        "share_of_copy",
        0.8,
        cases="^segment sum.*in float32$",
        among_arms=True,
    ),
    Bar("nothing shared: time over that of the fastest rival", "unshared", "slowdown", 1.03, False),
    Bar("attention: error over that of an ordinary kernel", "attention", "error_ratio", 2, False, is_speed=False),
)


def verdicts(
    results: Iterable[tuple[str, str, dict[str, Any]]], bars: Sequence[Bar] = BARS, tiny: bool = False
) -> list[Verdict]:
    """One for each bar. results: part, case and measures. tiny: of shapes whose speed says nothing."""
    known = list(results)
    return [Verdict(bar, LEFT_OUT) if tiny and bar.is_speed else _verdict(bar, known) for bar in bars]


def _verdict(bar: Bar, results: list[tuple[str, str, dict[str, Any]]]) -> Verdict:
    figures = [
        (float(measures[bar.measure]), case)
        for part, case, measures in results
        if part == bar.part and bar.measure in measures and re.search(bar.cases, case)
    ]
    if not figures:
        return Verdict(bar, LEFT_OUT)
    groups: dict[str, list[tuple[float, str]]] = {}
    for figure in figures:
        groups.setdefault(figure[1].rpartition(", ")[0] if bar.among_arms else figure[1], []).append(figure)
    found, case = max((min(group, key=_shortfall(bar)) for group in groups.values()), key=_shortfall(bar))
    meets = found >= bar.limit if bar.at_least else found <= bar.limit  # written so that NaN fails
    return Verdict(bar, "pass" if meets else "fail", found, case)


def _shortfall(bar: Bar) -> Any:
    """How bad a figure is, for sorting. A NaN is worse than any number."""

    def shortfall(figure: tuple[float, str]) -> float:
        value = -figure[0] if bar.at_least else figure[0]
        return value if value == value else float("inf")

    return shortfall
