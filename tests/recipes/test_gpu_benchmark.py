"""The GPU's benchmark on a CPU, with tiny shapes: the whole command, its bars, its rivals, and what fails or hangs.

Times and speeds are not looked at: they say nothing here.
"""

import argparse
import json
import math
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu
import gpu_trainers
import pytest
import real_model
import torch
from gpu_parts import arms as gpu_arms
from gpu_parts import bars as gpu_bars
from gpu_parts import batches, parts, steps
from gpu_parts.measure import run_parts
from gpu_parts.results import Results
from gpu_parts.run import GRACE, Run
from gpu_parts.steps import prepare
from step import build_model, work_of
from tiers import FULL

from radixtrain.collators.misuse_guard import end_watch
from radixtrain.collators.steps import Step
from radixtrain.errors import UserError
from radixtrain.kernels.varlen import KERNELS
from radixtrain.testing import relative_error
from radixtrain.verification.oracle import float64_arithmetic

pytestmark = FULL
ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "recipes" / "benchmarks"
TINY_RUN = ["--device", "cpu", "--tiny"]
CPU, TINY = torch.device("cpu"), batches.TINY_MODEL


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
    names = [name for name in gpu.PARTS if name not in ("groups", "compile")]  # as `trees`; compiled below
    path = tmp_path / "gpu.json"
    options = [*TINY_RUN, "--json", str(path), "--seconds", "800", "--parts", *names]
    printed = run_command(str(FOLDER / "gpu.py"), *options, path=str(tmp_path))
    found, page = json.loads(path.read_text("utf-8")), path.with_suffix(".md").read_text("utf-8")
    assert printed.endswith(f"{page}\n"), "the page is printed last"
    assert {part for part in names if f"\n## {part}\n" not in page} == {"liger"}
    assert "| tiny, step, 4 x (32 + 8), cascade/torch |" in page
    failed = [line for line in found["left_out"] if line.split(":")[0] in gpu.PARTS or "Error" in line]
    assert not failed, "no part failed"
    assert str(ROOT) not in path.read_text("utf-8") + page, "no paths of this machine"

    measured = {(part, measure) for part, _, measures in found["results"] for measure in measures}
    steps = ("fastest_rival", "efficiency", "peak_megabytes_a_token", "over_padded/flash", "over_packed/torch")
    expected = {(part, measure) for part in ("step", "trees", "unshared") for measure in steps}
    expected |= {("sync", "finite"), ("repeat", "same_bits"), ("table", "milliseconds")}
    expected |= {("equivalence", "median_ratio"), ("attention", "error_ratio")}
    assert expected <= measured
    shared = [measures["r"] for part, _, measures in found["results"] if part == "trees" and "r" in measures]
    assert shared == [2.0, 2.0], "turns and answers of an agent, each once"
    profiled = {case.split(", ")[1] for part, case, measures in found["results"] if "wall_milliseconds" in measures}
    assert profiled == {"step", "forward"}
    bars = [line.split("|")[1:6] for line in page.splitlines() if line.count("|") == 7 and "**" in line]
    verdicts = {asked.strip(): verdict.strip(" *") for asked, _, _, _, verdict in bars}
    assert verdicts["gradients in bfloat16: every tensor within its bar"] == "pass"
    assert verdicts["nothing shared: time over that of the fastest rival"] == "left out"


def test_trainers(tmp_path: Path) -> None:
    """As the page starts it; TRL's where they are installed, and `real` without its folder."""
    path = tmp_path / "trainers.json"
    options = [*TINY_RUN, "--json", str(path), "--seconds", "800"]
    run_command(str(FOLDER / "gpu_trainers.py"), *options)
    found = json.loads(path.read_text("utf-8"))
    assert found["left_out"] == ["real: --real names no folder with weights and rows"]
    arms: dict[str, list[str]] = {}
    for part, case, measures in found["results"]:
        trainer, *_, arm = case.split(", ")
        if part == "trainers":
            arms.setdefault(trainer, []).append(arm)
            assert ("over_noise" in measures) == (arm not in ("padded", "as it is", "other order"))
            assert abs(measures["first_loss"]) > 1e-4, "or a wrong loss would go unseen"
    assert {name: " | ".join(each) for name, each in arms.items()} == {
        "Trainer": "padded | radixtrain cascade/torch | other order | padding-free torch",
        "SFTTrainer": "padded | radixtrain cascade/torch | other order | padding_free torch | packing torch",
        **dict.fromkeys(("DPOTrainer", "GRPOTrainer"), "as it is | share_prefixes cascade/torch | other order"),
    }
    profiled = [case for part, case, measures in found["results"] if "busy_milliseconds" in measures]
    assert profiled == [f"GRPOTrainer, tiny, 8 x (16 + 16), {arm}" for arm in arms["GRPOTrainer"][:2]]


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
    assert measured_here(*TINY_RUN, "--parts", "sync", "equivalence", "chunks", "--json", str(file)) == 0
    found = Results(path=file)
    found.read()
    assert {part for part, *_ in found.results} == {"equivalence", "chunks"} and not found.passed
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
    run.GRACE, gpu.PARTS["repeat"] = 1, 0.001
    parts.repeat = lambda *_: time.sleep(600)
    measure.device_works = lambda device: False
gpu.__file__ = __file__
sys.exit(gpu.main(sys.argv[1:]))
""")
    run_command(
        str(script), *TINY_RUN, "--parts", "repeat", "chunks", "groups", "--json", str(file), "--seconds", "600"
    )
    found = json.loads(file.read_text("utf-8"))
    assert [part for part, *_ in found["results"]] == ["chunks"] * 2 + ["groups"] * 4
    assert found["parts"] == dict.fromkeys(["repeat", "chunks", "groups"], "ended")
    assert found["left_out"][0] == "repeat: its process ended with code 1, by a hang or a crash"
    assert found["left_out"][1] == "this process: the device does not answer any more"


def test_without_time_everything_is_left_out() -> None:
    run = Run(device=CPU, seconds=0.0)
    for part in parts.calls(run, gpu.parse(TINY_RUN)).values():
        part()
    assert not run.results
    assert len([line for line in run.left_out if "0 of 0 seconds were left" in line]) >= len(gpu.PARTS)


def commands_of_the_page() -> tuple[list[str], list[tuple[str, argparse.Namespace]]]:
    """Blocks, the first two of which are whole commands, and the benchmarks in those two with their options."""
    page = (ROOT / "recipes" / "benchmarks" / "on-a-gpu.md").read_text("utf-8")
    blocks = [text for text in re.findall(r"^```\n(.*?)^```$", page, re.MULTILINE | re.DOTALL) if "$OUT" in text]
    found = []
    for block in blocks:
        for line in re.findall(r"\$G/(gpu\w*\.py .*?) \$F", block.replace("\\\n", "")):
            arms = re.search(r'^A="(.*)"$', block, re.MULTILINE)
            script, *options = shlex.split(line.replace("$A", arms.group(1) if arms else ""))
            found.append((script, {"gpu.py": gpu, "gpu_trainers.py": gpu_trainers}[script].parse(options)))
    return blocks, found


def test_the_page() -> None:
    """Each command fits into 2,000 characters, both into 700 s, their options exist; the goals are the bars'."""
    page = (ROOT / "recipes" / "benchmarks" / "on-a-gpu.md").read_text("utf-8")
    blocks, found = commands_of_the_page()
    assert ["COMMIT" in text for text in blocks] == [True, True, False], "two that are whole, and lines to take one of"
    assert all(len(command) <= 2000 for command in blocks)
    limits = [[int(limit) for limit in re.findall(r"\bt (\d+) ", text)] for text in blocks]
    assert sum(map(sum, limits[:2])) <= 670 and max(limits[2]) <= 540, "and 30 s to install and to start"
    assert sum(limits[0]) == sum(limits[1]) == 335 and "335 s each at most" in page
    seconds = [
        re.findall(r"\bt (\d+) .*?(?:--seconds (\d+)|$)", text.replace("\\\n", ""), re.MULTILINE) for text in blocks
    ]
    assert all(int(own) + 15 <= int(limit) for block in seconds for limit, own in block if own)
    assert len(found) == 9
    [options] = re.findall(r"recipes/real_model\.py (.*?) \$D", page.replace("\\\n", ""), re.DOTALL)
    assert real_model.parse(shlex.split(options)).device == "cuda"
    rows = [f"| {bar.asked} | {bar.predicted or '–'} | {gpu_bars.limit(bar)} |" for bar in gpu_bars.BARS]
    assert [row for row in rows if row not in page] == []


def test_what_is_wanted_most_comes_first_and_every_arm_has_a_kernel() -> None:
    _, found = commands_of_the_page()
    assert [options.parts for _, options in found[:5]] == [
        ["profile", "liger", "compile"],
        ["profile", "hf", "sft", "dpo"],
        ["table", "trees", "groups", "equivalence"],
        ["real"],
        ["groups"],
    ]
    assert [*gpu.PARTS][-2:] == ["liger", "compile"]
    named = {arm for script, options in found if script == "gpu.py" for arm in options.arms} | {*gpu.ARMS}
    assert all(kernel in (*KERNELS, *gpu_arms.BACKENDS, "flex") for kernel in (arm.partition("/")[2] for arm in named))


@pytest.mark.parametrize("name", ["cascade", "path/auto", "packed", "packed/auto", "padded", "padded/", "auto/torch"])
def test_no_arm_is_auto(name: str) -> None:
    with pytest.raises(UserError, match="an arm names its"):
        gpu_arms.arm_named(name, TINY, CPU)


def test_the_time_of_a_run_is_shared_among_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """In proportion to what each should take; a watchdog ends each, and what one does not use goes to the others."""
    clock, watched = [0.0], list[float]()
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    monkeypatch.setattr("faulthandler.dump_traceback_later", lambda seconds, **_: watched.append(seconds))
    run = Run(device=CPU, seconds=180.0, start=0.0)

    def takes(seconds: float) -> Callable[[], None]:
        return lambda: clock.__setitem__(0, clock[0] + seconds)

    names = ["profile", "liger", "compile"]
    run_parts(run, dict(zip(names, map(takes, (20.0, 10.0, 140.0)), strict=True)), names, gpu.PARTS)
    assert watched == pytest.approx([180 * 25 / 215 + GRACE, 160 * 40 / 190 + GRACE, 150 + GRACE])
    assert clock[0] < 180 and not run.left_out


def turns_of(
    seconds: float, monkeypatch: pytest.MonkeyPatch, **arms: tuple[float, float]
) -> tuple[dict[str, steps.Turns], Run, float]:
    """Turns, the run and the seconds that passed. arms: seconds of compiling, and of a run."""
    clock, compiled = [0.0], set[int]()

    def turn(_: Any, arm: Any, *__: Any) -> tuple[float, int]:
        clock[0] += 2 * arm.seconds + (0 if id(arm) in compiled else arm.compiling)
        compiled.add(id(arm))
        return arm.seconds, 2_000_000

    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    monkeypatch.setattr(steps, "_turn", turn)
    batches = [{"input_ids": torch.zeros(2, 10)}, {"input_ids": torch.zeros(1, 10)}]
    step = SimpleNamespace(micro_batches=batches)
    work: Any = SimpleNamespace(name="a cell")
    made: Any = {
        name.replace("_", "/", 1): (SimpleNamespace(compiling=first, seconds=each, step=lambda _: step), work)
        for name, (first, each) in arms.items()
    }
    run = Run(device=CPU, seconds=1000.0, start=0.0)
    return steps.take_turns(run, build_model(TINY, CPU, torch.float32), made, seconds), run, clock[0]


def test_an_arm_that_would_take_the_turns_of_others_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    arms = {"padded_cudnn": (30, 1), "cascade_cudnn": (20, 0.5), "packed_torch": (30, 0.5), "path_torch": (30, 0.5)}
    turns, run, passed = turns_of(100, monkeypatch, **arms)
    assert {name: each.seconds for name, each in turns.items()} == {
        **{"padded/cudnn": [1, 1, 1], "cascade/cudnn": [0.5] * 3, "packed/torch": [0.5] * 3},
    }
    assert run.left_out == ["a cell, path/torch: 8 of 100 seconds were left for it"] and passed < 100


def test_the_first_arm_begins_in_any_case(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, run, _ = turns_of(1, monkeypatch, padded_cudnn=(30, 1), cascade_torch=(0, 0.1))
    assert {name: len(each.seconds) for name, each in turns.items()} == {"padded/cudnn": 3} and len(run.left_out) == 1


def test_peaks_are_bytes_of_a_computed_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the largest micro-batch, whose peak it is; with the times of the turns."""
    turns, *_ = turns_of(100, monkeypatch, padded_cudnn=(0, 1), cascade_torch=(0, 0.25))
    found = steps._compared(turns, ideal=5.0)
    assert found["padded/cudnn"] == {
        **{"seconds": 1, "slowest_over_fastest": 1, "peak_gigabytes": 0.002, "micro_batches": 2},
        "peak_megabytes_a_token": 0.1,
    }
    assert (found["cascade/torch"]["measured"], found["cascade/torch"]["efficiency"]) == (4, 0.8)


def test_every_arm_is_cut_by_the_memory_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The packed one by tokens, exactly as ours is where nothing is shared."""
    shape, run = TINY, Run(device=CPU, seconds=1000.0)
    apart, shared = (batches.Case(shape, batches.unequal(prompt, 64, 9)) for prompt in (0, 32))
    model = build_model(shape, CPU, torch.float32)

    def tokens(step: Step) -> list[int]:
        return [batch["input_ids"].numel() for batch in step.micro_batches]

    features = apart.batch.features(shape)
    work = work_of(str(apart), features, None, 100)
    assert tokens(gpu_arms.packed_work(work, 100).ordinary) == tokens(work.radix) and len(tokens(work.radix)) > 1
    work, packed = steps.fitting_work(run, model, apart, features)
    assert [len(tokens(step)) for step in (work.ordinary, packed.ordinary, work.radix)] == [1, 1, 1]
    monkeypatch.setattr(steps, "_free_bytes", lambda _: 5_000_000)
    work, packed = steps.fitting_work(run, model, shared, shared.batch.features(shape))
    assert len(tokens(work.ordinary)) > len(tokens(packed.ordinary)) > len(tokens(work.radix)) >= 1
    assert sum(tokens(packed.ordinary)) == work.num_tokens < sum(tokens(work.ordinary))


def test_each_arm_is_compiled_on_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A padded one for each of its sizes, the others for all; the second turn compiles nothing."""
    graphs = list[bool]()

    def backend(graph: Any, inputs: list[Any]) -> Any:
        sizes = [size for x in inputs for size in (x.shape if isinstance(x, torch.Tensor) else [x])]
        graphs.append(any(isinstance(size, torch.SymInt) for size in sizes))
        return graph.forward

    monkeypatch.setattr("torch._dynamo.lookup_backend", lambda _: backend)
    case = batches.Case(TINY, batches.one_prompt(16, 8, 5), change="compiled")
    run, model = Run(device=CPU, seconds=1000.0), steps.built(case, CPU)
    work = work_of(str(case), case.batch.features(case.shape), 3)
    arms = steps.arms_of(run, case, work, gpu_arms.packed_work(work), ["padded/flash", "packed/torch"])
    end_watch()
    for turn in range(2):
        for name, (arm, of_arm) in arms.items():
            graphs.clear()
            prepare(model, arm)
            arm.run_step(model, of_arm)
            if turn:
                assert not graphs
            elif name == "padded/flash":
                assert graphs == [False, False], "for 3 and for 2 sequences"
            else:
                assert graphs and any(graphs)
    again = gpu_arms.compiled("padded/cudnn", gpu_arms.arm_named("padded/flash", TINY, CPU), CPU)
    graphs.clear()
    prepare(model, again)
    again.run_step(model, work)
    assert len(graphs) == 2, "or a second backend would run the code of the first"
    assert torch._dynamo.config.recompile_limit == 64
    gpu_arms.as_loaded(model)
    assert all(layer._compiled_call_impl is None for layer in model.model.layers)


GOOD: list[tuple[str, str, dict[str, Any]]] = [
    ("equivalence", "cascade, torch", {"passed": True, "median_ratio": 1.02}),
    ("sync", "cascade, own loss", {"waits": 0}),
    ("step", "Qwen3-0.6B, step, 2 x (3 + 4), path", {"efficiency": 0.7}),  # the best arm of a step counts
    *(("step", f"Qwen3-{size}, step, 2 x (3 + 4), cascade", {"efficiency": 0.92}) for size in ("0.6B", "4B", "8B")),
    ("step", "Qwen3-0.6B, forward, 2 x (3 + 4), cascade", {"measured": 5.0}),
    ("step", "Qwen3-8B, forward, 2 x (3 + 4), cascade", {"measured": 6.2}),  # on the limit
    ("attention", "one prompt, cascade torch", {"error_ratio": 1.1}),
    ("table", "N 16, P 64k, cascade torch", {"milliseconds": 1000}),
    ("table", "N 16, P 64k, cascade cudnn", {"milliseconds": 660}),
]


def test_bars_are_judged() -> None:
    """All good, nothing measured, and shapes whose speed says nothing."""
    found = gpu_bars.verdicts(GOOD)
    assert sorted(verdict.verdict for verdict in found if verdict.figure is not None) == ["pass"] * 11
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
        (8, {"error_ratio": math.nan}, "attention"),
        (10, {"milliseconds": 661}, "DualKV's table, N 16, P 64k, a kernel for Hopper"),
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
    names = ("padded/flash", "packed/torch", "packed/eager", "cascade/torch")
    arms = [gpu_arms.arm_named(name, shape, CPU) for name in names]
    with float64_arithmetic():
        model = build_model(shape, CPU, torch.float64)
        for batch_size in (None, 2):
            work = work_of(str(case), case.batch.features(shape), batch_size)
            gradients = []
            for arm in arms:
                prepare(model, arm)
                packed = gpu_arms.packed_work(work, batch_size and 100)
                arm.run_step(model, packed if isinstance(arm, gpu_arms.PackedArm) else work)
                gradients.append([parameter.grad.clone() for parameter in model.parameters()])
            for found in gradients[1:]:
                assert max(relative_error(*pair) for pair in zip(found, gradients[0], strict=True)) <= 1e-12
