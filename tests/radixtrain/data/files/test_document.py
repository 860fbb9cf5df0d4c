"""A JSON document read piece by piece gives what the whole gives, wherever a piece ends."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixtrain.data.files import streams
from radixtrain.data.formats import read_rows
from radixtrain.errors import DataError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=3), values, max_size=3),
    max_leaves=8,
)
ROWS = st.lists(st.dictionaries(st.text(max_size=5), JSON, max_size=4), min_size=1, max_size=4)


@settings(max_examples=80, deadline=None)
@given(
    rows=ROWS, piece=st.integers(1, 40), indent=st.sampled_from([None, 1]), ascii=st.booleans(), wrapped=st.booleans()
)
def test_the_size_of_a_piece_does_not_matter(tmp_path_factory, rows, piece, indent, ascii, wrapped):
    path = tmp_path_factory.mktemp("rows") / "a.json"
    document = {"version": 12, "rows": rows, "license": "none"} if wrapped else rows
    path.write_text(json.dumps(document, indent=indent, ensure_ascii=ascii), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "CHUNK", piece)
        found = list(read_rows(path))
    assert [row.fields for row in found] == rows
    assert [row.where for row in found] == [f"{path}:row {n}" for n in range(1, len(rows) + 1)]


@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
def test_where_it_stops_being_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(streams, "CHUNK", piece)
    path = tmp_path / "a.json"
    path.write_text('[{"a": "é"},\n  {"a": 1},\n  {"a": tru}]', encoding="utf-8")
    rows = read_rows(path)
    assert [next(rows).fields, next(rows).fields] == [{"a": "é"}, {"a": 1}]
    with pytest.raises(DataError) as raised:
        next(rows)
    assert raised.value.where == str(path)
    assert raised.value.reason.startswith("not valid JSON: Expecting value at line 3, column 9;")


def test_only_a_piece_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tracemalloc

    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"text": "x" * 1000}] * 20_000), encoding="utf-8")
    tracemalloc.start()
    count = sum(1 for _ in read_rows(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 20_000
    assert peak < 12 << 20 < path.stat().st_size
