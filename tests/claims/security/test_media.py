"""Images, audio and the like in tables: no address is fetched and no file is opened, whatever a row names."""

import shutil
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from tiers import cases

from radixtrain.data.files.sources import read_rows
from radixtrain.errors import DataError

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
opened: list[str] = []
watched: set[str] = set()
is_hooked = False


class Watch:
    """What was asked for: requests to a server here, and times that one file was opened."""

    def __init__(self, file: Path, server: HTTPServer, requests: list[str]):
        self.file, self.requests = str(file), requests
        self.address = f"http://127.0.0.1:{server.server_port}/a.png"

    @property
    def found(self) -> list[str]:
        return [*self.requests, *(each for each in opened if each == self.file)]


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Watch]:
    global is_hooked
    file = tmp_path / "private.png"
    file.write_bytes(b"private")
    watched.add(str(file))
    if not is_hooked:  # a hook cannot be taken away
        sys.addaudithook(lambda event, given: _note(event, given))
        is_hooked = True
    requests: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requests.append(self.path)
            self.send_error(404)

        do_HEAD = do_GET

        def log_message(self, *given: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Watch(file, server, requests)
        server.shutdown()


def _note(event: str, given: Any) -> None:
    if event == "open" and isinstance(given[0], str) and given[0] in watched:
        opened.append(given[0])


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
def test_nothing_is_fetched_and_nothing_opened(kind: str, watch: Watch, tmp_path: Path) -> None:
    for place in PLACES:
        for path in (watch.address, watch.file):
            for source in written(tmp_path, kind, place, path):
                [row] = read_rows(source)
                assert row.fields["text"] == "a" and row.where.endswith(":row 1"), place
            assert not watch.found, place


def test_the_watch_sees_both(watch: Watch, tmp_path: Path) -> None:
    """With the media decoded, as `datasets` does it, the address is fetched and the file opened."""
    pytest.importorskip("PIL", reason="images: pip install pillow")
    for path in (watch.address, watch.file):
        features = datasets.Features({"x": datasets.Image()})
        row = datasets.Dataset.from_list([{"x": {"bytes": None, "path": path}}], features=features)
        with pytest.raises(Exception, match=r"private\.png|http|404|identify"):
            row[0]
    assert "/a.png" in watch.found and watch.file in watch.found


def test_a_row_with_an_image_is_refused_by_name(watch: Watch, tmp_path: Path) -> None:
    from radixtrain.data.messages import check_messages

    for part in ({"type": "image", "image": watch.file}, {"type": "image_url", "image_url": {"url": watch.address}}):
        with pytest.raises(DataError, match="image"):
            check_messages([{"role": "user", "content": [part]}], "a.jsonl:1")
    assert not watch.found
