"""The GPU's benchmark on a CPU: the command, its clock, its files, and what it does without a device or packages."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "recipes" / "benchmarks"
import gpu  # noqa: E402
from gpu_parts import run as gpu_run  # noqa: E402

TINY = ["--device", "cpu", "--tiny"]
CPU = torch.device("cpu")
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}  # minutes, in a part


def run_of(seconds: float = 100.0, **options: Any) -> gpu_run.Run:
    return gpu_run.Run(CPU, seconds, {"date": "today"}, **options)


class TestCommandLine:
    @pytest.fixture(scope="class")
    def done(self, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[str], str]:
        """With only torch, transformers and what they need: the output, the lines of the file, and the page."""
        path = tmp_path_factory.mktemp("gpu") / "gpu.csv"
        missing = ("jsonargparse", "datasets", "lightning", "rich", "matplotlib", "plotly", "wandb")
        missing += ("flash_attn", "peft", "trl", "hypothesis", "triton")
        code = f"""
import runpy, sys
sys.modules.update(dict.fromkeys({missing!r}))
sys.argv = ["gpu.py", *{TINY!r}, "--csv", {str(path)!r}, "--attention", "cascade", "path"]
runpy.run_path({str(FOLDER / "gpu.py")!r}, run_name="__main__")
"""
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=ENVIRONMENT)
        assert done.returncode == 0, done.stderr[-3000:]
        page = path.with_suffix(".md").read_text(encoding="utf-8")
        return done.stdout, path.read_text(encoding="utf-8").splitlines(), page

    def test_every_part_has_its_table(self, done: tuple[str, list[str], str]) -> None:
        for part in gpu.PARTS:
            assert f"\n## {part}\n" in done[2], part
        assert "| tiny, step, cascade |" in done[2] and "| tiny, forward, path |" in done[2]
        assert done[0].endswith(f"{done[2]}\n"), "the page is printed last"

    def test_no_part_failed(self, done: tuple[str, list[str], str]) -> None:
        left_out = [line for line in done[1] if line.startswith("# left out: ")]
        assert not [line for line in left_out if any(line.startswith(f"# left out: {part}: ") for part in gpu.PARTS)]
        assert not [line for line in left_out if "Error" in line], "an exception by name"

    def test_the_file_names_machine_and_date(self, done: tuple[str, list[str], str]) -> None:
        header = dict(line[2:].split(": ", 1) for line in done[1] if line.startswith("# "))
        assert {"date", "commit", "machine", "torch", "transformers", "triton", "flash-attn", "packed arm"} <= {*header}
        assert header["torch"] == torch.__version__
        assert header["packed arm"] == "torch_varlen"
        assert str(ROOT) not in "".join(done[1]) + done[2], "no paths of this machine"

    def test_the_file_has_a_line_for_every_measure(self, done: tuple[str, list[str], str]) -> None:
        rows = [line for line in done[1] if not line.startswith("# ")]
        assert rows[0] == "part,case,measure,value"
        measured = {(line.split(",")[0], line.rsplit(",", 2)[1]) for line in rows[1:]}
        steps = ("ideal", "measured", "efficiency", "radix_peak_gigabytes", "over_padded", "over_packed")
        expected = {("rows", "share_of_copy"), ("unshared", "slowdown"), ("sync", "finite")}
        expected |= {(part, measure) for part in ("step", "unequal") for measure in steps}
        expected |= {("equivalence", measure) for measure in ("passed", "median_ratio")}
        expected |= {("attention", measure) for measure in ("forward_milliseconds", "error_ratio", "mask_milliseconds")}
        assert expected <= measured

    def test_the_bars_of_exactness_are_judged_and_those_of_speed_are_not(
        self, done: tuple[str, list[str], str]
    ) -> None:
        bars = [line.split("|")[1:5] for line in done[2].splitlines() if line.count("|") == 6 and "**" in line]
        verdicts = {asked.strip(): verdict.strip(" *") for asked, _, _, verdict in bars}
        assert verdicts["gradients in bfloat16: every tensor within its bar"] == "pass"
        assert verdicts["attention: error over that of an ordinary kernel"] == "pass"
        assert verdicts["nothing shared: time over that of the fastest rival"] == "left out"


def test_without_a_device(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpu.main([]) == 1
    assert capsys.readouterr().err.startswith("error: torch sees no CUDA device; --device cpu --tiny")


def test_a_wrong_gradient_fails_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "equivalence", lambda run, *_: run.found("equivalence", "cascade", passed=False))
    assert gpu.main([*TINY, "--parts", "equivalence"]) == 1


def test_a_part_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no kernel image is available\nand a long trace")

    monkeypatch.setattr(gpu, "equivalence", broken)
    file = tmp_path / "gpu.csv"
    assert gpu.main([*TINY, "--parts", "equivalence", "rows", "--csv", str(file)]) == 0
    results, left_out = gpu_run.read_csv(file)
    assert {result.part for result in results} == {"rows"}
    assert left_out[0] == "equivalence: RuntimeError: no kernel image is available"


def test_a_device_that_is_gone_leaves_the_others_to_a_fresh_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Replaced(BaseException):
        pass

    def execv(path: str, command: list[str]) -> None:
        raise Replaced(command)

    monkeypatch.setattr(gpu, "device_works", lambda device: False)
    monkeypatch.setattr(os, "execv", execv)
    file = tmp_path / "gpu.csv"
    with pytest.raises(Replaced) as replaced:
        gpu.main([*TINY, "--parts", "rows", "equivalence", "attention", "--csv", str(file), "--seconds", "300"])
    command = replaced.value.args[0]
    options = gpu.parse(command[2:])
    assert command[1].endswith("gpu.py") and options.parts == ["rows", "attention"] and options.go_on
    assert options.tiny and options.csv == file and 0 < options.seconds < 300
    found = gpu_run.read_csv(file)[0]
    monkeypatch.undo()
    assert gpu.main([*TINY, "--parts", "rows", "--csv", str(file), "--go_on"]) == 0
    results = gpu_run.read_csv(file)[0]
    assert results[: len(found)] == found and {result.part for result in results} == {"equivalence", "rows"}


def test_a_killed_run_leaves_its_files(tmp_path: Path) -> None:
    """Killed by a signal that nothing can catch, after its first results."""
    file = tmp_path / "gpu.csv"
    command = [sys.executable, str(FOLDER / "gpu.py"), *TINY, "--parts", "rows", "step", "--csv", str(file)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, env=ENVIRONMENT)
    try:
        deadline = time.monotonic() + 300
        while not file.exists() or len(gpu_run.read_csv(file)[0]) < 2:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    results, _ = gpu_run.read_csv(file)
    assert len(results) >= 2 and all(result.measures for result in results)
    assert f"| {results[0].case} |" in file.with_suffix(".md").read_text(encoding="utf-8")


def test_a_part_has_its_share_of_the_time() -> None:
    run = run_of(seconds=100.0)
    with run.part("rows", 0.25):
        assert 24 < run.seconds_left <= 25
    assert 99 < run.seconds_left <= 100, "what a part does not need is left to the others"
    assert sum(gpu.PARTS.values()) < gpu.parse([]).seconds <= 540, "the estimates fit, and one call of ten minutes"


def test_results_are_written_at_once(tmp_path: Path) -> None:
    run = run_of(csv=tmp_path / "gpu.csv")
    run.found("step", "a case, an arm", measured=2.5, turns=3, finite=True, where="x.py:3")
    run.leave_out("another case", "CUDA out of memory\nand a long trace")
    assert (tmp_path / "gpu.csv").read_text(encoding="utf-8").splitlines()[:4] == [
        "# date: today",
        "# left out: another case: CUDA out of memory",
        "part,case,measure,value",
        'step,"a case, an arm",measured,2.5',
    ]
    assert gpu_run.read_csv(tmp_path / "gpu.csv") == (run.results, run.left_out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpu.csv", "gpu.md"]


def test_short_rounds_do_not_count() -> None:
    calls = []
    seconds = gpu_run.seconds_of(lambda: (calls.append(1), time.sleep(0.001)), CPU, at_least=0.004)
    assert 0.0009 < seconds < 0.1 and len(calls) > 5
