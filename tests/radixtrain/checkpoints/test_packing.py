"""A state comes back as it was, tensors that are one stay one, and what cannot be held is refused by its name."""

import json
import math
from collections import Counter, OrderedDict, defaultdict
from contextlib import suppress
from enum import Enum, IntEnum, StrEnum
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import TRIES
from torch import nn

from radixtrain.checkpoints.packing import MODEL, OPTIMIZER, STATE, MalformedState, Packed, pack, unpack
from radixtrain.checkpoints.tensors import DTYPES
from radixtrain.errors import UserError


def packed_and_back(state):
    """By way of the text that is written."""
    packed = pack(state)
    return unpack(Packed(json.loads(json.dumps(packed.skeleton, allow_nan=False)), packed.tensors))


def is_same(one, other):
    """Equal to the bit, and of the same types."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bits_of(one) == bits_of(other)
    if isinstance(one, np.ndarray | np.generic):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return is_same(list(one.items()), list(other.items()))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    return repr(one) == repr(other) if isinstance(one, float) else one == other


def bits_of(tensor):
    return tensor.resolve_conj().contiguous().reshape(-1).view(torch.uint8).tolist()


def tensors():
    shapes = st.lists(st.integers(0, 3), max_size=3)
    return st.builds(lambda dtype, shape: torch.randn(shape).mul(9).to(dtype), st.sampled_from(list(DTYPES)), shapes)


def arrays():
    names = st.sampled_from(["<u4", ">i8", "?", "<f2", "<c16"])
    shapes = st.lists(st.integers(0, 3), min_size=1, max_size=2)
    return st.builds(lambda name, shape: np.zeros(shape, "<u1").astype(name), names, shapes)


TEXT = st.text(max_size=6)
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | TEXT | st.binary(max_size=6)
LEAVES = PLAIN | tensors() | arrays() | st.builds(np.float32)
KEYS = TEXT | st.integers() | st.booleans() | st.none() | st.tuples(st.integers(), TEXT)
STATES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.sets(st.integers() | TEXT, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=3)
    ),
    max_leaves=12,
)


@settings(max_examples=3 * TRIES, deadline=None)
@given(st.dictionaries(st.sampled_from(["state_dict", "optimizer_states", "loops", "$tensor", ""]), STATES, max_size=4))
def test_any_state_comes_back(state):
    assert is_same(packed_and_back(state), state)


@pytest.mark.parametrize(
    ("value", "skeleton"),
    [
        ([1, 2.5, None, True, "a"], [1, 2.5, None, True, "a"]),
        ((0.9, 0.999), {"$tuple": [0.9, 0.999]}),
        ({0: "a"}, {"$dict": [[0, "a"]]}),
        ({"$tensor": 1}, {"$dict": [["$tensor", 1]]}),
        ({"a": {}}, {"a": {}}),
        (-math.inf, {"$float": "-inf"}),
        (2**64, 2**64),
        (b"\0", {"$bytes": "AA=="}),
        (np.float32(1), {"$array": [STATE, "x"], "dtype": "<f4", "shape": []}),
    ],
)
def test_what_is_written(value, skeleton):
    assert pack({"x": value}).skeleton == {"x": skeleton}
    assert is_same(packed_and_back({"x": value}), {"x": value})


class Color(StrEnum):
    RED = "red"


class Level(IntEnum):
    LOW = 1


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (Path("out/x"), "out/x"),
        (OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
        (defaultdict(list, {"a": [1]}), {"a": [1]}),
        (Counter("aab"), {"a": 2, "b": 1}),
        (torch.Size([2, 3]), (2, 3)),
        (nn.Parameter(torch.ones(2)), torch.ones(2)),
        (Color.RED, "red"),
        (Level.LOW, 1),
        (bytearray(b"a"), b"a"),
    ],
)
def test_kinds_that_become_plain_ones(value, plain):
    assert is_same(packed_and_back({"x": value}), {"x": plain})


def test_tensors_go_into_the_file_of_their_key():
    ones = torch.ones(2)
    state = {
        "state_dict": {"a.b": ones, "a": {"b": ones + 1}},
        "optimizer_states": [{"state": {0: ones + 2}}],
        "x": ones + 3,
    }
    packed = pack(state)
    assert {file: list(tensors) for file, tensors in packed.tensors.items()} == {
        MODEL: ["a.b", "a.b#1"],
        OPTIMIZER: ["optimizer_states.0.state.0"],
        STATE: ["x"],
    }
    assert packed.num_bytes == 4 * 2 * 4
    assert is_same(packed_and_back(state), state)


def test_tied_tensors_are_one_again():
    weight = torch.randn(3, 2)
    state = {"state_dict": {"embed": weight, "head": nn.Parameter(weight)}, "other": [weight, weight.view(6), weight.T]}
    packed = pack(state)
    assert [len(tensors) for tensors in packed.tensors.values()] == [1, 0, 3]  # another view is another tensor
    back = unpack(packed)
    assert back["state_dict"]["embed"] is back["state_dict"]["head"]
    assert is_same(back["other"], state["other"])


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (SimpleNamespace(a=1), r"callbacks\.Mine\.0, a types\.SimpleNamespace"),
        (len, r"callbacks\.Mine\.0, a builtins\.builtin_function_or_method"),
        (Enum("E", "A").A, r"callbacks\.Mine\.0, a .*E"),
        (torch.bfloat16, r"callbacks\.Mine\.0, a torch\.dtype"),
        (1j, r"callbacks\.Mine\.0, a builtins\.complex"),
        (np.array([object()]), r"callbacks\.Mine\.0, a numpy\.ndarray"),
        (np.zeros(2, [("a", "f4")]), r"callbacks\.Mine\.0, a numpy\.ndarray"),
        (torch.zeros(2, dtype=torch.complex128), r"callbacks\.Mine\.0, a Tensor of torch\.complex128"),
        (torch.zeros(2).to_sparse(), r"callbacks\.Mine\.0, a Tensor of torch\.float32 \(torch\.sparse_coo"),
        (torch.zeros(2, device="meta"), r"callbacks\.Mine\.0, a Tensor of .* on meta"),
    ],
)
def test_anything_else_is_refused_by_name(value, named):
    with pytest.raises(UserError, match=f"a checkpoint cannot hold {named}"):
        pack({"callbacks": {"Mine": [value]}})


def test_a_state_that_holds_itself_is_refused():
    endless = []
    endless.append(endless)
    with pytest.raises(UserError, match="nested without end"):
        pack({"x": endless})


TAGS = ["$tensor", "$array", "$tuple", "$set", "$dict", "$float", "$bytes", "$x"]
JSON = st.recursive(
    PLAIN.filter(lambda value: not isinstance(value, bytes)) | st.sampled_from([*TAGS, STATE, "x", "float32", "|O"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*TAGS, "dtype", "shape"]) | TEXT, inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=6 * TRIES, deadline=None)
@given(JSON)
def test_a_skeleton_of_somebody_else_is_refused_or_harmless(skeleton):
    with suppress(MalformedState):
        unpack(Packed(skeleton, {STATE: {"x": torch.zeros(4, dtype=torch.uint8)}}))


def test_malformed_skeletons():
    for skeleton in (
        {"$tensor": ["../x", "y"]},
        {"$tensor": "x"},
        {"$array": [STATE, "x"], "dtype": "|O", "shape": [1]},
        {"$array": [STATE, "x"], "dtype": "<f4", "shape": [-1]},
        {"$array": [STATE, "x"], "dtype": "<f4", "shape": [2]},
        {"$array": [STATE, "x"], "dtype": "|u1", "shape": [-2, -2]},
        {"$array": [STATE, "x"]},
        {"$float": "x"},
        {"$bytes": "?"},
        {"$set": [[1]]},
        {"$dict": [[1, 2, 3]]},
        {"$tuple": {"a": 1}},
        {"$code": "print"},
    ):
        with pytest.raises(MalformedState):
            unpack(Packed({"a": [skeleton]}, {STATE: {"x": torch.zeros(4, dtype=torch.uint8)}}))
