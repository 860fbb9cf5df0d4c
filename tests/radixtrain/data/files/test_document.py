"""Rows of a JSON document: the array itself, or the only one in an object."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixtrain.data.formats import read_rows
from radixtrain.errors import DataError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=3), values, max_size=3),
    max_leaves=8,
)
ROWS = st.lists(st.dictionaries(st.text(max_size=5), JSON, max_size=4), min_size=1, max_size=4)


@settings(max_examples=80, deadline=None)
@given(rows=ROWS, indent=st.sampled_from([None, 1]), ascii=st.booleans(), wrapped=st.booleans())
def test_rows_are_those_of_the_document(tmp_path_factory, rows, indent, ascii, wrapped):
    path = tmp_path_factory.mktemp("rows") / "a.json"
    document = {"version": 12, "rows": rows, "license": "none"} if wrapped else rows
    path.write_text(json.dumps(document, indent=indent, ensure_ascii=ascii), encoding="utf-8")
    read = list(read_rows(path))
    assert [row.fields for row in read] == rows
    assert [row.where for row in read] == [f"{path}:row {n}" for n in range(1, len(rows) + 1)]


def test_where_it_stops_being_json(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('[{"a": "é"},\n  {"a": 1},\n  {"a": tru}]', encoding="utf-8")
    rows = read_rows(path)
    assert [next(rows).fields, next(rows).fields] == [{"a": "é"}, {"a": 1}]
    with pytest.raises(DataError) as raised:
        next(rows)
    assert raised.value.where == str(path)
    assert raised.value.reason.startswith("not valid JSON: Expecting value at line 3, column 9;")
