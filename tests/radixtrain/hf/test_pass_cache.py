"""C rows of a context, U rows of a pass, K heads of keys and values, each of H."""

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from torch.utils.checkpoint import checkpoint

from radixtrain.errors import UserError
from radixtrain.hf.pass_cache import LayerRows, PassCache

LAYER = 7
SHAPE = (4, 2, 3)


def heads(num_rows: int = 4, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    key, value = torch.randn(2, num_rows, *SHAPE[1:], generator=generator, dtype=torch.float64).to(dtype)
    return key.requires_grad_(), value.requires_grad_()


def kept_rows(num_rows: int = 4, dtype: torch.dtype = torch.float64, seed: int = 1) -> LayerRows:
    rows = LayerRows()
    rows.keep(LAYER, *heads(num_rows, dtype, seed))
    return rows


def test_the_context_is_read_in_its_order() -> None:
    first, second = kept_rows(seed=1), kept_rows(seed=2)
    key, value = heads()
    cache = PassCache(None, [(second, 1, 3), (first, 0, 1), (second, 3, 4)])
    own, stored = cache.keys_and_values(LAYER, key, value)
    assert stored is not None and torch.equal(own[0], key) and torch.equal(own[1], value)
    for found, one, other in zip(stored, first.rows[LAYER], second.rows[LAYER], strict=True):
        assert torch.equal(found, torch.cat([other[1:3], one[:1], other[3:]]))


def test_gradients_go_to_the_rows_that_were_read() -> None:
    """Of a pass that reads some rows twice, and one that reads others."""
    kept, (key, value) = kept_rows(), heads()
    own, stored = PassCache(None, [(kept, 1, 3), (kept, 0, 2)]).keys_and_values(LAYER, key, value)
    gradients = torch.arange(96.0, dtype=torch.float64).view(4, *SHAPE)
    gradients[3] = 1
    torch.autograd.backward([*own, *stored], list(gradients))
    assert torch.equal(key.grad, gradients[0]) and torch.equal(value.grad, gradients[1])
    expected = torch.zeros(SHAPE, dtype=torch.float64)
    expected[1:3] += gradients[2, :2]
    expected[0:2] += gradients[2, 2:]
    assert torch.equal(kept.gradients[LAYER][0], expected)
    assert kept.gradients[LAYER][1][:, 0, 0].tolist() == [1, 2, 1, 0]
    _, again = PassCache(None, [(kept, 3, 4)]).keys_and_values(LAYER, *heads())
    torch.autograd.backward(again, [torch.ones(1, 2, 3, dtype=torch.float64)] * 2)
    assert kept.gradients[LAYER][1][:, 0, 0].tolist() == [1, 2, 1, 1], "added, in place"


def test_a_kept_pass_joins_the_gradients_of_the_later_ones() -> None:
    kept, (key, value) = LayerRows(), heads()
    own, _ = PassCache(kept, []).keys_and_values(LAYER, key, value)
    _, later = PassCache(None, [(kept, 1, 3)]).keys_and_values(LAYER, *heads(2))
    torch.autograd.backward(later, [torch.full((2, 2, 3), 5.0, dtype=torch.float64)] * 2)
    torch.autograd.backward(own, [torch.ones(SHAPE, dtype=torch.float64)] * 2)
    assert key.grad[:, 0, 0].tolist() == value.grad[:, 1, 2].tolist() == [1, 6, 6, 1]


def test_gradcheck() -> None:
    kept = kept_rows()
    cache = PassCache(None, [(kept, 0, 2), (kept, 1, 4)])
    assert gradcheck(lambda key, value: cache.keys_and_values(LAYER, key, value)[0], heads())


def test_kept_once_when_it_is_recomputed() -> None:
    kept, (key, value) = LayerRows(), heads()
    with torch.no_grad():
        PassCache(kept, []).keys_and_values(LAYER, key, value)
    before = kept.rows[LAYER][0]
    assert not before.requires_grad
    (keys, values), _ = checkpoint(PassCache(kept, []).keys_and_values, LAYER, key, value, use_reentrant=False)
    (keys.sum() + values.sum()).backward()
    assert kept.rows[LAYER][0] is before


def test_a_layer_has_rows_of_its_own() -> None:
    kept = kept_rows()
    with pytest.raises(KeyError):
        PassCache(None, [(kept, 0, 1)]).keys_and_values(LAYER + 1, *heads())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_many_gradients_add_up_in_float32(dtype: torch.dtype) -> None:
    """1 and 1,000 times 2**-10, each of which bfloat16 would lose beside the 1; rounded once, in the kept pass."""
    kept, (key, value) = LayerRows(), heads(1, dtype)
    own, _ = PassCache(kept, []).keys_and_values(LAYER, key, value)
    for share in [1.0] + [2.0**-10] * 1000:
        _, read = PassCache(None, [(kept, 0, 1)]).keys_and_values(LAYER, *heads(1, dtype))
        torch.autograd.backward(read, [torch.full((1, 2, 3), share, dtype=dtype)] * 2)
    assert kept.gradients[LAYER][0].dtype == torch.float32
    assert kept.gradients[LAYER][0].unique().tolist() == [1 + 1000 * 2.0**-10]
    torch.autograd.backward(own, [torch.zeros(1, 2, 3, dtype=dtype)] * 2)
    assert key.grad.dtype == dtype and key.grad.unique().tolist() == [float(torch.tensor(1.9765625, dtype=dtype))]


def test_a_gradient_that_comes_too_late_is_refused() -> None:
    kept, (key, value) = LayerRows(), heads()
    own, _ = PassCache(kept, []).keys_and_values(LAYER, key, value)
    _, later = PassCache(None, [(kept, 0, 1)]).keys_and_values(LAYER, *heads(1))
    torch.autograd.backward(own, [torch.ones(SHAPE, dtype=torch.float64)] * 2)
    with pytest.raises(UserError, match=r"call backward on each loss of step_losses before asking for the next one"):
        torch.autograd.backward(later, [torch.ones(1, 2, 3, dtype=torch.float64)] * 2)
