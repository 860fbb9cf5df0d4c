"""A mixer on the runs of a tree, against the mixer on each sequence by itself."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiers import FULL, TRIES
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from transformers import DynamicCache, Qwen3_5TextConfig
from transformers.cache_utils import Cache, LinearAttentionLayer

from radixtrain.errors import UserError
from radixtrain.hf.recurrent.running import (
    ForkedStates,
    TreeRuns,
    arguments_by_name,
    cache_argument,
    parents_of,
    run_on_tree,
)
from radixtrain.testing import FREE_FORKS, ragged_batches
from radixtrain.tree.layout import TreeLayout
from radixtrain.tree.plan import build_prefix_plan
from radixtrain.tree.runs import RunCall, RunCost, RunLayout, cheapest_runs, runs_of_segments

CHANNELS, WIDTH = 2, 3
DEEP = [[1, 1, 1, 1], [1, 1, 1, 2], [1, 1, 2, 1], [1, 1, 2, 2], [1, 2], [3, 1, 1, 1, 1], [3, 1, 1, 1, 2], [3, 2]]
THREE_CHILDREN = [[1, 1, 1, end, 5] for end in (2, 3, 4)]


class Decay(nn.Module):
    """h_t = a h_(t-1) + c_t of a causal convolution c of x, three wide; it speaks Hugging Face's cache protocol."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.decay = nn.Parameter(torch.rand(CHANNELS, generator=generator, dtype=torch.float64))
        self.taps = nn.Parameter(torch.randn(CHANNELS, 1, WIDTH, generator=generator, dtype=torch.float64))

    def forward(self, hidden_states, cache_params=None, attention_mask=None, **kwargs):
        assert attention_mask is None
        x = hidden_states.transpose(1, 2)
        state = x.new_zeros(x.shape[:2])
        if cache_params is not None:
            previous = cache_params.get_recurrent_state(0)
            state = state if previous is None else previous
            x = cache_params.update_conv_state(x, 0, conv_kernel_size=WIDTH)
        mixed = nn.functional.conv1d(nn.functional.pad(x, (WIDTH - 1, 0)), self.taps, groups=CHANNELS)
        states = []
        for column in mixed[..., -hidden_states.shape[1] :].unbind(-1):
            state = self.decay * state + column
            states.append(state)
        if cache_params is not None:
            cache_params.update_recurrent_state(state, 0)
        return torch.stack(states, dim=1)


class Gated(Decay):
    """Its output is two tensors, one of them None if there is no gate; it takes arguments that count rows."""

    def forward(self, hidden_states, gates=None, past_key_values=None, scale=1.0, places=None, conv_mask=None):
        assert conv_mask is None
        mixed = scale * super().forward(hidden_states, past_key_values)
        if gates is None:
            return mixed, None
        first, (second, _) = gates
        return mixed * first, (mixed + second) * places[..., None]


def plan_of(sequences, **options):
    ids = [token for sequence in sequences for token in sequence]
    return build_prefix_plan(ids, np.cumsum([0, *map(len, sequences)]), **options)


def runs_of(plan, min_saved=2, multiple=1, rates=FREE_FORKS):
    segments = plan.segment_starts, plan.segment_parents
    return RunLayout.from_table(runs_of_segments(*segments, min_saved, multiple, rates))


def sequences_by_themselves(mixer, x, plan):
    """(1, T, channels): the mixer on the rows of one sequence after another."""
    inverse = torch.tensor(plan.inverse_indices)
    bounds = plan.cu_seqlens.tolist()
    outputs = [mixer(x[:, inverse[start:end]]) for start, end in pairwise(bounds) if end > start]
    return torch.cat(outputs, dim=1), inverse


def inputs(num_rows, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, num_rows, CHANNELS, generator=generator, dtype=torch.float64)


def on_tree(mixer, x, runs):
    return run_on_tree(mixer, mixer.forward, {"hidden_states": x}, runs)


def test_literally():
    """Without a convolution and with a decay of 1 a state is the sum of the path: 1 2 -> 3 | 4."""
    mixer = Decay()
    with torch.no_grad():
        mixer.decay.fill_(1.0)
        mixer.taps.copy_(torch.tensor([0.0, 0.0, 1.0]))
    plan = plan_of([[1, 2, 3], [1, 2, 4]])
    x = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)[None, :, None].expand(1, 4, CHANNELS)
    runs = RunLayout(
        calls=(RunCall(1, 2, 1, ()), RunCall(2, 2, 0, ((0, 2),))),
        rows=torch.tensor([0, 1, 2, 2, 3, 3]),
        places=torch.tensor([0, 1, 2, 4]),
        parents=torch.tensor([0, 0]),
    )
    assert on_tree(mixer, x, runs)[0, :, 0].tolist() == [1.0, 3.0, 6.0, 7.0]
    assert runs.calls == runs_of(plan).calls


@settings(max_examples=2 * TRIES, deadline=None)
@given(
    sequences=ragged_batches(),
    min_saved=st.sampled_from([None, 2, 2, 6]),
    multiple=st.sampled_from([1, 2, 3]),
    call=st.sampled_from([0.0, 100.0]),
    padding=st.sampled_from([None, 4]),
)
@example(DEEP, 2, 1, 0.0, None)
@example(THREE_CHILDREN, 2, 2, 0.0, None)
@example([[1], [1], [2]], 2, 1, 0.0, None)
def test_values_and_gradients_are_those_of_each_sequence(sequences, min_saved, multiple, call, padding):
    mixer, plan = Decay(), plan_of(sequences, pad_to_multiple_of=padding)
    x = inputs(plan.num_rows).requires_grad_()
    expected, inverse = sequences_by_themselves(mixer, x, plan)
    output = on_tree(mixer, x, runs_of(plan, min_saved, multiple, RunCost(call=call, state=0.0)))
    assert output.shape == x.shape
    torch.testing.assert_close(output[:, inverse], expected, rtol=1e-13, atol=1e-13)
    weights = torch.linspace(-1, 2, expected.numel(), dtype=torch.float64).reshape(expected.shape)
    sources = [x, *mixer.parameters()]
    wanted = torch.autograd.grad((expected * weights).sum(), sources)
    found = torch.autograd.grad((output[:, inverse] * weights).sum(), sources)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("sequences", "multiple"),
    [
        pytest.param(THREE_CHILDREN, 1, marks=FULL, id="wide"),
        pytest.param(DEEP, 1, marks=FULL, id="deep"),
        pytest.param(THREE_CHILDREN, 2, id="cut"),
    ],
)
def test_gradcheck(sequences, multiple):
    """A state that three runs start from, and states of states."""
    plan = plan_of(sequences)
    runs, mixer = runs_of(plan, multiple=multiple), Decay()
    assert any(call.sources for call in runs.calls)
    assert len(runs.parents.unique()) < len(runs.parents), "parents repeat"

    def of(x, decay, taps):
        given = {"hidden_states": x}
        return run_on_tree(
            mixer, lambda **named: torch.func.functional_call(mixer, parameters(decay, taps), (), named), given, runs
        )

    def parameters(decay, taps):
        return {"decay": decay, "taps": taps}

    sources = inputs(plan.num_rows).requires_grad_(), mixer.decay, mixer.taps
    assert gradcheck(of, sources)
    assert gradgradcheck(of, sources)


def test_non_contiguous_rows():
    plan, mixer = plan_of(DEEP), Decay()
    wide = torch.randn(plan.num_rows, 1, 3 * CHANNELS, dtype=torch.float64).transpose(0, 1)[..., ::3]
    assert not wide.is_contiguous()
    runs = runs_of(plan)
    torch.testing.assert_close(on_tree(mixer, wide, runs), on_tree(mixer, wide.contiguous(), runs), rtol=1e-13, atol=0)


def test_the_same_bits_every_time():
    plan, mixer = plan_of(DEEP), Decay().float()
    x = inputs(plan.num_rows).float().requires_grad_()

    def gradients():
        return torch.autograd.grad(on_tree(mixer, x, runs_of(plan)).square().sum(), [x, *mixer.parameters()])

    assert all(map(torch.equal, gradients(), gradients()))


class TestArguments:
    def given(self, plan):
        """Arguments as a layer passes them: hidden rows, nested rows, integer rows, a scale and a mask of U x U."""
        rows = plan.num_rows
        return {
            "hidden_states": inputs(rows),
            "gates": (inputs(rows, 2), (inputs(rows, 3), None)),
            "places": torch.tensor(plan.position_ids)[None],
            "scale": 2.0,
            "conv_mask": torch.zeros(1, rows, dtype=torch.bool),
        }

    def test_rows_reach_the_mixer_with_the_rows_of_the_runs(self):
        mixer, plan = Gated(), plan_of(DEEP)
        given = self.given(plan)
        two, plus = run_on_tree(mixer, mixer.forward, given, runs_of(plan))
        state = 2 * run_on_tree(Decay(), Decay().forward, {"hidden_states": given["hidden_states"]}, runs_of(plan))
        first, (second, _) = given["gates"]
        torch.testing.assert_close(two, state * first, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(plus, (state + second) * given["places"][..., None], rtol=1e-13, atol=1e-13)
        _, nothing = run_on_tree(mixer, mixer.forward, {"hidden_states": given["hidden_states"]}, runs_of(plan))
        assert nothing is None, "an output that is None for every run"

    def test_what_counts_no_rows_is_passed_as_it_is(self):
        seen = []

        def forward(**given):
            seen.append(given)
            return given["hidden_states"]

        plan = plan_of(DEEP)
        others = {"table": torch.zeros(7, 3), "flag": True, "nothing": None, "two_rows": torch.zeros(2, plan.num_rows)}
        runs = runs_of(plan)
        run_on_tree(Decay(), forward, {"hidden_states": inputs(plan.num_rows), **others}, runs)
        assert len(seen) == len(runs.calls)
        for named, call in zip(seen, runs.calls, strict=True):
            assert all(named[name] is value for name, value in others.items())
            assert named["hidden_states"].shape == (call.num_runs, call.length, CHANNELS)

    def test_only_calls_that_fork_have_a_cache(self):
        """The others are ordinary calls of a mixer, by its training kernels."""
        seen = []

        def forward(hidden_states, cache_params):
            seen.append(cache_params)
            return Decay()(hidden_states, cache_params)

        plan = plan_of([[1, 1, 1, 2], [1, 1, 1, 3], [4, 4]])
        runs = runs_of(plan)
        run_on_tree(Decay(), forward, {"hidden_states": inputs(plan.num_rows)}, runs)
        kinds = [ForkedStates if call.keeps or call.sources else type(None) for call in runs.calls]
        assert [type(each) for each in seen] == kinds == [ForkedStates, type(None), ForkedStates]

    def test_by_name(self):
        named = arguments_by_name(Gated(), ("rows", "gate"), {"scale": 3.0, "radix_call": "a call"})
        assert named == {"hidden_states": "rows", "gates": "gate", "scale": 3.0}

    def test_a_subclass_that_passes_everything_on(self):
        class Twice(Decay):
            def forward(self, *args, **kwargs):
                return 2 * super().forward(*args, **kwargs)

        assert cache_argument(Twice()) == cache_argument(Decay())
        assert arguments_by_name(Twice(), ("rows",), {}) == {"hidden_states": "rows"}

    def test_a_cache_without_a_name(self):
        class Unnamed(nn.Module):
            def forward(self, *args, **kwargs):
                raise NotImplementedError

        with pytest.raises(UserError, match=r"Unnamed has a recurrent state, and its forward does not name the cache"):
            cache_argument(Unnamed())


RUNS, CHANNELS = 2, 3


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


def test_a_mixer_that_hands_over_only_what_it_keeps():
    """Without a width it is that of what is handed over, piece after piece, as ZAYA has it."""
    stock, past = stock_cache(), {}
    for number in range(3):
        states = ForkedStates(past)
        new = columns(2, start=number)
        states.update_conv_state(new, 0)
        stock.update_conv_state(new, 0)
        past = states.final
        assert torch.equal(past["conv", 0], stock.get_conv_state(0))


def test_a_piece_shorter_than_the_convolution():
    """One column, then one more: the state is filled from the right."""
    first = ForkedStates()
    assert torch.equal(first.update_conv_state(columns(1), 0, conv_kernel_size=3), columns(1))
    assert first.final["conv", 0][0, 0].tolist() == [0.0, 0.0, 1.0]
    second = ForkedStates(first.final)
    returned = second.update_conv_state(columns(1, start=1), 0, conv_kernel_size=3)
    assert returned[0, 0].tolist() == [0.0, 0.0, 1.0, 1001.0]
    assert second.final["conv", 0][0, 0].tolist() == [0.0, 1.0, 1001.0]


@pytest.mark.parametrize("num_states", [0, 1, 2])
def test_several_states_of_one_layer(num_states):
    """Also as mixers read them before transformers 5.21: `cache.layers[layer_idx]`, None before the first update."""
    stock, states = Cache(layers=[LinearAttentionLayer(number_of_states=2)]), ForkedStates()
    for cache in (states, stock):
        for number in range(num_states):
            cache.update_conv_state(columns(4, start=number), 0, state_idx=number, conv_kernel_size=2 + number)
            cache.update_recurrent_state(columns(1, start=number), 0, state_idx=number)
    again = ForkedStates(states.final)
    for number in range(num_states):
        assert torch.equal(again.get_conv_state(0, number), stock.get_conv_state(0, number))
        assert torch.equal(again.get_recurrent_state(0, number), stock.get_recurrent_state(0, number))
    ours, other = again.layers[0], stock.layers[0]
    for kind in ("conv_states", "recurrent_states"):
        for number in range(2):
            mine, its = getattr(ours, kind)[number], getattr(other, kind)[number]
            assert (mine is None and its is None) or torch.equal(mine, its)
    assert ours.record_past, "or a run of one token would write into its state in place"


@pytest.mark.parametrize("past", [{}, {("conv", 0): columns(3)}], ids=["from nothing", "from a state"])
def test_never_a_step_of_generation(past):
    """Which would write into the state in place."""
    assert ForkedStates(past).is_recording_past(0)


def test_both_gradients_pass_and_nothing_is_written_in_place():
    conv, recurrent = columns(3).requires_grad_(), columns(1).requires_grad_()
    before = conv.detach().clone(), recurrent.detach().clone()
    states = ForkedStates({("conv", 0): conv, ("recurrent", 0): recurrent})
    new = columns(2, start=1).requires_grad_()
    returned = states.update_conv_state(new, 0, conv_kernel_size=3)
    states.update_recurrent_state(2 * states.get_recurrent_state(0), 0)
    (returned.sum() + 10 * states.final["conv", 0].sum() + states.final["recurrent", 0].sum()).backward()
    assert conv.grad[0, 0].tolist() == [1.0, 1.0, 11.0], "the last of three is still kept"
    assert (new.grad == 11).all()
    assert (recurrent.grad == 2).all()
    assert torch.equal(conv, before[0]) and torch.equal(recurrent, before[1])


PROMPT = [*range(300)]
LONG = [[*PROMPT, 1], [*PROMPT, 2, 2], [*PROMPT, 3]]  # by default it pays to fork


def contents(runs):
    return runs.calls, runs.rows.tolist(), runs.places.tolist(), runs.parents.tolist()


@settings(max_examples=4 * TRIES, deadline=None)
@given(
    ragged_batches(min_length=0, min_sequences=0, max_length=14),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([None, 8]),
)
def test_parents_from_the_ends_of_subtrees(sequences, min_shared_tokens, pad_to_multiple_of):
    plan = plan_of(sequences, min_shared_tokens=min_shared_tokens, pad_to_multiple_of=pad_to_multiple_of)
    found = parents_of(plan.segment_starts, plan.subtree_ends)
    assert found.dtype == np.int64
    assert found.tolist() == plan.segment_parents.tolist()


def test_parents_literally():
    """A -> B -> C | D, A -> E, and F by itself."""
    starts, ends = np.array([0, 3, 5, 7, 10, 12, 13]), np.array([12, 10, 7, 10, 12, 13])
    assert parents_of(starts, ends).tolist() == [-1, 0, 1, 1, 0, -1]


def test_those_of_the_batch_if_it_brings_some():
    layout = TreeLayout.from_plan(plan_of([[1, 1, 1, 2], [1, 1, 1, 3]]), run_cost=FREE_FORKS)
    assert TreeRuns(layout).forked is layout.runs
    assert layout.runs.num_forks == 1


def test_otherwise_the_cheapest_by_default():
    plan = plan_of(LONG)
    runs = TreeRuns(TreeLayout.from_plan(plan))
    expected = cheapest_runs(plan.segment_starts, plan.segment_parents)
    assert expected.num_forks == 1
    assert contents(runs.forked) == contents(RunLayout.from_table(expected))
    assert runs.forked is runs.forked, "made once"


@pytest.mark.parametrize("run_cost", [None, RunCost()], ids=["made here", "of the batch"])
def test_whole_sequences(run_cost):
    plan = plan_of(LONG)
    runs = TreeRuns(TreeLayout.from_plan(plan, run_cost=run_cost))
    expected = runs_of_segments(plan.segment_starts, plan.segment_parents, None)
    assert contents(runs.whole) == contents(RunLayout.from_table(expected))
    assert runs.whole is runs.whole and runs.whole is not runs.forked
    assert not any(call.keeps or call.sources for call in runs.whole.calls)


def test_runs_of_the_batch_are_not_read_back():
    """On meta tensors, as on a device under capture, reading a value raises."""
    layout = TreeLayout.from_plan(plan_of([[1, 2, 3], [4, 5]]), run_cost=RunCost()).to("meta")
    runs = TreeRuns(layout)
    assert runs.forked is runs.whole is layout.runs
    assert runs.forked.rows.device == torch.device("meta")
