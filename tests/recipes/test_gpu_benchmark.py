"""The GPU's benchmark on a CPU: the same code on tiny shapes, and what it does without time, memory or packages."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "recipes" / "benchmarks"
sys.path.insert(0, str(FOLDER))
import gpu  # noqa: E402

sys.path.remove(str(FOLDER))

TINY = ["--device", "cpu", "--tiny"]
CPU = torch.device("cpu")


def run_of(seconds: float = 100.0, **options: Any) -> gpu.Run:
    return gpu.Run(CPU, seconds, ("cascade",), {"date": "today"}, **options)


def cases(run: gpu.Run, part: str) -> dict[str, dict[str, Any]]:
    return {case: measures for row_part, case, measures in run.results if row_part == part}


class TestCommandLine:
    @pytest.fixture(scope="class")
    def done(self, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[str]]:
        """With only torch, transformers and what they need: the output, and the lines of the file."""
        path = tmp_path_factory.mktemp("gpu") / "gpu.csv"
        missing = ("jsonargparse", "datasets", "lightning", "rich", "matplotlib", "wandb", "flash_attn", "peft", "trl")
        code = f"""
import runpy, sys
sys.modules.update(dict.fromkeys({missing!r}))
sys.argv = ["gpu.py", *{TINY!r}, "--csv", {str(path)!r}, "--attention", "cascade", "path"]
runpy.run_path({str(FOLDER / "gpu.py")!r}, run_name="__main__")
"""
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout, path.read_text(encoding="utf-8").splitlines()

    def test_the_tables_come_last(self, done: tuple[str, list[str]]) -> None:
        tables = done[0].split("\n\n", 1)[1]
        for part in gpu.PARTS:
            assert f"| {part} |" in tables
        assert "| tiny, step, cascade |" in tables and "| tiny, forward, path |" in tables
        assert tables.splitlines()[-1].startswith("17 results in")

    def test_the_file_names_machine_and_date(self, done: tuple[str, list[str]]) -> None:
        header = dict(line[2:].split(": ", 1) for line in done[1] if line.startswith("# "))
        assert {"date", "commit", "machine", "torch", "transformers", "triton", "flash-attn"} <= header.keys()
        assert header["torch"] == torch.__version__
        assert str(ROOT) not in "".join(done[1]), "no paths of this machine"

    def test_the_file_has_a_line_for_every_measure(self, done: tuple[str, list[str]]) -> None:
        rows = [line for line in done[1] if not line.startswith("# ")]
        assert rows[0] == "part,case,measure,value"
        measured = {(line.split(",")[0], line.rsplit(",", 2)[1]) for line in rows[1:]}
        steps = ("ideal", "measured", "efficiency", "radix_peak_gigabytes")
        expected = {("kernels", "share_of_copy"), *(("step", measure) for measure in steps)}
        expected |= {("equivalence", measure) for measure in ("passed", "median_ratio")}
        assert expected <= measured

    def test_without_a_device(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        assert gpu.main([]) == 1
        assert capsys.readouterr().err.startswith("error: torch sees no CUDA device; --device cpu --tiny")

    def test_a_difference_fails_the_run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gpu, "equivalence", lambda run, *_: run.found("equivalence", "cascade", passed=False))
        monkeypatch.setattr(gpu, "print_tables", lambda run: None)
        assert gpu.main([*TINY, "--parts", "equivalence"]) == 1


def test_shapes_are_those_of_qwen3() -> None:
    """Parameters in billions, as the model cards have them."""
    from transformers import Qwen3ForCausalLM

    counted = {}
    for shape in gpu.MODELS:
        with torch.device("meta"):
            model = Qwen3ForCausalLM(shape.config())
        counted[shape.name] = round(sum(parameter.numel() for parameter in model.parameters()) / 1e9, 2)
    assert counted == {"Qwen3-0.6B": 0.6, "Qwen3-4B": 4.02, "Qwen3-8B": 8.19}


def test_every_strategy_with_every_installed_kernel() -> None:
    run = run_of()
    ways = list(gpu.ways(run, 64))
    strategies = ("cascade", "path", "expand")
    assert ways == [*((s, kernel) for kernel in ("torch", "eager") for s in strategies), ("reference", "auto")]
    left_out = [line.split(":")[0] for line in run.left_out]
    assert left_out == ["equivalence with flash_attn", "equivalence with flash_attn_3"]


def test_a_kernel_that_raises_is_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(model: Any, features: Any, attention: str, **_: Any) -> Any:
        raise RuntimeError("CUDA error: misaligned address")

    monkeypatch.setattr(gpu, "verify_equivalence", broken)
    run = run_of()
    gpu.equivalence(run, gpu.TINY_MODELS[0], 32)
    assert len(run.results) == 7 and not any(measures["passed"] for _, _, measures in run.results)
    assert "misaligned address" in run.left_out[-1]


def test_kernels_agree_and_move_bytes() -> None:
    run = run_of()
    gpu.kernels(run, gpu.TINY_GATHERS)
    found = cases(run, "kernels")
    assert len(found) == 6
    assert all(measures["gigabytes_per_second"] > 0 and measures["share_of_copy"] > 0 for measures in found.values())
    assert all(measures["difference_to_torch"] < 0.01 for measures in found.values())
    assert run.left_out == ["kernels in Triton: they need CUDA"]


def test_an_arm_that_does_not_compile_leaves_the_others() -> None:
    def broken() -> torch.Tensor:
        raise ValueError("no such instruction")

    run = run_of()
    gpu._beside_a_copy(run, "sum", {"torch": lambda: torch.ones(4), "Triton": broken}, 64)
    assert list(cases(run, "kernels")) == ["sum, torch"]
    assert run.left_out == ["kernels sum, Triton: no such instruction"]


def test_without_time_everything_is_left_out() -> None:
    run = run_of(seconds=0.0)
    gpu.equivalence(run, gpu.TINY_MODELS[0], 32)
    gpu.kernels(run, gpu.TINY_GATHERS)
    gpu.steps(run, gpu.TINY_MODELS, 32, 8, 4)
    assert not run.results
    late = [line for line in run.left_out if "of 0 seconds were left" in line]
    assert len(late) == 1 + 1 + 2


class TestMicroBatches:
    def sizes(self, run: gpu.Run, free: int, monkeypatch: pytest.MonkeyPatch, num_sequences: int = 8) -> Any:
        """The work if a token costs 1,000 bytes, and `free` bytes are left for sequences."""
        monkeypatch.setattr(gpu, "_peak", lambda model, work, arm: 1000 * work.num_tokens)
        monkeypatch.setattr(gpu, "_free_bytes", lambda run: free)
        cell = gpu.Cell(gpu.TINY_MODELS[0], 32, 8, num_sequences)
        ordinary = gpu.OrdinaryArm(plain_head=True)
        return gpu.fitting_work(run, None, cell, 1.0, ordinary, gpu.RadixArm(attention="cascade", plain_head=True))

    def test_all_in_one_if_there_is_room(self, monkeypatch: pytest.MonkeyPatch) -> None:
        work = self.sizes(run_of(), 10**9, monkeypatch)
        assert (len(work.ordinary), len(work.radix)) == (1, 1)

    def test_as_few_as_fit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        work = self.sizes(run_of(), 40 * 3 * 1000, monkeypatch)  # three sequences of 40 tokens
        assert [len(batch.members) for batch in work.ordinary] == [3, 3, 2]
        assert len(work.radix) == 1 and work.num_unique_tokens("cascade") == 32 + 8 * 8  # 96 of 120

    def test_one_sequence_at_least(self, monkeypatch: pytest.MonkeyPatch) -> None:
        work = self.sizes(run_of(), 0, monkeypatch)
        assert [len(batch.members) for batch in work.ordinary] == [1] * 8
        assert [len(batch.members) for batch in work.radix] == [1] * 8


def test_a_step_of_several_micro_batches_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "CPU_BYTES", 10**6)  # two sequences of 40 tokens in a step
    run = run_of()
    gpu.steps(run, gpu.TINY_MODELS, 32, 8, 12)
    step, forward = cases(run, "step").values()
    assert step["ordinary_micro_batches"] > step["radix_micro_batches"] > 1
    assert forward["ordinary_micro_batches"] < step["ordinary_micro_batches"], "no activations are kept"
    assert all(measures["loss_difference"] < 1e-2 and measures["measured"] > 0 for measures in (step, forward))


def test_out_of_memory_is_tried_again_in_smaller_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = []

    def measure(run: gpu.Run, model: Any, cell: Any, seconds: float, share: float) -> None:
        shares.append(share)
        if share > 0.3:
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(gpu, "_measure", measure)
    run = run_of()
    gpu.steps(run, gpu.TINY_MODELS, 32, 8, 4)
    assert shares == [0.8, 0.4, 0.2] * 2 and not run.left_out
    monkeypatch.setattr(gpu, "MEMORY_SHARES", (0.8, 0.4))
    gpu.steps(run, gpu.TINY_MODELS, 32, 8, 4)
    assert [line.partition(": ")[2] for line in run.left_out] == ["CUDA out of memory"] * 2


def test_a_model_is_built_once_for_both_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    built, build = [], gpu.build_model
    monkeypatch.setattr(gpu, "build_model", lambda shape, *rest: built.append(shape) or build(shape, *rest))
    monkeypatch.setattr(gpu, "_measure", lambda *args: None)
    gpu.steps(run_of(), gpu.TINY_MODELS, 32, 8, 4)
    assert built == list(gpu.TINY_MODELS)


def test_results_are_written_at_once(tmp_path: Path) -> None:
    run = run_of(csv=tmp_path / "gpu.csv")
    run.found("step", "a case", measured=2.5)
    run.leave_out("another case", "CUDA out of memory\nand a long trace")
    assert (tmp_path / "gpu.csv").read_text(encoding="utf-8").splitlines() == [
        "# date: today",
        "# left out: another case: CUDA out of memory",
        "part,case,measure,value",
        "step,a case,measured,2.5",
    ]
