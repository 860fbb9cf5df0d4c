"""Parquet, Arrow and saved data sets: batches, and columns that are not read."""

import gzip
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from radixtrain.data.files import tables
from radixtrain.data.files.tables import read_arrow, read_dataset, read_parquet
from radixtrain.errors import UserError

datasets = pytest.importorskip("datasets", reason="saved data sets: pip install datasets")

ROWS = [{"text": f"é{n}", "n": n, "turns": [{"role": "user", "x": None}]} for n in range(300)]


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
    image = {"bytes": b"no image at all", "path": None}
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
    """What `datasets` writes as JSON inside of a table."""
    rows = [{"turns": [{"role": "a", "arguments": {"x": 1}}, {"role": "b", "arguments": "text"}]}]
    dataset = datasets.Dataset.from_list(rows, on_mixed_types="use_json")
    dataset.to_parquet(tmp_path / "a.parquet")
    assert fields(read_parquet(str(tmp_path / "a.parquet"))) == fields(read_dataset("chats", dataset)) == rows


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
