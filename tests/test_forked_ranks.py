"""Ranks that are forked from a test: what they return, why one did not, and no longer than they take."""

from __future__ import annotations

import time

import pytest
from forked_ranks import on_ranks


def test_it_waits_no_longer_than_the_last_rank() -> None:
    begin = time.monotonic()
    assert on_ranks(2, lambda rank: time.sleep(0.1 * rank) or rank, seconds=60.0, has_group=False) == [0, 1]
    assert time.monotonic() - begin < 30.0


def test_a_rank_that_fails_is_named_and_the_others_get_five_seconds_more() -> None:
    begin = time.monotonic()
    with pytest.raises(AssertionError, match=r"rank 1: Traceback[\s\S]*ZeroDivisionError") as failed:
        on_ranks(2, lambda rank: time.sleep(60.0) if rank == 0 else 1 // 0, seconds=60.0, has_group=False)
    assert "rank 0: no answer" in str(failed.value)
    assert time.monotonic() - begin < 30.0
