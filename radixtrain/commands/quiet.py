"""Log lines and warnings that a command shows, and environment variables that nothing reads: misspelt ones, keys."""

from __future__ import annotations

import logging
import re
import sys
import warnings
from collections.abc import Iterator, Mapping

from tqdm import tqdm
from transformers.utils.logging import disable_progress_bar

from radixtrain.commands import COMMANDS
from radixtrain.errors import did_you_mean

logger = logging.getLogger(__name__)

PREFIX = "RADIXTRAIN_"
VARIABLES = ("CACHE", "OPTIONS")  # docs/configuration.md explains them
KEYS = re.compile(rf"({'|'.join(COMMANDS).upper()}|TRAINER|MODEL|DATA)__")  # as other tools write keys


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


def warn_of_variables(environment: Mapping[str, str]) -> None:
    """Warn of each variable that nothing reads, but of no other name, which may be the user's own."""
    for line in _unread(environment):
        logger.warning("%s", line)


def _unread(environment: Mapping[str, str]) -> Iterator[str]:
    for name in sorted(environment):
        end = name.removeprefix(PREFIX)
        if end in (name, *VARIABLES):
            continue
        if KEYS.match(end):
            yield f"{name} is not read: give keys in the file of --config, or as --key value"
        elif near := did_you_mean(end, VARIABLES):
            yield f"{name} is not read{near.replace('mean ', f'mean {PREFIX}')}"
