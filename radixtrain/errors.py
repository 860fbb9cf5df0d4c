"""Errors that a user can fix: the command line prints one line and exits with code 1, or 2 for a `UsageError`."""

import logging
import signal
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

logger = logging.getLogger(__name__)
_told: set[str] = set()

TRAIN_WITHOUT_SHARING = "train it without sharing (fit: dedup: false)"


class UserError(ValueError):
    """A request that cannot be met. The message says what was expected, what came and how to fix it."""


class UsageError(UserError):
    """A mistake in the command line or a settings file: a key, a type, a class. Exit code 2."""


class DataError(UserError):
    """A row of a data file that cannot be used. `where` is `file:line` (JSONL) or `file:row N` (other formats)."""

    def __init__(self, where: str, reason: str):
        super().__init__(f"{where}: {reason}")
        self.where, self.reason = where, reason

    def __reduce__(self):  # a DataLoader worker pickles an error by the arguments of its constructor
        return type(self), (self.where, self.reason)


class Stopped(BaseException):
    """A signal or a request ended the run. The command prints the message and exits with `code`.

    Like KeyboardInterrupt not an `Exception`: a signal may raise it where a library catches those.
    """

    def __init__(self, message: str, code: int):
        super().__init__(message)
        self.code = code


@contextmanager
def handling(handlers: Mapping[int, Any]) -> Iterator[None]:
    """Handle signals by these functions within, and as before afterwards. A signal that was ignored stays ignored."""
    before = {number: signal.getsignal(number) for number in handlers}
    changed = [number for number, handler in before.items() if handler != signal.SIG_IGN]
    for number in changed:
        signal.signal(number, handlers[number])
    try:
        yield
    finally:
        for number in changed:
            signal.signal(number, before[number] or signal.SIG_DFL)


class EndedElsewhere(Exception):
    """Another process of this run has ended with an error and reports it. This one ends too, and prints nothing."""


@contextmanager
def only_warns(failed: str, kind: Any = (OSError, UserError)) -> Iterator[None]:
    """Turn an error in what a run does besides its result into a warning, once per process; the run continues.

    failed: what did not happen, for the warning. kind: of errors.
    """
    try:
        yield
    except kind as error:
        if failed not in _told:
            _told.add(failed)
            logger.warning("%s (%s: %s); the run continues", failed, type(error).__name__, first_line(error))


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "", cutoff: float = 0.6) -> str:
    """Return `, did you mean ...?` with the nearest known name, or `otherwise` if none is as alike as `cutoff`."""
    close = get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f", did you mean {close[0]}?" if close else otherwise


def first_line(error: BaseException) -> str:
    """Return the first line of another library's message, or the name of its type."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def bytes_text(number: float) -> str:
    """Format bytes: `512 MiB` below one GiB, else `1.23 GiB`."""
    size = number / 2**30
    return f"{number / 2**20:,.0f} MiB" if size < 1 else f"{size:.3g} GiB" if size < 999.5 else f"{size:,.0f} GiB"
