"""Work that dies in a fork as by `kill -9`: before an operation on files, or anywhere between two calls of C functions.

    for _ in kills_at_file_operations(lambda: replace(folder, "new")):
        assert content(folder) in ("old", "new")
        replace(folder, "old")

The work is first run to its end, which counts the places, so the body of the loop finds it finished once.
"""

import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence

from tiers import tries

KILLED = 9
OPERATIONS = ("os.", "open", "shutil.", "ctypes.dlopen")  # audit events; the last one is renameat2
Watch = Callable[[Callable[[], None]], None]


def kills_at_file_operations(work: Callable[[], object], events: Sequence[str] = OPERATIONS) -> Iterator[None]:
    """Yields after each death: before every operation in `make test-full`, before every fifth in `make test`.

    events: beginnings of the names of audit events.
    """

    def watch(reached: Callable[[], None]) -> None:
        sys.addaudithook(lambda event, _: reached() if event.startswith(tuple(events)) else None)

    return _kills(work, watch, lambda total: range(0, total, total // tries(total, total)))


def kills_at_calls(work: Callable[[], object], number: int) -> Iterator[None]:
    """Yields after each death, at `number` random places in `make test-full`: also in the middle of a file's bytes."""

    def watch(reached: Callable[[], None]) -> None:
        sys.setprofile(lambda frame, event, _: reached() if event == "c_call" else None)

    return _kills(work, watch, lambda total: random.Random(1).sample(range(total), tries(number, total)))


def _kills(work: Callable[[], object], watch: Watch, places: Callable[[int], Sequence[int]]) -> Iterator[None]:
    total = _run(work, watch, sys.maxsize)
    assert total is not None and total > 10  # it does count
    yield
    for place in places(total):
        assert _run(work, watch, place) is None, f"it ended before place {place} of {total}"
        yield


def _run(work: Callable[[], object], watch: Watch, place: int) -> int | None:
    """The number of places that the work has; None if it was killed at one."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        seen = 0

        def reached() -> None:
            nonlocal seen
            if seen == place:
                os._exit(KILLED)
            seen += 1

        try:
            watch(reached)
            work()
            sys.setprofile(None)
            os.write(write, str(seen).encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as file:
        told = file.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert (code == KILLED) != bool(told), f"exit code {code}"  # no other end, such as an error of the work
    return int(told) if told else None
