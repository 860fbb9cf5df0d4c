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
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from radixtrain import RadixCollator, restore_model
from radixtrain.testing import labelled_features
from radixtrain.tree.layout import TreeLayout
from radixtrain.tree.radix_inputs import layout_of
from radixtrain.tree.runs import GROUP_COST, MIN_SAVED, RunLayout, runs_of_segments
from radixtrain.verification.equivalence import Rung
from radixtrain.verification.oracle import Features, radix_batch
from tests.claims.equivalence.ways import set_checkpointing, with_runs
from tests.support import cases, tries
from tests.support.models import FAMILIES, NEEDS_FORKS
from tests.support.steps import same_step

pytestmark = NEEDS_FORKS

NUM_TRIES = max(20, tries(10, 1000))
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
    "no fork": Forks(None),
    "the defaults": Forks(MIN_SAVED, GROUP_COST),
}
TRUNK = [1, 2, 3, 1, 1, 2, 0, 3, 2, 1, 3, 0, 0, 1]
# None, shorter than a convolution, longer than a chunk: of 8 rows in Mamba 2, of 64 in delta rules.
TRUNKS = [*(TRUNK[:length] for length in (0, 1, 2, 3, 6, 12)), TRUNK * 2, TRUNK * 5]


@pytest.fixture(autouse=True)
def forked(mixer: str, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No layer may fall back to whole sequences, which are exact too and so would hide what is tried."""
    yield
    said = [each.message for each in caplog.get_records("call")]
    assert any("from its first token on" in each for each in said) == (mixer == WHOLE)


@pytest.mark.parametrize("mixer", ONE_OF_EACH)
def test_generated_tries(print_after: Callable[[str, str], None], mixer: str) -> None:
    model = next(each for each in FAMILIES if each.model_class == MIXERS[mixer]).build()
    rungs: list[Rung] = []
    num_forks: list[int] = []

    @settings(max_examples=NUM_TRIES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(
        features=labelled_features(min_sequences=3, max_length=14),
        trunk=st.sampled_from(TRUNKS),
        teeth=st.sets(st.integers(1, len(TRUNK) - 1), min_size=4),
        forks=st.sampled_from([*[EVERY_BRANCH] * 6, *CHOICES.values()]),
        min_shared_tokens=st.sampled_from([1, 1, 1, 3]),
        pad_to_multiple_of=st.sampled_from([None, 4]),
        checkpointing=st.sampled_from([0.0, 0.5, 1.0]),
    )
    def one_try(
        features: Features, trunk: list[int], teeth: set[int], forks: Forks, checkpointing: float, **options: Any
    ) -> None:
        comb = [[*TRUNK[:place], (TRUNK[place] + 1) % 4, 2] for place in teeth]
        features = [features[0], *(after(trunk, feature) for feature in features[1:])]
        features += [{"input_ids": ids, "labels": ids} for ids in comb]
        batch = RadixCollator(**options)(features)
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
