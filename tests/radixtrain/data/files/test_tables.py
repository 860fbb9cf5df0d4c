"""Parquet, Arrow and saved data sets: batches, and columns that are not read."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
import trl

from radixtrain.data.chat import ChatEncoder
from radixtrain.data.files.readers import read_dataset, read_table
from radixtrain.data.files.sources import open_rows
from radixtrain.data.sample import EncodeReport
from radixtrain.errors import UserError
from tests.support.batches import byte_tokenizer
from tests.support.runs import write_rows

datasets = pytest.importorskip("datasets", reason="saved data sets: pip install datasets")

FOLDER = Path(trl.__file__).parent / "chat_templates"
ROWS = [{"text": f"é{n}", "n": n, "turns": [{"role": "user"}, {"role": "user", "x": 1}]} for n in range(300)]
IMAGE = {"bytes": b"no image at all", "path": "a.png"}
TEXT = datasets.Value("string")
MEDIA = {
    "text": TEXT,
    "image": datasets.Image(),
    "images": datasets.List(datasets.Image()),
    "turns": datasets.List({"type": TEXT, "image": datasets.Image()}),
}
OF_MEDIA = {"text": "a", "image": IMAGE, "images": [IMAGE], "turns": [{"type": "image", "image": IMAGE}]}
MIXED = [{"turns": [{"role": "a", "arguments": {"x": 1, "y": None}}, {"role": "b", "arguments": "text"}]}]

# A data set, and its rows if they differ.
DATASETS = {
    "objects of several keys": (datasets.Dataset.from_list(ROWS), ROWS),
    "in another format": (datasets.Dataset.from_list(ROWS).with_format("numpy"), ROWS),
    "filtered": (datasets.Dataset.from_list(ROWS).select([7, 3]), [ROWS[7], ROWS[3]]),
    "images, neither decoded nor read": (
        datasets.Dataset.from_list([OF_MEDIA], features=datasets.Features(MEDIA)),
        [{**OF_MEDIA, "image": "(Image, not read)", "images": "(Image, not read)"}],
    ),
    "values of several types, with the nulls that were written": (
        datasets.Dataset.from_list(MIXED, on_mixed_types="use_json"),
        MIXED,
    ),
}


def fields(found: Any) -> list[dict[str, Any]]:
    return [row.content for row in found]


def write(table: pa.Table, folder: Path) -> list[Path]:
    """As parquet of several row groups, and as the two kinds of Arrow files."""
    paths = [folder / name for name in ("a.parquet", "stream.arrow", "file.arrow")]
    pyarrow.parquet.write_table(table, paths[0], row_group_size=70)
    for path, writer_to in zip(paths[1:], (pa.ipc.new_stream, pa.ipc.new_file), strict=True):
        with pa.OSFile(str(path), "wb") as sink, writer_to(sink, table.schema) as writer:
            writer.write_table(table, 70)
    return paths


@pytest.mark.parametrize("case", DATASETS)
def test_every_kind_gives_the_same_rows(case: str, tmp_path: Path) -> None:
    dataset, rows = DATASETS[case]
    found = list(read_dataset("chats", dataset))
    assert fields(found) == rows and found[-1].where == f"chats:row {len(rows)}"
    dataset.save_to_disk(tmp_path / "saved")
    assert fields(open_rows(str(tmp_path / "saved"))) == rows
    for path in write(dataset.with_format(None).flatten_indices().data.table, tmp_path):
        assert fields(read_table(str(path))) == rows


def test_a_file_that_is_damaged_further_on(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=100, use_dictionary=False)
    with open(path, "r+b") as file:  # in the last row group; the index at the end of the file stays
        column = pyarrow.parquet.read_metadata(path).row_group(2).column(1)
        file.seek(column.data_page_offset)
        file.write(b"\xff" * 16)
    with pytest.raises(UserError, match=r"a\.parquet: cannot be read: "):
        list(read_table(str(path)))


def test_nulls_that_a_table_fills_in_are_not_learned(tmp_path: Path) -> None:
    """Tools and arguments with other keys in every row, and one row whose keys are those of all."""
    rows = [called({"city": "Oslo"}), called({"unit": "K", "deep": [{"a": 1}, {"b": [2]}]}), called({})]
    rows.append(called({"city": "Oslo", "unit": "K", "deep": []}))
    table = pa.Table.from_pylist([json.loads(json.dumps(row)) for row in rows])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert None in table.to_pylist()[0]["messages"][1]["tool_calls"][0]["function"]["arguments"].values()
    write_rows(tmp_path / "a.jsonl", rows)
    assert [row.read().fields for row in read_table(str(tmp_path / "a.parquet"))] == rows
    encoder = ChatEncoder(byte_tokenizer((FOLDER / "qwen3.jinja").read_text("utf-8")))
    found, reports = [], (EncodeReport(), EncodeReport())
    for name, report in zip(("a.jsonl", "a.parquet"), reports, strict=True):
        encoded = encoder.encode_all(open_rows(str(tmp_path / name)), report=report)
        found.append([each.input_ids.tolist() for samples in encoded for each in samples])
    assert found[0] == found[1]
    assert str(reports[1]) == str(reports[0])


def called(arguments: dict[str, Any]) -> dict[str, Any]:
    properties = {name: {"type": "string"} for name in arguments}
    function = {"name": "f", "parameters": {"type": "object", "properties": properties}}
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    return {"tools": [{"type": "function", "function": function}], "messages": messages}
