"""In float32 and bfloat16 radix is as far from the float64 truth as the ordinary padded batch is.

Over all tries of a strategy: the worst tensor's error at most 2x the worst of two ordinary runs, on the padded batch
and on its rows one by one; the median ratio to the padded batch at most 1.2. A single try is held to the looser bar of
`Rung`, since one batch of a model with norms of 8 elements has luck.
"""

import math
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from radixtrain import restore_model, share_prefixes
from radixtrain.attention import EVERYWHERE
from radixtrain.testing import labelled_features
from radixtrain.verification.equivalence import Rung, compare_gradients
from radixtrain.verification.oracle import (
    Features,
    float64_truth,
    gradients_of,
    ordinary_one_by_one,
    ordinary_padded,
)
from tests.claims.equivalence.ways import MODELS, build, set_checkpointing, ways
from tests.support import FULL, TRIES

BATCHES = labelled_features(vocab_size=50, max_sequences=16, max_length=40)
ROW_BY_ROW = "ordinary rows one by one"
SECTION = "rounding: error against the float64 truth, radix and the worse of two ordinary runs"


@FULL
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_rounding(dtype: torch.dtype, kind: str, print_after: Callable[[str, str], None]) -> None:
    model = build(kind, seed=1).to(dtype)
    rungs: dict[str, list[Rung]] = {arm: [] for arm in (ROW_BY_ROW, *EVERYWHERE)}
    # In one piece, as the ordinary batch: gradients that are added up over micro-batches round once more for each.
    whole = ways(max_tokens=st.none())

    # The worst of ten tries is luck, 2.1x once.
    @settings(max_examples=max(TRIES, 50), deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
    @given(features=BATCHES, way=whole)
    def one_try(features: Features, way: Any) -> None:
        set_checkpointing(model, way.activation_checkpointing)
        for arm, rung in climb(model, features, way).items():
            assert math.isfinite(rung.worst.radix), f"{arm}, {way}: {rung.worst}"
            rungs[arm].append(rung)

    one_try()
    row_by_row = rungs.pop(ROW_BY_ROW)
    ordinary = max(max(rung.errors("ordinary")[-1], rung.worst.radix) for rung in row_by_row)
    for attention, tried in rungs.items():
        radix = max(rung.worst.radix for rung in tried)
        median = statistics.median(t.radix / t.ordinary for rung in tried for t in rung.alive)
        name = str(dtype).removeprefix("torch.")
        print_after(
            SECTION,
            f"{name} {kind}, {attention}: worst tensor {radix:.2e} and {ordinary:.2e} ({radix / ordinary:.2f}x), "
            f"median ratio {median:.3f}, {len(tried)} tries",
        )
        assert radix <= 2 * ordinary
        assert median <= 1.2
        assert sum(rung.passed for rung in tried) >= 0.98 * len(tried), "a try of a few tokens may be unlucky, not many"


def climb(model: Any, features: Features, way: Any) -> dict[str, Rung]:
    """The rung of the model's own dtype for every strategy, and for rows one by one, against the truth and a batch."""
    precision = str(next(model.parameters()).dtype).removeprefix("torch.")
    truth = float64_truth(restore_model(model), features)
    ordinary = gradients_of(model, lambda: ordinary_padded(model, features))
    alone = gradients_of(model, lambda: ordinary_one_by_one(model, features))
    rungs = {ROW_BY_ROW: compare_gradients(precision, truth, ordinary, alone)}
    for attention in EVERYWHERE:
        radix = gradients_of(share_prefixes(model, attention=attention), lambda: way.terms(model, features))
        rungs[attention] = compare_gradients(precision, truth, ordinary, radix)
    restore_model(model)
    return rungs
