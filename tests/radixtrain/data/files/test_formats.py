"""Files of every kind: each is read as it is meant, or says what is wrong and where. None crashes, none loses a row.

A case is a file's name, its bytes, and what becomes of its rows in their order: `learns X` for each sample, or the
error of a row; or else one text, the error of the whole file. `@` stands for the path, ¶ for a line feed.
"""
# ruff: noqa: E501 (the tables)

import ast
import gzip
import io
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixtrain.data.chat import ChatEncoder
from radixtrain.data.files.sources import Row, Source, UnreadRow, open_rows, read_rows
from radixtrain.errors import DataError, UserError
from tests.support import TRIES
from tests.support.batches import byte_tokenizer


def parquet(**columns: Any) -> bytes:
    return as_parquet(pa.table(columns))


def as_parquet(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pyarrow.parquet.write_table(table, sink)
    return sink.getvalue()


def zstd(content: bytes) -> bytes:
    return pa.compress(content, codec="zstd", asbytes=True)


A = b'{"text": "a"}\n'
B = b'{"text": "b"}\n'
AB = ["learns a", "learns b"]
TWICE = as_parquet(pa.table([pa.array(["a"]), pa.array(["b"])], names=["text", "text"]))
LONG = b"".join(b'{"text": "%d"}\n' % n for n in range(10_000))

TEXTS = r"""
a.jsonl b'' -> file: no rows in @; expected at least one
a.jsonl b'\n \n\t\n' -> file: no rows in @; expected at least one
a.jsonl b'\xef\xbb\xbf{"text": "a"}\n\r\n{"text": "b"}' -> learns a | learns b
a.jsonl b'\n  \n{"text": "a"}\n\n\t\n{"text": "b"}' -> learns a | learns b
a.ndjson b'{"text": "a"}\n{"text": "b"}\n' -> learns a | learns b
a.JSONL b'{"text": "a"}\n' -> learns a
a.jsonl b'{"text": "a"}\n{"text": "x"\n{"text": "b"}\n' -> learns a | @:2: not valid JSON: Expecting ',' delimiter | learns b
a.jsonl b'{"text": "a"}\n}\n' -> learns a | @:2: not valid JSON: Expecting value at column 1
a.jsonl b'{"text": "a' -> @:1: not valid JSON: Unterminated string
a.jsonl b'{"text": NaN}\n' -> @:1: not valid JSON: NaN is not a JSON number
a.jsonl b'{"text": -Infinity}\n' -> @:1: not valid JSON: -Infinity is not a JSON number
a.jsonl b'{"text": "x", "text": "y"}' -> @:1: key 'text' occurs more than once in one object; keep one of its values
a.jsonl b'{"a": {"b": 1, "b": 2}}' -> @:1: key 'b' occurs more than once
a.jsonl b'{"text": "\xe9"}\n{"text": "b"}\n' -> @:1: not valid UTF-8: byte 0xe9 at offset 10 | learns b
a.jsonl b'{"text": "\\ud83d"}' -> @:1: text holds \ud83d, half of a surrogate pair
a.jsonl b'{"\\udc00": 1}' -> @:1: text holds \udc00, half of a surrogate pair; write both halves or \ufffd
a.jsonl b'{"text": "\\uD83D\\uDE00"}' -> learns 😀
a.jsonl b'\x00\x00\n{"text": "b"}\n' -> @:1: not valid JSON | learns b
a.jsonl b'"text"\n3\nnull\n' -> @:1: expected a JSON object, found | @:2: expected a JSON object, found | @:3: expected a JSON object, found
a.jsonl b'[{"text": "a"}]' -> @:1: expected a JSON object, found an array; a file that holds one array of rows is named .json
a.jsonl b'[\n{"text": "a"}\n]' -> @:1: not valid JSON: Expecting value at column 2; a file that holds one array of rows is named .json | learns a | @:3: not valid JSON
a.jsonl b'\xff\xfe{\x00"\x00t\x00e\x00x\x00t\x00"\x00:\x00 \x00"\x00a\x00"\x00}\x00\n\x00' -> @:1: not valid UTF-8: byte 0xff at offset 0; save the file as UTF-8 | @:2:
a.jsonl b'PK\x03\x04zip' -> @:1: not valid JSON: Expecting value at column 1
a.json b'[{"text": "a"}, {"text": "b"}]' -> learns a | learns b
a.json b'\xef\xbb\xbf{"version": 1, "data": [{"text": "a"},\n{"text": "b"}]}' -> learns a | learns b
a.json b'{"text": "a"}\n\n{"text": "b"}\n' -> learns a | learns b
a.json b'{"text": "a"}\n{\n{"text": "b"}\n' -> learns a | @:2: not valid JSON: Expecting property name | learns b
a.json b'[]' -> file: no rows in @; expected at least one
a.json b'{}' -> file: @: expected an array of rows, or an object with one such array, found the keys ; a file of one object per line is named .jsonl
a.json b'"a"' -> file: @: expected an array of rows, or an object with one such array, found a string
a.json b'[{"text": "a"}, 7, {"text": "b"}]' -> learns a | @:row 2: expected a JSON object, found a number | learns b
a.json b'[{"text": "\\ud83d"}, {"text": "b"}]' -> @:row 1: text holds \ud83d, half of a surrogate pair | learns b
a.json b'[{"text": "a", "text": "b"}, {"text": "b"}]' -> file: @: key 'text' occurs more than once
a.json b'[{"text": NaN}, {"text": "b"}]' -> file: @: not valid JSON: NaN is not a JSON number
a.json b'[{"text": "a"}\n{"text": "b"}]' -> file: @: not valid JSON: Expecting ',' delimiter at line 2, column 1
a.json b'[{"text": "a"}' -> file: @: not valid JSON: Expecting ',' delimiter at column 15
a.json b'[{"text": "a"},]' -> file: @: not valid JSON:
a.json b'[{"text": "a"}] {}' -> file: @: not valid JSON: Extra data at column 17
a.json b'[{"text": "\xff"}]' -> file: @: not valid UTF-8: byte 0xff at offset 11
a.json b'{"train": [{"text": "a"}], "test": [{"text": "b"}]}' -> file: @: expected an array of rows, or an object with one such array, found the keys train, test
a.json b'{"messages": []}' -> file: @: expected an array of rows, or an object with one such array, found the keys messages
a.csv b'text\r\na\r\n\r\nb\r\n' -> learns a | learns b
a.csv b'\xef\xbb\xbftext\n"a"\nb' -> learns a | learns b
a.csv b'question,answer\nq,a,b\nq,b\n' -> @:2: expected 2 fields (question, answer), found 3 | learns b
a.csv b'text\na\n"b' -> learns a | @:3: cannot be read as a table: unexpected end of data
a.csv b'text\n"a"b\nb\n' -> @:2: cannot be read as a table: ',' expected after '"' | learns b
a.csv b'text\n\xe9\nb\n' -> file: @:2: not valid UTF-8: byte 0xe9 at offset 0; save the file as UTF-8
a.csv b'text,id\n,\nb,2\n' -> @:2: no token bears loss | learns b
a.csv b'text,text\na,b\n' -> file: @:1: the header names the column 'text' more than once
a.csv b'text\n' -> file: no rows in @; expected at least one
a.csv b'' -> file: no rows in @; expected at least one
a.csv b',question,answer\n0,q,a\n' -> learns a
a.csv b'q,a\nq,b\n' -> @:2: no format has the columns q, a; expected messages
a.csv b'\xff\xfet\x00e\x00x\x00t\x00\n\x00a\x00\n\x00' -> file: @:1: not valid UTF-8: byte 0xff at offset 0; save the file as UTF-8
a.csv b'text\ra\r' -> file: @:1: cannot be read as a table: new-line character
a.tsv b'question\tanswer\nq, \ta\n' -> learns a
a.jsonl.gz b'{"text": "a"}\n' -> file: @: cannot be decompressed:
a.jsonl.zst b'{"text": "a"}\n' -> file: @: cannot be decompressed:
a.json.gz b'' -> file: no rows in @; expected at least one
a.arrow b'ARROW1 nothing' -> file: @: cannot be read:
a.arrow b'' -> file: @: cannot be read:
a.xlsx b'PK\x03\x04' -> file: @: unknown suffix '.xlsx'; expected .jsonl
a b'{"text": "a"}\n' -> file: @: unknown suffix ''; expected .jsonl
"""
FILES: list[tuple[str, bytes, list[str] | str]] = [
    ("a.jsonl", '{"text": "x\u2028y\x85"}'.encode(), ["learns x\u2028y\x85"]),
    ("a.jsonl", b"[" * 100_000 + b"\n" + B, ["@:1: not valid JSON: nested too deeply", "learns b"]),
    ("a.json", b"[" * 100_000, "@: not valid JSON: nested too deeply"),
    ("a.csv", b'question,answer\nq,"a\n""b"""\nq\n', ['learns a\n"b"', "@:4: expected 2 fields (question, answer), found 1"]),
    ("a.csv", b"text\n" + b"x" * 200_000 + b"\n", ["learns " + "x" * 200_000]),
    ("a.jsonl.gz", gzip.compress(A) + gzip.compress(B), AB),
    ("a.jsonl.zst", zstd(A) + zstd(B), AB),
    ("a.csv.gz", gzip.compress(b"text\na\n"), AB[:1]),
    ("a.json.zst", zstd(b'[{"text": "a"}]'), AB[:1]),
    ("a.parquet.zst", zstd(parquet(text=["a"])), "@: unknown suffix '.zst'; expected .jsonl, .ndjson, .json, .csv, .tsv, each also with .gz or .zst, .parquet or .arrow"),
    ("a.jsonl.gz", gzip.compress(LONG)[:-100], "@: cannot be decompressed: Truncated compressed stream"),
    ("a.jsonl.zst", zstd(LONG)[:-100], "@: cannot be decompressed: Truncated compressed stream"),
    ("a.json.gz", gzip.compress(LONG)[:-100], "@: cannot be decompressed: Truncated compressed stream"),
    ("a.parquet", b"PAR1 nothing PAR1", "@: cannot be read: "),
    ("a.parquet", b"", "@: cannot be read: "),
    ("a.parquet", TWICE, "@: cannot be read: "),
    ("a[1]*.parquet", parquet(text=["a"]), AB[:1]),
    ("a.parquet", parquet(text=["a", None, "b"]), ["learns a", "@:row 2: no format has the columns text (null)", "learns b"]),
]  # fmt: skip


def cases() -> Iterator[tuple[str, bytes, list[str] | str]]:
    yield from FILES
    for line in TEXTS.strip().splitlines():
        given, becomes = line.replace("¶", "\n").split(" -> ")
        name, content = given.split(" ", 1)
        of_file = becomes.removeprefix("file: ")
        yield name, ast.literal_eval(content), of_file if of_file != becomes else becomes.split(" | ")


def outcomes(path: Path) -> list[str]:
    """Row by row: what is learned from each sample, or what is wrong."""
    found = []
    tokenizer = byte_tokenizer()
    encoder = ChatEncoder(tokenizer)
    for row in open_rows(path):
        errors: list[DataError] = []
        [samples] = encoder.encode_all([row], errors.append)
        labels = [sample.labels[sample.labels != -100] for sample in samples]
        found += [f"learns {tokenizer.decode(each).removesuffix('<|im_end|>')}" for each in labels] or map(str, errors)
    return found


def error_of(read: Any) -> str:
    with pytest.raises(UserError) as raised:
        list(read())
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize("name", sorted({name for name, *_ in cases()}))
def test_a_file(name: str, tmp_path: Path) -> None:
    for number, (_, content, expected) in enumerate(case for case in cases() if case[0] == name):
        path = tmp_path / str(number) / name
        path.parent.mkdir()
        path.write_bytes(content)
        if isinstance(expected, str):
            assert error_of(lambda path=path: outcomes(path)).startswith(expected.replace("@", str(path)))
            continue
        found = outcomes(path)
        assert len(found) == len(expected), found
        for said, wanted in zip(found, expected, strict=True):
            assert said == wanted if wanted.startswith("learns") else said.startswith(wanted.replace("@", str(path)))


def test_a_forbidden_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str, mode: str) -> None:  # root, as whom containers run tests, may read every file
        raise PermissionError(13, "Permission denied", path)

    (tmp_path / "a.jsonl").write_bytes(A)
    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(UserError, match=r"^cannot read .*: Permission denied$"):
        list(read_rows(tmp_path / "a.jsonl"))


FRAGMENTS = st.sampled_from(
    [b'{"a":', b'"', b"\n", b"\r", b"}", b"[", b"]", b"\\ud800", b"\xff", b"1", b",", b"\t", b"PAR1", b"ARROW1", b"\0"]
)
SUFFIXES = st.sampled_from(["jsonl", "json", "csv", "tsv", "parquet", "arrow", "jsonl.gz", "csv.zst"])


@settings(max_examples=16 * TRIES, deadline=None)
@given(suffix=SUFFIXES, content=st.binary(max_size=60) | st.lists(FRAGMENTS, max_size=12).map(b"".join))
def test_any_bytes_give_rows_or_a_user_error(tmp_path_factory: Any, suffix: str, content: bytes) -> None:
    path = tmp_path_factory.mktemp("fuzz") / f"a.{suffix}"
    path.write_bytes(content)
    errors: list[DataError] = []
    try:
        for row in open_rows(path):
            try:
                row.read()
            except DataError as error:
                errors.append(error)
    except UserError as error:
        assert str(path) in str(error)
    assert all(error.where.startswith(str(path)) for error in errors)


def test_lines_are_parsed_by_whoever_reads_them(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"q": "x"}\n\n{\n')
    first, second = open_rows(Source(str(path), columns={"user": "q"}))
    assert first == UnreadRow(b'{"q": "x"}', f"{path}:1", {"user": "q"})
    first, second = pickle.loads(pickle.dumps([first, second]))
    assert first.read() == Row({"user": "x"}, f"{path}:1")
    with pytest.raises(DataError, match=f"^{path}:3: not valid JSON"):
        second.read()


def test_a_mapping_is_applied_to_every_kind_of_file(tmp_path: Path) -> None:
    lines, table, tokens = tmp_path / "a.jsonl", tmp_path / "a.csv", tmp_path / "b.jsonl"
    lines.write_bytes(b'{"q": "x", "id": 1, "tools": []}\n{"id": 2}')
    table.write_bytes(b"q,id\nx,1\n")
    tokens.write_bytes(b'{"tokens": [1, 2], "labels": [-100, 2], "id": 7}')
    first, second = open_rows(Source(str(lines), columns={"user": "q", "system": "s"}))
    assert first.read() == Row({"user": "x", "tools": []}, f"{lines}:1", {"id": 1})
    with pytest.raises(DataError, match=":2: columns: user: the row has no column 'q'; it has id"):
        second.read()
    assert list(read_rows(Source(str(table), columns={"id": None}))) == [Row({"q": "x"}, f"{table}:2")]
    [row] = read_rows(Source(str(tokens), columns={"input_ids": "tokens"}))
    read = {"input_ids": [1, 2], "labels": [-100, 2]}, f"{tokens}:1", {"id": 7}
    assert row == Row(*read), "and what comes with tokens"
