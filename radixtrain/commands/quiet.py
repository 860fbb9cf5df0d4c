"""Which log lines and warnings a command shows."""

from __future__ import annotations

import logging
import warnings

from transformers.utils.logging import disable_progress_bar

from radixtrain.training.progress_bar import NoticeHandler

__all__ = ["quiet"]


def quiet(speaks: bool) -> None:
    """Show our log lines, and of those of the libraries only what a user can act on.

    speaks: False for a rank other than the first: it shows errors only.
    """
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[NoticeHandler()])
    logging.getLogger("radixtrain").setLevel(logging.INFO if speaks else logging.ERROR)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING if speaks else logging.ERROR)
    disable_progress_bar()
    if not speaks:
        logging.getLogger().setLevel(logging.ERROR)
        warnings.simplefilter("ignore")
        return
    for noise in (
        "number of training batches",
        "LeafSpec",
        "Total length of",
        "LightningCLI's args",
        "infer the batch indices",
        "pre-optimization",
        "callbacks used to create the checkpoint",
        "you requested to overfit",
        "It is recommended to use .self.log.*sync_dist",  # what several ranks log is summed already
        "is_gradient_checkpointing",  # PEFT asks by transformers' former name
    ):
        warnings.filterwarnings("ignore", f".*{noise}")
