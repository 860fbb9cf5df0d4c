"""`model.verify_first_batch`: compare the gradient of the first step with ordinary Hugging Face before training."""

from __future__ import annotations

import logging
from typing import Any

from radixtrain.data.datamodule import SFTData
from radixtrain.distributed import ranks
from radixtrain.errors import UserError
from radixtrain.training.devices.gradient_sync import rebuild_ddp

logger = logging.getLogger(__name__)


def verify_first_batch(module: Any) -> None:
    """Compare the gradient of the first optimizer step with ordinary Hugging Face's. UserError if they differ.

    With several ranks the first one compares the whole step, before the others take theirs with it.

    module: a `RadixModule` whose training starts.
    """
    data = module.trainer.datamodule
    if not isinstance(data, SFTData):
        raise UserError("model.verify_first_batch needs SFTData: it compares with sequences that are not collated")
    collator = data.step_collator()  # of the whole step

    def reason() -> str:
        report = module.verify(data.features_of_step(0), collator)
        if report.passed:
            logger.info("first batch verified:\n%s", report)
        return "" if report.passed else report.reason

    if why := ranks().broadcast_from_rank0(reason, long_timeout=True):
        raise UserError(f"model.verify_first_batch: {why}. Nothing was trained")
    rebuild_ddp(module.trainer.strategy)
