"""Refuses a PEFT adapter that cannot be merged. Whether adapters may share a prefix is tried (`guards/model.py`)."""

from __future__ import annotations

from torch import nn

from radixtrain.errors import UserError
from radixtrain.hf.backbone import pretrained_model_of


def check_not_shared(model: nn.Module) -> None:
    """Refuse an adapter on a matrix that two modules share: it would be merged into both of them.

    model: wrapped by PEFT.

    Raises UserError that names both modules.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    modules = dict(pretrained_model_of(model).named_modules())
    holders = [(path, p) for path, module in modules.items() for p in module._parameters.values()]
    for path, layer in modules.items():
        weight = getattr(layer.get_base_layer(), "weight", None) if isinstance(layer, BaseTunerLayer) else None
        if weight is not None:
            others = [holder for holder, p in holders if p is weight and not f"{holder}.".startswith(f"{path}.")]
            if others:
                raise UserError(
                    f"model.lora_target_modules: {path} shares its weight with {others[0]} (tie_word_embeddings), so "
                    f"merging the adapter would change both; leave it out, or train a checkpoint that does not share it"
                )
