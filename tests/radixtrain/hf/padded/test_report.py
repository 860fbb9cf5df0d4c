"""The counts of `sharing_report`, and the lines that users read."""

import copy
import pickle
from collections import Counter

from radixtrain.hf.padded.report import SharingReport


def test_lines():
    report = SharingReport(
        num_shared=2,
        not_shared=Counter({"a cache is wanted (use_cache=True)": 1, "attention_mask has a hole": 3}),
        num_places=2400,
        num_tokens=2000,
        num_unique_tokens=500,
        num_head_places=2400,
        num_head_rows=501,
        plan_seconds=0.125,
    )
    assert report.compression_ratio == 4.0
    assert str(report).splitlines() == [
        "2 calls shared: 2,400 places, 2,000 tokens, 500 unique, r = 4.00; plans took 0.12 s",
        "the head computed 501 rows for 2,400 places",
        "3 calls not shared: attention_mask has a hole",
        "1 calls not shared: a cache is wanted (use_cache=True)",
    ]


def test_before_the_first_call():
    report = SharingReport()
    assert report.compression_ratio == 1.0
    first, second = str(report).splitlines()
    assert first == "0 calls shared: 0 places, 0 tokens, 0 unique, r = 1.00; plans took 0.00 s"
    assert second.startswith("the backbone was never called")


def test_a_copy_counts_its_own_calls():
    report = SharingReport(num_shared=3, not_shared=Counter({"generate() runs": 2}))
    for copied in (copy.deepcopy(report), pickle.loads(pickle.dumps(report))):
        copied.not_shared["generate() runs"] += 1
        assert report.not_shared["generate() runs"] == 2
