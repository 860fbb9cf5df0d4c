"""Floating-point operations of a step, before and after deduplication: the speed-up that the arithmetic allows.

Counted per forward pass, a multiply-add as two; the backward pass costs twice as much in both arms, so ratios are those
of a training step.

- linear layers: 2 x parameters x tokens (T against U);
- attention: 4 x heads x head_dim x (query, key) pairs a layer: `sum L (L + 1) / 2` against the trie's;
- head and loss: 2 x hidden x vocabulary x rows (labelled tokens against distinct predictors).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from radixtrain.tree.plan import PrefixPlan

__all__ = ["StepFlops", "ideal_speedup", "ordinary_flops", "unique_flops"]


@dataclass(frozen=True)
class StepFlops:
    """Operations of one forward pass by part."""

    linear: float
    attention: float
    head: float

    @property
    def total(self) -> float:
        return self.linear + self.attention + self.head


def ordinary_flops(config: Any, plan: PrefixPlan, num_labels: int) -> StepFlops:
    """Every sequence for itself, without padding.

    config: a Hugging Face text configuration of a dense decoder (hidden_size, intermediate_size, ...).
    num_labels: labelled tokens.
    """
    lengths = np.diff(plan.cu_seqlens)
    return _flops(config, plan.num_tokens, int((lengths * (lengths + 1) // 2).sum()), num_labels)


def unique_flops(config: Any, plan: PrefixPlan, num_predictors: int) -> StepFlops:
    """Unique tokens alone: a node attends to its own path.

    num_predictors: distinct rows that predict.
    """
    entries = len(plan.path_cu_seqlens_q) - 1 - (plan.num_padding > 0)  # padding rows are the last entry
    new, path = (np.diff(bounds)[:entries] for bounds in (plan.path_cu_seqlens_q, plan.path_cu_seqlens_k))
    pairs = int((new * (path - new) + new * (new + 1) // 2).sum())
    return _flops(config, plan.num_unique_tokens, pairs, num_predictors)


def ideal_speedup(config: Any, plan: PrefixPlan, num_labels: int, num_predictors: int) -> float:
    """Operations of the ordinary batch over those of the deduplicated one."""
    return ordinary_flops(config, plan, num_labels).total / unique_flops(config, plan, num_predictors).total


def _flops(config: Any, num_tokens: int, num_pairs: int, num_predictions: int) -> StepFlops:
    hidden, layers, heads = config.hidden_size, config.num_hidden_layers, config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    queries, keys = heads * head_dim, (config.num_key_value_heads or heads) * head_dim
    parameters = layers * (hidden * (2 * queries + 2 * keys) + 3 * hidden * config.intermediate_size)
    return StepFlops(
        linear=2.0 * parameters * num_tokens,
        attention=4.0 * layers * queries * num_pairs,
        head=2.0 * hidden * config.vocab_size * num_predictions,
    )
