"""Count the floating-point operations of a forward pass, ordinary and on unique tokens: the ideal beside a speed-up.

A multiply-add counts as two. The backward pass costs twice as much in both arms, so the ratio is that of a training
step.

- layers: 2 x parameters in their matrices x tokens (T against U);
- recurrent layers: besides, 6 x numbers of their state x tokens. The state's value for a token is removed, the token is
  added, and the output is read: the gated delta rule (arXiv 2412.06464, section 3),
  `S_t = a_t (S_{t-1} - b_t (S_{t-1} k_t) k_t') + b_t v_t k_t'`, `o_t = S_t q_t`. A state space (Mamba 2, arXiv
  2405.21060) removes nothing and is counted the same. Kernels that work in chunks do more;
- attention: 4 x heads x head dim x (query, key) pairs in each layer that attends: `sum L (L + 1) / 2` against those of
  the trie;
- head and loss: 2 x hidden x vocabulary x rows (labelled tokens against distinct predictors).
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import AutoModel, PreTrainedConfig

from radixtrain.hf.backbone import mixers_of, text_layers
from radixtrain.hf.recurrent import ForkedStates, cache_argument
from radixtrain.tree.plan import PrefixPlan

USES_OF_STATE = 3  # multiply-adds per number of a state


class Costs(NamedTuple):
    """Multiply-adds: of all layers for a token, of all attention for a (query, key) pair, of the head for a row."""

    token: int
    pair: int
    row: int


class StepFlops(NamedTuple):
    """Operations of one forward pass by part."""

    linear: float
    attention: float
    head: float

    @property
    def total(self) -> float:
        return sum(self)


def costs_of(config: PreTrainedConfig) -> Costs:
    """Count on a model without memory, of a dense decoder whose layers have the same heads."""
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        decoder = AutoModel.from_config(config.get_text_config())
    config, layers, mixers = decoder.config, text_layers(decoder), mixers_of(decoder).values()
    matrices = sum(weight.numel() for layer in layers for weight in layer.parameters() if weight.ndim > 1)
    states = sum(_state_size(mixer, config) for mixer in mixers)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Costs(
        token=matrices + USES_OF_STATE * states,
        pair=(len(layers) - len(mixers)) * config.num_attention_heads * 2 * head_dim,
        row=config.hidden_size * config.vocab_size,
    )


def ordinary_flops(costs: Costs, plan: PrefixPlan, num_labels: int) -> StepFlops:
    """Each sequence in full, without padding. num_labels: labelled tokens."""
    lengths = np.diff(plan.cu_seqlens)
    return _flops(costs, plan.num_tokens, int((lengths * (lengths + 1) // 2).sum()), num_labels)


def unique_flops(costs: Costs, plan: PrefixPlan, num_predictors: int) -> StepFlops:
    """Unique tokens only, each of which attends to its own path. num_predictors: distinct rows that predict."""
    entries = len(plan.path_cu_seqlens_q) - 1 - (plan.num_padding > 0)  # padding rows are the last entry
    new, path = (np.diff(bounds)[:entries] for bounds in (plan.path_cu_seqlens_q, plan.path_cu_seqlens_k))
    pairs = int((new * (path - new) + new * (new + 1) // 2).sum())
    return _flops(costs, plan.num_unique_tokens, pairs, num_predictors)


def _flops(costs: Costs, num_tokens: int, num_pairs: int, num_rows: int) -> StepFlops:
    return StepFlops(2.0 * costs.token * num_tokens, 2.0 * costs.pair * num_pairs, 2.0 * costs.row * num_rows)


def _state_size(mixer: nn.Module, config: Any) -> int:
    """Numbers in the state of a mixer, which is on the meta device."""
    states = ForkedStates()
    x = torch.empty(1, 2, config.hidden_size, dtype=config.dtype, device="meta")
    with torch.no_grad():
        mixer(x, **{cache_argument(mixer): states})
    return sum(final.numel() for (kind, _), final in states.final.items() if kind == "recurrent")
