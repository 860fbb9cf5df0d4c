"""Loss weights are float32, and a precision of 16 bits converts every float of a batch: then they are refused."""

from __future__ import annotations

from radixtrain.data.tokenized.corpus import Corpus
from radixtrain.errors import UserError

__all__ = ["check_weights_kept"]


def check_weights_kept(corpus: Corpus, precision: str) -> None:
    """UserError that names the first row with loss weights if they would be rounded. precision: the trainer's."""
    if precision != "bf16-true":
        return
    weighted = (sample for row in corpus for sample in row if sample.loss_weights is not None)
    sample = next(weighted, None)
    if sample is not None:
        raise UserError(
            f"{sample.where}: trainer.precision bf16-true would round its loss weights to 3 digits; set "
            f"trainer.precision: 32-true and model.dtype: bfloat16, which computes the same"
        )
