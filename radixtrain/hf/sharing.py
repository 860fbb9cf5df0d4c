"""Warns once if a prepared model trains without sharing anything, which is slow but not an error.

Only shapes are read, so the device is not waited for. A call takes 0.1 us once a batch has shared something.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import nn

from radixtrain.hf.padded.report import SharingReport
from radixtrain.tree.layout import TreeLayout

__all__ = ["NUM_CALLS", "SharingWatch"]

logger = logging.getLogger(__name__)
NUM_CALLS = 10  # training calls before the warning


@dataclass(eq=False)
class SharingWatch:
    """Counts the training calls of a model until a batch shares something or the warning is logged."""

    name: str
    num_ordinary: int = 0
    num_unshared: int = 0
    is_done: bool = False

    def ordinary_batch(self, backbone: nn.Module) -> None:
        """Count an ordinary batch. Warns after the first few, unless a radix batch came too."""
        if self.is_done or not _trains(backbone):
            return
        self.num_ordinary += 1
        if self.num_ordinary == NUM_CALLS and not self.num_unshared and not _is_frozen(backbone):
            logger.warning(
                "%s is prepared, but its first %d training batches were ordinary ones, so training shares nothing: "
                "give the trainer data_collator=RadixCollator(), or call share_prefixes(model) if it makes its "
                "batches itself, as TRL's for DPO and GRPO",
                self.name,
                NUM_CALLS,
            )

    def radix_batch(self, backbone: nn.Module, layout: TreeLayout) -> None:
        """Count a radix batch. Warns after the first few, if none had a branch or fewer rows than tokens.

        Both are asked, because padding adds rows.
        """
        if self.is_done or not _trains(backbone):
            return
        self.num_unshared += 1
        shares = bool(layout.levels) or layout.num_rows < layout.inverse_indices.shape[0]
        if not shares and self.num_unshared == NUM_CALLS and not _is_frozen(backbone):
            logger.warning(
                "the first %d training batches of %s shared nothing: no two sequences of a batch began alike, or not "
                "for as many tokens as min_shared_tokens asks. Larger batches help, and sequences with the same prompt "
                "next to each other in the data",
                NUM_CALLS,
                self.name,
            )
        self.is_done = shares or self.num_unshared == NUM_CALLS

    def padded_batch(self, backbone: nn.Module, report: SharingReport) -> None:
        """Count a call of a model of `share_prefixes`. Warns after the first few, if none of them could be shared."""
        if self.is_done or not _trains(backbone):
            return
        self.num_ordinary += 1
        self.is_done = bool(report.num_shared) or self.num_ordinary == NUM_CALLS
        if self.is_done and not report.num_shared and not _is_frozen(backbone):
            logger.warning(
                "share_prefixes(%s): the first %d training calls shared nothing. %s", self.name, NUM_CALLS, report
            )


def _trains(backbone: nn.Module) -> bool:
    """Not an evaluation, a generation, or the reference model of a preference loss."""
    return backbone.training and torch.is_grad_enabled()


def _is_frozen(backbone: nn.Module) -> bool:
    """Another reference or reward model."""
    return not any(parameter.requires_grad for parameter in backbone.parameters())
