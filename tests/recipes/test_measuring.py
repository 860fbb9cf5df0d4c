"""What measures: what both arms compute, that arms that differ are not timed, and the GPU's benchmark on a CPU.

Times and speeds are not looked at: they say nothing here.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import flash4
import gpu
import numpy as np
import pytest
import step
import torch
from flops import costs_of, ordinary_flops, unique_flops
from gpu_parts import arms as gpu_arms
from gpu_parts import bars, batches, parts, steps
from gpu_parts.run import Run
from step import Arm, ModelShape, build_model, measure, random_rows, work_of
from transformers import LlamaConfig

from radixtrain.errors import UserError
from radixtrain.kernels.varlen import KERNELS
from radixtrain.testing import relative_error
from radixtrain.tree.plan import build_prefix_plan
from radixtrain.verification.oracle import float64_arithmetic, float64_throughout
from tests.support import FULL
from tests.support.steps import with_wrong_keys

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "recipes" / "benchmarks"
DATA = Path(os.environ.get("RADIXTRAIN_DATA", ROOT.parent / "shared" / "data" / "sft"))
ORDINARY = ("padded", "as it is", "other order")
CPU, TINY = torch.device("cpu"), batches.TINY_MODEL
SHAPE = ModelShape(num_hidden_layers=2, hidden_size=32, head_dim=8, vocab_size=97)
# One layer: q and o 8 x 8 each, k and v 8 x 4 each, gate, up and down 8 x 16 each: 576 parameters.
SIZES = {"hidden_size": 8, "intermediate_size": 16, "vocab_size": 10}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}


@pytest.fixture
def ragged() -> list[dict[str, Any]]:
    """Two prompts of 20 and 21 tokens, each with four answers of 3 to 6 tokens that bear the loss; shuffled."""
    rng = np.random.default_rng(1)
    rows = []
    for group in range(2):
        prompt = rng.integers(0, 97, 20 + group)
        for branch in range(4):
            ids = np.concatenate([prompt, rng.integers(0, 97, 3 + branch)])
            rows.append({"input_ids": ids, "labels": np.where(np.arange(len(ids)) < len(prompt), -100, ids)})
    return [rows[index] for index in rng.permutation(len(rows))]


def command(*words: str, path: Path | str = "") -> str:
    """What a command prints. path: a folder before the others in PYTHONPATH."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(path), str(ROOT)])}
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_runs_take_turns() -> None:
    order: list[str] = []
    runs = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    seconds = step.seconds_in_turns(runs, CPU, 2, lambda name: order.append(f"before {name}"))
    assert order == ["before a", "a", "before b", "b"] * 2
    assert [len(turns) for turns in seconds.values()] == [2, 2]


def test_operations_are_counted() -> None:
    """Of two sequences of three tokens that share two."""
    costs = costs_of(LlamaConfig(**SIZES, num_hidden_layers=1))
    plan = build_prefix_plan(np.array([1, 2, 3, 1, 2, 4]), np.array([0, 3, 6]))
    assert costs == (576, 2 * 2 * 4, 80)
    assert ordinary_flops(costs, plan, 2) == (2 * 576 * 6, 4 * 8 * 12, 2 * 80 * 2)  # 6 + 6 pairs
    assert unique_flops(costs, plan, 1) == (2 * 576 * 4, 4 * 8 * 9, 2 * 80)  # 1 + 2 + 3 + 3 pairs


def test_the_loss_in_several_micro_batches(ragged: Any) -> None:
    model, work = build_model(SHAPE, CPU, torch.float32), work_of("rows", ragged, batch_size=3, max_tokens=40)
    assert [tuple(batch["input_ids"].shape) for batch in work.ordinary.micro_batches] == [(3, 27), (3, 25), (2, 24)]
    assert [*map(len, work.radix.members)] == [4, 4] and work.num_unique_tokens == 41 + 2 * 18
    pairs = [(torch.tensor(row["input_ids"])[None], torch.tensor(row["labels"])[None]) for row in ragged]
    with float64_throughout(model):
        truth = sum(model(input_ids=ids, labels=y).loss * (y[0, 1:] >= 0).sum() for ids, y in pairs)
        for strategy in (None, "cascade", "path"):
            arm = Arm(attention=strategy, plain_head=True)
            arm.prepare(model)
            found = sum(arm.loss_terms(model, work)).item()
            assert found == pytest.approx(truth.item() / work.radix.num_labels, rel=1e-12)


@pytest.mark.parametrize(("model", "mode"), [("Qwen3", "step"), pytest.param("Qwen3.5", "forward", marks=FULL)])
def test_what_is_measured(model: Any, mode: Any) -> None:
    made, strategies = build_model(replace(SHAPE, model=model), CPU, torch.float32), ["cascade", "path"]
    found = measure(made, work_of("rows", random_rows(97, 200, 6, 16, "nested"), mode=mode), strategies, repeats=2)
    assert [each.attention for each in found] == strategies
    assert all(len(each.turns) == len(each.ordinary_turns) == 2 and min(each.turns) > 0 for each in found)
    assert found[0].r > found[0].ideal > 2 and found[0].peaks[0] > 2 * found[0].peaks[1]
    assert made.config._attn_implementation == "sdpa" and all(each.grad is None for each in made.parameters())


@pytest.mark.parametrize(("by", "forward", "mode"), [(1e-3, False, "step"), (1e-2, True, "forward")])
def test_a_wrong_gradient_is_not_timed(
    by: float, forward: bool, mode: Any, monkeypatch: pytest.MonkeyPatch, ragged: Any, without_the_trial: None
) -> None:
    with_wrong_keys(monkeypatch, by, forward)
    with pytest.raises(UserError, match=r"rows, cascade: float32: NOT EQUAL: model\.layers\."):
        measure(build_model(SHAPE, CPU, torch.float32), work_of("rows", ragged, 3, 40, mode), ["cascade"], repeats=1)


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured before an error is printed."""
    with_wrong_keys(monkeypatch, above=17)  # the second step only
    tiny = ["--layers=1", "--hidden=64", "--repeats=1", "--own=4", "--sequences=4"]
    assert step.main([*tiny, "--prompt", "1", "8", "--attention", "cascade"]) == 1
    printed = capsys.readouterr()
    assert step.TITLES in printed.out and "| 1x64, 4 x (1 + 4), flat, step | cascade | 17 | 1.18 |" in printed.out
    assert "error: 1x64, 4 x (8 + 4), flat, cascade: float32: NOT EQUAL: model.layers.0" in printed.err


@FULL
@pytest.mark.data
def test_banking77(tmp_path: Path) -> None:
    """On 192 rows: an accuracy before and after."""
    for split, count in (("train", 192), ("test", 40)):
        source = DATA / f"banking77_{split}.jsonl"
        if not source.is_file():
            pytest.skip(f"RADIXTRAIN_DATA names no folder with {source.name}")
        with source.open(encoding="utf-8") as rows:
            (tmp_path / source.name).write_text("".join(next(rows) for _ in range(count)), encoding="utf-8")
    flags = [f"--data_dir={tmp_path}", f"--output_dir={tmp_path / 'runs'}", "--max_epochs=1"]
    printed = command("recipes/banking77.py", *flags)
    assert re.search(r"exact match before: 0\.0%", printed) and re.search(r"exact match after: \d+\.\d%", printed)
    assert float(re.search(r"^r +([\d.]+) tokens", printed, re.MULTILINE)[1]) > 8


@FULL
class TestGPU:
    """gpu.py on a CPU, with tiny shapes."""

    def test_the_one_call(self, tmp_path: Path) -> None:
        """Every part measures what its bars ask for, of trainers also; what is missing here is left out by name."""
        missing = ("wandb", "flash_attn", "hypothesis", "triton", "liger_kernel")
        (tmp_path / "sitecustomize.py").write_text(f"import sys; sys.modules.update(dict.fromkeys({missing!r}))")
        path = tmp_path / "gpu.json"
        flags = ["--device", "cpu", "--tiny", "--json", str(path), "--seconds", "800"]
        printed = command(str(FOLDER / "gpu.py"), *flags, path=tmp_path)
        found, page = json.loads(path.read_text("utf-8")), path.with_suffix(".md").read_text("utf-8")
        assert printed.endswith(f"{page}\n") and "every tensor within its bar | – | at least 1 | 1 | **pass**" in page
        assert str(ROOT) not in path.read_text("utf-8") + page, "no paths of this machine"
        failed = [line for line in found["left_out"] if line.split(":")[0] in gpu.PARTS]
        assert failed == ["real: --real names no folder with weights and rows"]
        measured = {(part, measure) for part, _, measures in found["results"] for measure in measures}
        of_steps = ("fastest_rival", "efficiency", "peak_megabytes_a_token", "over_padded/flash", "over_packed/torch")
        expected = {(part, measure) for part in ("step", "trees", "groups", "compile") for measure in of_steps}
        assert expected | {("table", "milliseconds"), ("equivalence", "median_ratio")} <= measured
        assert {measures["r"] for part, _, measures in found["results"] if part == "trees" and "r" in measures} == {2}
        profiled = {case.split(", ")[1] for part, case, found in found["results"] if "wall_milliseconds" in found}
        assert profiled == {"step", "forward"}
        arms: dict[str, list[str]] = {}
        for part, case, measures in found["results"]:
            if part == "trainers":
                arms.setdefault(case.split(", ")[0], []).append(case.split(", ")[-1])
                assert abs(measures["first_loss"]) > 1e-4, "or a wrong loss would go unseen"
                assert ("over_noise" in measures) == (arms[case.split(", ")[0]][-1] not in ORDINARY)
        assert {name: " | ".join(each) for name, each in arms.items()} == {
            "Trainer": "padded | radixtrain cascade/torch | other order | padding-free torch",
            "SFTTrainer": "padded | radixtrain cascade/torch | other order | padding_free torch | packing torch",
            "DPOTrainer": "as it is | share_prefixes cascade/torch | other order",
        }

    def test_a_part_that_hangs_costs_only_itself(self, tmp_path: Path) -> None:
        """So does one that fails, and a device that is gone: the others run in a fresh process."""
        file, script = tmp_path / "gpu.json", tmp_path / "hanging.py"
        script.write_text(f"""
import sys, time
sys.path.insert(0, {str(FOLDER)!r})
import gpu
if "--until" in " ".join(sys.argv):
    from gpu_parts import parts, run
    run.GRACE, gpu.PARTS["table"] = 1, 0.001
    parts.table, parts.profile_steps = (lambda *_, **__: time.sleep(600)), (lambda *_: 1 / 0)
    run.device_works = lambda device: False
gpu.__file__ = __file__
sys.exit(gpu.main(sys.argv[1:]))
""")
        flags = ["--device", "cpu", "--tiny", "--seconds", "600", "--json", str(file)]
        command(str(script), *flags, "--parts", "table", "profile", "groups")
        found = json.loads(file.read_text("utf-8"))
        assert {part for part, *_ in found["results"]} == {"groups"}
        assert found["parts"] == dict.fromkeys(["table", "profile", "groups"], "ended")
        assert found["left_out"][0] == "table: its process ended with code 1, by a hang or a crash"
        assert "profile: ZeroDivisionError: division by zero" in found["left_out"]
        assert "this process: the device does not answer any more" in found["left_out"]

    def test_without_a_device_and_without_time(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        assert gpu.main(["--until", str(time.time() + 1000)]) == 1
        assert capsys.readouterr().err.startswith("error: torch sees no CUDA device; --device cpu --tiny")
        run = Run(device=CPU, seconds=0.0)
        for part in parts.calls(run, gpu.parse(["--device", "cpu", "--tiny"])).values():
            part()
        assert not run.results and sum("0 of 0 seconds were left" in line for line in run.left_out) > 10

    def test_the_page(self) -> None:
        """The commands fit into 2,000 characters and 700 s, their options exist; the goals are those of the bars."""
        page = (FOLDER / "on-a-gpu.md").read_text("utf-8")
        blocks = [text for text in re.findall(r"^```\n(.*?)^```$", page, re.MULTILINE | re.DOTALL) if "$OUT" in text]
        assert ["COMMIT" in text for text in blocks] == [True, True, False], "two that are whole, and lines for one"
        assert all(len(text) <= 2000 for text in blocks)
        assert [sum(map(int, re.findall(r"\bt (\d+) ", text))) for text in blocks[:2]] == [335, 335]
        for block in blocks:
            names = re.search(r'^A="(.*)"$', block, re.MULTILINE)
            for line in re.findall(r"\$G/gpu\.py (.*?) \$F", block.replace("\\\n", "")):
                options = gpu.parse(shlex.split(line.replace("$A", names.group(1) if names else "")))
                kernels = {arm.partition("/")[2] for arm in options.arms}
                assert kernels <= {*KERNELS, *gpu_arms.BACKENDS, "flex"}, "no arm is `auto`"
        rows = [f"| {bar.asked} | {bar.predicted or '–'} | {bars.limit(bar)} |" for bar in bars.BARS]
        assert [row for row in rows if row not in page] == []
        assert len(list(flash4.calls())) > 20
        with pytest.raises(UserError, match="an arm names its"):
            gpu_arms.arm_named("path/auto", TINY, CPU)

    def test_rivals_compute_the_same_gradient_in_micro_batches_of_their_own(self, ragged: Any) -> None:
        """In float64, also compiled; and the packed rival is cut by tokens, as ours is where nothing is shared."""
        names = ("padded/flash", "packed/torch", "packed/eager", "cascade/torch")
        run, case = Run(device=CPU, seconds=1000.0), batches.Case(TINY, batches.one_prompt(8, 8, 4))
        with float64_arithmetic():
            model = build_model(replace(TINY, vocab_size=97), CPU, torch.float64)
            for batch_size, change in ((None, ""), (2, ""), (2, "compiled")):
                work = work_of("rows", ragged, batch_size)
                packed = gpu_arms.packed_work(work, batch_size and 100)
                assert len(packed.ordinary.micro_batches) == (3 if batch_size else 1)
                gradients = []
                for arm, own in steps.arms_of(run, case._replace(change=change), work, packed, names).values():
                    steps.prepare(model, arm)
                    arm.run_step(model, own)
                    gradients.append([parameter.grad.clone() for parameter in model.parameters()])
                for found in gradients[1:]:
                    assert max(relative_error(*pair) for pair in zip(found, gradients[0], strict=True)) <= 1e-12
        gpu_arms.as_loaded(model)
