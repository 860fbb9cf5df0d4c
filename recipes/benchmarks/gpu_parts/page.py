"""The Markdown page of a run of the GPU's benchmark: the bars with their figures first, then a table for each part."""

from collections.abc import Sequence
from typing import Any

from gpu_parts.bars import BARS, verdicts

__all__ = ["COLUMNS", "page"]

COLUMNS = {
    "equivalence": ("passed", "median_ratio", "worst_error", "ordinary_worst_error"),
    "sync": ("waits", "where", "finite"),
    "step": (
        *("r", "ideal", "measured", "efficiency", "over_padded", "over_packed"),
        *("radix_seconds", "padded_seconds", "packed_seconds"),
        *("radix_peak_gigabytes", "padded_peak_gigabytes", "packed_peak_gigabytes"),
    ),
    "rows": ("microseconds", "gigabytes_per_second", "share_of_copy", "difference_to_torch"),
    "unshared": ("slowdown", "over_padded", "over_packed", "radix_seconds", "padded_seconds", "packed_seconds"),
    "attention": (
        *("forward_milliseconds", "step_milliseconds", "teraflops_per_second", "error_ratio", "worst_error"),
        *("mask_milliseconds", "step_with_mask_milliseconds"),
    ),
}
COLUMNS["unequal"] = COLUMNS["step"]
NOTES = {
    "equivalence": "Relative L2 errors of gradients against float64: the median ratio to those of the ordinary step, "
    "and the worst of both.",
    "sync": "A step from the collator to the optimizer under `torch.cuda.set_sync_debug_mode('error')`.",
    "step": "One prompt for all sequences. *measured* is against the faster of two ordinary arms: `padded` is `sdpa`, "
    "`packed` is varlen attention without padding; both have the head on labelled tokens only. Peaks are beyond the "
    "weights: gradients and activations.",
    "rows": "Beside a copy of as many bytes from device to device.",
    "unshared": "Sequences that share nothing: the time over that of the faster ordinary arm.",
    "unequal": "As `step`, with own parts of unequal lengths. `padded` is sorted by length and cut into batches of 8.",
    "attention": "One layer, forward, and forward and backward. Errors over those of flash-attention in the same "
    "dtype, the worst of output, dq, dk and dv.",
}
EMPTY = "–"


def page(header: dict[str, Any], results: Sequence[tuple[str, str, dict[str, Any]]], left_out: Sequence[str]) -> str:
    """The page. results: part, case and measures."""
    lines = [f"# radixtrain on {header.get('machine', 'a device')}, {header.get('date', '')}", ""]
    lines += [", ".join(f"{name} {value}" for name, value in header.items() if name not in ("date", "machine")), ""]
    lines += ["## What was asked", "", *_bars(results, header.get("shapes") == "tiny"), ""]
    for part in dict.fromkeys(result[0] for result in results):
        rows = [(case, measures) for row_part, case, measures in results if row_part == part]
        lines += [f"## {part}", "", *([NOTES[part], ""] if part in NOTES else []), *_table(part, rows), ""]
    if left_out:
        lines += ["## Left out", "", *(f"- {line}" for line in left_out), ""]
    return "\n".join(lines)


def _bars(results: Sequence[tuple[str, str, dict[str, Any]]], tiny: bool) -> list[str]:
    lines = ["| bar | asked | found | verdict | worst case |", "|---|---|---|---|---|"]
    for bar, verdict, found, case in verdicts(results, BARS, tiny):
        limit = f"{'at least' if bar.at_least else 'at most'} {bar.limit:g}"
        lines.append(f"| {bar.asked} | {limit} | {_shown(found)} | **{verdict}** | {case} |")
    return lines


def _table(part: str, rows: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
    """The columns of the part that some row has."""
    names = [name for name in COLUMNS.get(part, ()) if any(name in measures for _, measures in rows)]
    titles = ["case", *(name.replace("_", " ") for name in names)]
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    return lines + [
        "| " + " | ".join([case, *(_shown(measures.get(name)) for name in names)]) + " |" for case, measures in rows
    ]


def _shown(value: Any) -> str:
    if value is None:
        return EMPTY
    return f"{value:.3g}" if isinstance(value, float) else str(value)
