"""`radixtrain bench`: the command line, its table, its files and its exit code."""

import csv
import os
import platform
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiers import FULL
from wrong_keys import with_wrong_keys

import radixtrain.timing
from radixtrain.__main__ import main
from radixtrain.bench.cells import Cell, ModelShape
from radixtrain.bench.work import make_work

TITLES = ["model", "sequences", "tree", "mode", "attention", "tokens", "r", "speed-up"]
LAST = ["ratio", "error"]
SHAPE = {"num_hidden_layers": 2, "hidden_size": 32, "head_dim": 8, "vocab_size": 97}
CELL = {"prompt_length": 60, "suffix_length": 5, "num_sequences": 8}
TINY = {"models": SHAPE, **CELL, "repeats": 1, "attention": "cascade"}
GRID = """
models:
- {num_hidden_layers: 1, hidden_size: 16, head_dim: 8, vocab_size: 50}
- {name: wide, num_hidden_layers: 1, hidden_size: 32, head_dim: 8, vocab_size: 50}
prompt_length: [4, 8]
suffix_length: 2
num_sequences: 3
repeats: 2
attention: cascade
"""


def command(**changes: Any) -> list[str]:
    flags = {**TINY, **changes}
    return ["bench", *(f"--{name}={value}" for name, value in flags.items() if value is not None)]


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_the_whole_grid_in_a_csv_that_parses_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    axes = {"num_sequences": "[8, 1]", "tree": "[flat, nested]", "mode": "[step, forward]"}
    assert main(command(**axes, csv=tmp_path / "a.csv")) == 0
    rows = rows_of(tmp_path / "a.csv")
    assert len(rows) == 2 * 2 * 2
    shape = ModelShape(**SHAPE)
    for row in rows:
        work = make_work(Cell(shape, 60, 5, int(row["num_sequences"]), row["tree"], row["mode"]))  # type: ignore[arg-type]
        found = {name: float(text) for name, text in row.items() if re.fullmatch(r"\d+(\.\d+)?(e[+-]?\d+)?", text)}
        assert found["r"] == work.num_tokens / work.num_unique_tokens
        assert found["ideal_speedup"] == work.ideal_speedup(shape.config())
        seconds = 1e-6 * found["microseconds_per_unique_token"] * found["num_unique_tokens"]
        assert seconds == pytest.approx(found["radix_seconds"], rel=1e-12)
        memory = found["ordinary_peak_bytes"] / found["radix_peak_bytes"]
        assert found["memory_ratio"] == pytest.approx(memory, rel=1e-12)
        assert found["efficiency"] == found["measured_speedup"] / found["ideal_speedup"]
        assert found["lowest_speedup"] <= found["measured_speedup"] <= found["highest_speedup"]
        assert (row["dtype"], row["vocab_size"]) == ("float32", "97")
    without_sharing = [row for row in rows if row["num_sequences"] == "1"]
    assert {(row["r"], row["ideal_speedup"]) for row in without_sharing} == {("1.0", "1.0")}
    captured = capsys.readouterr()
    header, _, columns, *table = captured.out.splitlines()
    assert re.match(r"\d{4}-\d\d-\d\d, .*threads.*, float32, torch \d.*, transformers \d.*, medians of 1 ", header)
    assert columns.split() == [*TITLES, "speed-up", "highest", "ciency", "token", *["ordinary", "radix"] * 2, *LAST]
    assert len(table) == len(rows) and table[0].split()[:7] == ["2x32", "8", "x", "(60", "+", "5)", "flat"]
    assert captured.err.splitlines()[0] == "[1/8] 2x32, 8 x (60 + 5), flat, step"


@FULL
def test_a_config_and_what_overrides_it(tmp_path: Path) -> None:
    (tmp_path / "grid.yaml").write_text(GRID)
    given = ["--prompt_length", "[6, 0]", f"--csv={tmp_path / 'a.csv'}"]
    assert main(["bench", "--config", str(tmp_path / "grid.yaml"), *given]) == 0
    rows = rows_of(tmp_path / "a.csv")
    cells = [("1x16", "6"), ("1x16", "0"), ("wide", "6"), ("wide", "0")]
    assert [(row["model"], row["prompt_length"]) for row in rows] == cells
    assert [row["r"] == row["ideal_speedup"] == "1.0" for row in rows] == [False, True] * 2  # nothing to share


@FULL
def test_cells_that_are_too_large_are_left_out_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(prompt_length="[60, 600]", max_teraflops=1e-4, csv=tmp_path / "a.csv")) == 0
    assert [row["prompt_length"] for row in rows_of(tmp_path / "a.csv")] == ["60"]
    assert "[2/2] 2x32, 8 x (600 + 5), flat, step: left out: " in capsys.readouterr().err


def test_times_of_a_wrong_gradient_are_not_reported_and_the_others_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_wrong_keys(monkeypatch, above=65)  # if there is something to share
    assert main(command(num_sequences="[1, 8]", csv=tmp_path / "a.csv")) == 1
    captured = capsys.readouterr()
    (error,) = (line for line in captured.err.splitlines() if line.startswith("error: "))
    assert "8 x (60 + 5), flat, step, cascade: float32: NOT EQUAL: model.layers." in error
    assert ".self_attn.k_" in error and "worst element [" in error
    assert [row["num_sequences"] for row in rows_of(tmp_path / "a.csv")] == ["1"]
    assert "1 x (60 + 5)" in captured.out and "8 x (60 + 5)" not in captured.out


@pytest.mark.parametrize(("name", "begins"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml")])
@FULL
def test_a_picture(tmp_path: Path, name: str, begins: bytes) -> None:
    assert main(command(plot=tmp_path / name, num_sequences="[1, 8]", attention="[cascade, expand]")) == 0
    assert (tmp_path / name).read_bytes().startswith(begins)


def test_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    for changes, code, message in (
        ({"prompt_lenght": 3}, 2, "no key prompt_lenght, did you mean prompt_length?"),
        ({"prompt_length": "many"}, 2, "prompt_length must be an integer or list of integer; got many ("),
        ({"attention": "ring"}, 2, "ring"),
        ({"float64_truth": "maybe"}, 2, "float64_truth must be true or false; got maybe"),
        ({"models": "{class_path: evil.Shape}"}, 2, "models must be mapping or list of mapping; got {class_path"),
        ({"repeats": 0}, 1, "repeats must be above 0, got 0"),
        ({"num_threads": 0}, 1, "num_threads must be above 0, got 0"),
        ({"max_teraflops": 0}, 1, "max_teraflops must be above 0, got 0"),
        ({"num_sequences": "[4, 0]"}, 1, "num_sequences must be at least 1, got 0"),
        ({"prompt_length": -1}, 1, "prompt_length must be at least 0, got -1"),
        *(
            ({key: "[]"}, 1, f"{key} is an empty list: nothing would be timed")
            for key in ("models", "tree", "attention")
        ),
        ({"suffix_length": 1}, 1, "suffix_length must be at least 2, got 1"),
        ({"models": {**SHAPE, "hidden_size": 0}}, 1, "models: hidden_size must be at least 1, got 0"),
        ({"models": {**SHAPE, "num_key_value_heads": 3}}, 1, "models: num_attention_heads (4) must be a multiple of"),
        ({"kernel": "flash_attn"}, 1, "kernel='flash_attn' cannot be used: needs CUDA"),
        ({"attn_implementation": "sdpaa"}, 1, "attn_implementation: "),
        ({"csv": "nowhere/a.csv"}, 1, "csv: no such folder: nowhere"),
        ({"plot": "a.pdf"}, 1, "plot must end in .png or .svg, got a.pdf"),
    ):
        assert main(command(**changes)) == code, changes
        (error,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("error: "))
        assert message in error


@pytest.mark.parametrize("width", [pytest.param(30, marks=FULL), 80, pytest.param(300, marks=FULL)])
def test_whatever_the_width_of_the_terminal_no_number_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "get_terminal_size", lambda *_: os.terminal_size((width, 24)))
        assert main(command(csv=tmp_path / "a.csv")) == 0
    text, (row,) = capsys.readouterr().out, rows_of(tmp_path / "a.csv")
    assert "…" not in text and "..." not in text
    for name in ("measured_speedup", "ideal_speedup", "efficiency", "r"):
        assert f"{float(row[name]):.2f}" in text
    assert f"{float(row['ordinary_tokens_per_second']):,.0f}" in text
    assert ("measured speed-up: " in text) == (width < 190)
    assert "efficiency: " in text or "effi-" in text


def test_neither_a_host_nor_a_path_nor_git_is_needed_in_the_header(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    header = radixtrain.timing.header(torch.device("cpu"), "float32", 3)
    assert platform.node() not in header and "/" not in header
