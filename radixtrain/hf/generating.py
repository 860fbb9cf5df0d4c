"""A Hugging Face model while it generates: what is refused, and calls on rows whose keys and values we keep.

The same attention functions as in training (`radixtrain/hf/attention_interface.py`), whether the model is shared or
not. Layers see no cache of Hugging Face's: the attention function itself receives the call (`radix_call`), stores keys
and values, and attends to what is stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import RLock
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from radixtrain.errors import TRAIN_WITHOUT_SHARING, UserError
from radixtrain.hf.attention_interface import Call, Extent
from radixtrain.hf.backbone import Parts
from radixtrain.hf.dropout import evaluating
from radixtrain.hf.guards.model import why_inexact
from radixtrain.hf.guards.rules import WITHOUT
from radixtrain.hf.head import only_rows
from radixtrain.hf.modules import num_attention_layers
from radixtrain.hf.progress import Progress
from radixtrain.hf.refusals import check_generation
from radixtrain.hf.third_party import hooks_of, why_third_party
from radixtrain.hf.windows import no_mask, window_may_bind

_LOCKS: WeakKeyDictionary[nn.Module, RLock] = WeakKeyDictionary()  # of models that have generated


@contextmanager
def generating(model: nn.Module, parts: Parts, longest: int) -> Iterator[None]:
    """Let the model compute on stored rows: in evaluation mode, without gradients. Restores it afterwards.

    Another thread that generates with the same model waits.

    model: as the user gave it, maybe with adapters around it. longest: as in `check_generation`.

    Raises UserError for a model or an adapter that cannot generate exactly this way.
    """
    check_generation(parts, longest)
    lock = _LOCKS.setdefault(parts.base, RLock())
    with _in_words_of_generation(), lock, evaluating(model), torch.no_grad():
        reason = why_third_party(parts.base, parts.base, hooks_of(parts.base))
        if reason := reason or why_inexact(parts.backbone, parts.head, progress=Progress(), shape=(3, longest)):
            raise UserError(f"{parts.name}: {reason}; leave it out, or {WITHOUT['generate']}")
        yield


@contextmanager
def _in_words_of_generation() -> Iterator[None]:
    """Replace the advice to train without sharing, in errors of a layer, by that to generate without it."""
    try:
        yield
    except UserError as error:
        if TRAIN_WITHOUT_SHARING not in str(error):
            raise
        raise UserError(str(error).replace(TRAIN_WITHOUT_SHARING, WITHOUT["generate"])) from None


class GeneratingCall(Call):
    """A forward pass on new rows of some sequences, whose earlier rows are stored.

    depths: (U,), int64. the place of each new row in its sequence.
    """

    def __init__(self, parts: Parts, depths: Tensor, longest: int) -> None:
        super().__init__(Extent(longest), "auto", window_may_bind(parts.decoder.config, longest))
        self.parts, self.depths = parts, depths

    def arguments(self, rows: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the arguments of the model for these rows, (1, U, ...): ids or embeddings, by the name of each."""
        mask = no_mask(self.window_may_bind, self.depths.device, self)
        positions = {"position_ids": self.depths[None], "attention_mask": mask}
        return {**rows, **positions, "use_cache": False, "radix_call": self}

    def logits(self, input_ids: Tensor, rows: Tensor) -> Tensor:
        """Run the model on ids, (U,), and return the logits of some rows, (R, V)."""
        base: Any = self.parts.base
        with only_rows(self.parts.backbone, rows):
            logits: Tensor = base(**self.arguments({"input_ids": input_ids[None]})).logits[0]
        self.check()
        return logits

    def check(self) -> None:
        """Raise RuntimeError if a layer attended without the stored rows."""
        number = num_attention_layers(self.parts.decoder)
        self.check_layers(self.parts.backbone, number, "did not see the stored rows; use model.generate")


def device_of(parts: Parts) -> torch.device:
    """Return the device on which the model takes its tokens."""
    weight: Tensor = parts.base.get_input_embeddings().weight  # type: ignore[assignment]
    return weight.device
