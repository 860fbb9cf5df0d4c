"""Which log lines and warnings a command shows."""

from __future__ import annotations

import logging
import warnings

from transformers.utils.logging import disable_progress_bar

from radixtrain.training.progress_bar import NoticeHandler

__all__ = ["quiet"]


def quiet() -> None:
    """Show our log lines, and of those of the libraries only what a user can act on."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[NoticeHandler()])
    logging.getLogger("radixtrain").setLevel(logging.INFO)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    disable_progress_bar()
    for noise in (
        "number of training batches",
        "LeafSpec",
        "Total length of",
        "LightningCLI's args",
        "infer the batch indices",
        "pre-optimization",
        "callbacks used to create the checkpoint",
        "you requested to overfit",
        "is_gradient_checkpointing",  # PEFT asks by transformers' former name
    ):
        warnings.filterwarnings("ignore", f".*{noise}")
