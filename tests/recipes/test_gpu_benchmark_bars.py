"""What is asked of a GPU, judged from made-up measures: pass, fail, left out, and the case that was worst."""

import math
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "recipes" / "benchmarks"
from gpu_parts import bars as gpu_bars  # noqa: E402
from gpu_parts import page as gpu_page  # noqa: E402

Results = list[tuple[str, str, dict[str, Any]]]
GOOD: Results = [
    ("equivalence", "cascade, torch", {"passed": True, "median_ratio": 1.02}),
    ("sync", "cascade, own loss", {"waits": 0}),
    *(("step", f"{name}, step, cascade", {"efficiency": 0.9}) for name in ("Qwen3-0.6B", "Qwen3-4B", "Qwen3-8B")),
    ("step", "Qwen3-0.6B, forward, cascade", {"measured": 4.0}),
    ("step", "Qwen3-8B, forward, cascade", {"measured": 5.5}),
    ("rows", "gather [1, 2] x 3 float32, torch index_select", {"share_of_copy": 0.95}),
    ("rows", "segment sum [1, 2] x 3 float32, torch index_add_", {"share_of_copy": 0.3}),
    ("rows", "segment sum [1, 2] x 3 float32, sorted index_put_ in float32", {"share_of_copy": 0.5}),
    ("rows", "segment sum [1, 2] x 3 float32, Triton in float32", {"share_of_copy": 0.85}),
    ("unshared", "Qwen3-0.6B, step, cascade", {"slowdown": 1.01}),
    ("attention", "one prompt, cascade torch", {"error_ratio": 1.1}),
]


def verdicts_of(results: Results, **options: Any) -> dict[str, gpu_bars.Verdict]:
    return {verdict.bar.asked: verdict for verdict in gpu_bars.verdicts(results, **options)}


def test_all_good() -> None:
    found = verdicts_of(GOOD)
    assert {verdict.verdict for verdict in found.values()} == {"pass"} and len(found) == 12


def test_nothing_was_measured() -> None:
    found = verdicts_of([])
    assert {(verdict.verdict, verdict.found, verdict.case) for verdict in found.values()} == {("left out", None, "")}


@pytest.mark.parametrize(
    ("place", "measures", "asked"),
    [
        (0, {"passed": False, "median_ratio": 1.0}, "gradients in bfloat16: every tensor within its bar"),
        (0, {"passed": True, "median_ratio": 2.01}, "gradients in bfloat16: median error over"),
        (1, {"waits": 1}, "a step waits for the device"),
        (3, {"efficiency": 0.849}, "Qwen3-4B: share of the ideal"),
        (5, {"measured": 2.73}, "Qwen3-0.6B: speed-up of the forward pass"),
        (6, {"measured": 4.97}, "Qwen3-8B: speed-up of the forward pass"),
        (7, {"share_of_copy": 0.79}, "gather"),
        (10, {"share_of_copy": 0.79}, "segment sum in float32"),
        (11, {"slowdown": 1.031}, "nothing shared"),
        (12, {"error_ratio": 2.1}, "attention"),
        (12, {"error_ratio": math.nan}, "attention"),
    ],
)
def test_one_figure_below_its_bar(place: int, measures: dict[str, Any], asked: str) -> None:
    results = [*GOOD]
    results[place] = (*GOOD[place][:2], measures)
    failed = [verdict for verdict in gpu_bars.verdicts(results) if verdict.verdict == "fail"]
    assert [verdict.bar.asked.startswith(asked) for verdict in failed] == [True]
    assert failed[0].case == GOOD[place][1]


def test_a_figure_on_the_limit_passes() -> None:
    assert verdicts_of([("step", "Qwen3-8B, forward, cascade", {"measured": 4.98})])[
        "Qwen3-8B: speed-up of the forward pass"
    ][1:3] == ("pass", 4.98)


def test_the_worst_case_counts_and_the_best_arm_of_a_shape() -> None:
    bar = gpu_bars.Bar("rows", "rows", "share_of_copy", 0.8, among_arms=True)
    results: Results = [
        ("rows", "small, slow", {"share_of_copy": 0.1}),
        ("rows", "small, fast", {"share_of_copy": 0.9}),
        ("rows", "large, slow", {"share_of_copy": 0.2}),
        ("rows", "large, fast", {"share_of_copy": 0.7}),
    ]
    assert gpu_bars.verdicts(results, [bar])[0][1:] == ("fail", 0.7, "large, fast")
    assert gpu_bars.verdicts(results, [bar._replace(among_arms=False)])[0][1:] == ("fail", 0.1, "small, slow")


@pytest.mark.parametrize("figures", [[1.1, math.nan], [math.nan, 1.1]])
def test_a_nan_is_worse_than_any_number(figures: list[float]) -> None:
    bar = gpu_bars.Bar("attention", "attention", "error_ratio", 2, at_least=False)
    results: Results = [("attention", f"case {figure}", {"error_ratio": figure}) for figure in figures]
    assert gpu_bars.verdicts(results, [bar])[0][1::2] == ("fail", "case nan")


def test_tiny_shapes_say_nothing_about_speed() -> None:
    found = verdicts_of(GOOD, tiny=True)
    judged = [asked for asked, verdict in found.items() if verdict.verdict == "pass"]
    assert len(judged) == 4 and not any("share" in asked or "speed" in asked or "time" in asked for asked in judged)


def test_the_page_says_every_bar_beside_its_figure() -> None:
    header = {"machine": "a GPU", "date": "2026-11-23", "commit": "abc"}
    page = gpu_page.page(header, GOOD, ["flash_attn_3: not installed"])
    assert page.startswith("# radixtrain on a GPU, 2026-11-23\n\ncommit abc\n")
    assert (
        "| Qwen3-8B: share of the ideal of a step | at least 0.85 | 0.9 | **pass** | Qwen3-8B, step, cascade |" in page
    )
    assert "- flash_attn_3: not installed" in page
    assert all(f"\n## {part}\n" in page for part, _, _ in GOOD)
