"""What measures: what both arms compute, that arms that differ are not timed, and the GPU's benchmark on a CPU.

Times and speeds are not looked at: they say nothing here.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import flash4
import gpu
import numpy as np
import pytest
import step
import torch
from flops import costs_of, ordinary_flops, unique_flops
from gpu_parts import arms as gpu_arms
from gpu_parts import bars, batches, steps
from gpu_parts.run import Run
from step import ModelShape, build_model, random_rows, work_of

from radixtrain.kernels.varlen import KERNELS
from radixtrain.testing import relative_error
from radixtrain.tree.plan import build_prefix_plan
from radixtrain.verification.oracle import float64_arithmetic
from tests.support import FULL
from tests.support.steps import with_wrong_keys

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "recipes" / "benchmarks"
CPU, TINY = torch.device("cpu"), batches.TINY_MODEL
# q and o 8 x 8 each, k and v 8 x 4 each, gate, up and down 8 x 16 each: 576 parameters.
ONE_LAYER = ModelShape(1, 8, 16, num_attention_heads=2, num_key_value_heads=1, head_dim=4, vocab_size=10)


def test_runs_take_turns() -> None:
    order: list[str] = []
    runs = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    step.seconds_in_turns(runs, CPU, 2, lambda name: order.append(f"before {name}"))
    assert order == ["before a", "a", "before b", "b"] * 2


def test_operations_are_counted() -> None:
    """Of two sequences of three tokens that share two."""
    costs = costs_of(ONE_LAYER.config())
    plan = build_prefix_plan(np.array([1, 2, 3, 1, 2, 4]), np.array([0, 3, 6]))
    assert costs == (576, 2 * 2 * 4, 80)
    assert ordinary_flops(costs, plan, 2) == (2 * 576 * 6, 4 * 8 * 12, 2 * 80 * 2)  # 6 + 6 pairs
    assert unique_flops(costs, plan, 1) == (2 * 576 * 4, 4 * 8 * 9, 2 * 80)  # 1 + 2 + 3 + 3 pairs


@pytest.mark.parametrize(("mode", "by"), [("step", 1e-3), ("forward", 1e-2)])
def test_a_wrong_gradient_is_not_timed(
    mode: str, by: float, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was measured before the error is printed."""
    with_wrong_keys(monkeypatch, by, forward=mode == "forward", above=17)  # the second step only
    tiny = ["--layers=1", "--hidden=64", "--repeats=1", "--own=4", "--sequences=4", "--mode", mode]
    assert step.main([*tiny, "--prompt", "1", "8", "--attention", "cascade"]) == 1
    printed = capsys.readouterr()
    assert step.TITLES in printed.out and f"1x64, 4 x (1 + 4), flat, {mode} | cascade | 17 | 1.18 |" in printed.out
    assert "error: 1x64, 4 x (8 + 4), flat, cascade: float32: NOT EQUAL: model.layers.0" in printed.err


@FULL
def test_recurrent_layers_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert step.main(["--model=Qwen3.5", "--hidden=64", "--prompt=200", "--tree=nested", "--repeats=1"]) == 0
    assert re.search(r"Qwen3.5 4x64, .* nested, step \| auto \| .* \| [2-9]", capsys.readouterr().out)


@FULL
class TestGPU:
    """gpu.py on a CPU, with tiny shapes."""

    def test_the_one_call(self, tmp_path: Path) -> None:
        """Every part measures. One that hangs costs only itself, and what is missing here is left out by name."""
        missing = ("wandb", "flash_attn", "hypothesis", "triton", "liger_kernel")
        (tmp_path / "sitecustomize.py").write_text(f"import sys; sys.modules.update(dict.fromkeys({missing!r}))")
        file, script = tmp_path / "gpu.json", tmp_path / "hanging.py"
        script.write_text(f"""
import sys, time
sys.path.insert(0, {str(FOLDER)!r})
import gpu
if "--until" in " ".join(sys.argv):
    from gpu_parts import parts, run
    run.GRACE, gpu.PARTS["real"] = 1, 0.001
    parts.real = lambda *_, **__: time.sleep(600)
gpu.__file__ = __file__
sys.exit(gpu.main(sys.argv[1:]))
""")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{tmp_path}:{ROOT}"}
        flags = ["--device", "cpu", "--tiny", "--json", str(file), "--seconds", "800"]
        done = subprocess.run([sys.executable, script, *flags], capture_output=True, text=True, env=environment)
        assert "every tensor within its bar | – | at least 1 | 1 | **pass**" in done.stdout, done.stderr
        found = json.loads(file.read_text("utf-8"))
        failed = [line for line in found["left_out"] if line.split(":")[0] in gpu.PARTS]
        assert failed == ["real: its process ended with code 1, by a hang or a crash"]
        parts = {part for part, *_ in found["results"]}
        assert parts >= {"step", "trees", "groups", "compile", "table", "equivalence", "profile", "trainers"}
        arms = {case.split(", ")[0] for part, case, _ in found["results"] if part == "trainers"}
        assert arms == {"Trainer", "SFTTrainer", "DPOTrainer"}

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

    def test_rivals_compute_the_same_gradient_in_micro_batches_of_their_own(self) -> None:
        """In float64, also compiled; and the packed rival is cut by tokens, as ours is where nothing is shared."""
        rows = random_rows(97, 20, 5, 8, "nested")
        names = ("padded/flash", "packed/torch", "packed/eager", "cascade/torch")
        run, case = Run(device=CPU, seconds=1000.0), batches.Case(TINY, batches.one_prompt(8, 8, 4))
        with float64_arithmetic():
            model = build_model(replace(TINY, vocab_size=97), CPU, torch.float64)
            for batch_size, change in ((None, ""), (2, ""), (2, "compiled")):
                work = work_of("rows", rows, batch_size)
                packed = gpu_arms.packed_work(work, batch_size and 80)
                assert len(packed.ordinary.micro_batches) == (3 if batch_size else 1)
                gradients = []
                for arm, own in steps.arms_of(run, case._replace(change=change), work, packed, names).values():
                    steps.prepare(model, arm)
                    arm.run_step(model, own)
                    gradients.append([parameter.grad.clone() for parameter in model.parameters()])
                for found in gradients[1:]:
                    assert max(relative_error(*pair) for pair in zip(found, gradients[0], strict=True)) <= 1e-12
        gpu_arms.as_loaded(model)
