"""What a mixer gets on the runs of a tree: its arguments, the states of a fork, and the runs of a batch.

That values and gradients are those of each sequence: tests/claims/equivalence/test_recurrent_tries.py.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from older_transformers import since
from tiers import TRIES
from torch import nn
from transformers import DynamicCache, Qwen3_5TextConfig
from transformers.cache_utils import Cache

from radixtrain.errors import UserError
from radixtrain.hf.names import CACHE
from radixtrain.hf.recurrent.running import (
    ForkedStates,
    arguments_by_name,
    cache_argument,
    run_on_tree,
    tree_runs,
)
from radixtrain.testing import FREE_FORKS
from radixtrain.tree.layout import TreeLayout
from radixtrain.tree.plan import build_prefix_plan
from radixtrain.tree.runs import cheapest_runs

RUNS, CHANNELS = 2, 3
STOCK = since("5.21", "a cache has no method that reads its states")


class Sums(nn.Module):
    """The sum of the rows so far, which is its state; it speaks Hugging Face's cache protocol."""

    def forward(self, hidden_states, cache_params=None):
        if cache_params is None:
            return hidden_states.cumsum(1)
        before = cache_params.get_recurrent_state(0)
        sums = hidden_states.cumsum(1) + (0 if before is None else before[:, None])
        cache_params.update_recurrent_state(sums[:, -1], 0)
        return sums


def plan_of(sequences, **options):
    ids = [token for sequence in sequences for token in sequence]
    return build_prefix_plan(ids, np.cumsum([0, *map(len, sequences)]), **options)


def test_literally():
    """1 2 3 -> 4 | 5, and 6 7. Only calls that fork have a cache: the others run on the training kernels of a mixer."""
    seen = []

    def forward(hidden_states, cache_params):
        seen.append(type(cache_params))
        return Sums()(hidden_states, cache_params)

    plan = plan_of([[1, 2, 3, 4], [1, 2, 3, 5], [6, 7]])
    runs = cheapest_runs(plan.segment_starts, plan.segment_parents, FREE_FORKS)
    rows = torch.tensor([1.0, 2, 3, 4, 1, 2, 3, 5, 6, 7])[torch.tensor(plan.gather_indices)][None, :, None]
    sums = run_on_tree(Sums(), forward, {"hidden_states": rows}, runs)[0, :, 0]
    assert sums[torch.tensor(plan.inverse_indices)].tolist() == [1, 3, 6, 10, 1, 3, 6, 11, 6, 13]
    assert seen == [ForkedStates, type(None), ForkedStates]


class TestArguments:
    def test_by_name(self):
        named = arguments_by_name(Sums(), ("rows",), {"cache_params": None, "radix_call": "a call"})
        assert named == {"hidden_states": "rows", "cache_params": None}

    def test_a_subclass_that_passes_everything_on(self):
        class Twice(Sums):
            def forward(self, *args, **kwargs):
                return 2 * super().forward(*args, **kwargs)

        assert cache_argument(Twice()) == cache_argument(Sums())
        assert arguments_by_name(Twice(), ("rows",), {}) == {"hidden_states": "rows"}

    @pytest.mark.parametrize("annotation", [Cache | None, "Qwen3NextDynamicCache | None"])
    def test_the_cache_by_its_annotation(self, annotation):
        """Whatever a later transformers calls it; an old name that a layer still passes is left out."""

        class Renamed(Sums):
            def forward(self, hidden_states, kept_states=None):
                return super().forward(hidden_states, kept_states)

        Renamed.forward.__annotations__["kept_states"] = annotation
        assert cache_argument(Renamed()) == "kept_states"
        plan = plan_of([[1, 2, 3], [1, 2, 4]])
        runs = cheapest_runs(plan.segment_starts, plan.segment_parents, FREE_FORKS)
        given = {"hidden_states": torch.ones(1, 4, 1), "cache_params": None}
        assert run_on_tree(Renamed(), Renamed().forward, given, runs)[0, :, 0].tolist() == [1, 2, 3, 3]

    @pytest.mark.parametrize("name", CACHE)
    def test_the_cache_by_its_name(self, name):
        module = type("Named", (nn.Module,), {})
        exec(f"def forward(self, x, {name}=None): ...", space := {})
        module.forward = space["forward"]
        assert cache_argument(module()) == name

    def test_a_cache_without_a_name(self):
        class Unnamed(nn.Module):
            def forward(self, *args, **kwargs):
                raise NotImplementedError

        with pytest.raises(UserError, match=r"Unnamed has a recurrent state, and its forward does not name the cache"):
            cache_argument(Unnamed())


def stock_cache() -> Cache:
    return DynamicCache(config=Qwen3_5TextConfig(num_hidden_layers=1, layer_types=["linear_attention"]))


def columns(length, start=0):
    """(runs, channels, length), all different and none zero."""
    numbers = torch.arange(RUNS * CHANNELS * length, dtype=torch.float64).reshape(RUNS, CHANNELS, length)
    return numbers + 1 + 1000 * start


def same_but_for_zeros_before(ours, stock):
    """Hugging Face puts zeros before a first piece that is shorter than the convolution; the mixer puts its own."""
    missing = stock.shape[-1] - ours.shape[-1]
    assert missing >= 0 and not stock[..., :missing].any()
    assert torch.equal(ours, stock[..., missing:])


@STOCK
@settings(max_examples=2 * TRIES, deadline=None)
@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=6), width=st.integers(1, 4))
def test_beside_the_stock_cache(lengths, width):
    """Any pieces of a sequence: the same columns come back, and the same states are kept."""
    stock, past = stock_cache(), {}
    for number, length in enumerate(lengths):
        states, new = ForkedStates(past), columns(length, start=number)
        assert states.has_previous_state(0) == stock.has_previous_state(0)
        for ours, other in (
            (states.get_conv_state(0), stock.get_conv_state(0)),
            (states.get_recurrent_state(0), stock.get_recurrent_state(0)),
        ):
            assert (ours is None and other is None) or torch.equal(ours, other)
        returned = states.update_conv_state(new, 0, conv_kernel_size=width)
        same_but_for_zeros_before(returned, stock.update_conv_state(new, 0, conv_kernel_size=width))
        state = torch.full((RUNS, 4), float(number + 1))
        assert torch.equal(states.update_recurrent_state(state, 0), stock.update_recurrent_state(state, 0))
        past = states.final
        assert past["conv", 0].shape == (RUNS, CHANNELS, width)
    assert torch.equal(past["conv", 0], stock.get_conv_state(0))


@pytest.mark.parametrize("num_states", [0, 1, 2])
@STOCK
def test_several_states_of_one_layer(num_states):
    from transformers.cache_utils import LinearAttentionLayer

    stock, states = Cache(layers=[LinearAttentionLayer(number_of_states=2)]), ForkedStates()
    for cache in (states, stock):
        for number in range(num_states):
            cache.update_conv_state(columns(4, start=number), 0, state_idx=number, conv_kernel_size=2 + number)
            cache.update_recurrent_state(columns(1, start=number), 0, state_idx=number)
    again = ForkedStates(states.final)
    for number in range(num_states):
        assert torch.equal(again.get_conv_state(0, number), stock.get_conv_state(0, number))
        assert torch.equal(again.get_recurrent_state(0, number), stock.get_recurrent_state(0, number))


@pytest.mark.parametrize("past", [{}, {("conv", 0): columns(3)}], ids=["from nothing", "from a state"])
def test_never_a_step_of_generation(past):
    """Which would write into the state in place."""
    assert ForkedStates(past).is_recording_past(0)


PROMPT = [*range(300)]
LONG = [[*PROMPT, 1], [*PROMPT, 2, 2], [*PROMPT, 3]]  # by default it pays to fork


def contents(runs):
    return runs.calls, runs.rows.tolist(), runs.places.tolist(), runs.parents.tolist()


def test_otherwise_the_cheapest_by_default():
    plan = plan_of(LONG)
    runs = tree_runs(TreeLayout.from_plan(plan), forks=True)
    expected = cheapest_runs(plan.segment_starts, plan.segment_parents)
    assert expected.num_forks == 1
    assert contents(runs) == contents(expected)


def test_runs_of_the_batch_are_not_read_back():
    """On meta tensors, as on a device under capture, reading a value raises."""
    layout = TreeLayout.from_plan(plan_of([[1, 2, 3], [4, 5]])).to("meta")
    assert all(tree_runs(layout, forks).rows.device == torch.device("meta") for forks in (True, False))
