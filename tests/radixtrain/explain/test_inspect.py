"""`radixtrain inspect`, in this process: what it prints, what it refuses, and that it needs no weights."""

import json
import shutil
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from radixtrain.__main__ import main
from radixtrain.commands.explain import inspect
from radixtrain.data.datamodule import SFTData
from radixtrain.errors import UserError

Arguments = Callable[..., list[str]]
LEGEND = "×3 sequences that pass   ⟦loss⟧×2 that learn it, if not all   ↵ line break   ⋯ left out"


@pytest.fixture(scope="module")
def model(shop: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without weights."""
    folder = tmp_path_factory.mktemp("model")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(shop / "model" / name, folder)
    return folder


@pytest.fixture
def command(
    arguments: Arguments, model: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Its exit code, and what it writes to stdout and stderr."""

    def run(**flags: Any) -> tuple[int, str, str]:
        code = main(arguments("inspect", model__model_name_or_path=model, **flags))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def shown(shop: Path, model: Path, tmp_path: Path) -> Callable[..., str]:
    """What is printed in a width, without the command line. Arguments are those of `SFTData` and of `inspect`."""

    def run(width: int = 80, **options: Any) -> str:
        of_show = {name: options.pop(name) for name in ("step", "micro_batch", "row", "full") if name in options}
        files = {"train_file": str(shop / "train.jsonl"), "cache_dir": str(tmp_path), "dataset_num_proc": 1}
        data = SFTData(**{**files, "model_name_or_path": str(model), "batch_size": 4, **options})
        console = Console(width=width, file=StringIO())
        inspect(data, console, **of_show)
        return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]

    return run


def test_a_micro_batch(
    command: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    code, out, _ = command(step=1)
    lines = [line.rstrip() for line in out.splitlines()]
    assert code == 0
    assert lines[0] == "step 1 of 5, micro-batch 0 of 1, counted from 0"
    numbers = {line[:22].strip(): line[22:].split()[0] for line in lines[1:11]}
    assert list(numbers) == [
        *("sequences", "tokens", "computed tokens", "r", "labelled tokens", "distinct predictions"),
        *("predicting tokens", "segments", "depth", "roots"),
    ]
    num_tokens, computed = int(numbers["tokens"]), int(numbers["computed tokens"])
    assert numbers["sequences"] == "4" and numbers["r"] == f"{num_tokens / computed:.2f}"
    tree = lines[lines.index(LEGEND) + 2 :]
    assert tree[0].startswith("×4  tokens 0-")
    assert sum("; ends train.jsonl:" in line for line in tree) == 4
    assert "radix_cu_seqlens" not in out and "\x1b" not in out
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("width", [80, 120])
def test_it_fits_the_terminal(shown: Callable[..., str], width: int) -> None:
    lines = shown(width).splitlines()
    assert width - 12 < max(map(cell_len, lines)) <= width


def test_parts_of_a_step(shown: Callable[..., str]) -> None:
    sizes = {"max_tokens": 120, "max_length": 100}
    parts = [shown(micro_batch=index, **sizes) for index in range(2)]
    for index, part in enumerate(parts):
        assert part.startswith(f"step 0 of 5, micro-batch {index} of ")
    assert parts[0] != parts[1]


def test_a_row_longer_than_max_tokens_is_whole(shown: Callable[..., str]) -> None:
    """`max_length` is 4,096: the row is a micro-batch by itself, with all its tokens."""
    sizes = {"batch_size": 1, "max_length": 4096}
    assert shown(max_tokens=20, **sizes) == shown(max_tokens=4096, **sizes)


def test_what_it_shows_is_what_is_trained(shown: Callable[..., str], shop: Path) -> None:
    """The answers of the four rows of the step stand in the brackets."""
    rows = [json.loads(line)["messages"] for line in (shop / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    lines = shown(width=200).splitlines()
    for place, line in enumerate(lines):
        if "; ends train.jsonl:" in line:
            number = int(line.rpartition(":")[2])
            assert lines[place + 1].rstrip().endswith(f"{rows[number - 1][-1]['content']}<|im_end|>⟧")


def test_one_row(command: Callable[..., tuple[int, str, str]], shown: Callable[..., str]) -> None:
    code, out, _ = command(row="train.jsonl:7")
    assert code == 0
    assert "train.jsonl:7: row 7 of data.train_file" in " ".join(out.split())
    assert "computed, in the first epoch" in out
    assert out.splitlines()[4:20] == shown(row=7).splitlines()[4:20]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step": 5}, "step: an epoch has the steps 0 to 4, got 5"),
        ({"step": -1}, "step counts from 0, got -1"),
        ({"micro_batch": 1}, "micro_batch: step 0 has the micro-batches 0 to 0, got 1"),
        ({"row": 21}, "row: data.train_file has the rows 1 to 20, got 21"),
        ({"row": "x.jsonl:1"}, "row: no row 'x.jsonl:1' in the files of the configuration"),
        ({"dedup": False}, "inspect shows what a batch shares, which is nothing with dedup: false"),
        ({"train_file": None}, "data.train_file is missing"),
        ({"train_file": None, "row": 1}, "data.train_file is missing"),
    ],
)
def test_what_is_not_there(shown: Callable[..., str], options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        shown(**options)


def test_an_error_is_a_line(command: Callable[..., tuple[int, str, str]]) -> None:
    code, _, error = command(step=9)
    assert code == 1
    assert error.splitlines()[-1] == "error: step: an epoch has the steps 0 to 4, got 9"
