"""Whether a process that is not ours to wait for has ended."""

import time
from pathlib import Path

__all__ = ["is_alive", "wait_for_end"]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for_end(pid: int) -> bool:
    """False after a minute, which no machine needs."""
    until = time.monotonic() + 60
    while is_alive(pid) and time.monotonic() < until:
        time.sleep(0.01)
    return not is_alive(pid)
