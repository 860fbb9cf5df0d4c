"""Tables as text: what a writer of CSV wrote, row by row and each with its line."""

import csv
import io
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from radixtrain.data.files.lines import read_csv, read_jsonl
from radixtrain.data.files.rows import UnreadRow

TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=8)


@settings(max_examples=80, deadline=None)
@given(
    rows=st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=5),
    tabs=st.booleans(),
    end=st.sampled_from(["\n", "\r\n"]),
)
def test_what_a_writer_wrote_is_read_back(tmp_path_factory, rows, tabs, end):
    path = tmp_path_factory.mktemp("table") / "a.csv"
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter="\t" if tabs else ",", lineterminator=end, quoting=csv.QUOTE_ALL)
    writer.writerow(["prompt", "completion"])
    lines = []
    for row in rows:
        lines.append(text.getvalue().count("\n") + 1)
        writer.writerow(row)
    path.write_bytes(text.getvalue().encode("utf-8"))
    found = list(read_csv(str(path), delimiter="\t" if tabs else ","))
    assert found == [
        UnreadRow({"prompt": prompt, "completion": completion}, f"{path}:{line}")
        for (prompt, completion), line in zip(rows, lines, strict=True)
    ]


def test_lines_of_json_are_not_parsed(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf {}\r\n\n nonsense \n")
    assert list(read_jsonl(str(path))) == [UnreadRow(b"{}", f"{path}:1"), UnreadRow(b"nonsense", f"{path}:3")]
