"""A key that stands twice, in files and values as people write them; anchors, merges and later files still override."""

import re
from pathlib import Path
from typing import Any

import jsonargparse
import pytest

from radixtrain.commands.repeated_keys import refuse_repeated_keys


@pytest.fixture
def parser() -> Any:
    refuse_repeated_keys()
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--config", action="config")
    parser.add_argument("--data", type=dict)
    parser.add_argument("--rows", type=list)
    return parser


def test_the_lines_of_both(parser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the file was named if it is in this folder, else in full."""
    (tmp_path / "run").mkdir()
    other = str(tmp_path / "other.yaml")
    for folder, path, text, lines in (
        (tmp_path, "run/my.yaml", "data:\n  batch_size: 8\n  max_tokens: 64\n  batch_size: 4\n", (4, 2)),
        (tmp_path / "run", other, "data: {}\ndata: {}\n", (2, 1)),
        (tmp_path, "run/my.yaml", "rows:\n  - a: 1\n    b: 2\n    a: 3\n", (4, 2)),  # in a list
        (tmp_path, "run/my.yaml", "data:\n  a: &x\n    b: 1\n    b: 2\n  c: *x\n", (4, 3)),  # in an anchor
        (tmp_path, "run/my.yaml", "data: {'a': 1, \"a\": 2}\n", (1, 1)),  # in quotes it is the same
        (tmp_path, "run/my.yaml", "data:\n  a: 1\nrows: []\ndata:\n  b: 1\n", (4, 1)),  # a section
    ):
        monkeypatch.chdir(folder)
        refuse_repeated_keys()  # which looks where it is
        Path(path).write_text(text)
        with pytest.raises(jsonargparse.ArgumentError) as refused:
            parser.parse_args(["--config", path])
        said = rf"{path}:{lines[0]}: the key \w+ is given twice, first in {path}:{lines[1]}; leave one of them out"
        assert re.fullmatch(said, str(refused.value)), text


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
