"""Text for a screen or a log. Names, keys and messages may come from anybody: control characters are made visible."""

from __future__ import annotations

import logging
import os
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

# Of C0 and C1, all but line feed and tab; what changes the direction of a text; other ends of lines; halves of pairs.
OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
WIDTH = 12  # of the names of printed lines
PASSWORD = re.compile(r"(:/{1,2})[^\s/?#]+@")  # `user:password@` of an address; a path has one slash


def without_passwords(text: str) -> str:
    """Return the text with `***` for user and password of each address in it."""
    return PASSWORD.sub(r"\1***@", text)


def printable(text: object) -> str:
    r"""Return the text with `\x1b` for an escape, and likewise for every control character a terminal would obey."""
    return OBEYED.sub(lambda found: ascii(found[0])[1:-1], str(text))


@contextmanager
def logged_from(level: int, name: str) -> Iterator[None]:
    """Show log lines of a library only from a level on. name: of its logger."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)


def screen(**options: Any) -> Console:
    """Return rich's Console with these options; it writes no control characters but its own."""
    from rich.console import Console  # here, since errors are printed where rich is not needed
    from rich.segment import Segment

    class EscapingConsole(Console):
        def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                yield segment if segment.control else Segment(printable(segment.text), segment.style)

    return EscapingConsole(**options)


class _Record(logging.LogRecord):
    def getMessage(self) -> str:  # its name in logging
        return printable(super().getMessage())

    def __setattr__(self, name: str, value: object) -> None:
        """Make the text of a traceback printable, which formatters keep here: it ends with the message of its error."""
        super().__setattr__(name, printable(value) if value and name in ("exc_text", "stack_info") else value)


def guard_logs() -> None:
    """Make every log record and warning of this process printable from here on."""
    logging.setLogRecordFactory(_Record)
    if getattr(warnings.formatwarning, "__name__", "") != "_formatted":
        before = warnings.formatwarning

        def _formatted(*args: Any, **kwargs: Any) -> str:
            return printable(before(*args, **kwargs))

        warnings.formatwarning = _formatted


def print_line(name: str, text: object, width: int = WIDTH) -> None:
    """Print a line on stdout. width: of the name."""
    screen(soft_wrap=True, highlight=False, markup=False).print(f"{name:<{width}} {text}")


def print_lines(lines: Mapping[str, str]) -> None:
    """Print lines with their texts in one column, without those that have no text."""
    shown = {name: text for name, text in lines.items() if text}
    for name, text in shown.items():
        print_line(name, text, max(WIDTH, *map(len, shown)))


class PipeTolerantStream:
    """A stream that may fail without ending the run: the rest is dropped, and `failure` says why."""

    def __init__(self, stream: Any):
        self.stream = stream
        self.failure: str | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        with self._dropped():
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._dropped():
            self.stream.flush()

    @contextmanager
    def _dropped(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:  # the reader is gone, the disk is full
            self.failure = error.strerror or str(error)
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, self.stream.fileno())  # also for buffered text, and for libraries
            os.close(nothing)


@contextmanager
def screens() -> Iterator[None]:
    """Let a run continue after an error of stdout or stderr, since only files count."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = PipeTolerantStream(sys.stdout), PipeTolerantStream(sys.stderr)
    try:
        yield
    finally:
        screen_failure()
        sys.stdout, sys.stderr = before


def screen_failure() -> str | None:
    """Say why the output of a run is lost: `stdout: Broken pipe`. None if it is not, or outside of `screens`."""
    for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)):
        if isinstance(stream, PipeTolerantStream):
            stream.flush()
            if stream.failure:
                return f"{name}: {stream.failure}"
    return None


class NoticeHandler(logging.StreamHandler):
    """Writes log lines on stderr above a progress bar, not into its line."""

    def emit(self, record: logging.LogRecord) -> None:
        from tqdm import tqdm  # here, since errors are printed where it is not needed

        with tqdm.external_write_mode(file=sys.stderr):
            super().emit(record)


def quiet(speaks: bool) -> None:
    """Show our log lines, and of the libraries' only those that a user can act on.

    speaks: False for a rank other than the first: it shows errors only.
    """
    from transformers.utils.logging import disable_progress_bar  # here, since it takes seconds

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
