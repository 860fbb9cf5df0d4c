"""Text for a screen or a log. Names, keys and messages may come from anybody: control characters are made visible."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

# Of C0 and C1, all but line feed and tab; what changes the direction of a text; other ends of lines; halves of pairs.
OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


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

    class Screen(Console):
        def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                yield segment if segment.control else Segment(printable(segment.text), segment.style)

    return Screen(**options)


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
