"""What a backbone does before its text decoder runs, which stays its own: it embeds, runs towers, counts, makes masks.

    input_ids, pixel_values -> [ backbone: tower, embeddings, positions, masks ] -> inputs_embeds -> [ text decoder ]

An `Upstream` is one such call. It knows the ids, which the decoder may not get, and the pictures that the tower
computed. A mask that the backbone requests for the decoder waits until the unique tokens are known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from radixtrain.hf.progress import Progress

HELD = "_radix_upstream"  # by the ids of a call, so that it lives as long as the frames of the call


@dataclass(eq=False)
class Upstream:
    """A call of a backbone that shares if its text decoder can.

    backbone, decoder: of the call. given: the arguments of the backbone.
    pictures: `Pictures` of the tower's call; None before it, or without one.
    embedded: what the embedding returned for the ids, until the decoder begins.
    is_over: whether the decoder has begun. Until then masks wait for it.
    """

    backbone: PreTrainedModel
    decoder: PreTrainedModel
    given: Mapping[str, Any]
    pictures: Any = None
    embedded: list[Tensor] = field(default_factory=list)
    is_over: bool = False

    def held_by_ids(self) -> Tensor:
        """Return the ids of the call as another tensor that holds this object."""
        ids: Tensor = self.given["input_ids"]
        ids = ids.view(ids.shape)
        setattr(ids, HELD, self)
        return ids


_calls = Progress()  # those of backbones, of any model; None for one that is not shared


def begin(upstream: Upstream | None) -> None:
    """Make this the innermost call. Something else has to hold it: an interrupt (Ctrl-C) leaves nothing behind."""
    _calls.begin(upstream)


def become(upstream: Upstream) -> None:
    """Set the innermost call, once it is known."""
    _calls.become(upstream)


def end() -> None:
    """End the innermost call."""
    call = _calls.end()
    if call is not None:
        call.given = {}  # autograd keeps the ids until the backward pass


def running() -> Upstream | None:
    """Return the innermost call, if its decoder has not begun."""
    upstream: Upstream | None = _calls.call
    return None if upstream is None or upstream.is_over else upstream
