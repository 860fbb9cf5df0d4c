"""The GPU's benchmark on a CPU, with tiny shapes: the whole command, its bars, its rivals, and what fails or hangs.

Times and speeds are not looked at: they say nothing here.
"""

import json
import math
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gpu
import gpu_trainers
import pytest
import real_model
import torch
from gpu_parts import arms as gpu_arms
from gpu_parts import bars as gpu_bars
from gpu_parts import batches, parts
from gpu_parts.results import Results
from gpu_parts.run import Run
from gpu_parts.steps import prepare
from tiers import FULL

from radixtrain.bench.cells import build_model
from radixtrain.bench.work import work_of
from radixtrain.testing import relative_error
from radixtrain.verification.oracle import float64_arithmetic

pytestmark = FULL
ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "recipes" / "benchmarks"
TINY_RUN = ["--device", "cpu", "--tiny"]
CPU = torch.device("cpu")
SAME_CODE = {"groups", "short", "unequal", "checkpointing", "contexts"}  # rows of one table, as `step` and `trees`


def run_command(*command: str, path: str = "") -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([path, str(ROOT)])}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_one_call(tmp_path: Path) -> None:
    """With only torch, transformers and what they need: every part measures, and the bars of exactness are judged."""
    missing = ("pydantic", "datasets", "lightning", "rich", "matplotlib", "wandb")
    missing += ("flash_attn", "peft", "trl", "hypothesis", "triton", "liger_kernel")
    (tmp_path / "sitecustomize.py").write_text(f"import sys; sys.modules.update(dict.fromkeys({missing!r}))")
    names = [name for name in gpu.PARTS if name not in SAME_CODE | {"compile"}]  # compiling takes longer than all else
    path = tmp_path / "gpu.json"
    options = [*TINY_RUN, "--json", str(path), "--seconds", "800", "--parts", *names]
    printed = run_command(str(FOLDER / "gpu.py"), *options, "--arms", *gpu.ARMS, "path", path=str(tmp_path))
    found, page = json.loads(path.read_text("utf-8")), path.with_suffix(".md").read_text("utf-8")
    assert printed.endswith(f"{page}\n"), "the page is printed last"
    assert {part for part in names if f"\n## {part}\n" not in page} == {"liger"}
    assert "| tiny, step, 4 x (32 + 8), cascade |" in page
    failed = [line for line in found["left_out"] if line.split(":")[0] in gpu.PARTS or "Error" in line]
    assert not failed, "no part failed"
    assert found["header"]["packed arm"] == "torch_varlen" and "FLASH" in found["header"]["padded arm"]
    assert str(ROOT) not in path.read_text("utf-8") + page, "no paths of this machine"

    measured = {(part, measure) for part, _, measures in found["results"] for measure in measures}
    steps = ("fastest_rival", "efficiency", "peak_gigabytes", "over_padded", "over_packed")
    expected = {(part, measure) for part in ("step", "trees", "unshared") for measure in steps}
    expected |= {("rows", "share_of_copy"), ("sync", "finite"), ("repeat", "same_bits"), ("table", "milliseconds")}
    expected |= {("equivalence", "median_ratio"), ("attention", "error_ratio")}
    assert expected <= measured
    shared = [measures["r"] for part, _, measures in found["results"] if part == "trees" and "r" in measures]
    assert shared == [2.0, 2.0], "turns and answers of an agent, each once"
    bars = [line.split("|")[1:6] for line in page.splitlines() if line.count("|") == 7 and "**" in line]
    verdicts = {asked.strip(): verdict.strip(" *") for asked, _, _, _, verdict in bars}
    assert verdicts["gradients in bfloat16: every tensor within its bar"] == "pass"
    assert verdicts["nothing shared: time over that of the fastest rival"] == "left out"


def test_trainers(tmp_path: Path) -> None:
    """As the page starts it; TRL's where they are installed, and `real` without its folder."""
    path = tmp_path / "trainers.json"
    options = [*TINY_RUN, "--json", str(path), "--parts", "hf", "sft", "real", "dpo", "grpo", "--seconds", "800"]
    run_command(str(FOLDER / "gpu_trainers.py"), *options)
    found = json.loads(path.read_text("utf-8"))
    assert found["left_out"] == ["real: --real names no folder with weights and rows"]
    arms: dict[str, list[str]] = {}
    for _, case, measures in found["results"]:
        trainer, *_, arm = case.split(", ")
        arms.setdefault(trainer, []).append(arm)
        assert ("over_noise" in measures) == (arm not in ("padded", "as it is", "other order"))
    assert {name: " / ".join(each[:3]) for name, each in arms.items()} == {
        **dict.fromkeys(("Trainer", "SFTTrainer"), "padded / radixtrain / other order"),
        **dict.fromkeys(("DPOTrainer", "GRPOTrainer"), "as it is / share_prefixes / other order"),
    }


def measured_here(*options: str) -> int:
    """As in the process that the watching one starts."""
    return gpu.main([*options, "--until", str(time.time() + 1000)])


def test_without_a_device(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert measured_here() == 1
    assert capsys.readouterr().err.startswith("error: torch sees no CUDA device; --device cpu --tiny")


def test_a_part_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And a wrong gradient is remembered."""

    def broken(*_: Any) -> None:
        raise RuntimeError("no kernel image is available\nand a long trace")

    monkeypatch.setattr(parts, "sync", broken)
    monkeypatch.setattr(parts, "equivalence", lambda run, *_: run.found("equivalence", "cascade", passed=False))
    file = tmp_path / "gpu.json"
    assert measured_here(*TINY_RUN, "--parts", "sync", "equivalence", "rows", "--json", str(file)) == 0
    found = Results(path=file)
    found.read()
    assert {part for part, *_ in found.results} == {"equivalence", "rows"} and not found.passed
    assert found.left_out[0] == "sync: RuntimeError: no kernel image is available"


def test_a_part_that_hangs_and_a_device_that_is_gone_cost_only_themselves(tmp_path: Path) -> None:
    """The others run in a fresh process, and what was found before stays."""
    file, script = tmp_path / "gpu.json", tmp_path / "hanging.py"
    script.write_text(f"""
import sys, time
sys.path.insert(0, {str(FOLDER)!r})
import gpu
if "--until" in " ".join(sys.argv):
    from gpu_parts import measure, parts, run
    run.GRACE, gpu.PARTS["rows"] = 1, 0.001
    parts.rows = lambda *_: time.sleep(600)
    measure.device_works = lambda device: False
gpu.__file__ = __file__
sys.exit(gpu.main(sys.argv[1:]))
""")
    run_command(str(script), *TINY_RUN, "--parts", "rows", "chunks", "shared", "--json", str(file), "--seconds", "600")
    found = json.loads(file.read_text("utf-8"))
    assert [part for part, *_ in found["results"]] == ["chunks"] * 2 + ["shared"] * 2
    assert found["parts"] == dict.fromkeys(["rows", "chunks", "shared"], "ended")
    assert found["left_out"][0] == "rows: its process ended with code 1, by a hang or a crash"
    assert found["left_out"][1] == "this process: the device does not answer any more"


def test_without_time_everything_is_left_out() -> None:
    run = Run(device=CPU, seconds=0.0)
    for part in parts.calls(run, gpu.parse(TINY_RUN)).values():
        part()
    assert not run.results
    assert len([line for line in run.left_out if "0 of 0 seconds were left" in line]) >= len(gpu.PARTS)


def test_the_page() -> None:
    """Each command fits into a call of ten minutes and 2,000 characters, its options exist; the goals are the bars'."""
    page = (ROOT / "recipes" / "benchmarks" / "on-a-gpu.md").read_text("utf-8")
    blocks = [text for text in re.findall(r"^```\n(.*?)^```$", page, re.MULTILINE | re.DOTALL) if "$OUT" in text]
    commands = [text for text in blocks if "COMMIT" in text]
    assert (len(commands), len(blocks)) == (2, 3), "two that are whole, and lines to take one of"
    assert all(len(command) <= 2000 for command in commands)
    limits = [[int(limit) for limit in re.findall(r"\bt (\d+) ", text)] for text in blocks]
    assert all(sum(each) <= 540 for each in limits[:2]) and max(limits[2]) <= 540
    found = re.findall(r"\$G/(gpu\w*)\.py (.*?) \$F", "".join(blocks).replace("\\\n", ""))
    assert len(found) == 9
    for script, options in found:
        {"gpu": gpu, "gpu_trainers": gpu_trainers}[script].parse(shlex.split(options))
    [options] = re.findall(r"recipes/real_model\.py (.*?) \$D", page.replace("\\\n", ""), re.DOTALL)
    assert real_model.parse(shlex.split(options)).device == "cuda"
    rows = [f"| {bar.asked} | {bar.predicted or '–'} | {gpu_bars.limit(bar)} |" for bar in gpu_bars.BARS]
    assert [row for row in rows if row not in page] == []


GOOD: list[tuple[str, str, dict[str, Any]]] = [
    ("equivalence", "cascade, torch", {"passed": True, "median_ratio": 1.02}),
    ("sync", "cascade, own loss", {"waits": 0}),
    ("step", "Qwen3-0.6B, step, 2 x (3 + 4), path", {"efficiency": 0.7}),  # the best arm of a step counts
    *(("step", f"Qwen3-{size}, step, 2 x (3 + 4), cascade", {"efficiency": 0.92}) for size in ("0.6B", "4B", "8B")),
    ("step", "Qwen3-0.6B, forward, 2 x (3 + 4), cascade", {"measured": 5.0}),
    ("step", "Qwen3-8B, forward, 2 x (3 + 4), cascade", {"measured": 6.2}),  # on the limit
    ("rows", "[1, 2] of 3 float32", {"share_of_copy": 0.85}),
    ("attention", "one prompt, cascade torch", {"error_ratio": 1.1}),
    ("table", "N 16, P 64k, cascade torch", {"milliseconds": 1000}),
    ("table", "N 16, P 64k, cudnn_flex", {"milliseconds": 660}),
]


def test_bars_are_judged() -> None:
    """All good, nothing measured, and shapes whose speed says nothing."""
    found = gpu_bars.verdicts(GOOD)
    assert sorted(verdict.verdict for verdict in found if verdict.figure is not None) == ["pass"] * 12
    nothing = gpu_bars.verdicts([])
    assert {(verdict.verdict, verdict.figure, verdict.case) for verdict in nothing} == {("left out", None, "")}
    judged = [verdict.bar.asked for verdict in gpu_bars.verdicts(GOOD, tiny=True) if verdict.verdict == "pass"]
    assert len(judged) == 4 and not any("share" in asked or "speed" in asked or "time" in asked for asked in judged)
    page = gpu_bars.page({"date": "2026-11-23", "commit": "abc"}, GOOD, ["flash_attn_3: not installed"])
    case = "Qwen3-8B, step, 2 x (3 + 4), cascade"
    row = f"| Qwen3-8B: share of the ideal of a step | 0.92, 6.1x | at least 0.92 | 0.92 | **pass** | {case} |"
    assert row in page and "- flash_attn_3: not installed" in page


@pytest.mark.parametrize(
    ("place", "measures", "asked"),
    [
        (1, {"waits": 1}, "a step waits for the device"),
        (6, {"measured": 4.89}, "Qwen3-0.6B: speed-up of the forward pass"),
        (8, {"share_of_copy": 0.79}, "segment sum in float32"),
        (9, {"error_ratio": math.nan}, "attention"),
        (11, {"milliseconds": 661}, "DualKV's table, N 16, P 64k, a kernel for Hopper"),
    ],
)
def test_one_figure_below_its_bar(place: int, measures: dict[str, Any], asked: str) -> None:
    results = [*GOOD]
    results[place] = (*GOOD[place][:2], measures)
    results.append(("attention", "another", {"error_ratio": 1.2}))  # a NaN is worse than any number
    failed = [verdict for verdict in gpu_bars.verdicts(results) if verdict.verdict == "fail"]
    assert [verdict.bar.asked.startswith(asked) for verdict in failed] == [True]
    assert failed[0].case == GOOD[place][1]


def test_the_compiler_of_flash_attn_4_starts_without_it() -> None:
    """It imports the parts of the benchmark."""
    assert "--check" in run_command(str(ROOT / "recipes" / "flash4" / "compile.py"), "--help")


def test_rivals_compute_the_same_gradient() -> None:
    """On sequences of unequal lengths, in float64, also in several micro-batches: or they would be no rivals."""
    shape = batches.TINY_MODEL
    case = batches.Case(shape, batches.unequal(12, 64, 6))
    arms = [gpu_arms.arm_named(name, shape, CPU) for name in ("padded", "packed", "packed/eager", "cascade")]
    with float64_arithmetic():
        model = build_model(shape, CPU, torch.float64, "sdpa")
        for batch_size in (None, 2):
            work = work_of(case.cell, case.batch.features(shape), batch_size)
            gradients = []
            for arm in arms:
                prepare(model, arm)
                arm.run_step(model, gpu_arms.packed_work(work) if isinstance(arm, gpu_arms.PackedArm) else work)
                gradients.append([parameter.grad.clone() for parameter in model.parameters()])
            for found in gradients[1:]:
                assert max(relative_error(*pair) for pair in zip(found, gradients[0], strict=True)) <= 1e-12
