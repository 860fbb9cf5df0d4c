"""A key that stands twice, in files and values as people write them; anchors, merges and later files still override."""

from pathlib import Path
from typing import Any

import jsonargparse
import pytest

from radixtrain.__main__ import main
from radixtrain.commands.repeated_keys import refuse_repeated_keys


@pytest.fixture
def parser() -> Any:
    refuse_repeated_keys()
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--config", action="config")
    parser.add_argument("--data", type=dict)
    parser.add_argument("--rows", type=list)
    return parser


@pytest.fixture
def refusal(parser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What is said of a file, `run/my.yaml` of this folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()

    def parse(text: str, path: str = "run/my.yaml") -> str:
        refuse_repeated_keys()  # in the folder of now
        Path(path).write_text(text)
        with pytest.raises(jsonargparse.ArgumentError) as refused:
            parser.parse_args(["--config", path])
        return str(refused.value)

    return parse


def test_the_lines_of_both(refusal: Any) -> None:
    told = "run/my.yaml:4: the key batch_size is given twice, first in run/my.yaml:2; leave one of them out"
    assert refusal("data:\n  batch_size: 8\n  max_tokens: 64\n  batch_size: 4\n") == told


def test_a_file_that_lies_elsewhere(refusal: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path / "run")
    path = str(tmp_path / "other.yaml")
    assert refusal("data: {}\ndata: {}\n", path).startswith(f"{path}:2: the key data is given twice, first in {path}:1")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("rows:\n  - a: 1\n    b: 2\n    a: 3\n", 4),  # in a list
        ("data:\n  a: &x\n    b: 1\n    b: 2\n  c: *x\n", 4),  # in an anchor
        ("data: {'a': 1, \"a\": 2}\n", 1),  # in quotes it is the same
        ("data:\n  a: 1\nrows: []\ndata:\n  b: 1\n", 4),  # a section
    ],
)
def test_wherever_it_stands(refusal: Any, text: str, line: int) -> None:
    assert refusal(text).startswith(f"run/my.yaml:{line}: the key ")


def test_a_value_of_the_command_line(parser: Any) -> None:
    with pytest.raises(jsonargparse.ArgumentError, match=r"^the key a is given twice in one section; leave one"):
        parser.parse_args(["--data", "{a: 1, a: 2}"])


@pytest.mark.parametrize(
    ("text", "data"),
    [
        ("rows: [&x {a: 1, b: 2}]\ndata:\n  <<: *x\n  a: 3\n", {"a": 3, "b": 2}),
        ("rows: [&x {a: 1}, &y {b: 2}]\ndata:\n  <<: *x\n  <<: *y\n", {"a": 1, "b": 2}),
        ("rows: [&x {a: 1}, *x]\ndata: *x\n", {"a": 1}),
        ('data:\n  "1": text\n  1: number\n', {"1": "text", 1: "number"}),
        ("data:\n  a: {c: 1}\n  b: {c: 1}\n", {"a": {"c": 1}, "b": {"c": 1}}),
    ],
)
def test_what_is_not_given_twice(parser: Any, tmp_path: Path, text: str, data: dict[Any, Any]) -> None:
    (tmp_path / "my.yaml").write_text(text)
    assert parser.parse_args(["--config", str(tmp_path / "my.yaml")]).data == data


def test_a_later_file_overrides(parser: Any, tmp_path: Path) -> None:
    for name, value in (("one", 1), ("two", 2)):
        (tmp_path / f"{name}.yaml").write_text(f"data: {{a: {value}}}\n")
    files = [f"--config={tmp_path / name}.yaml" for name in ("one", "two")]
    assert parser.parse_args([*files]).data == {"a": 2}


def test_what_the_command_says(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "my.yaml"
    path.write_text("data:\n  batch_size: 8\n  batch_size: 4\n")
    assert main(["fit", "--config", str(path)]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"error: {path}:3: the key batch_size is given twice, first in {path}:2; leave one of them out"
    )
