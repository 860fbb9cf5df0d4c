"""Floating-point operations of a step, before and after deduplication: the speed-up that the arithmetic allows.

They are counted for a forward pass, a multiply-add as two. The backward pass costs twice as much in both arms, so the
ratio is that of a training step.

- linear layers: 2 x parameters x tokens (T against U); recurrent ones too (`radixtrain/bench/recurrent.py`);
- attention: 2 x heads x (head dim of keys + of values) x (query, key) pairs in each layer that attends: `sum L (L + 1)
  / 2` against those of the trie;
- head and loss: 2 x hidden x vocabulary x rows (labelled tokens against distinct predictors).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from radixtrain.bench.recurrent import mixed_layers
from radixtrain.errors import UserError
from radixtrain.hf.shape import ModelDimensions
from radixtrain.tree.plan import PrefixPlan

__all__ = ["StepFlops", "ordinary_flops", "unique_flops"]


@dataclass(frozen=True)
class StepFlops:
    """Operations of one forward pass by part. linear: recurrent layers included, which take as much for every token."""

    linear: float
    attention: float
    head: float

    @property
    def total(self) -> float:
        return self.linear + self.attention + self.head


def ordinary_flops(config: Any, plan: PrefixPlan, num_labels: int) -> StepFlops:
    """Each sequence computed in full, without padding.

    config: a Hugging Face configuration of a dense decoder, or of a hybrid one. UserError if it does not say its
        dimensions.
    num_labels: labelled tokens.
    """
    lengths = np.diff(plan.cu_seqlens)
    return _flops(config, plan.num_tokens, int((lengths * (lengths + 1) // 2).sum()), num_labels)


def unique_flops(config: Any, plan: PrefixPlan, num_predictors: int) -> StepFlops:
    """Only unique tokens: each attends to its own path.

    num_predictors: distinct rows that predict.
    """
    entries = len(plan.path_cu_seqlens_q) - 1 - (plan.num_padding > 0)  # padding rows are the last entry
    new, path = (np.diff(bounds)[:entries] for bounds in (plan.path_cu_seqlens_q, plan.path_cu_seqlens_k))
    pairs = int((new * (path - new) + new * (new + 1) // 2).sum())
    return _flops(config, plan.num_unique_tokens, pairs, num_predictors)


def _flops(config: Any, num_tokens: int, num_pairs: int, num_predictions: int) -> StepFlops:
    model = ModelDimensions.of(config)
    if model.intermediate_size is None:
        raise UserError(f"{type(config).__name__} does not say the width of its MLP, so its flops cannot be counted")
    layers = mixed_layers(config)
    num_attention, num_mlps = (model.num_hidden_layers * x for x in (layers.kinds.attention, layers.kinds.mlps))
    in_mlps = num_mlps * model.mlp_parameters(model.intermediate_size)
    parameters = num_attention * model.attention_parameters + in_mlps + layers.mixing
    per_pair = model.num_attention_heads * (model.head_dim + model.v_head_dim)
    return StepFlops(
        linear=2.0 * parameters * num_tokens,
        attention=2.0 * num_attention * per_pair * num_pairs,
        head=2.0 * model.hidden_size * model.vocab_size * num_predictions,
    )
