"""Log lines and warnings that a command shows."""

from __future__ import annotations

import logging
import sys
import warnings

from tqdm import tqdm
from transformers.utils.logging import disable_progress_bar


class NoticeHandler(logging.StreamHandler):
    """Writes log lines on stderr above a progress bar, not into its line."""

    def emit(self, record: logging.LogRecord) -> None:
        with tqdm.external_write_mode(file=sys.stderr):
            super().emit(record)


def quiet(speaks: bool) -> None:
    """Show our log lines, and of the libraries' only those that a user can act on.

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
        "Experiment logs directory",  # the record of a command is there before its metrics
        "is_gradient_checkpointing",  # PEFT asks by transformers' former name
    ):
        warnings.filterwarnings("ignore", f".*{noise}")
