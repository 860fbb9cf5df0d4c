"""The GPU's benchmark on a CPU, with tiny shapes: the whole command, its bars, its rivals, and what fails or is killed.

Times and speeds are not looked at: they say nothing here.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gpu
import pytest
import torch
from gpu_parts import arms as gpu_arms
from gpu_parts import bars as gpu_bars
from gpu_parts import steps as gpu_steps
from gpu_parts.run import Run
from tiers import FULL

from radixtrain.bench.cells import GivenBatch, build_model
from radixtrain.bench.work import Arm, work_of
from radixtrain.testing import relative_error
from radixtrain.verification.oracle import float64_arithmetic

pytestmark = FULL
ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "recipes" / "benchmarks"
TINY_RUN = ["--device", "cpu", "--tiny"]
# Neither the interpreter of Triton nor threads that wait for each other beside other load: both take minutes.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
ENVIRONMENT["OMP_NUM_THREADS"] = "1"
CPU = torch.device("cpu")
TINY, CASCADE = gpu_steps.TINY_MODELS[0], ("cascade",)


def run_of(seconds: float = 1000.0) -> Run:
    return Run(CPU, seconds, {"date": "today"})


def test_the_one_call(tmp_path: Path) -> None:
    """With only torch, transformers and what they need: every part measures, and the bars of exactness are judged."""
    path = tmp_path / "gpu.json"
    missing = ("jsonargparse", "datasets", "lightning", "rich", "matplotlib", "wandb")
    missing += ("flash_attn", "peft", "trl", "hypothesis", "triton")
    code = f"""
import runpy, sys
sys.modules.update(dict.fromkeys({missing!r}))
sys.path[0] = {str(FOLDER)!r}
sys.argv = ["gpu.py", *{TINY_RUN!r}, "--json", {str(path)!r}, "--attention", "cascade", "path", "--seconds", "800"]
runpy.run_path({str(FOLDER / "gpu.py")!r}, run_name="__main__")
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-3000:]
    found, page = json.loads(path.read_text("utf-8")), path.with_suffix(".md").read_text("utf-8")
    assert done.stdout.endswith(f"{page}\n"), "the page is printed last"
    assert all(f"\n## {part}\n" in page for part in gpu.PARTS)
    assert "| tiny, step, cascade |" in page and "| tiny, forward, path |" in page
    failed = [line for line in found["left_out"] if line.split(":")[0] in gpu.PARTS or "Error" in line]
    assert not failed, "no part failed"
    assert {"date", "commit", "machine", "torch", "transformers", "triton", "flash-attn"} <= {*found["header"]}
    assert found["header"]["packed arm"] == "torch_varlen"
    assert str(ROOT) not in path.read_text("utf-8") + page, "no paths of this machine"

    measured = {(part, measure) for part, _, measures in found["results"] for measure in measures}
    steps = ("ideal", "measured", "efficiency", "radix_peak_gigabytes", "over_padded", "over_packed")
    expected = {("rows", "share_of_copy"), ("unshared", "slowdown"), ("sync", "finite"), ("rates", "slowdown")}
    expected |= {(part, measure) for part in ("step", "unequal") for measure in steps}
    expected |= {("equivalence", measure) for measure in ("passed", "median_ratio")}
    expected |= {("attention", measure) for measure in ("forward_milliseconds", "error_ratio")}
    assert expected <= measured
    bars = [line.split("|")[1:5] for line in page.splitlines() if line.count("|") == 6 and "**" in line]
    verdicts = {asked.strip(): verdict.strip(" *") for asked, _, _, verdict in bars}
    assert verdicts["gradients in bfloat16: every tensor within its bar"] == "pass"
    assert verdicts["attention: error over that of an ordinary kernel"] == "pass"
    assert verdicts["nothing shared: time over that of the fastest rival"] == "left out"


def test_without_a_device(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpu.main([]) == 1
    assert capsys.readouterr().err.startswith("error: torch sees no CUDA device; --device cpu --tiny")


def test_a_part_that_fails_leaves_the_others_and_a_wrong_gradient_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no kernel image is available\nand a long trace")

    monkeypatch.setattr(gpu, "sync", broken)
    monkeypatch.setattr(gpu, "equivalence", lambda run, *_: run.found("equivalence", "cascade", passed=False))
    file = tmp_path / "gpu.json"
    assert gpu.main([*TINY_RUN, "--parts", "sync", "equivalence", "rows", "--json", str(file)]) == 1
    found = json.loads(file.read_text("utf-8"))
    assert {part for part, *_ in found["results"]} == {"equivalence", "rows"}
    assert found["left_out"][0] == "sync: RuntimeError: no kernel image is available"


def test_a_device_that_is_gone_leaves_the_others_to_a_fresh_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Replaced(BaseException):
        pass

    def execv(path: str, command: list[str]) -> None:
        raise Replaced(command)

    monkeypatch.setattr(gpu, "device_works", lambda device: False)
    monkeypatch.setattr(os, "execv", execv)
    file = tmp_path / "gpu.json"
    with pytest.raises(Replaced) as replaced:
        gpu.main([*TINY_RUN, "--parts", "rows", "equivalence", "attention", "--json", str(file), "--seconds", "3000"])
    command = replaced.value.args[0]
    options = gpu.parse(command[2:])
    assert command[1].endswith("gpu.py") and options.parts == ["rows", "attention"] and options.go_on
    assert options.tiny and options.json == file and 0 < options.seconds < 3000
    found = json.loads(file.read_text("utf-8"))["results"]  # written after every result
    monkeypatch.undo()
    assert gpu.main([*TINY_RUN, "--parts", "rows", "--json", str(file), "--go_on"]) == 0
    results = json.loads(file.read_text("utf-8"))["results"]
    assert results[: len(found)] == found and {part for part, *_ in results} == {"equivalence", "rows"}


def test_without_time_everything_is_left_out() -> None:
    run = run_of(seconds=0.0)
    for part in gpu.calls(run, gpu.parse(TINY_RUN)).values():
        part()
    assert not run.results
    assert len([line for line in run.left_out if "0 of 0 seconds were left" in line]) >= len(gpu.PARTS)
    assert sum(gpu.PARTS.values()) < gpu.parse([]).seconds <= 540, "the estimates fit, and one call of ten minutes"


GOOD: list[tuple[str, str, dict[str, Any]]] = [
    ("equivalence", "cascade, torch", {"passed": True, "median_ratio": 1.02}),
    ("sync", "cascade, own loss", {"waits": 0}),
    *(("step", f"{name}, step, cascade", {"efficiency": 0.9}) for name in ("Qwen3-0.6B", "Qwen3-4B", "Qwen3-8B")),
    ("step", "Qwen3-0.6B, forward, cascade", {"measured": 4.0}),
    ("step", "Qwen3-8B, forward, cascade", {"measured": 4.98}),  # on the limit
    ("rows", "[1, 2] of 3 float32, torch", {"share_of_copy": 0.5}),
    ("rows", "[1, 2] of 3 float32, Triton", {"share_of_copy": 0.85}),
    ("rates", "equal", {"slowdown": 1.0}),
    ("unshared", "Qwen3-0.6B, step, cascade", {"slowdown": 1.01}),
    ("attention", "one prompt, cascade torch", {"error_ratio": 1.1}),
]


def test_bars_are_judged() -> None:
    """All good, nothing measured, and shapes whose speed says nothing."""
    found = gpu_bars.verdicts(GOOD)
    assert {verdict.verdict for verdict in found} == {"pass"} and len(found) == 12
    nothing = gpu_bars.verdicts([])
    assert {(verdict.verdict, verdict.figure, verdict.case) for verdict in nothing} == {("left out", None, "")}
    judged = [verdict.bar.asked for verdict in gpu_bars.verdicts(GOOD, tiny=True) if verdict.verdict == "pass"]
    assert len(judged) == 4 and not any("share" in asked or "speed" in asked or "time" in asked for asked in judged)
    page = gpu_bars.page({"date": "2026-11-23", "commit": "abc"}, GOOD, ["flash_attn_3: not installed"])
    row = "| Qwen3-8B: share of the ideal of a step | at least 0.85 | 0.9 | **pass** | Qwen3-8B, step, cascade |"
    assert row in page and "- flash_attn_3: not installed" in page


@pytest.mark.parametrize(
    ("place", "measures", "asked"),
    [
        (0, {"passed": False, "median_ratio": 1.0}, "gradients in bfloat16: every tensor within its bar"),
        (0, {"passed": True, "median_ratio": 2.01}, "gradients in bfloat16: median error over"),
        (1, {"waits": 1}, "a step waits for the device"),
        (3, {"efficiency": 0.849}, "Qwen3-4B: share of the ideal"),
        (5, {"measured": 2.73}, "Qwen3-0.6B: speed-up of the forward pass"),
        (6, {"measured": 4.97}, "Qwen3-8B: speed-up of the forward pass"),
        (8, {"share_of_copy": 0.79}, "segment sum in float32"),  # the best arm of the shape counts
        (9, {"slowdown": 1.031}, "fixed rates"),
        (10, {"slowdown": 1.031}, "nothing shared"),
        (11, {"error_ratio": 2.1}, "attention"),
        (11, {"error_ratio": math.nan}, "attention"),
    ],
)
def test_one_figure_below_its_bar(place: int, measures: dict[str, Any], asked: str) -> None:
    results = [*GOOD, ("attention", "another", {"error_ratio": 1.2})]  # a NaN is worse than any number
    results[place] = (*GOOD[place][:2], measures)
    failed = [verdict for verdict in gpu_bars.verdicts(results) if verdict.verdict == "fail"]
    assert [verdict.bar.asked.startswith(asked) for verdict in failed] == [True]
    assert failed[0].case == GOOD[place][1]


def test_rivals_compute_the_same_gradient() -> None:
    """On sequences of unequal lengths, in float64, also in several micro-batches: or they would be no rivals."""
    arms = Arm(plain_head=True), packed_arm(), Arm(attention="cascade", plain_head=True)
    with float64_arithmetic():
        model = build_model(TINY, CPU, torch.float64, "sdpa")
        for batch_size in (None, 2):
            features = gpu_steps.features_of_unequal_lengths(TINY, 12, 64, 6)
            work = work_of(GivenBatch(TINY, "six", 6), features, batch_size)
            gradients = []
            for arm, of_arm in zip(arms, (work, gpu_arms.packed_work(work), work), strict=True):
                arm.prepare(gpu_arms.as_loaded(model))
                model.zero_grad(set_to_none=True)
                arm.run_step(model, of_arm)
                gradients.append([parameter.grad.clone() for parameter in model.parameters()])
            for found in gradients[1:]:
                assert max(relative_error(*pair) for pair in zip(found, gradients[0], strict=True)) <= 1e-12


def packed_arm() -> gpu_arms.PackedArm:
    return gpu_arms.PackedArm(plain_head=True, implementation=gpu_arms.packed_implementation(CPU))
