"""Layers with a recurrent state fork exactly: over generated tries the gradient is that of each sequence by itself.

One tiny model for each kind of mixer, in float64: the bar is a relative L2 error of 1e-12 for every parameter tensor
and for the loss. Forks are forced, because on rows as short as these none would pay. Rounding below float64 is compared
in test_families.py.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from radixtrain import RadixCollator, restore_model
from radixtrain.testing import labelled_features
from radixtrain.tree.layout import TreeLayout
from radixtrain.tree.radix_inputs import layout_of
from radixtrain.tree.runs import GROUP_COST, MIN_SAVED, RunLayout, runs_of_segments
from radixtrain.verification.oracle import Features, float64_truth, radix_batch
from radixtrain.verification.report import Rung
from tests.claims.equivalence.ways import set_checkpointing, with_runs
from tests.support import cases, tries
from tests.support.models import FAMILIES, NEEDS_FORKS
from tests.support.steps import same_step

pytestmark = NEEDS_FORKS

NUM_TRIES = max(10, tries(10, 1000))
WHOLE = "Mamba, whole sequences"  # from whose states none can start
# Mixer -> a class that has it.
MIXERS = {
    "gated delta rule": "Qwen3_5ForCausalLM",
    "delta rule, a gate for each channel": "KimiLinearForCausalLM",
    "Mamba 2": "BambaForCausalLM",
    "short convolution": "Lfm2ForCausalLM",
    "Mamba 2 beside attention": "FalconH1ForCausalLM",
    WHOLE: "JambaForCausalLM",
    "convolutions before attention": "ZayaForCausalLM",
}
ONE_OF_EACH = cases(MIXERS, ["gated delta rule", "Mamba 2", "short convolution"])


@dataclass(frozen=True)
class Forks:
    """How the runs of a batch are chosen.

    min_saved, group_cost: as for `runs_of_segments`.
    """

    min_saved: int | None
    group_cost: float = 0.0

    def terms(self, model: Any, batch: Mapping[str, Any]) -> Iterator[Tensor]:
        """The loss of a batch whose recurrent layers have these runs."""
        with with_runs(self.table):
            yield from radix_batch(model, batch)

    def table(self, layout: TreeLayout) -> RunLayout:
        return runs_of_segments(*layout.segments, self.min_saved, group_cost=self.group_cost)

    def num_forks(self, batch: Mapping[str, Any]) -> int:
        return sum(group.num_runs for group in self.table(layout_of(batch)).groups if group.is_fork)


EVERY_BRANCH = Forks(2)
CHOICES = {
    "a fork at every branch": EVERY_BRANCH,
    "a fork at every branch, leaves in one group": Forks(2, group_cost=1000.0),
    "forks that save six rows": Forks(6, group_cost=10.0),  # rows of other branches are computed again
    "forks that save ten rows": Forks(10),
    "no fork": Forks(None),
    "the defaults": Forks(MIN_SAVED, GROUP_COST),
}
TRUNK = [1, 2, 3, 1, 1, 2, 0, 3, 2, 1, 3, 0, 0, 1]
CASES = {
    "a fork at every token": [[*TRUNK[:length], (TRUNK[length] + 1) % 4, 2] for length in range(1, 9)],
    "segments shorter than the convolution": [
        *([*TRUNK[:2], 0, 0, *end] for end in ([1, 1], [1, 2], [3, 0])),
        *([*TRUNK[:2], 1, 3, *end] for end in ([2], [0, 0], [0, 1])),
    ],
    "identical rows, and prefixes of others": [TRUNK[:4], TRUNK[:9], TRUNK[:9], TRUNK, TRUNK[:1]],
    "a deep comb": [[*TRUNK[:length], (TRUNK[length - 1] + 2) % 4, length % 4] for length in range(2, 14, 2)],
    "longer than a chunk": [[*TRUNK * 2, *end] for end in ([1], [2, 3], [0, 1, *TRUNK])],  # of 8 rows: Mamba 2
    "longer than a chunk of 64": [[*TRUNK * 5, *end] for end in ([1], [2, 3], [0, 1, *TRUNK * 5])],
}


def tiny(mixer: str) -> Any:
    return next(each for each in FAMILIES if each.model_class == MIXERS[mixer]).build()


@pytest.fixture(autouse=True)
def forked(mixer: str, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No layer may fall back to whole sequences, which are exact too and so would hide what is tried."""
    yield
    said = [each.message for each in caplog.get_records("call")]
    assert any("from its first token on" in each for each in said) == (mixer == WHOLE)


@pytest.mark.parametrize("mixer", ONE_OF_EACH)
def test_cases(mixer: str) -> None:
    """Every case, with a fork at every branch and with rows that are computed again."""
    model = tiny(mixer)
    for name, sequences in CASES.items():
        features = [{"input_ids": ids, "labels": ids} for ids in sequences]
        truth = float64_truth(restore_model(model), features)
        for forks in (EVERY_BRANCH, CHOICES["forks that save six rows"]):
            same_step(model, truth, partial(forks.terms, batch=RadixCollator()(features)), what=(name, forks))


@pytest.mark.parametrize("mixer", ONE_OF_EACH)
def test_generated_tries(print_after: Callable[[str, str], None], mixer: str) -> None:
    model = tiny(mixer)
    rungs: list[Rung] = []
    num_forks: list[int] = []

    @settings(max_examples=NUM_TRIES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(
        features=labelled_features(min_sequences=3, max_length=14),
        trunk=st.sampled_from([TRUNK[:length] for length in (0, 1, 2, 3, 6, 12)]),
        forks=st.sampled_from([EVERY_BRANCH, EVERY_BRANCH, *CHOICES.values()]),
        min_shared_tokens=st.sampled_from([1, 1, 1, 3]),
        pad_to_multiple_of=st.sampled_from([None, 4]),
        checkpointing=st.sampled_from([0.0, 0.5, 1.0]),
    )
    def one_try(features: Features, trunk: list[int], forks: Forks, checkpointing: float, **options: Any) -> None:
        features = [features[0], *(after(trunk, feature) for feature in features[1:])]
        batch = RadixCollator(**options)(features)
        assume(EVERY_BRANCH.num_forks(batch))
        set_checkpointing(restore_model(model), checkpointing)
        num_forks.append(forks.num_forks(batch))
        rungs.append(same_step(model, features, partial(forks.terms, batch=batch), what=forks))

    one_try()
    worst, forked = max(rung.worst.radix for rung in rungs), sum(number > 0 for number in num_forks)
    print_after(
        "recurrent layers, float64: worst relative L2 error of a gradient tensor",
        f"{mixer}: {len(rungs)} tries, {forked} with forks ({sum(num_forks)} states): {worst:.1e}",
    )
    assert forked >= len(num_forks) / 2, "hardly a try has a fork"
    never = set.intersection(*({tensor.name for tensor in rung.dead} for rung in rungs))
    assert not never, f"no try proves anything of {never}"


def after(trunk: list[int], feature: dict[str, list[int]]) -> dict[str, list[int]]:
    """A feature with tokens before it that others have too; every other one of them bears loss."""
    more = {"input_ids": trunk, "labels": [-100 if place % 2 else token for place, token in enumerate(trunk)]}
    if "position_ids" not in feature:
        return {name: more[name] + feature[name] for name in more}
    places = [*range(len(trunk)), *(place + len(trunk) for place in feature["position_ids"])]
    return {**{name: more[name] + feature[name] for name in more}, "position_ids": places}
