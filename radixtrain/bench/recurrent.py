"""What the recurrent layers of a hybrid model compute for a token, counted on a model of its shape without memory.

A mixer multiplies and adds with each of its parameters once, and with each number of its state three times: what the
state says of the token is taken out, the token is put in, and the output is read. That is the gated delta rule (Gated
Delta Networks, arXiv 2412.06464, section 3),

    S_t = a_t (S_{t-1} - b_t (S_{t-1} k_t) k_t') + b_t v_t k_t',    o_t = S_t q_t;

a state space (Mamba 2, arXiv 2405.21060) takes nothing out, and is counted the same. Kernels that work in chunks do
more.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModel

from radixtrain.errors import UserError, first_line
from radixtrain.hf.backbone import parts_of
from radixtrain.hf.layer_kinds import ALIKE, LayerKinds, kinds_of_mixers
from radixtrain.hf.recurrent.running import cache_argument
from radixtrain.hf.recurrent.states import ForkedStates
from radixtrain.hf.refusals import EXACT_LAYERS

__all__ = ["MixedLayers", "mixed_layers"]

USES_OF_STATE = 3  # multiply-adds with each number of a state
_COUNTED: dict[str, MixedLayers] = {}  # by the configuration, because it is asked for each micro-batch


@dataclass(frozen=True, kw_only=True)
class MixedLayers:
    """The layers of a model.

    kinds: what its mean layer has. mixing: multiply-adds of all its mixers for a token.
    """

    kinds: LayerKinds = ALIKE
    mixing: int = 0


def mixed_layers(config: Any) -> MixedLayers:
    """The layers of the model that a configuration describes. UserError if it cannot be made."""
    config = config.get_text_config()
    if all(kind in EXACT_LAYERS for kind in getattr(config, "layer_types", None) or ()):
        return MixedLayers()
    key = config.to_json_string(use_diff=False)
    if key not in _COUNTED:
        _COUNTED[key] = _counted(deepcopy(config))
    return _COUNTED[key]


def _counted(config: Any) -> MixedLayers:
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            decoder = parts_of(AutoModel.from_config(config, trust_remote_code=False)).decoder
            mixing = sum(number * _multiply_adds(mixer, decoder.config) for mixer, number in kinds_of_mixers(decoder))
    except (ValueError, ImportError, RuntimeError, IndexError, AttributeError) as error:
        reason = f"{type(config).__name__}: its recurrent layers cannot be counted: {first_line(error)}"
        raise UserError(reason) from error
    return MixedLayers(kinds=LayerKinds.of(decoder), mixing=mixing)


def _multiply_adds(mixer: nn.Module, config: Any) -> int:
    """Of a mixer on the meta device, for a token."""
    states = ForkedStates()
    given = {cache_argument(mixer): states}
    with torch.no_grad():
        mixer(torch.empty(1, 2, config.hidden_size, dtype=config.dtype), **given)
    state = sum(found.numel() for (kind, _), found in states.final.items() if kind == "recurrent")
    return sum(parameter.numel() for parameter in mixer.parameters()) + USES_OF_STATE * state
