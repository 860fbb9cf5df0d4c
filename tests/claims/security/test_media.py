"""Images, audio and the like in tables: no address is fetched and no file is opened, whatever a row names."""

import shutil
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from radixtrain.data.files.sources import read_rows
from tests.support import cases

datasets = pytest.importorskip("datasets", reason="features of images: pip install datasets")
KINDS = [kind for kind in ("Image", "Audio", "Video", "Pdf", "Nifti") if hasattr(datasets, kind)]
PLACES = {
    "a column": (lambda media: media, lambda value: value),
    "a list": (lambda media: datasets.List(media), lambda value: [value]),
    "a large list": (lambda media: datasets.LargeList(media), lambda value: [value]),
    "a mapping": (lambda media: {"a": {"b": media}}, lambda value: {"a": {"b": value}}),
    "messages": (
        lambda media: datasets.List({"parts": datasets.List({"image": media})}),
        lambda v: [{"parts": [{"image": v}]}],
    ),
}
PORT = 65533  # where nobody listens: who asks is seen
ADDRESS = f"http://127.0.0.1:{PORT}/a.png"
touched: set[str] = set()


def _note(event: str, given: Any) -> None:
    if event == "socket.connect" and given[1][1:2] == (PORT,):
        touched.add(ADDRESS)
    elif event == "open" and isinstance(given[0], str) and given[0].endswith("private.png"):
        touched.add(given[0])


@pytest.fixture(scope="module", autouse=True)
def hook() -> None:
    sys.addaudithook(_note)


@pytest.fixture
def private(tmp_path: Path) -> str:
    path = tmp_path / "private.png"
    path.write_bytes(b"private")
    touched.clear()
    return str(path)


def written(folder: Path, kind: str, place: str, path: str) -> list[Path]:
    """A parquet file, an Arrow file and a saved data set with a row whose media have this path and no bytes."""
    feature, value = PLACES[place]
    schema = datasets.Features({"text": datasets.Value("string"), "x": feature(getattr(datasets, kind)())}).arrow_schema
    table = pa.Table.from_pylist([{"text": "a", "x": value({"bytes": None, "path": path})}], schema=schema)
    pyarrow.parquet.write_table(table, folder / "a.parquet")
    with pa.OSFile(str(folder / "b.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    saved = folder / "saved"
    datasets.Dataset.from_list([{"text": "a"}]).save_to_disk(saved)
    shutil.copy(folder / "b.arrow", saved / "data-00000-of-00001.arrow")
    (saved / "dataset_info.json").write_text("{}")  # the features are those of the file
    return [folder / "a.parquet", folder / "b.arrow", saved]


@pytest.mark.parametrize("kind", cases(KINDS, ["Image"]))
def test_nothing_is_fetched_and_nothing_opened(kind: str, private: str, tmp_path: Path) -> None:
    for place in PLACES:
        for path in (ADDRESS, private):
            for source in written(tmp_path, kind, place, path):
                [row] = read_rows(source)
                assert row.fields["text"] == "a" and row.where.endswith(":row 1"), place
            assert not touched, place


def test_both_would_be_seen(private: str) -> None:
    """With the media decoded, as `datasets` does it, the address is fetched and the file opened."""
    pytest.importorskip("PIL", reason="images: pip install pillow")
    for path in (ADDRESS, private):
        features = datasets.Features({"x": datasets.Image()})
        row = datasets.Dataset.from_list([{"x": {"bytes": None, "path": path}}], features=features)
        with pytest.raises(Exception, match=r"private\.png|http|Connect|identify"):
            row[0]
    assert touched == {ADDRESS, private}
