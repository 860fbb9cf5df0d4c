"""What a thread is computing with shared models.

A call reaches most layers as an argument. What gets no arguments, such as a mixer or a loss function, reads `running`.
Each thread has its own calls, and each call ends before the one around it: a hook that calls the model again, or a
backward pass within a forward pass, finds its own call and leaves the outer one as it was.

What a backbone does before its text decoder runs stays its own: it embeds, runs towers, counts, makes masks.

    input_ids, pixel_values -> [ backbone: tower, embeddings, positions, masks ] -> inputs_embeds -> [ text decoder ]

An `Upstream` is one such call. It knows the ids, which the decoder may not get, and the pictures that the tower
computed. A mask that the backbone requests for the decoder waits until the unique tokens are known.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from transformers import PreTrainedModel

HELD = "_radix_upstream"  # by the ids of a call, so that it lives as long as the frames of the call


class Progress(threading.local):
    """The calls that run in this thread, the innermost last; an ordinary one is None.

    Calls are held weakly, so one that Ctrl-C interrupted reads as None once the frames that ran it are gone.
    """

    def __init__(self) -> None:
        self.calls: list[Any] = []  # weak references

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Pickle without calls: nothing runs in the copy of a model."""
        return type(self), ()

    @property
    def call(self) -> Any:
        """Return the innermost call; None if that is an ordinary one, or nothing runs."""
        return self.calls[-1]() if self.calls else None

    def upstream(self) -> Upstream | None:
        """Return the innermost call, if it is one of a backbone whose decoder has not begun."""
        call = self.call
        return call if isinstance(call, Upstream) and not call.is_over else None

    def begin(self, call: object) -> None:
        """Make this the innermost call."""
        self.calls.append(_no_call if call is None else ref(call))

    def become(self, call: object) -> None:
        """Set the innermost call, once it is known."""
        self.calls[-1] = ref(call)

    @torch.compiler.disable
    def end(self) -> Any:
        """End the innermost call and return it; None if an error came before it began."""
        return self.calls.pop()() if self.calls else None

    @contextmanager
    def during(self, call: object) -> Iterator[None]:
        """Make this the innermost call for a while."""
        self.begin(call)
        try:
            yield
        finally:
            self.end()


@dataclass(eq=False)
class Upstream:
    """A call of a backbone that shares if its text decoder can.

    backbone, decoder: of the call. given: the arguments of the backbone. verdict: what is known of the model.
    pictures: `Pictures` of the tower's call; None before it, or without one.
    embedded: what the embedding returned for the ids, until the decoder begins.
    is_over: whether the decoder has begun. Until then masks wait for it.
    """

    backbone: PreTrainedModel
    decoder: PreTrainedModel
    given: Mapping[str, Any]
    verdict: Any = None
    pictures: Any = None
    embedded: list[Tensor] = field(default_factory=list)
    is_over: bool = False

    def held_by_ids(self) -> Tensor:
        """Return the ids of the call as another tensor that holds this object."""
        ids: Tensor = self.given["input_ids"]
        ids = ids.view(ids.shape)
        setattr(ids, HELD, self)
        return ids


def _no_call() -> None:
    """Return None, as the reference to a call that is gone."""


running = Progress()  # the calls of all shared models: an `Upstream` until its decoder begins, then its layers' call
