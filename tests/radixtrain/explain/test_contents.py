"""Numbers as the page and the terminal show them."""

from typing import Any

import pytest

from radixtrain.errors import bytes_text
from radixtrain.explain.contents import duration, ratio, rounded

SHOWN: dict[Any, dict[float, str]] = {
    ratio: {1.0: "1", 1.843: "1.84", 20.27: "20.3", 21.0: "21", 100.4: "100", 999.6: "1,000", 1250.0: "1,250"},
    rounded: {0.2: "0", 7: "7", 349_123: "349,000", 4_812_345: "4,810,000", 999_999: "1,000,000"},
    bytes_text: {0: "0 MiB", 2**29: "512 MiB", 2**30: "1 GiB", 1.234 * 2**30: "1.23 GiB", 1250 * 2**30: "1,250 GiB"},
    duration: {
        **{0.002: "< 1 s", 0.99: "< 1 s", 1.36: "1.4 s", 9.94: "9.9 s", 9.96: "10 s", 59.6: "1 min"},
        **{725: "12 min 5 s", 3599.4: "59 min 59 s", 3599.6: "1 h", 12_000: "3 h 20 min", 108_000: "30 h"},
    },
}


@pytest.mark.parametrize("function", SHOWN)
def test_numbers(function: Any) -> None:
    assert {number: function(number) for number in SHOWN[function]} == SHOWN[function]
