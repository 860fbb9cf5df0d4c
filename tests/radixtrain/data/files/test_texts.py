"""Lines of JSON as they are before anybody parses them. What becomes of files of every kind: `../test_formats.py`."""

from pathlib import Path

from radixtrain.data.files.rows import UnreadRow
from radixtrain.data.files.texts import read_jsonl


def test_lines_of_json_are_not_parsed(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf {}\r\n\n nonsense \n")
    assert list(read_jsonl(str(path))) == [UnreadRow(b"{}", f"{path}:1"), UnreadRow(b"nonsense", f"{path}:3")]
