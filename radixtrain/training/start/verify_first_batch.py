"""`model.verify_first_batch`: compare the gradient of the first step with ordinary Hugging Face before training."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import lightning as L

from radixtrain.collators.steps import StepCollator
from radixtrain.data.datamodule import SFTData
from radixtrain.distributed import ranks
from radixtrain.errors import UserError
from radixtrain.training.devices.gradient_sync import rebuild_ddp
from radixtrain.verification.oracle import Features
from radixtrain.verification.report import EquivalenceReport

logger = logging.getLogger(__name__)


class VerifyFirstBatch(L.Callback):
    """Compares the gradient of the first optimizer step with ordinary Hugging Face's, and stops if they differ.

    With several ranks the first one compares the whole step, before the others take theirs with it.

    module: whose runs it compares; the trainer keeps the callback when it fits another one.
    verify: sequences of a step and what cuts them -> the comparison, as `RadixModule.verify`.
    """

    def __init__(self, module: L.LightningModule, verify: Callable[[Features, StepCollator], EquivalenceReport]):
        self.module = module
        self.verify = verify

    def on_train_start(self, trainer: Any, module: L.LightningModule) -> None:
        if module is not self.module:
            return
        data = trainer.datamodule
        if not isinstance(data, SFTData):
            raise UserError("model.verify_first_batch needs SFTData: it compares with sequences that are not collated")
        collator = data.step_collator()  # of the whole step
        reason = ranks().broadcast_from_rank0(
            lambda: self._verified(data.features_of_step(0), collator), long_timeout=True
        )
        if reason:
            raise UserError(f"model.verify_first_batch: {reason}. Nothing was trained")
        rebuild_ddp(trainer.strategy)

    def _verified(self, features: Features, collator: StepCollator) -> str:
        """Why the whole step, on one rank, did not pass; empty if it did."""
        report = self.verify(features, collator)
        if not report.passed:
            return report.reason
        logger.info("first batch verified:\n%s", report)
        return ""
