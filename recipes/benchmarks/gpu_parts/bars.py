"""What is asked of a GPU, whether the figures of a run meet it (pass, fail, or left out), and the page that says so.

The forward speed-ups are those that the RadixMLP paper reached on an H100, at a prefix of 2,048 and a suffix of 256
tokens. Nothing is tuned here: a bar that fails says so beside its figure and the case that was worst.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

__all__ = ["BARS", "Bar", "Verdict", "page", "shown", "verdicts"]

Result = tuple[str, str, dict[str, Any]]  # part, case, measures
LEFT_OUT = "left out"


class Bar(NamedTuple):
    """Every case of a part must meet the limit.

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
    """figure: the worst one, None if there is none. case: its own."""

    bar: Bar
    verdict: str
    figure: float | None = None
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
    Bar("segment sum in float32: share of a copy's bandwidth", "rows", "share_of_copy", 0.8, among_arms=True),
    Bar("nothing shared: time over that of the fastest rival", "unshared", "slowdown", 1.03, False),
    Bar("fixed rates: time over what a calibration chooses", "rates", "slowdown", 1.03, False),
    Bar("attention: error over that of an ordinary kernel", "attention", "error_ratio", 2, False, is_speed=False),
)
NOTES = {
    "equivalence": "Relative L2 errors of gradients against float64: the median ratio to those of the ordinary step, "
    "and the worst of both.",
    "sync": "A step from the collator to the optimizer under `torch.cuda.set_sync_debug_mode('error')`.",
    "step": "One prompt for all sequences. *measured* is against the faster of two ordinary arms: `padded` is `sdpa`, "
    "`packed` is varlen attention without padding; both have the head on labelled tokens only. Peaks are beyond the "
    "weights: gradients and activations.",
    "rows": "Beside a copy of as many bytes from device to device.",
    "rates": "A step with the choices of the fixed rates beside one with those that a calibration finds.",
    "attention": "One layer, forward, and forward and backward. Errors over those of flash-attention in the same "
    "dtype, the worst of output, dq, dk and dv.",
}


def verdicts(results: Iterable[Result], tiny: bool = False) -> list[Verdict]:
    """One for each bar. tiny: of shapes whose speed says nothing."""
    known = list(results)
    return [Verdict(bar, LEFT_OUT) if tiny and bar.is_speed else _verdict(bar, known) for bar in BARS]


def _verdict(bar: Bar, results: list[Result]) -> Verdict:
    groups: dict[str, list[tuple[float, str]]] = {}
    for part, case, measures in results:
        if part == bar.part and bar.measure in measures and re.search(bar.cases, case):
            group = case.rpartition(", ")[0] if bar.among_arms else case
            groups.setdefault(group, []).append((float(measures[bar.measure]), case))
    if not groups:
        return Verdict(bar, LEFT_OUT)
    figure, case = max((min(group, key=_shortfall(bar)) for group in groups.values()), key=_shortfall(bar))
    meets = figure >= bar.limit if bar.at_least else figure <= bar.limit  # written so that NaN fails
    return Verdict(bar, "pass" if meets else "fail", figure, case)


def _shortfall(bar: Bar) -> Callable[[tuple[float, str]], float]:
    """How bad a figure is, for sorting. A NaN is worse than any number."""

    def shortfall(figure: tuple[float, str]) -> float:
        value = -figure[0] if bar.at_least else figure[0]
        return value if value == value else float("inf")

    return shortfall


def page(header: dict[str, Any], results: Sequence[Result], left_out: Sequence[str]) -> str:
    """The bars with their figures first, then a table for each part."""
    lines = [f"# radixtrain on {header.get('machine', 'a device')}, {header.get('date', '')}", ""]
    lines += [", ".join(f"{name} {value}" for name, value in header.items() if name not in ("date", "machine")), ""]
    lines += ["## What was asked", "", "| bar | asked | found | verdict | worst case |", "|---|---|---|---|---|"]
    for bar, verdict, figure, case in verdicts(results, header.get("shapes") == "tiny"):
        limit = f"{'at least' if bar.at_least else 'at most'} {bar.limit:g}"
        lines.append(f"| {bar.asked} | {limit} | {shown(figure)} | **{verdict}** | {case} |")
    for part in dict.fromkeys(result[0] for result in results):
        rows = [(case, measures) for row_part, case, measures in results if row_part == part]
        lines += ["", f"## {part}", "", *([NOTES[part], ""] if part in NOTES else []), *_table(rows)]
    if left_out:
        lines += ["", "## Left out", "", *(f"- {line}" for line in left_out)]
    return "\n".join([*lines, ""])


def _table(rows: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
    names = list(dict.fromkeys(name for _, measures in rows for name in measures))
    lines = ["| case | " + " | ".join(name.replace("_", " ") for name in names) + " |", "|---" * (len(names) + 1) + "|"]
    cells = ([case, *(shown(measures.get(name)) for name in names)] for case, measures in rows)
    return lines + ["| " + " | ".join(row) + " |" for row in cells]


def shown(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
