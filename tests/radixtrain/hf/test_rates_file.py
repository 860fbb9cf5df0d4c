"""Rates on disk: one file for each key, written once."""

import json

import pytest

from radixtrain.hf.rates_file import cache_folder, file_of, keep_rates, read_rates
from radixtrain.tree.cost_model import Rates

RATES = Rates(call=1, rectangle=1, pair=1, element=1, flop=1)
OTHER = Rates(call=2, rectangle=2, pair=2, element=2, flop=2)


def test_rates_are_read_back_with_what_they_depend_on(tmp_path):
    path = tmp_path / "folder" / "rates-x.json"
    assert read_rates(path) is None
    assert keep_rates(path, RATES, {"threads": 3}) == read_rates(path) == RATES
    assert json.loads(path.read_text())["threads"] == 3


def test_the_first_of_two_processes_counts(tmp_path):
    path = tmp_path / "rates-x.json"
    assert keep_rates(path, RATES, {}) == RATES
    assert keep_rates(path, OTHER, {}) == RATES
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("text", ["{", "{}", '{"rates": {"call": -1}}', '{"rates": {"call": NaN}}'])
def test_a_broken_file_is_named(tmp_path, caplog, text):
    path = tmp_path / "rates-x.json"
    path.write_text(text)
    assert read_rates(path) is None
    assert f"{path} cannot be read and is measured again for this run" in caplog.text
    assert path.read_text() == text


def test_a_folder_that_cannot_be_written(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    assert keep_rates(tmp_path / "file" / "rates-x.json", RATES, {}) == RATES
    assert "the calibration cannot be kept" in caplog.text


def test_where_it_is_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("RADIXTRAIN_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.delenv("RADIXTRAIN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "radixtrain"


def test_another_key_has_another_file():
    one, other = file_of({"threads": 1, "torch": "2"}), file_of({"threads": 2, "torch": "2"})
    assert one != other and one.parent == other.parent == cache_folder()
    assert one == file_of({"torch": "2", "threads": 1}), "the order of the key does not matter"
