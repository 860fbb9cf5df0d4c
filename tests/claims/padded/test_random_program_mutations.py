"""The random programs are tested: with each mistake below in the lazy tensor, one of them ends differently."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from radixtrain.hf.padded import places, row_functions, spread_rows
from radixtrain.hf.padded.row_functions import RULES
from radixtrain.hf.padded.spread_rows import LATE, Modes, SpreadRows
from tests.claims.padded.random_programs import BATCH, PADDED, compare, program, tiny_pair
from tests.support import cases

pytestmark = pytest.mark.usefixtures("without_the_trial")

MOST = 3000


@dataclass
class Mistake:
    """room, name: what is replaced. by: from what it was, what it becomes. kind: of the programs that show it."""

    room: Any
    name: str
    by: Callable[[Any], Any]
    kind: str = "float64"


def constant(value: Any) -> Callable[[Any], Any]:
    return lambda before: lambda *args, **options: value


def changed(x: str, **options: Any) -> Mistake:
    """A rule that gets other options."""
    func = getattr(functional, x)
    return Mistake(
        RULES, func, lambda before: lambda x, func, others, kwargs: before(x, func, others, kwargs | options)
    )


def rule(func: Any, change: Callable[[Any], Any], kind: str = "float64") -> Mistake:
    """Another result of a rule."""

    def by(before: Any) -> Any:
        def mutated(*args: Any) -> Any:
            found = before(*args)
            return found if found is NotImplemented else change(found)

        return mutated

    return Mistake(RULES, func, by, kind)


def shown(before: Any) -> Any:
    """A copy of all that is a view."""

    def at(self: SpreadRows, place_rows: Any, shaped: Any = None) -> Any:
        is_copy = shaped is None and place_rows.shape == self.place_rows.shape
        return before(self, place_rows, self.shaped if is_copy else shaped)

    return at


def copied(before: Any) -> Any:
    """The ordinary tensor of a view is a copy."""

    def make_dense(self: SpreadRows) -> None:
        before(self)
        if self.base is not None:
            assert self.dense is not None
            self.dense = self.dense.clone()
            self.dense_node = self.dense.grad_fn

    return make_dense


def anew(before: Any) -> Any:
    def whole(self: SpreadRows) -> Tensor:
        self.dense = before(self).clone()
        self.dense_node = self.dense.grad_fn
        return self.dense

    return whole


def ambient(before: Any) -> Any:
    @contextmanager
    def entered(self: Modes, x: Tensor) -> Iterator[None]:
        yield

    return entered


def without(*names: str) -> Callable[[Any], Any]:
    """The ordinary tensor is made in these modes of the caller."""

    def by(before: Any) -> Any:
        def entered(self: Modes, x: Tensor) -> Any:
            now = Modes.now()
            return before(self._replace(**{name: getattr(now, name) for name in names}), x)

        return entered

    return by


def early(x: SpreadRows, hook: Any) -> Any:
    """A hook of the rows of the table, as if it were at the places."""
    return x.table.register_hook(hook)


def last_place(before: Any) -> Any:
    """A gradient that is written and not added."""

    def sum_rows(grad: Tensor, rows: Tensor, num_rows: int) -> Tensor:
        found = grad.new_zeros(num_rows, *grad.shape[1:])
        found[rows] = grad
        return found

    return sum_rows


def shifted(found: Any) -> Any:
    """The rows of other places."""
    found.place_rows = found.place_rows.reshape(-1)[::-1].reshape(found.place_rows.shape).copy()
    return found


MISTAKES: dict[str, Mistake] = {
    "a copy that sees a change": Mistake(SpreadRows, "at", shown),
    "a view that is a copy": Mistake(SpreadRows, "_make_dense", copied),
    "made in the modes of the reader": Mistake(Modes, "entered", ambient),
    "made in the grad mode of the reader": Mistake(Modes, "entered", without("grad")),
    "made in inference mode": Mistake(Modes, "entered", without("inference")),
    "made anew each time": Mistake(SpreadRows, "whole", anew),
    "without a gradient": Mistake(
        spread_rows, "at_places", lambda before: lambda values, *others: before(values.detach(), *others)
    ),
    "reading is not marked": Mistake(SpreadRows, "mark_read", constant(None)),
    "late wishes are not refused": Mistake(spread_rows, "_check_not_read", constant(None)),
    "a late hook is lost": Mistake(LATE, Tensor.register_hook, constant(None)),
    "a late hook gets values": Mistake(LATE, Tensor.register_hook, lambda before: early),
    "a checkpoint is not known": Mistake(spread_rows, "is_checkpointed", constant(False)),
    "only the last place counts": Mistake(places, "sum_rows", last_place),
    "padding is not checked": Mistake(places, "check_unread", constant(None), "padded"),
    "the rows of other places": rule(Tensor.__getitem__, shifted),
    "rows in another order": rule(Tensor.reshape, shifted),
    "numbers of other places": rule(Tensor.gather, lambda found: found.flip(0)),
    "the dtype of bfloat16 logits": rule(functional.cross_entropy, lambda found: found.to(torch.bfloat16), "autocast"),
    "what is ignored": changed("cross_entropy", ignore_index=-100),
    "a sum is a mean": changed("cross_entropy", reduction="sum"),
    "another axis": Mistake(row_functions, "_is_last", constant(True)),
    "a cast that is none": Mistake(RULES, Tensor.to, lambda before: lambda x, *call: x),
    "a detached tensor that is not": Mistake(RULES, Tensor.detach, lambda before: lambda x, *call: x),
}


def programs_until_seen(kind: str) -> int:
    """How many programs there were when one ended differently; 0 if none does."""
    dtype = torch.float32 if kind == "autocast" else torch.float64
    pair, batch = tiny_pair(dtype), PADDED if kind == "padded" else BATCH
    for seed in range(MOST):
        found = compare(pair, program(Random(seed), kind), batch, "autocast" if kind == "autocast" else "")
        if found not in ("", "refused"):
            return seed + 1
    return 0


# Those that one program in 500 shows.
RARE = {"a checkpoint is not known"}


@pytest.mark.parametrize("name", cases(MISTAKES, MISTAKES.keys() - RARE))
def test_mutations(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    mistake = MISTAKES[name]
    if isinstance(mistake.room, dict):
        monkeypatch.setitem(mistake.room, mistake.name, mistake.by(mistake.room.get(mistake.name)))
    else:
        monkeypatch.setattr(mistake.room, mistake.name, mistake.by(getattr(mistake.room, mistake.name)))
    assert programs_until_seen(mistake.kind)
