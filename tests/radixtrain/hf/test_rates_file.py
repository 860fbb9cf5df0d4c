"""Rates on disk: one file for each key, written once."""

import json
from contextlib import suppress

import pytest
from tiers import FULL

from radixtrain.hf import rates_file
from radixtrain.hf.rates_file import cache_folder, file_of, keep_rates, rates_in, read_rates
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


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "{}", "[]", "5", '{"rates": 5}', '{"rates": {"call": "x"}}', '{"rates": [1]}', "[" * 100_000),
        *('{"rates": {"call": -1}}', '{"rates": {"call": NaN}}', '{"rates": {"runs": {"call": Infinity}}}', "\x00"),
    ],
)
@pytest.mark.parametrize("checked", [True, False])
def test_a_damaged_file_is_named_and_replaced(tmp_path, caplog, text, checked):
    """With the right checksum too, so that what the rates are is looked at."""
    path = tmp_path / "rates-x.json"
    if checked and text.startswith('{"'):
        content = json.loads(text)
        text = json.dumps({**content, "checksum": rates_file._checksum(content)})
    path.write_text(text)
    assert read_rates(path) is None
    assert f"{path} is damaged, and the machine is measured again: " in caplog.text
    assert path.read_text() == text
    assert keep_rates(path, RATES, {}) == RATES
    assert read_rates(path) == RATES and list(tmp_path.iterdir()) == [path]


@FULL
def test_every_flipped_bit_is_found(tmp_path):
    """A rate with another digit is as good a number as before."""
    path = tmp_path / "rates-x.json"
    keep_rates(path, RATES, {"threads": 3})
    good = path.read_bytes()
    for place in range(len(good)):
        path.write_bytes(good[:place] + bytes([good[place] ^ 1 << place % 7]) + good[place + 1 :])
        with suppress(ValueError):
            assert rates_in(path) == RATES and json.loads(path.read_bytes()) == json.loads(good), "only a blank differs"


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
