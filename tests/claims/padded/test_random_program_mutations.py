"""The random programs are tested: with each mistake below in the lazy tensor, one of them ends differently."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
from torch import Tensor
from torch.nn import functional

from radixtrain.hf.padded import places, row_functions, spread_rows
from radixtrain.hf.padded.row_functions import RULES
from radixtrain.hf.padded.spread_rows import LATE, Modes, SpreadRows
from tests.claims.mistakes import plant, returning
from tests.claims.padded.random_programs import compare, program, tiny_pair

pytestmark = pytest.mark.usefixtures("without_the_trial")

MOST = 3000


def with_options(**changed: Any) -> Callable[..., Any]:
    """A rule that gets other options."""
    return lambda real, x, func, others, named: real(x, func, others, named | changed)


def result(change: Callable[[Any], Any]) -> Callable[..., Any]:
    """Another result of a rule."""

    def mistake(real: Any, *args: Any) -> Any:
        found = real(*args)
        return found if found is NotImplemented else change(found)

    return mistake


def shown(real: Any, x: SpreadRows, place_rows: Any, shaped: Any = None) -> SpreadRows:
    """A copy of all that is a view."""
    is_copy = shaped is None and place_rows.shape == x.place_rows.shape
    return real(x, place_rows, x.shaped if is_copy else shaped)


def cloned(x: SpreadRows) -> Tensor:
    """As if the ordinary tensor were made anew."""
    assert x.dense is not None
    x.dense = x.dense.clone()
    x.dense_node = x.dense.grad_fn
    return x.dense


def copied(real: Any, x: SpreadRows) -> None:
    """The ordinary tensor of a view is a copy."""
    real(x)
    if x.base is not None:
        cloned(x)


def anew(real: Any, x: SpreadRows) -> Tensor:
    real(x)
    return cloned(x)


def of_the_reader(mode: str) -> Callable[..., Any]:
    """The ordinary tensor is made in this mode of the caller."""
    return lambda real, modes, x=None: real(modes._replace(**{mode: getattr(Modes.now(), mode)}), x)


def last_place(real: Any, grad: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """A gradient that is written and not added."""
    found = grad.new_zeros(num_rows, *grad.shape[1:])
    found[rows] = grad
    return found


def shifted(found: SpreadRows) -> SpreadRows:
    """The rows of other places."""
    found.place_rows = found.place_rows.reshape(-1)[::-1].reshape(found.place_rows.shape).copy()
    return found


MISTAKES: dict[str, tuple[Any, Any, Callable[..., Any]]] = {
    "a copy that sees a change": (SpreadRows, "at", shown),
    "a view that is a copy": (SpreadRows, "_make_dense", copied),
    "made in the modes of the reader": (Modes, "entered", lambda *args: nullcontext()),
    "made in the grad mode of the reader": (Modes, "entered", of_the_reader("grad")),
    "made in inference mode": (Modes, "entered", of_the_reader("inference")),
    "made anew each time": (SpreadRows, "whole", anew),
    "without a gradient": (spread_rows, "at_places", lambda real, values, *others: real(values.detach(), *others)),
    "reading is not marked": (SpreadRows, "mark_read", returning(None)),
    "late wishes are not refused": (spread_rows, "_check_not_read", returning(None)),
    "a late hook is lost": (LATE, Tensor.register_hook, returning(None)),
    "a late hook gets values": (LATE, Tensor.register_hook, lambda real, x, hook: x.table.register_hook(hook)),
    "a checkpoint is not known": (spread_rows, "is_checkpointed", returning(False)),
    "only the last place counts": (places, "sum_rows", last_place),
    "padding is not checked": (places, "check_unread", returning(None)),
    "the rows of other places": (RULES, Tensor.__getitem__, result(shifted)),
    "rows in another order": (RULES, Tensor.reshape, result(shifted)),
    "numbers of other places": (RULES, Tensor.gather, result(lambda found: found.flip(0))),
    "the dtype of bfloat16 logits": (RULES, functional.cross_entropy, result(Tensor.bfloat16)),
    "what is ignored": (RULES, functional.cross_entropy, with_options(ignore_index=-100)),
    "a sum is a mean": (RULES, functional.cross_entropy, with_options(reduction="sum")),
    "another axis": (row_functions, "_is_last", returning(True)),
    "a cast that is none": (RULES, Tensor.to, lambda real, x, *call: x),
    "a detached tensor that is not": (RULES, Tensor.detach, lambda real, x, *call: x),
}
WAYS = {"padding is not checked": "padded", "the dtype of bfloat16 logits": "autocast"}  # of the programs that show it


@pytest.mark.parametrize("name", MISTAKES)
def test_mutations(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    plant(monkeypatch, *MISTAKES[name])
    way = WAYS.get(name, "float64")
    pair = tiny_pair(way)
    assert any(compare(pair, program(seed, way), way) not in ("", "refused") for seed in range(MOST))
