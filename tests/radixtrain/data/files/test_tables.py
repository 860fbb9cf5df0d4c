"""Parquet, Arrow and saved data sets: batches, and columns that are not read."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
import trl
from byte_tokenizer import byte_tokenizer

from radixtrain.data.chat import ChatEncoder
from radixtrain.data.files import tables
from radixtrain.data.files.tables import read_arrow, read_dataset, read_parquet
from radixtrain.data.formats import open_rows
from radixtrain.data.sample import EncodeReport
from radixtrain.errors import UserError

datasets = pytest.importorskip("datasets", reason="saved data sets: pip install datasets")

FOLDER = Path(trl.__file__).parent / "chat_templates"
ROWS = [{"text": f"é{n}", "n": n, "turns": [{"role": "user"}, {"role": "user", "x": 1}]} for n in range(300)]


def fields(found: Any) -> list[dict[str, Any]]:
    return [row.content for row in found]


def test_every_kind_gives_the_same_rows(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=70)
    with gzip.open(tmp_path / "a.parquet.gz", "wb") as packed:
        packed.write((tmp_path / "a.parquet").read_bytes())
    with pa.OSFile(str(tmp_path / "stream.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    with pa.OSFile(str(tmp_path / "file.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, 70)
    for path, read in [("a.parquet", read_parquet), ("a.parquet.gz", read_parquet)]:
        assert fields(read(str(tmp_path / path))) == ROWS
    for path in ("stream.arrow", "file.arrow"):
        assert fields(read_arrow(str(tmp_path / path))) == ROWS
    found = list(read_dataset("chats", datasets.Dataset.from_list(ROWS).with_format("numpy")))
    assert fields(found) == ROWS
    assert [row.where for row in found[:2]] == ["chats:row 1", "chats:row 2"]


def test_a_data_set_that_was_filtered(tmp_path: Path) -> None:
    dataset = datasets.Dataset.from_list(ROWS).select([7, 3])
    assert fields(read_dataset("chats", dataset)) == [ROWS[7], ROWS[3]]


def test_images_are_neither_decoded_nor_read(tmp_path: Path) -> None:
    image = {"bytes": b"no image at all", "path": "a.png"}
    features = datasets.Features(
        {
            "text": datasets.Value("string"),
            "image": datasets.Image(),
            "images": datasets.List(datasets.Image()),
            "turns": datasets.List({"type": datasets.Value("string"), "image": datasets.Image()}),
        }
    )
    row = {"text": "a", "image": image, "images": [image], "turns": [{"type": "image", "image": image}]}
    dataset = datasets.Dataset.from_list([row], features=features)
    dataset.to_parquet(tmp_path / "a.parquet")
    expected = {"text": "a", "image": "(Image, not read)", "images": "(Image, not read)", "turns": row["turns"]}
    assert fields(read_parquet(str(tmp_path / "a.parquet"))) == [expected]
    assert fields(read_dataset("chats", dataset)) == [expected]


def test_values_of_several_types_are_read_back(tmp_path: Path) -> None:
    """What `datasets` writes as JSON inside of a table, with the nulls that were written."""
    rows = [{"turns": [{"role": "a", "arguments": {"x": 1, "y": None}}, {"role": "b", "arguments": "text"}]}]
    dataset = datasets.Dataset.from_list(rows, on_mixed_types="use_json")
    dataset.to_parquet(tmp_path / "a.parquet")
    assert fields(read_parquet(str(tmp_path / "a.parquet"))) == fields(read_dataset("chats", dataset)) == rows


def test_nulls_that_a_table_fills_in_are_not_learned(tmp_path: Path) -> None:
    """Tools and arguments with other keys in every row, and one row whose keys are those of all."""
    rows = [called({"city": "Oslo"}), called({"unit": "K", "deep": [{"a": 1}, {"b": [2]}]}), called({})]
    rows.append(called({"city": "Oslo", "unit": "K", "deep": []}))
    table = pa.Table.from_pylist([json.loads(json.dumps(row)) for row in rows])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert None in table.to_pylist()[0]["messages"][1]["tool_calls"][0]["function"]["arguments"].values()
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [row.read().fields for row in read_parquet(str(tmp_path / "a.parquet"))] == rows
    encoder = ChatEncoder(byte_tokenizer((FOLDER / "qwen3.jinja").read_text("utf-8")))
    found, reports = [], (EncodeReport(), EncodeReport())
    for name, report in zip(("a.jsonl", "a.parquet"), reports, strict=True):
        encoded = encoder.encode_all(open_rows(str(tmp_path / name)), report=report)
        found.append([each.input_ids.tolist() for samples in encoded for each in samples])
    assert found[0] == found[1]
    assert str(reports[1]) == f"{reports[0]}, 3 rows without the nulls that their table had put into tools or arguments"


def called(arguments: dict[str, Any]) -> dict[str, Any]:
    properties = {name: {"type": "string"} for name in arguments}
    function = {"name": "f", "parameters": {"type": "object", "properties": properties}}
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    return {"tools": [{"type": "function", "function": function}], "messages": messages}


def test_rows_come_before_the_last_batch_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tables, "ROWS_PER_BATCH", 2)
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=100, use_dictionary=False)
    with open(path, "r+b") as file:  # of the last row group; the index at the end of the file stays
        column = pyarrow.parquet.read_metadata(path).row_group(2).column(1)
        file.seek(column.data_page_offset)
        file.write(b"\xff" * 16)
    rows = read_parquet(str(path))
    assert fields(next(rows) for _ in range(200)) == ROWS[:200]
    with pytest.raises(UserError, match=r"a\.parquet: cannot be read as parquet: "):
        list(rows)


def test_a_column_that_is_there_twice(tmp_path: Path) -> None:
    table = pa.table([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(
        UserError, match=r"a\.parquet: cannot be read as parquet: it holds the column 'text' more than once"
    ):
        list(read_parquet(str(tmp_path / "a.parquet")))
