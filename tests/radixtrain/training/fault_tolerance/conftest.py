"""What the tests of this folder share: signals that do something, also where the tests run under `nohup`."""

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_signal_is_ignored() -> Iterator[None]:
    """Those that are, as `nohup` and a shell's `&` have it, have their defaults during a test."""
    defaults = {signal.SIGHUP: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    ignored = [number for number in defaults if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, defaults[number])
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
