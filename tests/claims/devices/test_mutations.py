"""The tests are tested: every mistake of `mutations.py` is seen after a few steps.

Without one, ranks and a single process take the same steps.
"""

from __future__ import annotations

import pytest

from tests.claims.devices.mutations import MUTATIONS, SPLIT_MUTATIONS
from tests.support import cases
from tests.support.processes import FLOAT64, compute_in_float64
from tests.support.runs import assert_same_trajectory

FLAGS = {**FLOAT64, "trainer__max_steps": 6, "data__max_tokens": 48, "data__max_length": 48}


@pytest.mark.parametrize(
    "mutation",
    cases([None, *MUTATIONS], MUTATIONS[:1]),
    ids=lambda each: each.__name__ if each else "without_a_mutation",
)
def test_a_mistake_is_seen(train, reference, mutation):
    assert_seen(train, reference, mutation)


@pytest.mark.parametrize("mutation", cases(SPLIT_MUTATIONS, SPLIT_MUTATIONS[:1]), ids=lambda each: each.__name__)
def test_a_mistake_of_the_split_is_seen(train, reference, mutation):
    assert_seen(train, reference, mutation, sp_size=2)


def assert_seen(train, reference, mutation, **options):
    changes = [compute_in_float64, *([mutation] if mutation else [])]
    run = train("ranks", ranks=2, strategy="ddp", **{**FLAGS, **options, "before": changes})
    whole = reference(**FLAGS)
    if mutation is None:
        assert_same_trajectory(run, whole)
    else:
        with pytest.raises(AssertionError, match="weights"):
            assert_same_trajectory(run, whole)
