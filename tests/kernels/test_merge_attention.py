"""U rows, N query heads, K key/value heads, H head dim."""

import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from radixtrain.errors import UserError
from radixtrain.kernels.cpu_loops import EagerKernel, TorchCPUKernel
from radixtrain.kernels.merge_attention import (
    Piece,
    Route,
    merge_piece,
    route_backward,
    route_forward,
    routed_attention,
)
from radixtrain.kernels.varlen_args import Scoring, VarlenKernel
from tests.kernels.ragged_calls import ragged
from tests.support import FULL
from tests.support.batches import assert_exact, one_softmax, random_tensors, seen_pairs, with_gradients

SCALE = 0.6
SCORING = Scoring(SCALE)
EVERYTHING = slice(None)

kernels = pytest.mark.parametrize("kernel", [EagerKernel(), TorchCPUKernel()], ids=["eager", "torch"])


# Ten rows: 0-2 are the trunk; 3-4 and 5-7 its branches; 8-9 hang below 3-4, and two pieces meet there.
OWN = Piece(EVERYTHING, EVERYTHING, ragged([3, 2, 3, 2], [3, 2, 3, 2], causal=True))
PIECES = {
    "only own rows": (OWN,),
    "slices": (
        OWN,
        Piece(slice(3, 10), slice(0, 3), ragged([7], [3])),
        Piece(slice(8, 10), slice(3, 5), ragged([2], [2])),
    ),
    "index tensors": (
        OWN,
        Piece(torch.tensor([9, 3, 4, 5, 8]), torch.tensor([2, 0, 1]), ragged([5], [3])),
        Piece(torch.tensor([6, 7, 9, 8]), torch.tensor([0, 1, 4, 3]), ragged([2, 2], [2, 2])),
    ),
    "indexed queries, sliced keys": (OWN, Piece(torch.tensor([3, 9, 7]), slice(0, 3), ragged([1, 2], [2, 1]))),
    "sliced queries, indexed keys": (OWN, Piece(slice(5, 8), torch.tensor([2, 0, 4]), ragged([3], [3]))),
    "entries without keys and without queries": (
        Piece(EVERYTHING, EVERYTHING, ragged([3, 2, 3, 0, 2], [3, 0, 3, 4, 0], causal=True)),
        Piece(slice(3, 5), slice(0, 3), ragged([2], [3])),
        Piece(torch.tensor([8, 9]), torch.tensor([3, 4]), ragged([1, 1], [1, 1])),
    ),
}


def union_of(pieces: tuple[Piece, ...], num_rows: int) -> Tensor:
    """(U, U): 0 for a key that a query sees in some piece, else -1. Asserts that it sees none twice."""
    seen = sum((seen_pairs(piece, num_rows) for piece in pieces), Counter())
    assert {*seen.values()} == {1}
    union = torch.full((num_rows, num_rows), -1)
    union[tuple(torch.tensor([*seen]).t())] = 0
    return union


def in_pieces(pieces: tuple[Piece, ...], kernel: VarlenKernel) -> Callable[..., Tensor]:
    return lambda q, k, v, *sinks: routed_attention(q, k, v, Route(pieces, kernel, SCORING), *sinks)


SINKS = torch.tensor([-2.0, 0.0, 1.5, 40.0], dtype=torch.float64)  # from hardly there to everything


@kernels
@pytest.mark.parametrize("name", PIECES)
def test_one_softmax_over_the_union(kernel: VarlenKernel, name: str) -> None:
    attend = partial(one_softmax, distances=union_of(PIECES[name], 10), scale=SCALE)
    for heads, sinks in product([(2, 2), (4, 2), (4, 1), (4, 4)], [(), (SINKS,)]):
        tensors, own = random_tensors((10, 10), heads=heads), [each[: heads[0]] for each in sinks]
        found = with_gradients(in_pieces(PIECES[name], kernel), tensors, *own)
        assert_exact(found, with_gradients(attend, tensors, *own), heads)


# Routes onto copies of rows: pieces, indices of the keys, and of the outputs; the keys that each output sees.
COPIED = {
    "rows 1 and 3 twice, as queries and as keys, of which one output each is read": (
        (Piece(EVERYTHING, EVERYTHING, ragged([3, 3], [3, 3])),),
        [1, 0, 3, 1, 2, 3],
        [1, 3, 4, 2],
        [[0, 1, 3], [1, 2, 3], [1, 2, 3], [0, 1, 3]],
    ),
    "two pieces: the first query sees 1, the others 0 and 1, and 2 and 0 see 3 and 2 too": (
        (
            Piece(EVERYTHING, EVERYTHING, ragged([1, 2, 0], [1, 2, 2])),
            Piece(torch.tensor([2, 0]), slice(3, 5), ragged([2], [2])),
        ),
        [1, 0, 1, 3, 2],
        None,
        [[1, 2, 3], [0, 1], [0, 1, 2, 3]],
    ),
}


@kernels
@pytest.mark.parametrize("name", COPIED)
def test_copies_of_rows(kernel: VarlenKernel, name: str) -> None:
    pieces, keys, outputs, seen = COPIED[name]
    indices = [None if each is None else torch.tensor(each) for each in (keys, outputs)]
    tensors, route = random_tensors((len(seen), 4)), Route(pieces, kernel, SCORING, *indices)
    distances = torch.full((len(seen), 4), -1)
    for row, columns in enumerate(seen):
        distances[row, columns] = 0
    found = with_gradients(lambda q, k, v, sinks: routed_attention(q, k, v, route, sinks), tensors, SINKS)
    expected = with_gradients(partial(one_softmax, distances=distances, scale=SCALE), tensors, SINKS)
    assert_exact(found, expected)


@kernels
def test_only_some_inputs_need_gradients(kernel: VarlenKernel) -> None:
    q, k, v, dout = random_tensors((10, 10))
    expected = with_gradients(in_pieces(PIECES["slices"], kernel), [q, k, v, dout])
    in_pieces(PIECES["slices"], kernel)(q, k.requires_grad_(), v).backward(dout)
    assert_exact([k.grad], [expected[2]])
    assert q.grad is None and v.grad is None


@kernels
def test_differentiating_twice_is_refused(kernel: VarlenKernel) -> None:
    q, k, v, _ = (x.requires_grad_() for x in random_tensors((10, 10)))
    out = in_pieces(PIECES["slices"], kernel)(q, k, v)
    with pytest.raises(UserError, match="create_graph=True"):
        torch.autograd.grad(out.square().sum(), q, create_graph=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_merge_is_rounded_once(dtype: torch.dtype) -> None:
    """As if the outputs were float32 and the merged ones rounded: a slice, indices, and a piece of all rows."""
    out, other = (x.to(dtype) for x in torch.randn(2, 50, 2, 8, generator=torch.Generator().manual_seed(0)))
    lse, other_lse = torch.randn(2, 2, 50, generator=torch.Generator().manual_seed(1))
    for rows in (slice(20, 50), torch.arange(49, 19, -1), EVERYTHING):
        number = len(out[rows])
        piece, found, expected = (other[:number], other_lse[:, :number]), (out.clone(), lse.clone()), out.float()
        weight = torch.sigmoid(piece[1] - lse[:, rows]).t()[..., None]
        expected[rows] = torch.lerp(expected[rows], piece[0].float(), weight)
        merge_piece(*found, rows, *piece)
        assert torch.equal(found[0], expected.to(dtype))
        assert torch.equal(found[1][:, rows], torch.logaddexp(lse[:, rows], piece[1]))
        assert torch.equal(found[1][:, :20], lse[:, :20]) == (rows is not EVERYTHING)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_many_pieces_are_rounded_once(dtype: torch.dtype) -> None:
    """Outputs are merged and shares of gradients added in float32; in 16 bits, some number of many has other bits."""
    q, k, v, dout = random_tensors((50, 80), dtype)
    first = Piece(EVERYTHING, EVERYTHING, ragged([50, 0], [20, 60]))
    rest = [Piece(EVERYTHING, slice(start, start + 20), ragged([50], [20])) for start in (20, 40, 60)]
    kernel = EagerKernel()
    route = Route([first, *rest], kernel, SCORING)
    out, lse = route_forward(q, k, v, None, route)
    calls = [(q, k[piece.k_rows], v[piece.k_rows], piece.ragged, SCORING) for piece in route.pieces]
    (merged, merged_lse), *others = (kernel.forward(*call) for call in calls)
    merged = merged.float()
    for other in others:
        merge_piece(merged, merged_lse, EVERYTHING, *other)
    assert torch.equal(out, merged.to(dtype))
    shares = [kernel.backward(dout, *call[:3], out, lse, *call[3:])[0].float() for call in calls]
    assert torch.equal(route_backward(dout, q, k, v, None, out, lse, route)[0], sum(shares).to(dtype))


@FULL
@pytest.mark.skipif(shutil.which("g++") is None, reason="with g++ installed this runs")
def test_compiled_as_on_cuda(tmp_path: Path) -> None:
    """The same bits as the eager form; compiled for any number of rows, once more for one row and for all rows."""
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "default", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, str(Path(__file__).with_name("compiled_merges.py"))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 2 * (3 + 2 + 1)
