"""Files to rows: every kind of file, and each bad row named by file and line."""

import json
import os
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixtrain.data.files.sources import Source
from radixtrain.data.formats import Row, UnreadRow, open_rows, read_rows
from radixtrain.errors import DataError, UserError

datasets = pytest.importorskip("datasets", reason="parquet and saved data sets: pip install datasets")


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return path


def read_all(path):
    errors = []
    return [row.fields for row in read_rows(path, errors.append)], [str(error) for error in errors]


def test_jsonl_rows_carry_their_line(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"text": "x"}\n\n{"text": "y"}\n')
    assert list(read_rows(path)) == [Row({"text": "x"}, f"{path}:1"), Row({"text": "y"}, f"{path}:3")]


@pytest.mark.parametrize(
    "content",
    [
        b'\xef\xbb\xbf{"text": "x"}\n{"text": "y"}\n',
        b'{"text": "x"}\r\n{"text": "y"}\r\n',
        b'\n  \n{"text": "x"}\n\t\n{"text": "y"}',
    ],
    ids=["byte order mark", "CRLF", "blank lines, no newline at the end"],
)
def test_jsonl_tolerates(tmp_path, content):
    assert read_all(write(tmp_path / "a.jsonl", content)) == ([{"text": "x"}, {"text": "y"}], [])


def test_jsonl_keeps_a_line_separator_inside_a_text(tmp_path):
    assert read_all(write(tmp_path / "a.jsonl", '{"text": "x\u2028y\x85"}'))[0] == [{"text": "x\u2028y\x85"}]


BAD_LINES = [
    (b'{"text": "x"', "not valid JSON: Expecting ',' delimiter at column 13"),
    (b"nonsense", "not valid JSON: Expecting value at column 1"),
    (b'{"text": NaN}', "not valid JSON: NaN is not a JSON number"),
    (b"[" * 200_000, "not valid JSON: nested too deeply to be read"),
    (b"[1]", "expected a JSON object, found an array"),
    (b'"x"', "expected a JSON object, found a string"),
    (b"7", "expected a JSON object, found a number"),
    (b"null", "expected a JSON object, found null"),
    (b'{"a": {"b": 1, "b": 2}}', "key 'b' occurs more than once in one object; keep one of its values"),
    (b'{"text": "\xff"}', "not valid UTF-8: byte 0xff at offset 10; save the file as UTF-8"),
    (b'{"text": "\\ud83d!"}', r"text holds \ud83d, half of a surrogate pair; write both halves or \ufffd"),
    (b'{"\\udc00": 1}', r"text holds \udc00, half of a surrogate pair; write both halves or \ufffd"),
]


@pytest.mark.parametrize(("line", "reason"), BAD_LINES, ids=[reason[:40] for _, reason in BAD_LINES])
def test_bad_lines_are_named_and_the_others_read(tmp_path, line, reason):
    path = write(tmp_path / "a.jsonl", b'{"text": "x"}\n' + line + b'\n{"text": "y"}\n')
    assert read_all(path) == ([{"text": "x"}, {"text": "y"}], [f"{path}:2: {reason}"])
    with pytest.raises(DataError) as raised:
        list(read_rows(path))
    assert (raised.value.where, raised.value.reason) == (f"{path}:2", reason)


def test_a_whole_surrogate_pair_is_one_character(tmp_path):
    assert read_all(write(tmp_path / "a.jsonl", r'{"text": "\ud83d\ude00"}')) == ([{"text": "\U0001f600"}], [])


def test_json_array(tmp_path):
    path = write(tmp_path / "a.json", '\ufeff[{"text": "x"},\n 7,\n {"text": "y"}]')
    expected = f"{path}:row 2: expected a JSON object, found a number"
    assert read_all(path) == ([{"text": "x"}, {"text": "y"}], [expected])
    assert [row.where for row in read_rows(path, lambda error: None)] == [f"{path}:row 1", f"{path}:row 3"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "{path}: expected an array of rows, found an object without one; one object per line is named .jsonl"),
        (
            '[{"a": 1}]\n{"a": 2}',
            "{path}: not valid JSON: Extra data at line 2, column 1; a file of one object per line is named .jsonl",
        ),
        ("[]", "no rows in {path}; expected at least one"),
        ("", "no rows in {path}; expected at least one"),
        (b"[\xff]", "{path}: not valid UTF-8: byte 0xff at offset 1; save the file as UTF-8"),
    ],
)
def test_a_json_file_that_is_no_array_raises(tmp_path, content, message):
    path = write(tmp_path / "a.json", content)
    with pytest.raises(UserError) as raised:
        list(read_rows(path, on_error=lambda error: None))
    assert str(raised.value) == message.replace("{path}", str(path))


def test_parquet_and_saved_folder_give_the_same_rows(tmp_path):
    rows = [{"messages": [{"role": "user", "content": "hé"}], "n": 1}, {"messages": [], "n": None}]
    dataset = datasets.Dataset.from_list(rows)
    dataset.to_parquet(tmp_path / "a[1].parquet")
    dataset.with_format("numpy").save_to_disk(tmp_path / "saved")
    for path in (tmp_path / "a[1].parquet", tmp_path / "saved"):
        assert list(read_rows(path)) == [Row(rows[0], f"{path}:row 1"), Row(rows[1], f"{path}:row 2")]


def test_a_folder_of_splits_names_them(tmp_path):
    dataset = datasets.Dataset.from_list([{"text": "x"}])
    datasets.DatasetDict(train=dataset, test=dataset).save_to_disk(tmp_path / "saved")
    with pytest.raises(UserError) as raised:
        list(read_rows(tmp_path / "saved"))
    splits = ", ".join(os.path.join(tmp_path / "saved", split) for split in ("train", "test"))
    assert str(raised.value) == f"{tmp_path / 'saved'}: holds several splits; name one of them: {splits}"
    assert [row.fields for row in read_rows(tmp_path / "saved" / "test")] == [{"text": "x"}]


def test_paths_that_cannot_be_read(tmp_path):
    with pytest.raises(UserError, match=r"^no such file: .*missing\.jsonl$"):
        read_rows(tmp_path / "missing.jsonl")
    with pytest.raises(
        UserError, match=r"unknown suffix '\.doc'; expected \.jsonl, .*, a folder of such files, or one"
    ):
        read_rows(write(tmp_path / "a.doc", "x"))
    (tmp_path / "saved").mkdir()
    write(tmp_path / "saved" / "state.json", "{}")
    with pytest.raises(UserError, match=r"not a data set folder .* expected one written by datasets' save_to_disk"):
        list(read_rows(tmp_path / "saved"))
    with pytest.raises(UserError, match=r"a\.parquet: cannot be read as parquet: "):
        list(read_rows(write(tmp_path / "a.parquet", b"PAR1 nothing PAR1")))
    with pytest.raises(UserError, match=r"^no rows in .*empty\.jsonl; expected at least one$"):
        list(read_rows(write(tmp_path / "empty.jsonl", "\n\n")))


def test_a_forbidden_file(tmp_path, monkeypatch):
    def refuse(path, mode):  # root, as whom containers run tests, may read every file
        raise PermissionError(13, "Permission denied", path)

    path = write(tmp_path / "a.jsonl", "{}")
    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(UserError, match=r"^cannot read .*: Permission denied$"):
        list(read_rows(path))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x, max_size=3), max_leaves=6
)


@settings(max_examples=50, deadline=None)
@given(rows=st.lists(st.dictionaries(st.text(), JSON, max_size=3), min_size=1, max_size=4), ascii=st.booleans())
def test_what_json_writes_is_read_back(tmp_path_factory, rows, ascii):
    folder = tmp_path_factory.mktemp("rows")
    lines = write(folder / "a.jsonl", "\n".join(json.dumps(row, ensure_ascii=ascii) for row in rows))
    array = write(folder / "a.json", json.dumps(rows, ensure_ascii=ascii))
    assert read_all(lines) == read_all(array) == (rows, [])


FRAGMENTS = st.sampled_from(
    [b'{"a":', b'"', b"\n", b"\r", b"}", b"[", b"]", b"\\ud800", b"\xff", b"1", b",", b"\t", b"PAR1", b"ARROW1", b"\0"]
)


@settings(max_examples=100, deadline=None)
@given(content=st.binary(max_size=60) | st.lists(FRAGMENTS, max_size=12).map(b"".join))
@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "tsv", "parquet", "arrow", "jsonl.gz", "csv.zst"])
def test_any_bytes_give_rows_or_a_user_error(tmp_path_factory, suffix, content):
    path = write(tmp_path_factory.mktemp("fuzz") / f"a.{suffix}", content)
    errors = []
    try:
        rows = list(read_rows(path, errors.append))
    except UserError as error:
        assert str(path) in str(error)
    else:
        assert rows or errors
        assert all(error.where.startswith(str(path)) for error in errors)


def test_lines_are_parsed_by_whoever_reads_them(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"q": "x"}\n{\n')
    first, second = open_rows(Source(str(path), columns={"user": "q"}))
    assert first == UnreadRow(b'{"q": "x"}', f"{path}:1", {"user": "q"})
    first, second = pickle.loads(pickle.dumps([first, second]))
    assert first.read() == Row({"user": "x"}, f"{path}:1")
    assert str(second.read()).startswith(f"{path}:2: not valid JSON")


def test_a_mapping_is_applied_to_every_kind_of_file(tmp_path):
    write(tmp_path / "a.jsonl", '{"q": "x", "id": 1, "tools": []}\n{"id": 2}')
    write(tmp_path / "a.csv", "q,id\nx,1\n")
    first, second = (
        item.read() for item in open_rows(Source(str(tmp_path / "a.jsonl"), columns={"user": "q", "system": "s"}))
    )
    assert first == Row({"user": "x", "tools": []}, f"{tmp_path / 'a.jsonl'}:1", ("id",))
    assert second.reason == "columns: user: the row has no column 'q'; it has id"
    [row] = open_rows(Source(str(tmp_path / "a.csv"), columns={"id": None}))
    assert row == Row({"q": "x"}, f"{tmp_path / 'a.csv'}:2", ("id",))
