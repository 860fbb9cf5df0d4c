"""A connection of every rank to rank 0, beside those of torch.distributed: who reports an error, and who is gone.

A thread listens to it, so that a rank hears of it even while it waits for another one for ever.
"""

from __future__ import annotations

import os
import secrets
import selectors
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakSet

from radixtrain.distributed import ranks

__all__ = ["RankMonitor", "first_to_end", "watch_children", "watch_parent"]

GRACE = 15.0  # seconds for a rank to end by itself once another is gone, or reports why the run ends
CONNECTING = 60.0  # seconds
TELL, YES, TOLD, END = b"T", b"Y", b"H", b"E"  # may I report? yes; another rank does; the run has ended well


class RankMonitor:
    """Make one on each rank once the ranks have found one another, and `close` it on each when the run has ended well.

    is_told: set when another rank reports why the run ends, or when one is known to be gone.
    gone: the ranks that are known to be gone: any of them on rank 0, only rank 0 on the others.

    children: the other ranks, from 1 on, if this process has started them.

    `GRACE` seconds after `is_told` is set, the process and its children end with exit code 1 if they still run.
    """

    def __init__(self, children: Sequence[subprocess.Popen[bytes]] = ()) -> None:
        self.children, self.gone = children, list[int]()
        self.is_told, self._is_mine = threading.Event(), threading.Event()
        self._ended = False
        self._lines: dict[socket.socket, int] = {}
        address, place = os.environ.get("MASTER_ADDR", "127.0.0.1"), None
        server = None
        if ranks().is_first:
            server = _server(address, ranks().size)
            place = server.getsockname()[1], secrets.token_bytes(16)
        port, key = ranks().broadcast_from_rank0(lambda: place)  # type: ignore[misc]
        if server is not None:
            self._accept(server, key)
        else:
            line = socket.create_connection((address, port), CONNECTING)
            line.settimeout(None)
            line.sendall(key + struct.pack("!I", ranks().rank))
            self._lines[line] = 0
        _monitors.add(self)
        threading.Thread(target=self._listen, daemon=True).start()

    def close(self) -> None:
        """From now on another rank may end without an effect on this one."""
        self._ended = True
        self._send(END)

    @property
    def is_told_elsewhere(self) -> bool:
        """Whether another rank, which is not gone, reports why the run ends."""
        return self.is_told.is_set() and not self.gone

    def claim_report(self, patience: float) -> bool:
        """Whether this rank is the one that reports why the run ends: rank 0 is, unless another one has begun to.

        patience: seconds to wait for another one that may report the same, and for the answer of rank 0.
        """
        if ranks().is_first:
            self._send(TOLD)
            return not self.is_told_elsewhere
        if self.is_told.wait(patience):
            return bool(self.gone) and ranks().rank == 1
        self._send(TELL)
        deadline = time.monotonic() + patience
        while not (self._is_mine.is_set() or self.is_told.is_set()) and time.monotonic() < deadline:
            time.sleep(0.01)
        return self._is_mine.is_set() or (ranks().rank == 1 and not self.is_told.is_set())  # rank 0 hangs

    def _accept(self, server: socket.socket, key: bytes) -> None:
        """Take the connection of each of the other ranks, and close any other one, which does not send the key."""
        server.settimeout(CONNECTING)
        with server:
            while len(self._lines) < ranks().size - 1:
                line, _ = server.accept()
                line.settimeout(CONNECTING)
                said = line.makefile("rb").read(len(key) + 4)
                if secrets.compare_digest(said[: len(key)], key):
                    line.settimeout(None)
                    self._lines[line] = struct.unpack("!I", said[len(key) :])[0]
                else:
                    line.close()

    def _listen(self) -> None:
        """Runs in a thread until the run ends, well or not."""
        with selectors.DefaultSelector() as selector:
            for line in self._lines:
                selector.register(line, selectors.EVENT_READ)
            while selector.get_map() and not self.is_told.is_set():
                for event, _ in selector.select():
                    if not self._hear(event.fileobj):
                        selector.unregister(event.fileobj)
        if self.is_told.is_set():
            time.sleep(GRACE)
            self._leave()

    def _hear(self, line: Any) -> bool:
        """Take the next word of a connection. False once no more will come."""
        try:
            word = line.recv(1)
        except OSError:
            word = b""
        if word == END or (not word and self._ended):
            return False
        if word == YES:
            self._is_mine.set()
            return True
        if word == TELL:
            self._send(TOLD, but=line)
            with suppress(OSError):  # it is gone
                line.sendall(YES)
        elif not word:
            self.gone.append(self._lines[line])
            if ranks().is_first:
                self._send(TOLD, but=line)  # rank 0 tells
        self.is_told.set()
        return bool(word)

    def _send(self, word: bytes, but: socket.socket | None = None) -> None:
        for line in self._lines:
            if line is not but:
                try:
                    line.sendall(word)
                except OSError:  # it is gone
                    continue

    def _leave(self) -> None:
        if self._ended:
            return
        if self.gone and ranks().rank <= 1:
            found = first_to_end(self.children) or f"rank {self.gone[0]} of the run is gone"
            os.write(2, f"error: {found}; go on with --ckpt_path last\n".encode())
        for child in self.children:
            child.kill()
        os._exit(1)


def _server(address: str, backlog: int) -> socket.socket:
    """Listens at any free port: of this machine only if the ranks meet there, else of IPv4 and, if there is, IPv6."""
    if address in ("127.0.0.1", "localhost"):
        return socket.create_server(("127.0.0.1", 0), backlog=backlog)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=backlog)


_monitors: WeakSet[RankMonitor] = WeakSet()


def _leave_to_parent() -> None:
    """In a process that is forked, such as a worker of a DataLoader: it must not hold open what tells that a rank is
    gone."""
    for monitor in _monitors:
        for line in monitor._lines:
            line.close()


os.register_at_fork(after_in_child=_leave_to_parent)

SECONDS_BETWEEN = 0.5


def watch_children(children: Sequence[subprocess.Popen[bytes]], until: threading.Event) -> None:
    """From now on, `GRACE` seconds after one of them fails, all are killed and this process ends with a line.

    children: by rank, from 1 on. until: ends the watch.
    """
    _start(lambda: _end_with_children(children, until))


def watch_parent(parent: int, until: threading.Event) -> None:
    """From now on, this process ends `GRACE` seconds after the one that has started it.

    parent: its id. until: ends the watch.
    """
    _start(lambda: _end_with_parent(parent, until))


def first_to_end(children: Sequence[subprocess.Popen[bytes]]) -> str:
    """`rank 1 was killed by SIGKILL` or `rank 1 ended with exit code 1`; empty while all run or have ended well."""
    for rank, code in enumerate((child.poll() for child in children), 1):
        if code:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            return f"rank {rank} {how}"
    return ""


def _start(target: Callable[[], None]) -> None:
    threading.Thread(target=target, daemon=True).start()


def _end_with_children(children: Sequence[subprocess.Popen[bytes]], until: threading.Event) -> None:
    while not (found := first_to_end(children)):
        if until.wait(SECONDS_BETWEEN):
            return
    time.sleep(GRACE)
    for child in children:
        child.kill()
    os.write(2, f"error: {found}; go on with --ckpt_path last\n".encode())
    os._exit(1)


def _end_with_parent(parent: int, until: threading.Event) -> None:
    while os.getppid() == parent:
        if until.wait(SECONDS_BETWEEN):
            return
    time.sleep(GRACE)
    os._exit(1)
