"""`radixtrain bench`: the command line, its table, its files and its exit code."""

import csv
import importlib.util
import os
import re
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import radixtrain.bench.environment
import radixtrain.hf.attention
from radixtrain.__main__ import main
from radixtrain.bench.measure import Cell, ModelShape, make_work

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = "recipes/benchmarks/training_step.py"
TITLES = ["model", "sequences", "tree", "mode", "attention", "tokens", "r", "speed-up"]
LAST = ["ratio", "error"]
SHAPE = {"num_hidden_layers": 2, "hidden_size": 32, "head_dim": 8, "vocab_size": 97}
CELL = {"prompt_length": 60, "suffix_length": 5, "num_sequences": 8}
TINY = {**{f"models.{name}": value for name, value in SHAPE.items()}, **CELL, "repeats": 1}


def command(**changes: Any) -> list[str]:
    """`models__hidden_size=16` is `--models.hidden_size=16`."""
    flags = {**TINY, **{name.replace("__", "."): value for name, value in changes.items()}}
    return ["bench", *(f"--{name}={value}" for name, value in flags.items() if value is not None)]


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_in_a_process_of_its_own(start: Any, tmp_path: Path) -> None:
    run = start(command(csv=tmp_path / "a.csv"))
    assert run.wait() == 0, run.said()
    header, _, columns, row = run.printed().splitlines()
    assert re.match(r"\d{4}-\d\d-\d\d, .*threads.*, float32, torch \d.*, transformers \d.*, medians of 1 ", header)
    assert columns.split() == [*TITLES, "speed-up", "highest", "ciency", "token", *["ordinary", "radix"] * 2, *LAST]
    assert row.split()[:7] == ["2x32", "8", "x", "(60", "+", "5)", "flat"]
    assert run.said().splitlines() == ["[1/1] 2x32, 8 x (60 + 5), flat, step"]
    assert len(rows_of(tmp_path / "a.csv")) == 1


def test_the_whole_grid_in_a_csv_that_parses_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    axes = {"num_sequences": "[8, 1]", "tree": "[flat, nested]", "mode": "[step, forward]"}
    assert main(command(**axes, attention="[cascade, path]", csv=tmp_path / "a.csv")) == 0
    rows = rows_of(tmp_path / "a.csv")
    assert len(rows) == 2 * 2 * 2 * 2
    shape = ModelShape(**SHAPE)
    for row in rows:
        work = make_work(Cell(shape, 60, 5, int(row["num_sequences"]), row["tree"], row["mode"]))  # type: ignore[arg-type]
        assert float(row["r"]) == work.num_tokens / work.num_unique_tokens("cascade")
        assert float(row["ideal_speedup"]) == work.ideal_speedup(shape.config())
        seconds = 1e-6 * float(row["microseconds_per_unique_token"]) * int(row["num_unique_tokens"])
        assert seconds == pytest.approx(float(row["radix_seconds"]))
        memory = float(row["ordinary_peak_bytes"]) / float(row["radix_peak_bytes"])
        assert float(row["memory_ratio"]) == pytest.approx(memory)
        assert float(row["efficiency"]) == float(row["measured_speedup"]) / float(row["ideal_speedup"])
        assert float(row["ordinary_seconds"]) > 0 and int(row["radix_peak_bytes"]) > 0
        assert float(row["error"]) < 1e-5
        speedups = [float(row[f"{name}_speedup"]) for name in ("lowest", "measured", "highest")]
        assert speedups == sorted(speedups)
        assert (row["dtype"], row["vocab_size"]) == ("float32", "97")
    without_sharing = [row for row in rows if row["num_sequences"] == "1"]
    assert {(row["r"], row["ideal_speedup"]) for row in without_sharing} == {("1.0", "1.0")}
    assert capsys.readouterr().out.count("2x32") == len(rows)


def test_auto_is_measured_and_says_what_it_chose(tmp_path: Path) -> None:
    assert main(command(attention="[auto, cascade, cascade]", csv=tmp_path / "a.csv")) == 0
    auto, by_name = (row["attention"] for row in rows_of(tmp_path / "a.csv"))
    assert re.fullmatch(r"auto: (cascade|path|expand)/(1|4|16|64)", auto)
    assert by_name == "cascade"


def test_a_config_and_what_overrides_it(tmp_path: Path) -> None:
    config = tmp_path / "grid.yaml"
    config.write_text(
        "models:\n- {num_hidden_layers: 1, hidden_size: 16, head_dim: 8, vocab_size: 50}\n"
        "- {name: wide, num_hidden_layers: 1, hidden_size: 32, head_dim: 8, vocab_size: 50}\n"
        "prompt_length: [4, 8]\nsuffix_length: 2\nnum_sequences: 3\nrepeats: 2\n"
    )
    assert main(["bench", "--config", str(config), "--prompt_length", "6", f"--csv={tmp_path / 'a.csv'}"]) == 0
    rows = rows_of(tmp_path / "a.csv")
    assert [(row["model"], row["prompt_length"]) for row in rows] == [("1x16", "6"), ("wide", "6")]


def test_without_a_timed_ordinary_arm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(ordinary="false", attention="cascade", num_sequences="[8, 50]", csv=tmp_path / "a.csv")) == 0
    _, _, columns, small, large = capsys.readouterr().out.splitlines()
    assert columns.split() == [*TITLES, "token", "radix", "radix", "error"]
    assert small.split()[8:10] == ["cascade", "100"] and large.split()[9] == "310"
    for row in rows_of(tmp_path / "a.csv"):
        assert row["ordinary_seconds"] == row["measured_speedup"] == row["memory_ratio"] == ""
        assert float(row["microseconds_per_unique_token"]) > 0 and float(row["error"]) < 1e-5


def test_nothing_to_share(tmp_path: Path) -> None:
    assert main(command(prompt_length=0, suffix_length="[5, 40]", csv=tmp_path / "a.csv")) == 0
    for row in rows_of(tmp_path / "a.csv"):
        assert row["r"] == row["ideal_speedup"] == "1.0"
        assert float(row["measured_speedup"]) > 0 and float(row["memory_ratio"]) > 0


class TestScript:
    """recipes/benchmarks/training_step.py: the same if little is installed."""

    @pytest.fixture
    def script(self, fresh: Any) -> Any:
        """Run it with nothing but torch, transformers and what those need."""
        left_out = ("jsonargparse", "datasets", "lightning", "rich", "matplotlib", "wandb", "flash_attn")

        def run(*flags: str) -> Any:
            blocked = f"import sys, runpy; sys.modules.update(dict.fromkeys({left_out!r}))"
            path = str(ROOT / SCRIPT)
            return fresh(f"{blocked}; sys.argv[1:] = {list(flags)!r}; runpy.run_path({path!r}, run_name='__main__')")

        return run

    def test_one_cell(self, script: Any) -> None:
        returned, ran = script(
            "--layers=1", "--hidden=16", "--vocab=50", "--prompt=20", "--suffix=3", "--sequences=4", "--repeats=1"
        )
        assert returned == 0, ran.said()[-2000:]
        rows = ran.printed().splitlines()[3:]
        assert [row.split()[:9] for row in rows] == [
            ["1x16", "4", "x", "(20", "+", "3)", "flat", "step", arm] for arm in ("cascade", "path", "expand")
        ]

    def test_a_config_and_what_overrides_it(self, script: Any, tmp_path: Path) -> None:
        config = tmp_path / "grid.yaml"
        config.write_text(
            "models:\n- {num_hidden_layers: 1, hidden_size: 16, head_dim: 8, vocab_size: 50}\n"
            "- {name: wide, num_hidden_layers: 1, hidden_size: 32, head_dim: 8, vocab_size: 50}\n"
            "prompt_length: [4, 8]\nsuffix_length: 2\nnum_sequences: 3\nrepeats: 2\ncsv: null\n"
        )
        flags = ["--prompt_length", "[6, 0]", "--attention", "cascade", "--csv", str(tmp_path / "a.csv")]
        returned, ran = script("--config", str(config), *flags)
        assert returned == 0, ran.said()[-2000:]
        cells = [(row["model"], row["prompt_length"]) for row in rows_of(tmp_path / "a.csv")]
        assert cells == [("1x16", "6"), ("1x16", "0"), ("wide", "6"), ("wide", "0")]

    def test_bad_input_in_a_process(self, script: Any, tmp_path: Path) -> None:
        (tmp_path / "a.yaml").write_text("prompt_lenght: 3")
        returned, ran = script("--config", str(tmp_path / "a.yaml"))
        assert returned == 1
        (error,) = (line for line in ran.said().splitlines() if line.startswith("error: "))
        assert "unknown key prompt_lenght" in error

    @pytest.mark.parametrize(
        ("written", "message"),
        [
            ("models: {hidden: 3}", "models: got an unexpected keyword argument 'hidden'"),
            ("tree: deep", "tree must be one of flat, nested, got deep"),
            ("dtype: float16", "dtype must be one of float32, bfloat16, got float16"),
            ("device: tpu", "device must be one of cpu, cuda, got tpu"),
            ("attention: ring", "ring"),
        ],
    )
    def test_bad_input(self, tmp_path: Path, capsys: pytest.CaptureFixture[str], written: str, message: str) -> None:
        (tmp_path / "a.yaml").write_text(written)
        run = runpy.run_path(str(ROOT / SCRIPT))["main"]
        assert run(["--config", str(tmp_path / "a.yaml")]) == 1
        (error,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("error: "))
        assert message in error


def test_cells_that_are_too_large_are_left_out_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(prompt_length="[60, 600]", max_teraflops=1e-4, csv=tmp_path / "a.csv")) == 0
    assert [row["prompt_length"] for row in rows_of(tmp_path / "a.csv")] == ["60"]
    assert "[2/2] 2x32, 8 x (600 + 5), flat, step: left out: " in capsys.readouterr().err


class TestRefusal:
    @pytest.fixture(autouse=True)
    def broken_attention(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Keys get a thousandth more gradient than they should, if there is something to share."""

        def broken(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
            wrong = key + 1e-3 * (key - key.detach()) if len(key) > 65 else key
            return attend(query, wrong, value, *args, **options)

        attend = radixtrain.hf.attention.tree_attention
        monkeypatch.setattr(radixtrain.hf.attention, "tree_attention", broken)

    def test_times_of_a_wrong_gradient_are_not_reported(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(command(attention="cascade")) == 1
        captured = capsys.readouterr()
        (error,) = (line for line in captured.err.splitlines() if line.startswith("error: "))
        assert "8 x (60 + 5), flat, step, cascade: float32: NOT EQUAL: model.layers." in error
        assert ".self_attn.k_" in error and "worst element [" in error
        assert "2x32" not in captured.out and "Traceback" not in captured.err

    def test_what_was_measured_before_is_kept(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(command(num_sequences="[1, 8]", csv=tmp_path / "a.csv")) == 1
        assert [row["num_sequences"] for row in rows_of(tmp_path / "a.csv")] == ["1"]
        assert "1 x (60 + 5)" in capsys.readouterr().out


class TestPlot:
    @pytest.mark.parametrize(("name", "begins"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml")])
    def test_a_picture(self, tmp_path: Path, name: str, begins: bytes) -> None:
        pytest.importorskip("matplotlib", reason="pip install matplotlib")
        assert main(command(plot=tmp_path / name, num_sequences="[1, 8]", attention="[cascade, expand]")) == 0
        assert (tmp_path / name).read_bytes().startswith(begins)

    def test_without_matplotlib(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        assert main(command(plot="a.png")) == 1
        assert capsys.readouterr().err == "error: plot needs matplotlib: pip install matplotlib\n"


@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        ({"prompt_lenght": 3}, 2, "no key prompt_lenght, did you mean prompt_length?"),
        ({"models__hidden": 3}, 2, "hidden"),
        ({"prompt_length": "many"}, 2, "prompt_length must be integer or list of integer; got many ("),
        ({"attention": "ring"}, 2, "ring"),
        ({"config": "nope.yaml"}, 2, "nope.yaml"),
        ({"repeats": 0}, 1, "repeats must be above 0, got 0"),
        ({"num_threads": 0}, 1, "num_threads must be above 0, got 0"),
        ({"max_teraflops": 0}, 1, "max_teraflops must be above 0, got 0"),
        ({"num_sequences": "[4, 0]"}, 1, "num_sequences must be at least 1, got 0"),
        ({"prompt_length": -1}, 1, "prompt_length must be at least 0, got -1"),
        ({"suffix_length": 1}, 1, "suffix_length must be at least 2, got 1"),
        ({"models__hidden_size": 0}, 1, "models: hidden_size must be at least 1, got 0"),
        ({"models__num_key_value_heads": 3}, 1, "models: num_attention_heads (4) must be a multiple of"),
        ({"kernel": "flash_attn"}, 1, "kernel='flash_attn' cannot be used: needs CUDA"),
        ({"attn_implementation": "sdpaa"}, 1, "attn_implementation: "),
        ({"csv": "nowhere/a.csv"}, 1, "csv: no such folder: nowhere"),
        ({"ordinary": "maybe"}, 2, "ordinary must be true or false; got maybe"),
        ({"ordinary": "false", "plot": "a.png"}, 1, "plot shows speed-ups, which ordinary: false leaves unmeasured"),
        ({"plot": "a.pdf"}, 1, "plot must end in .png or .svg, got a.pdf"),
    ],
)
def test_bad_input(changes: dict[str, Any], code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(**changes)) == code
    (error,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("error: "))
    assert message in error


def test_a_config_imports_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "evil.py").write_text("from pathlib import Path\nPath(__file__).with_suffix('.ran').touch()\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["bench", "--models", "{class_path: evil.Shape}"]) == 2
    assert "class_path 'evil.Shape' is not imported" in capsys.readouterr().err
    assert not (tmp_path / "evil.ran").exists()


class TestTable:
    """Whatever the terminal's width, no number is cut."""

    @pytest.fixture
    def printed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
        def run(width: int) -> str:
            monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
            monkeypatch.setattr(shutil, "get_terminal_size", lambda: os.terminal_size((width, 24)))
            assert main(command(csv=tmp_path / "a.csv")) == 0
            return capsys.readouterr().out

        return run

    @pytest.mark.parametrize("width", [30, 80, 120, 300])
    def test_width(self, printed: Any, tmp_path: Path, width: int) -> None:
        text = printed(width)
        (row,) = rows_of(tmp_path / "a.csv")
        assert "…" not in text and "..." not in text
        for name in ("measured_speedup", "ideal_speedup", "efficiency", "r"):
            assert f"{float(row[name]):.2f}" in text
        assert f"{float(row['ordinary_tokens_per_second']):,.0f}" in text
        assert ("measured speed-up: " in text) == (width < 190)
        assert "efficiency: " in text or "effi-" in text


def test_no_commit_without_git(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*args: Any, **options: Any) -> None:
        raise FileNotFoundError("git")

    monkeypatch.setattr(radixtrain.bench.environment.subprocess, "run", missing)
    assert radixtrain.bench.environment._commit() == ""


def test_neither_a_host_nor_a_path_in_the_header(monkeypatch: pytest.MonkeyPatch) -> None:
    import platform

    import torch

    header = radixtrain.bench.environment.header(torch.device("cpu"), "float32", 3)
    assert platform.node() not in header and "/" not in header
