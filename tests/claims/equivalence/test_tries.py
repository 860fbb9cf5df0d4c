"""In float64 the gradient by radix is the ordinary one, over generated tries and every way to run a step.

The oracle is Hugging Face's own model on one sequence at a time. Each try runs all four strategies; the bar is a
relative L2 error of 1e-12 for every parameter tensor and for the loss.
RADIXTRAIN_TRIES sets how many tries are drawn.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from radixtrain import restore_model
from radixtrain.attention import EVERYWHERE
from radixtrain.testing import labelled_features
from radixtrain.verification.equivalence import Rung
from radixtrain.verification.oracle import float64_truth
from tests.claims.equivalence.ways import MODELS, build, set_checkpointing, ways
from tests.support import TRIES, cases
from tests.support.steps import same_step

SECTION = "float64: worst relative L2 error of a gradient tensor"


@pytest.mark.parametrize("kind", cases(MODELS, ["tied", "LoRA"]))
def test_generated_tries(kind: str, print_after: Callable[[str, str], None]) -> None:
    model, worst, cuts = build(kind), Counter[str](), list[int]()

    @settings(max_examples=TRIES, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
    @given(features=labelled_features(), way=ways())
    def one_try(features: Any, way: Any) -> None:
        cuts.append(1 if way.loss == "own, one batch" else len(way.step(features).micro_batches))
        set_checkpointing(model, way.activation_checkpointing)
        for attention, rung in climb(model, features, way):
            worst[attention] = max(worst[attention], rung.worst.radix)

    one_try()
    split = sum(count > 1 for count in cuts)
    assert split > len(cuts) / 4, f"{split} of {len(cuts)} steps were cut"
    figures = ", ".join(f"{attention} {error:.1e}" for attention, error in worst.items())
    print_after(SECTION, f"{kind}: {len(cuts)} tries, {split} cut: {figures}")


def climb(model: Any, features: Any, way: Any) -> Iterator[tuple[str, Rung]]:
    """The errors of every strategy, each within the bar and with no dead gradient."""
    truth = float64_truth(restore_model(model), features)
    for attention in EVERYWHERE:
        rung = same_step(
            model, truth, partial(way.terms, features=features), what=(attention, way), attention=attention
        )
        assert not rung.dead, f"a try that proves nothing of {rung.dead[0].name}"
        yield attention, rung
