"""A pass of generation through a Hugging Face model: its own code and head, on new rows and stored ones.

The same attention functions as in training (`radixtrain/hf/attention_interface.py`), whether the model is prepared or
not. Hugging Face's caches are not involved: the attention function itself stores keys and values.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from threading import RLock
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from radixtrain.errors import TRAIN_WITHOUT_SHARING, UserError
from radixtrain.hf.attention_interface import CachedCall, Write
from radixtrain.hf.backbone import Parts
from radixtrain.hf.dropout import evaluating
from radixtrain.hf.guards.model import why_inexact
from radixtrain.hf.guards.rules import WITHOUT
from radixtrain.hf.head import only_rows
from radixtrain.hf.image_models import types_for
from radixtrain.hf.modules import num_attention_layers
from radixtrain.hf.progress import Progress
from radixtrain.hf.refusals import check_choice, check_generation
from radixtrain.hf.third_party import hooks_of, why_third_party
from radixtrain.hf.windows import no_mask, window_may_bind
from radixtrain.tree.cached_layout import CachedLayout

_LOCKS: WeakKeyDictionary[nn.Module, RLock] = WeakKeyDictionary()  # of models that have generated


@contextmanager
def on_stored_rows(model: nn.Module, parts: Parts, kernel: str, longest: int) -> Iterator[None]:
    """Let the model run passes of generation: in evaluation mode, without gradients. Restores it afterwards.

    Another thread that generates with the same model waits.

    model: as the user gave it, maybe with adapters around it. longest: as in `check_generation`.

    Raises UserError for a model, an adapter or a kernel that cannot generate exactly from stored rows.
    """
    check_generation(parts, longest)
    check_choice(parts.decoder, "auto", kernel)
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


class StoredPasses:
    """Runs passes of generation through one model, inside `on_stored_rows`.

    parts: of the model. write: of the store of keys and values. kernel: of the attention.
    """

    def __init__(self, parts: Parts, write: Write, kernel: str = "auto"):
        self.parts, self.write, self.kernel = parts, write, kernel
        self.num_layers = num_attention_layers(parts.decoder)

    @property
    def device(self) -> torch.device:
        """Return the device on which the model takes its tokens."""
        weight: Tensor = self.parts.base.get_input_embeddings().weight  # type: ignore[assignment]
        return weight.device

    def logits(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        predictor_indices: Tensor | None,
        layout: CachedLayout,
        **features: object,
    ) -> Tensor:
        """Run the model on the new rows of a pass and store their keys and values; returns the logits, (R, V).

        input_ids: (U,), int64. position_ids: (U,), or (A, U) on several axes, int64. features: of images in the rows.
        predictor_indices: (R,), int64. the rows whose logits are wanted. None: all, in order.
        Raises RuntimeError if a layer attended without the stored rows.
        """
        config, base = self.parts.decoder.config, self.parts.base
        may_bind = layout.blocks is not None or window_may_bind(config, layout.max_seqlen)
        call = CachedCall(layout, self.write, self.kernel, may_bind)
        call.depths = position_ids
        with nullcontext() if predictor_indices is None else only_rows(self.parts.backbone, predictor_indices):
            output = base(
                input_ids=input_ids[None],
                position_ids=position_ids.unsqueeze(-2),
                attention_mask=no_mask(may_bind, input_ids.device, call),
                use_cache=False,
                radix_call=call,
                **features,
                **types_for(self.parts.backbone, layout),
            )
        call.check_layers(self.parts.backbone, self.num_layers, "did not see the stored rows; use model.generate")
        logits: Tensor = output.logits[0]
        return logits
