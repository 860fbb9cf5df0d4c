"""The tests are tested: every mistake of `mutations.py` is seen after a few steps.

Without one, ranks and a single process take the same steps.
"""

from __future__ import annotations

import pytest
from device_mutations import MUTATIONS, USUAL
from device_trajectories import assert_same_trajectory
from tiers import cases

FLAGS = {"trainer__max_steps": 6, "trainer__max_epochs": None, "data__max_tokens": 48, "data__max_length": 48}


@pytest.mark.parametrize(
    "mutation", cases([None, *MUTATIONS], [None, *USUAL]), ids=lambda each: each.__name__ if each else "none"
)
def test_a_mistake_is_seen(train, reference, mutation):
    run = train("ranks", ranks=2, strategy="ddp", before=mutation, **FLAGS)
    whole = reference(**FLAGS)
    if mutation is None:
        assert_same_trajectory(run, whole)
    else:
        with pytest.raises(AssertionError, match="weights"):
            assert_same_trajectory(run, whole)
