"""In float64 the gradient by radix is the ordinary one, over generated tries and every way to run a step.

The oracle is Hugging Face's own model on one sequence at a time. Each try runs all four strategies, a step in passes
those two that it can use; the bar is a relative L2 error of 1e-12 for every parameter tensor and for the loss.
RADIXTRAIN_TRIES sets how many tries are drawn.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, find, given, settings
from hypothesis import strategies as st
from tiers import FULL, TRIES, cases

from radixtrain import prepare_model, restore_model
from radixtrain.attention import EVERYWHERE
from radixtrain.testing import labelled_features
from radixtrain.tree.context import WITH_CONTEXT
from radixtrain.verification.equivalence import compare_gradients
from radixtrain.verification.oracle import float64_throughout, float64_truth, gradients_of
from radixtrain.verification.report import Rung

BAR = 1e-12
SECTION = "float64: worst relative L2 error of a gradient tensor"
MOST = st.integers(4, 7)
KINDS = ["tied", "untied, biased", "LoRA"]


@pytest.mark.parametrize("kind", cases(KINDS, ["tied", "LoRA"]))
def test_generated_tries(
    build: Callable[..., Any],
    ways: Callable[..., Any],
    set_checkpointing: Callable[[Any, float], None],
    kind: str,
    print_after: Callable[[str, str], None],
) -> None:
    model = build(kind)
    worst = dict.fromkeys(EVERYWHERE, 0.0)
    cuts: list[int] = []

    @settings(max_examples=TRIES, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
    @given(features=labelled_features(), way=ways())
    def one_try(features: Any, way: Any) -> None:
        cuts.append(1 if way.loss == "own, one batch" else len(way.step(features).micro_batches))
        set_checkpointing(model, way.activation_checkpointing)
        for attention, rung in climb(model, features, way):
            worst[attention] = max(worst[attention], rung.worst.radix)
            assert not rung.dead, f"a try that proves nothing of {rung.dead[0].name}"
            assert rung.worst.radix <= BAR and rung.loss_error <= BAR, f"{attention}, {way}: {rung.worst}"

    one_try()
    split = sum(count > 1 for count in cuts)
    assert split > len(cuts) / 4, f"{split} of {len(cuts)} steps were cut"
    figures = ", ".join(f"{attention} {error:.1e}" for attention, error in worst.items())
    print_after(SECTION, f"{kind}: {len(cuts)} tries, {split} cut into micro-batches: {figures}")


PASSES = st.sampled_from(["fused, passes", "fused, held passes"])


@pytest.mark.parametrize("kind", cases(KINDS, ["tied"]))
def test_generated_steps_in_passes(
    build: Callable[..., Any],
    ways: Callable[..., Any],
    set_checkpointing: Callable[[Any, float], None],
    kind: str,
    print_after: Callable[[str, str], None],
) -> None:
    """Each prefix once in the step, on up to three levels, each held or again, with and without checkpointing."""
    model = build(kind)
    worst = dict.fromkeys(WITH_CONTEXT, 0.0)
    levels: list[int] = []

    @settings(max_examples=TRIES, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
    @given(features=labelled_features(max_sequences=12, max_length=16), way=ways(loss=PASSES, max_tokens=MOST))
    def one_try(features: Any, way: Any) -> None:
        levels.append(num_levels(way.step(features)))
        set_checkpointing(model, way.activation_checkpointing)
        for attention, rung in climb(model, features, way):
            worst[attention] = max(worst[attention], rung.worst.radix)
            assert not rung.dead, f"a try that proves nothing of {rung.dead[0].name}"
            assert rung.worst.radix <= BAR and rung.loss_error <= BAR, f"{attention}, {way}: {rung.worst}"

    one_try()
    assert sum(number > 0 for number in levels) > len(levels) / 2 and max(levels) >= 3
    figures = ", ".join(f"{attention} {error:.1e}" for attention, error in worst.items())
    print_after(SECTION, f"{kind}, passes: {len(levels)} tries, {max(levels)} levels at most: {figures}")


def num_levels(step: Any) -> int:
    """How many passes continue one another, at most; 0 if nothing is kept."""
    depth: list[int] = []
    for batch in step.micro_batches:
        depth.append(max([1 + depth[source] for source, *_ in batch.get("radix_sources", ())], default=0))
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
    for attention, rung in climb(model, features, way):
        assert rung.worst.radix <= BAR and rung.loss_error <= BAR and not rung.dead, f"{attention}: {rung.worst}"


def climb(model: Any, features: Any, way: Any) -> Iterator[tuple[str, Rung]]:
    """The float64 rung of every strategy, against one truth."""
    truth = float64_truth(restore_model(model), features)
    for attention in WITH_CONTEXT if way.has_passes else EVERYWHERE:
        with float64_throughout(model):
            prepare_model(model, attention=attention)
            radix = gradients_of(model, lambda: way.terms(model, features))
        yield attention, compare_gradients("float64", truth, truth, radix)
