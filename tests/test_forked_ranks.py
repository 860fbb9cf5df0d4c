"""Ranks that are forked from a test: what they return, and why one did not."""

from __future__ import annotations

import time

import pytest
from forked_ranks import on_ranks
from tiers import FULL


@FULL
def test_a_rank_that_fails_is_named_and_the_others_are_not_waited_for() -> None:
    assert on_ranks(2, lambda rank: rank, has_group=False) == [0, 1]
    with pytest.raises(AssertionError, match=r"rank 1: Traceback[\s\S]*ZeroDivisionError") as failed:
        on_ranks(2, lambda rank: time.sleep(3600.0) if rank == 0 else 1 // 0, seconds=3600.0, has_group=False)
    assert "rank 0: no answer" in str(failed.value)
