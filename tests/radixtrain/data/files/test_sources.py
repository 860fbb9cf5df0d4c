"""What a config key may name, and which files that is."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from radixtrain.data.files import readers
from radixtrain.data.files.sources import Source, as_sources, files_of, read_rows
from radixtrain.errors import UserError

datasets = pytest.importorskip("datasets", reason="saved data sets: pip install datasets")


def write(folder: Path, **texts: str) -> None:
    """A file of one row for each name, in which __ is a dot."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name.replace("__", ".")).write_text(json.dumps({"text": text}), encoding="utf-8")


def texts(source: Any) -> list[str]:
    return [row.fields["text"] for row in read_rows(source)]


def test_as_sources() -> None:
    assert as_sources("a.jsonl") == [Source("a.jsonl")]
    assert as_sources(Path("a.jsonl"), {"user": "q"}) == [Source("a.jsonl", columns={"user": "q"})]
    found = as_sources(
        ["a.jsonl", {"path": "b", "name": "B", "weight": 2, "columns": {"text": "t"}}, {"path": "c", "split": "train"}],
        {"user": "q"},
    )
    assert found == [
        Source("a.jsonl", columns={"user": "q"}),
        Source("b", name="B", weight=2, columns={"text": "t"}),
        Source("c", split="train", columns={"user": "q"}),
    ]
    assert [source.label for source in found] == ["a.jsonl", "B", "c/train"]


@pytest.mark.parametrize(
    ("value", "columns", "message"),
    [
        ([], None, "data.train_file: expected at least one source, found an empty list"),
        (7, None, "data.train_file: expected a path or a mapping with the key path, found 7"),
        ({"name": "x"}, None, "data.train_file: path: Field required; the keys of a source are path, name, subset,"),
        ({"path": "x", "wieght": 1}, None, "data.train_file: wieght: Unexpected keyword argument; the keys of a"),
        ({"path": "x", "weight": 0}, None, "data.train_file: weight must be above 0 and at most 10,000; got 0"),
        ({"path": "x", "split": 1}, None, "data.train_file: split: Input should be a valid string"),
        (["x", "x"], None, "data.train_file: x occurs more than once; give each a name, or one a weight"),
        ("x", {"question": "prompt"}, "data.columns: question: prompt: 'question' is not one of our columns"),
        ("x", {"prompt": "q", "completion": "q"}, "data.columns: q is named more than once"),
        ("x", {"prompt": 1}, "data.columns: expected a mapping of our columns"),
        ("x", ["prompt"], "data.columns: expected a mapping of our columns"),
    ],
)
def test_what_is_refused(value: Any, columns: Any, message: str) -> None:
    with pytest.raises(UserError) as raised:
        as_sources(value, columns)
    assert str(raised.value).startswith(message)


def test_globs_are_read_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "data", b__jsonl="b", a__jsonl="a", README__md="x")
    write(tmp_path / "data" / "more", c__jsonl="c")
    monkeypatch.chdir(tmp_path)
    assert texts("data/*.jsonl") == ["a", "b"]
    assert texts("data/**/?.jsonl") == ["a", "b", "c"]
    assert files_of(Source("data/a.jsonl")) == ["data/a.jsonl"]
    for path, error in (
        (
            "data",
            r"data: is a folder that save_to_disk has not written; choose its files by a glob such as data/\*\.jsonl",
        ),
        ("data/*", r"data/README\.md: unknown suffix '\.md'; expected \.jsonl"),
        ("*.jsonl", r"no file matches \*\.jsonl"),
        ("gone.jsonl", r"no such file: gone\.jsonl"),
    ):
        with pytest.raises(UserError, match=error):
            read_rows(path)


def test_what_exists_is_no_glob(tmp_path: Path) -> None:
    write(tmp_path, **{"a[1]__jsonl": "this", "a1__jsonl": "other"})
    assert texts(tmp_path / "a[1].jsonl") == ["this"]


@pytest.mark.parametrize("named", ["caf\udce9/a.jsonl", "caf*/*.jsonl"])
def test_a_name_that_is_not_utf8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("caf\udce9"), a__jsonl="a")
    for ask in (read_rows, files_of):
        with pytest.raises(UserError, match=r"caf\\xe9.*: the name of this file is not UTF-8; rename it"):
            ask(Source(named))


def test_a_split_is_of_data_sets_only(tmp_path: Path) -> None:
    write(tmp_path, a__jsonl="a")
    with pytest.raises(UserError, match="only a saved data set or one of the hub has a split; remove the key split"):
        read_rows(Source(str(tmp_path / "a.jsonl"), split="train"))


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.json.gz", "a.csv.gz", "a.tsv"])
def test_a_row_without_an_end_is_refused_before_it_fills_the_memory(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / name
    content = b'{"text": "a"}\n' * 2 if ".json" in name else b'text\na\n"'
    content += (b"x" * 999 + b"\n") * 9 if name == "a.tsv" else b"x" * 9999
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    monkeypatch.setattr(readers, "MAX_ROW_BYTES", 5000)
    rows = read_rows(path)
    assert next(rows).fields == {"text": "a"}
    with pytest.raises(UserError, match=rf"{name}:3: .* look for a quote or a line that is not closed"):
        list(rows)
    path.unlink()
    os.mkfifo(path)
    for source in (path, f"{tmp_path}/*"):
        with pytest.raises(UserError, match=rf"{name}: is a pipe or a device, which may never end; save its content"):
            files_of(Source(str(source)))


def test_saved_data_sets(tmp_path: Path) -> None:
    one = datasets.Dataset.from_list([{"text": "a"}])
    one.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=one).save_to_disk(tmp_path / "only")
    datasets.DatasetDict(train=one, test=one).save_to_disk(tmp_path / "both")
    assert texts(tmp_path / "one") == texts(tmp_path / "only") == ["a"]
    [row] = read_rows(Source(str(tmp_path / "both"), split="test"))
    assert row.where == f"{tmp_path / 'both' / 'test'}:row 1"
    [file] = files_of(Source(str(tmp_path / "both"), split="test"))
    assert Path(file).name == "data-00000-of-00001.arrow"
    for name, split, error in (
        ("both", None, "has the splits train, test; name one, as in .*split: train"),
        ("both", "dev", "has the splits train, test; name one"),
        ("one", "train", "holds one data set without splits; remove split: train"),
    ):
        with pytest.raises(UserError, match=error):
            read_rows(Source(str(tmp_path / name), split=split))


def test_hub_names(monkeypatch: pytest.MonkeyPatch) -> None:
    one = datasets.Dataset.from_list([{"text": "a"}])
    asked = []

    def load(name: str, subset: str | None, split: str | None, trust_remote_code: bool) -> Any:
        asked.append((name, subset, split, trust_remote_code))
        return one if split else datasets.DatasetDict(train=one, test=one)

    monkeypatch.setattr(datasets, "load_dataset", load)
    [row] = read_rows(Source("acme/chats", subset="en", split="train"))
    assert (row.fields, row.where) == ({"text": "a"}, "acme/chats/en/train:row 1")
    assert asked == [("acme/chats", "en", "train", False)]
    with pytest.raises(UserError, match="acme/chats: is only in memory; save it with save_to_disk"):
        files_of(Source("acme/chats", split="train"))
    with pytest.raises(
        UserError, match=r"acme/chats: has the splits train, test; name one, as in \{path: acme/chats, "
    ):
        read_rows("acme/chats")


def test_a_hub_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ConnectionError("Couldn't reach 'acme/chats' on the Hub\nand more")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    said = "not a file or folder, and not loaded from the Hugging Face hub: Couldn't reach 'acme/chats' on the Hub"
    for ask in (read_rows, files_of):
        with pytest.raises(UserError, match=f"^acme/chats: {said}$"):
            ask(Source("acme/chats"))


WEB = "https://a.org/b.jsonl"


@pytest.mark.parametrize("path", ["chats", "a/b/c", "./chats", "acme/chats.jsonl", "/acme", "acme/", "my chats/x", WEB])
def test_what_is_no_hub_name(path: str) -> None:
    with pytest.raises(UserError) as raised:
        read_rows(path)
    remote = "; only files of this machine are read: download it first" if path == WEB else ""
    assert str(raised.value) == f"no such file: {path}{remote}"


def test_no_password_is_in_a_label() -> None:
    assert Source("a.jsonl", name="https://me:letmein@example.com/x").label == "https://***@example.com/x"
