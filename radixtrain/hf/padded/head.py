"""The language-model head on unique rows: called on hidden rows that came from us, it computes each only once.

Heads of Hugging Face get the backbone's output or a slice of it (`logits_to_keep`), which is a view of the tensor that
we returned. So the place of every row that the head gets follows from the strides, which the host knows. Anything else,
such as rows that were selected, scaled or cast, goes to the head as it is.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from radixtrain.hf.padded.report import SharingReport
from radixtrain.hf.padded.spread import check_gradient_at
from radixtrain.kernels.rows import gather_rows
from radixtrain.tree.arrays import IntArray

__all__ = ["SharedHead", "keep_places", "places_of_view"]

MIN_SAVING = 1.1  # rows asked for / rows computed: below this, the copies cost more than the head saves
RETURNED, GATHERED = "_radixtrain_returned", "_radixtrain_gathered"  # attributes of tensors, freed with them


class _Returned(NamedTuple):
    """What stands at the places of hidden states that the backbone returned.

    version: of their memory; another one after a change in place.
    rows: (B L,), int64. the unique row at each place, num_rows at padding.
    """

    version: int
    rows: IntArray
    num_rows: int


class _Gathered(NamedTuple):
    """How the output of the head is put back.

    place_shape: of the places, without V.
    back: (places,), which of the rows each place reads.
    padding: the places of padding.
    """

    place_shape: tuple[int, ...]
    back: Tensor
    padding: Tensor


class _Distinct(NamedTuple):
    """Each row that is asked for, once.

    first: (R,). a place of each row, the first one.
    back: (places,). which of the R rows stands at each place.
    padding: the places of padding, all of which are one of the R rows.
    """

    first: IntArray
    back: IntArray
    padding: IntArray

    @classmethod
    def of(cls, asked: IntArray, num_rows: int) -> _Distinct:
        """asked: (places,). the unique row at each place, num_rows at padding."""
        is_asked = np.zeros(num_rows + 1, dtype=bool)
        is_asked[asked] = True
        back = (is_asked.cumsum() - 1)[asked]
        first = np.zeros(is_asked.sum(), dtype=np.int64)
        first[back[::-1]] = np.arange(len(asked))[::-1]  # of several, NumPy keeps the last
        return cls(first, back, np.flatnonzero(asked == num_rows))


class SharedHead:
    """Hooks on the output embeddings. What they have to know about a call is an attribute of its tensors.

    So it cannot be mixed up by two calls before one backward pass, by a head in a checkpoint, or by several threads.
    """

    def __init__(self, report: SharingReport):
        self.report = report

    def watch(self, head: nn.Module | None) -> None:
        """Register the hooks on the head of a model, unless they are there. A head may be replaced at any time."""
        owners = () if head is None else (getattr(hook, "__self__", None) for hook in head._forward_pre_hooks.values())
        if head is not None and self not in owners:
            head.register_forward_pre_hook(self.before)
            head.register_forward_hook(self.after, prepend=True)

    @torch.compiler.disable
    def before(self, head: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor, ...] | None:
        """Give the head each row once, [1, R, D]."""
        returned = _returned(args)
        places = None if returned is None else places_of_view(args[0])
        if returned is None or places is None:
            return None
        distinct = _Distinct.of(returned.rows[places], returned.num_rows)
        if len(places) < MIN_SAVING * len(distinct.first):
            return None
        self.report.num_head_places += len(places)
        self.report.num_head_rows += len(distinct.first)
        x: Tensor = args[0]
        first, back, padding = (torch.from_numpy(each).to(x.device, non_blocking=True) for each in distinct)
        once = gather_rows(x.reshape(-1, x.shape[-1]), first)[None]
        setattr(once, GATHERED, _Gathered(tuple(x.shape[:-1]), back, padding))
        return once, *args[1:]

    @torch.compiler.disable
    def after(self, head: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Bring its rows, [1, R, V], back to the places that were asked for."""
        gathered: _Gathered | None = getattr(args[0], GATHERED, None) if args else None
        if gathered is None:
            return None
        delattr(args[0], GATHERED)  # a head inside another one may have the same hooks
        placed = gather_rows(output[0], gathered.back)
        check_gradient_at(gathered.padding, placed)
        return placed.view(*gathered.place_shape, -1)


def keep_places(placed: Tensor, rows: IntArray, num_rows: int) -> None:
    """Remember what stands at the places of hidden states, (B L, D), for the head, which gets a view of them."""
    if not placed.is_inference():  # such a tensor does not know whether it was changed in place
        setattr(placed, RETURNED, _Returned(placed._version, rows, num_rows))


def _returned(args: tuple[Any, ...]) -> _Returned | None:
    """What stands in the memory of which the head's input is a view; None if it is not ours, or was changed."""
    if not args or not isinstance(args[0], Tensor) or args[0].is_inference() or not args[0].numel():
        return None
    owner = args[0] if args[0]._base is None else args[0]._base
    returned: _Returned | None = getattr(owner, RETURNED, None)
    same = returned is not None and args[0].dtype == owner.dtype and owner._version == returned.version
    return returned if same else None


def places_of_view(x: Tensor) -> IntArray | None:
    """The rows of the memory, (B L, D), that a view of it consists of, flat; None if it cuts through D."""
    owner = x if x._base is None else x._base
    width = owner.shape[-1]
    offset = x.storage_offset() - owner.storage_offset()
    is_whole = all(step % width == 0 for step in (offset, *x.stride()[:-1]))
    if x.ndim < 2 or x.shape[-1] != width or x.stride(-1) != 1 or not is_whole:
        return None
    places = np.full((1,) * (x.ndim - 1), offset // width)
    for axis, (size, stride) in enumerate(zip(x.shape[:-1], x.stride()[:-1], strict=True)):
        steps = np.arange(size) * (stride // width)
        places = places + steps.reshape([-1 if each == axis else 1 for each in range(x.ndim - 1)])
    return places.reshape(-1)
