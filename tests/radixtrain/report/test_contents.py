"""Numbers as the page and the terminal show them."""

from dataclasses import replace
from typing import Any

import pytest

from radixtrain.errors import bytes_text
from radixtrain.report import contents
from radixtrain.report.contents import Break, Setting

SETTING = Setting(batch_size=64, max_tokens=8192, group_by_prefix=True, r=2.0, best_r=2.0)
RATIOS = {1.0: "1", 1.843: "1.84", 20.27: "20.3", 21.0: "21", 100.4: "100", 999.6: "1,000", 1250.0: "1,250"}
ROUNDED = {0.2: "0", 7: "7", 349_123: "349,000", 4_812_345: "4,810,000", 999_999: "1,000,000"}
BYTES = {0: "0 MiB", 512 * 2**20: "512 MiB", 2**30: "1 GiB", 1.234 * 2**30: "1.23 GiB", 1250 * 2**30: "1,250 GiB"}
DURATIONS = {
    **{0.002: "< 1 s", 0.99: "< 1 s", 1.36: "1.4 s", 9.94: "9.9 s", 9.96: "10 s"},
    **{59.6: "1 min", 725: "12 min 5 s", 3599.4: "59 min 59 s", 3599.6: "1 h", 12_000: "3 h 20 min"},
    **{108_000: "30 h", 3_600_000: "1,000 h"},
}


@pytest.mark.parametrize(
    ("name", "shown"),
    [("ratio", RATIOS), ("rounded", ROUNDED), ("duration", DURATIONS)],
)
def test_numbers(name: str, shown: dict[Any, str]) -> None:
    assert {number: getattr(contents, name)(number) for number in shown} == shown


def test_bytes() -> None:
    assert {number: bytes_text(number) for number in BYTES} == BYTES


def test_setting_name() -> None:
    assert contents.setting_name(SETTING) == "batch_size 64, max_tokens 8,192, group_by_prefix"
    shuffled = replace(SETTING, group_by_prefix=False)
    assert contents.setting_name(shuffled) == "batch_size 64, max_tokens 8,192"


def test_the_heading_is_the_speedup_against_the_baseline_that_computes_less() -> None:
    found = [
        contents.speedup(replace(SETTING, **each))
        for each in ({"speedup": 5.24}, {"speedup": 5.24, "whole_speedup": 1.9})
    ]
    assert found == ["5.24x as fast", "1.9x as fast"]
    assert contents.speedup(replace(SETTING, speedup=None, r=12.0, whole_r=None)) == "r = 12"


def test_what_a_fix_adds_to_the_others_is_said_if_it_is_another_figure() -> None:
    each = Break(
        cause="a date", num_sequences=1, num_values=2, at_token=3, tokens_saved=1000, tokens_with_others=1100,
        advice="Move it.", examples=(),
    )  # fmt: skip
    assert contents.with_others(each) == ""
    for tokens in (0, 700, 5000):
        said = contents.with_others(replace(each, tokens_with_others=tokens))
        assert said == f"; {tokens:,} once the others here are fixed"
