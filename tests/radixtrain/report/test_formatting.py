import pytest

from radixtrain.report import formatting
from radixtrain.report.contents import Setting


@pytest.mark.parametrize(
    ("value", "text"),
    [(1.0, "1"), (1.843, "1.84"), (20.27, "20.3"), (21.0, "21"), (100.4, "100"), (999.6, "1,000"), (1250.0, "1,250")],
)
def test_ratio(value: float, text: str) -> None:
    assert formatting.ratio(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.2, "0"), (7, "7"), (349_123, "349,000"), (4_812_345, "4,810,000"), (999_999, "1,000,000")]
)
def test_rounded(value: float, text: str) -> None:
    assert formatting.rounded(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *[
            (0, "0 s"),
            (6.8e-7, "< 0.01 ms"),
            (0.00088, "0.88 ms"),
            (0.04, "40 ms"),
            (0.1, "0.1 s"),
            (9.94, "9.9 s"),
            (9.96, "10 s"),
            (59.6, "1 min"),
            (725, "12 min 5 s"),
            (3599.4, "59 min 59 s"),
        ],
        *[(3599.6, "1 h"), (12_000, "3 h 20 min"), (108_000, "30 h"), (3_600_000, "1,000 h")],
    ],
)
def test_duration(seconds: float, text: str) -> None:
    assert formatting.duration(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 MiB"), (512 * 2**20, "512 MiB"), (2**30, "1 GiB"), (1.234 * 2**30, "1.23 GiB")]
)
def test_bytes_text(number: float, text: str) -> None:
    assert formatting.bytes_text(number) == text


def test_setting_name() -> None:
    setting = Setting(batch_size=64, max_tokens=8192, group_by_prefix=True, r=2.0, best_r=2.0)
    assert formatting.setting_name(setting) == "batch_size 64, max_tokens 8,192, group_by_prefix"


@pytest.mark.parametrize(
    ("speedup", "part"), [(None, "was not predicted"), (16.21, "at 16.2x the speed"), (0.934, "at 0.934x the speed")]
)
def test_prediction(speedup: float | None, part: str) -> None:
    setting = Setting(batch_size=1, max_tokens=1, group_by_prefix=False, r=1.0, best_r=1.0, speedup=speedup)
    assert part in formatting.prediction(setting)
