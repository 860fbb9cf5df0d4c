"""Files of settings as people write them: a key that stands twice is refused, and so are anchors and merges."""

from pathlib import Path
from typing import Any

import pytest

from radixtrain.errors import UsageError
from radixtrain.yaml_text import check_yaml, read_yaml


@pytest.mark.parametrize(
    ("text", "first", "second"),
    [
        ("data:\n  batch_size: 8\n  max_tokens: 64\n  batch_size: 4\n", 2, 4),
        ("data: {}\ndata: {}\n", 1, 2),
        ("rows:\n  - a: 1\n    b: 2\n    a: 3\n", 2, 4),  # in a list
        ("data: {'a': 1, \"a\": 2}\n", 1, 1),  # in quotes it is the same
        ("data:\n  a: 1\nrows: []\ndata:\n  b: 1\n", 1, 4),  # a section
    ],
)
def test_the_lines_of_both(text: str, first: int, second: int, tmp_path: Path) -> None:
    path = str(tmp_path / "my.yaml")
    Path(path).write_text(text)
    said = rf"^{path}:{second}: the key \w+ is given twice, first in {path}:{first}; leave one of them out$"
    with pytest.raises(UsageError, match=said):
        read_yaml(path)
    with pytest.raises(UsageError, match=r"^the key \w+ is given twice in one section"):  # on the command line
        check_yaml(text)


@pytest.mark.parametrize(
    ("text", "data"),
    [
        ("data: ['<<', '&x', '*x', a & b, 2 * 3]\n", ["<<", "&x", "*x", "a & b", "2 * 3"]),
        ('data:\n  "1": text\n  1: number\n', {"1": "text", 1: "number"}),
        ("data:\n  a: {c: 1}\n  b: {c: 1}\n", {"a": {"c": 1}, "b": {"c": 1}}),
    ],
)
def test_what_is_not_given_twice(tmp_path: Path, text: str, data: Any) -> None:
    (tmp_path / "my.yaml").write_text(text)
    assert read_yaml(str(tmp_path / "my.yaml"))["data"] == data


@pytest.mark.parametrize(
    "text",
    ["a: 1\nb: &x {c: 2}\n", "a: 1\nb: &x [*x]\n", "a: 1\nb: *x\n", "a: 1\nb: &x 2\n", "a: 1\n<<: {b: 2}\n"],
)
def test_anchors_aliases_and_merges_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=rf"^{path}:2: `&`, `\*` and `<<` are not read: write the value out"):
        read_yaml(str(path))
