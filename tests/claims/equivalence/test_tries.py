"""In float64 the gradient by radix is the ordinary one, over generated tries and every way to run a step.

The oracle is Hugging Face's own model on one sequence at a time. Each try runs all four strategies, a step in passes
those two that it can use; the bar is a relative L2 error of 1e-12 for every parameter tensor and for the loss.
RADIXTRAIN_TRIES sets how many tries are drawn.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
from hypothesis import HealthCheck, find, given, settings
from hypothesis import strategies as st
from same_step import same_step
from tiers import FULL, TRIES, cases

from radixtrain import restore_model
from radixtrain.attention import EVERYWHERE
from radixtrain.testing import labelled_features
from radixtrain.tree.context import WITH_CONTEXT
from radixtrain.verification.oracle import float64_truth
from radixtrain.verification.report import Rung

SECTION = "float64: worst relative L2 error of a gradient tensor"
MOST = st.integers(4, 7)
KINDS = ["tied", "untied, biased", "LoRA"]


PASSES = {"loss": st.sampled_from(["fused, passes", "fused, held passes"]), "max_tokens": MOST}
STEPS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {  # what is drawn of a way, and of the features
    "any way": ({}, {}),
    "in passes": (PASSES, {"max_sequences": 12, "max_length": 16}),
}


@pytest.mark.parametrize(
    ("kind", "steps"),
    cases(product(KINDS, STEPS), [("tied", "any way"), ("LoRA", "any way"), ("tied", "in passes")]),
)
def test_generated_tries(
    build: Callable[..., Any],
    ways: Callable[..., Any],
    set_checkpointing: Callable[[Any, float], None],
    kind: str,
    steps: str,
    print_after: Callable[[str, str], None],
) -> None:
    """In passes each prefix is computed once in the step, on up to three levels, each held or again."""
    model, (way_of, sizes) = build(kind), STEPS[steps]
    worst: Counter[str] = Counter()
    cuts, levels = list[int](), list[int]()

    @settings(max_examples=TRIES, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
    @given(features=labelled_features(**sizes), way=ways(**way_of))
    def one_try(features: Any, way: Any) -> None:
        step = None if way.loss == "own, one batch" else way.step(features)
        cuts.append(len(step.micro_batches) if step else 1)
        levels.append(num_levels(step) if step else 0)
        set_checkpointing(model, way.activation_checkpointing)
        for attention, rung in climb(model, features, way):
            worst[attention] = max(worst[attention], rung.worst.radix)

    one_try()
    split = sum(count > 1 for count in cuts)
    assert split > len(cuts) / 4, f"{split} of {len(cuts)} steps were cut"
    if steps == "in passes":
        assert sum(number > 0 for number in levels) > len(levels) / 2 and max(levels) >= 3
    figures = ", ".join(f"{attention} {error:.1e}" for attention, error in worst.items())
    print_after(SECTION, f"{kind}, {steps}: {len(cuts)} tries, {split} cut, {max(levels)} levels at most: {figures}")


def num_levels(step: Any) -> int:
    """How many passes continue one another, at most; 0 if nothing is kept."""
    depth: list[int] = []
    for batch in step.micro_batches:
        depth.append(max([1 + depth[source] for source, *_ in batch["radix"].sources], default=0))
    return max(depth)


@pytest.mark.parametrize("num_pieces", cases([2, 3, 5, 10], [10]))
@pytest.mark.parametrize("loss", ["fused, passes", pytest.param("fused, held passes", marks=FULL)])
@pytest.mark.parametrize("share", [pytest.param(0.0, marks=FULL), 0.5, pytest.param(1.0, marks=FULL)])
def test_a_long_sequence_in_pieces(
    build: Callable[..., Any],
    ways: Callable[..., Any],
    set_checkpointing: Callable[[Any, float], None],
    num_pieces: int,
    loss: str,
    share: float,
) -> None:
    """A single one, of ten tokens a piece; its labels are at every border."""
    model, ids = build("tied"), [1 + n * n % 49 for n in range(10 * num_pieces)]
    way = ways(loss=st.just(loss), max_tokens=st.just(10), min_shared_tokens=st.just(1), pad_to_multiple_of=st.none())
    way = replace(find(way, lambda _: True), activation_checkpointing=share)
    features = [{"input_ids": ids, "labels": ids}]
    step = way.step(features)
    assert len(step.micro_batches) == num_pieces
    assert {batch["input_ids"].numel() for batch in step.micro_batches} == {10}
    set_checkpointing(model, share)
    assert [attention for attention, _ in climb(model, features, way)] == list(WITH_CONTEXT)


def climb(model: Any, features: Any, way: Any) -> Iterator[tuple[str, Rung]]:
    """The errors of every strategy that the way can use, each within the bar and with no dead gradient."""
    truth = float64_truth(restore_model(model), features)
    for attention in WITH_CONTEXT if way.has_passes else EVERYWHERE:
        rung = same_step(
            model, truth, partial(way.terms, features=features), what=(attention, way), attention=attention
        )
        assert not rung.dead, f"a try that proves nothing of {rung.dead[0].name}"
        yield attention, rung
