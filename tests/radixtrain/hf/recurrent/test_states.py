"""The stand-in for Hugging Face's cache, step by step beside the cache itself."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import TRIES
from transformers import DynamicCache, Qwen3_5TextConfig
from transformers.cache_utils import Cache, LinearAttentionLayer

from radixtrain.hf.recurrent.states import ForkedStates

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
