"""Floating-point operations of a step, before and after deduplication: the speed-up that the arithmetic allows.

They are counted for a forward pass, a multiply-add as two. The backward pass costs twice as much in both arms, so the
ratio is that of a training step.

- linear layers: 2 x parameters x tokens (T against U);
- recurrent layers: the same, and 6 x numbers of their state x tokens. The state's value for a token is removed, the
  token is added, and the output is read: the gated delta rule (arXiv 2412.06464, section 3),
  `S_t = a_t (S_{t-1} - b_t (S_{t-1} k_t) k_t') + b_t v_t k_t'`, `o_t = S_t q_t`. A state space (Mamba 2, arXiv
  2405.21060) removes nothing and is counted the same. Kernels that work in chunks do more;
- attention: 2 x heads x (head dim of keys + of values) x (query, key) pairs in each layer that attends: `sum L (L + 1)
  / 2` against those of the trie;
- head and loss: 2 x hidden x vocabulary x rows (labelled tokens against distinct predictors).
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoModel, PreTrainedConfig

from radixtrain.errors import UserError, first_line
from radixtrain.hf.backbone import parts_of
from radixtrain.hf.dimensions import ALIKE, LayerKinds, ModelDimensions, kinds_of_mixers
from radixtrain.hf.recurrent.running import ForkedStates, cache_argument
from radixtrain.tree.plan import PrefixPlan

# Kinds of layers without a recurrent state.
ATTENTION = ("full_attention", "attention", "sliding_attention", "chunked_attention")
USES_OF_STATE = 3  # multiply-adds per number of a state
_mixers: dict[str, tuple[LayerKinds, int]] = {}  # by configuration, which each micro-batch looks up


@dataclass(frozen=True)
class StepFlops:
    """Operations of one forward pass by part. linear: with recurrent layers, which take the same for every token."""

    linear: float
    attention: float
    head: float

    @property
    def total(self) -> float:
        return self.linear + self.attention + self.head


def ordinary_flops(config: PreTrainedConfig, plan: PrefixPlan, num_labels: int) -> StepFlops:
    """Count each sequence computed in full, without padding.

    config: a Hugging Face configuration of a dense decoder, or of a hybrid one. UserError if it does not say its
        dimensions.
    num_labels: labelled tokens.
    """
    lengths = np.diff(plan.cu_seqlens)
    return _flops(config, plan.num_tokens, int((lengths * (lengths + 1) // 2).sum()), num_labels)


def unique_flops(config: PreTrainedConfig, plan: PrefixPlan, num_predictors: int) -> StepFlops:
    """Count only unique tokens, each of which attends to its own path.

    num_predictors: distinct rows that predict.
    """
    entries = len(plan.path_cu_seqlens_q) - 1 - (plan.num_padding > 0)  # padding rows are the last entry
    new, path = (np.diff(bounds)[:entries] for bounds in (plan.path_cu_seqlens_q, plan.path_cu_seqlens_k))
    pairs = int((new * (path - new) + new * (new + 1) // 2).sum())
    return _flops(config, plan.num_unique_tokens, pairs, num_predictors)


def _flops(config: PreTrainedConfig, num_tokens: int, num_pairs: int, num_predictions: int) -> StepFlops:
    model = ModelDimensions.of(config)
    if model.intermediate_size is None:
        raise UserError(f"{type(config).__name__} does not say the width of its MLP, so its flops cannot be counted")
    kinds, mixing = _kinds_and_mixing(config)
    num_attention, num_mlps = (model.num_hidden_layers * x for x in (kinds.attention, kinds.mlps))
    in_mlps = num_mlps * model.mlp_parameters(model.intermediate_size)
    parameters = num_attention * model.attention_parameters + in_mlps + mixing
    per_pair = model.num_attention_heads * (model.head_dim + model.v_head_dim)
    return StepFlops(
        linear=2.0 * parameters * num_tokens,
        attention=2.0 * num_attention * per_pair * num_pairs,
        head=2.0 * model.hidden_size * model.vocab_size * num_predictions,
    )


def _kinds_and_mixing(config: PreTrainedConfig) -> tuple[LayerKinds, int]:
    """Return what the average layer has, and a token's multiply-adds in all recurrent mixers. UserError if unknown."""
    config = config.get_text_config()
    if all(kind in ATTENTION for kind in getattr(config, "layer_types", None) or ()):
        return ALIKE, 0
    key = config.to_json_string(use_diff=False)
    if key not in _mixers:
        _mixers[key] = _counted_on_meta(deepcopy(config))
    return _mixers[key]


def _counted_on_meta(config: PreTrainedConfig) -> tuple[LayerKinds, int]:
    """Count on a model without memory."""
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            decoder = parts_of(AutoModel.from_config(config, trust_remote_code=False)).decoder
            mixing = sum(number * _multiply_adds(mixer, decoder.config) for mixer, number in kinds_of_mixers(decoder))
    except (ValueError, ImportError, RuntimeError, IndexError, AttributeError) as error:
        reason = f"{type(config).__name__}: its recurrent layers cannot be counted: {first_line(error)}"
        raise UserError(reason) from error
    return LayerKinds.of(decoder), mixing


def _multiply_adds(mixer: nn.Module, config: Any) -> int:
    """Count the multiply-adds of a mixer, which is on the meta device, for a token."""
    states = ForkedStates()
    x = torch.empty(1, 2, config.hidden_size, dtype=config.dtype)
    with torch.no_grad():
        mixer(x, **{cache_argument(mixer): states})
    state = sum(final.numel() for (kind, _), final in states.final.items() if kind == "recurrent")
    return sum(parameter.numel() for parameter in mixer.parameters()) + USES_OF_STATE * state
