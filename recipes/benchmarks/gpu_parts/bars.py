"""What is asked of a GPU, whether the figures of a run meet it (pass, fail, or left out), and the page that says so.

Speeds are those of an H100: what was predicted from counts of operations and bytes, and what is asked. The predictions
are of 26 November 2026, before anything had run on a GPU. Nothing is tuned here: a bar that fails says so beside its
figure and the case that was worst.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

__all__ = ["BARS", "DUALKV", "OF_HOPPER", "Bar", "Result", "Verdict", "limit", "page", "shown", "verdicts"]

Result = tuple[str, str, dict[str, Any]]  # part, case, measures
LEFT_OUT = "left out"


class Bar(NamedTuple):
    """Every case of a part must meet the limit.

    cases: a regular expression; only those that it finds count.
    at_least: whether the measure must be at least the limit, or at most.
    among_arms: the best arm of a shape counts. A case ends with its arm, after the last comma.
    predicted: the figure that arithmetic expects, as it is shown.
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
    predicted: str = ""


class Verdict(NamedTuple):
    """figure: the worst one, None if there is none. case: its own."""

    bar: Bar
    verdict: str
    figure: float | None = None
    case: str = ""


# DualKV's Table 1 on an H100: answers of 2,048 tokens, tokens of their prompt, its milliseconds, and what is asked of
# the flash kernel inside torch and of a kernel that was made for Hopper.
DUALKV = (
    (28, 4096, 133, 90, 55),
    (28, 16_384, 468, 310, 190),
    (16, 32_768, 679, 430, 260),
    (28, 32_768, 1018, 650, 390),
    (16, 65_536, 1732, 1100, 660),
)
OF_HOPPER = "flash_attn_3|flash_attn_4|cudnn"


def _share_of_ideal(name: str, part: str, limit: float, predicted: str) -> Bar:
    what = {"step": "share of the ideal of a step", "trees": "an agent's tree", "groups": "a group of RL"}[part]
    cases, asked = f"^{name}, step", f"{name}: {what}"
    return Bar(asked, part, "efficiency", limit, cases=cases, among_arms=True, predicted=predicted)


def _of_dualkv(kernels: str, cases: str, goal: int) -> list[Bar]:
    """A bar for each row of its table. goal: the column of `DUALKV`."""
    return [
        Bar(
            f"DualKV's table, N {row[0]}, P {row[1] // 1024}k, {kernels} (DualKV {row[2]} ms)",
            *("table", "milliseconds", row[goal], False),
            cases=f"^N {row[0]}, P {row[1] // 1024}k, .*({cases})",
            among_arms=True,
        )
        for row in DUALKV
    ]


BARS = (
    Bar("gradients in bfloat16: every tensor within its bar", "equivalence", "passed", 1, is_speed=False),
    Bar("gradients in bfloat16: median error over ordinary", "equivalence", "median_ratio", 2, False, is_speed=False),
    _share_of_ideal("Qwen3-0.6B", "step", 0.90, "0.87, 4.7x"),
    _share_of_ideal("Qwen3-4B", "step", 0.90, "0.91, 5.8x"),
    _share_of_ideal("Qwen3-8B", "step", 0.92, "0.92, 6.1x"),
    Bar(
        "Qwen3-0.6B: speed-up of the forward pass (RadixMLP 2.74)",
        *("step", "measured", 4.9, True, "^Qwen3-0.6B, forward", True),
        predicted="4.5",
    ),
    Bar(
        "Qwen3-8B: speed-up of the forward pass (RadixMLP 4.98)",
        *("step", "measured", 6.2, True, "^Qwen3-8B, forward", True),
        predicted="5.8",
    ),
    _share_of_ideal("Qwen3-0.6B", "trees", 0.85, "0.81, 5.7x"),
    _share_of_ideal("Qwen3-0.6B", "groups", 0.92, "0.89, 1.36x"),
    _share_of_ideal("Qwen3-8B", "groups", 0.92, "0.94, 1.60x"),
    *_of_dualkv("flash in torch", "cascade torch", 3),
    *_of_dualkv("a kernel for Hopper", OF_HOPPER, 4),
    Bar(
        "trainers: losses and norms, difference over that of two orders",
        "trainers",
        "over_noise",
        2,
        False,
        is_speed=False,
    ),
)
NOTES = {
    "equivalence": "Relative L2 errors of gradients against float64: the median ratio to those of the ordinary step, "
    "and the worst of both.",
    "step": "One prompt for all sequences. *measured* is against the fastest rival: `padded` is `sdpa`, `packed` is "
    "varlen attention without padding; all have the head on labelled tokens only. Peaks are beyond the weights: "
    "gradients and activations. They are of one micro-batch, which differs in size: compare *peak megabytes a token*, "
    "of those that it computes, padding included.",
    "table": "Table 1 of DualKV: one layer, forward and backward, float16, 32 heads, 8 key heads, 128 wide, answers of "
    "2,048 tokens. Its milliseconds are those that its authors published for one H100.",
    "trainers": "Steps of the trainer itself, optimizer included. *over noise* is the largest difference of a loss, or "
    "of a gradient's norm, from those of the first arm, over that of the same arm with the rows of each batch in "
    "another order; where that noise is large, as in DPO, it shows little.",
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
    lines += ["## What was asked", "", *asked(verdicts(results, header.get("shapes") == "tiny"))]
    for part in dict.fromkeys(result[0] for result in results):
        rows = [(case, measures) for row_part, case, measures in results if row_part == part]
        lines += ["", f"## {part}", "", *([NOTES[part], ""] if part in NOTES else []), *_table(rows)]
    if left_out:
        lines += ["", "## Left out", "", *(f"- {line}" for line in left_out)]
    return "\n".join([*lines, ""])


def asked(judged: Sequence[Verdict]) -> list[str]:
    """The table of the bars."""
    lines = ["| bar | predicted | asked | found | verdict | worst case |", "|---" * 6 + "|"]
    for bar, verdict, figure, case in judged:
        found = f"{shown(figure)} | **{verdict}** | {case}"
        lines.append(f"| {bar.asked} | {bar.predicted or '–'} | {limit(bar)} | {found} |")
    return lines


def limit(bar: Bar) -> str:
    return f"{'at least' if bar.at_least else 'at most'} {bar.limit:g}"


def _table(rows: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
    names = list(dict.fromkeys(name for _, measures in rows for name in measures))
    lines = ["| case | " + " | ".join(name.replace("_", " ") for name in names) + " |", "|---" * (len(names) + 1) + "|"]
    cells = ([case, *(shown(measures.get(name)) for name in names)] for case, measures in rows)
    return lines + ["| " + " | ".join(row) + " |" for row in cells]


def shown(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
