"""Which reader reads which kind of file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

from radixtrain.data.files.document import read_json
from radixtrain.data.files.lines import read_csv, read_jsonl, read_tsv
from radixtrain.data.files.rows import UnreadRow
from radixtrain.data.files.streams import COMPRESSIONS
from radixtrain.data.files.tables import read_arrow, read_parquet
from radixtrain.errors import DataError

__all__ = ["KINDS", "READERS", "kind_of_file"]

Found = tuple[dict[str, Any], str] | UnreadRow | DataError  # fields and where; or a line to parse; or what is wrong

READERS: dict[str, Callable[[str], Iterable[Found]]] = {
    ".jsonl": read_jsonl,
    ".ndjson": read_jsonl,
    ".json": read_json,
    ".csv": read_csv,
    ".tsv": read_tsv,
    ".parquet": read_parquet,
    ".arrow": read_arrow,
}
KINDS = f"{', '.join(READERS)}, each also with .gz or .zst"


def kind_of_file(path: str) -> str:
    """The suffix that tells the kind, without that of a compression; empty if the kind is not known."""
    stem, suffix = os.path.splitext(path.lower())
    kind = os.path.splitext(stem)[1] if suffix in COMPRESSIONS else suffix
    return kind if kind in READERS else ""
