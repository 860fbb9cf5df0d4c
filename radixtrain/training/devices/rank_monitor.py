"""Side channel (TCP) from every rank to rank 0, beside torch.distributed: which rank prints an error, which is gone.

A background thread reads it, so a rank that is blocked in a collective still learns of a failure. Before it runs, a
watchdog ends the processes that a process has started once one of them dies.
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

GRACE = 15.0  # seconds for a process to end on its own once another is gone, or reports why the run ends
POLL_SECONDS = 0.5
CONNECTING = 60.0  # seconds
ASK, YES, NO, END = b"T", b"Y", b"H", b"E"  # "may I report?", "yes", "no, another rank does", "the run ended well"

Children = Sequence[subprocess.Popen[bytes]]  # the other ranks, from 1 on


class RankMonitor:
    """Connects each rank to rank 0. Make one once the ranks have found one another, and `close` it after a good end.

    children: the other ranks, from 1 on, if this process has started them.
    is_reported: set when another rank reports why the run ends, or when one is known to be gone.
    gone: the ranks known to be gone: any rank on rank 0, only rank 0 on the others.

    `GRACE` seconds after `is_reported` is set, the process and its children end with exit code 1 if they still run.
    """

    def __init__(self, children: Children = ()) -> None:
        self.children, self.gone = children, list[int]()
        self.is_reported, self._is_mine = threading.Event(), threading.Event()
        self._ended = False
        self._connections: dict[socket.socket, int] = {}
        host, server, door = os.environ.get("MASTER_ADDR", "127.0.0.1"), None, None
        if ranks().is_first:
            server = _server(host, ranks().size)
            door = server.getsockname()[1], secrets.token_bytes(16)
        port, key = ranks().broadcast_from_rank0(lambda: door)  # type: ignore[misc]
        if server is not None:
            self._accept(server, key)
        else:
            connection = socket.create_connection((host, port), CONNECTING)
            connection.settimeout(None)
            connection.sendall(key + struct.pack("!I", ranks().rank))
            self._connections[connection] = 0
        _monitors.add(self)
        threading.Thread(target=self._listen, daemon=True).start()

    def close(self) -> None:
        """Let other ranks end without an effect on this one from now on."""
        self._ended = True
        self._send(END)

    @property
    def is_reported_elsewhere(self) -> bool:
        """Return whether another rank, which is not gone, reports why the run ends."""
        return self.is_reported.is_set() and not self.gone

    def claim_report(self, patience: float) -> bool:
        """Return whether this rank reports why the run ends: rank 0 does, unless another one has begun to.

        patience: seconds to wait for another one that may report the same, and for the answer of rank 0.
        """
        if ranks().is_first:
            self._send(NO)
            return not self.is_reported_elsewhere
        if self.is_reported.wait(patience):
            return bool(self.gone) and ranks().rank == 1
        self._send(ASK)
        deadline = time.monotonic() + patience
        while not (self._is_mine.is_set() or self.is_reported.is_set()) and time.monotonic() < deadline:
            time.sleep(0.01)
        return self._is_mine.is_set() or (ranks().rank == 1 and not self.is_reported.is_set())  # rank 0 hangs

    def _accept(self, server: socket.socket, key: bytes) -> None:
        """Accept the connection of each other rank, and close any other connection, which does not send the key."""
        server.settimeout(CONNECTING)
        with server:
            while len(self._connections) < ranks().size - 1:
                connection, _ = server.accept()
                connection.settimeout(CONNECTING)
                greeting = connection.makefile("rb").read(len(key) + 4)
                if secrets.compare_digest(greeting[: len(key)], key):
                    connection.settimeout(None)
                    self._connections[connection] = struct.unpack("!I", greeting[len(key) :])[0]
                else:
                    connection.close()

    def _listen(self) -> None:
        """Listen in a thread until the run ends, well or not."""
        with selectors.DefaultSelector() as selector:
            for connection in self._connections:
                selector.register(connection, selectors.EVENT_READ)
            while selector.get_map() and not self.is_reported.is_set():
                for event, _ in selector.select():
                    if not self._receive(event.fileobj):
                        selector.unregister(event.fileobj)
        if self.is_reported.is_set():
            time.sleep(GRACE)
            if not self._ended:
                lost = first_to_end(self.children) or f"rank {self.gone[0]} of the run is gone" if self.gone else ""
                _end_all(self.children, lost if ranks().rank <= 1 else "")

    def _receive(self, connection: Any) -> bool:
        """Receive the next message of a connection. Returns False once no more will come."""
        try:
            message = connection.recv(1)
        except OSError:
            message = b""
        if message == END or (not message and self._ended):
            return False
        if message == YES:
            self._is_mine.set()
            return True
        if message == ASK:
            self._send(NO, but=connection)
            with suppress(OSError):  # it is gone
                connection.sendall(YES)
        elif not message:
            self.gone.append(self._connections[connection])
            if ranks().is_first:
                self._send(NO, but=connection)  # rank 0 reports
        self.is_reported.set()
        return bool(message)

    def _send(self, message: bytes, but: socket.socket | None = None) -> None:
        for connection in self._connections:
            if connection is not but:
                with suppress(OSError):  # it is gone
                    connection.sendall(message)


def watch_children(children: Children, until: threading.Event) -> None:
    """Kill the children and end this process with a line, from now on, `GRACE` seconds after one of them fails.

    until: ends the watch.
    """
    _watch(lambda: first_to_end(children), until, children)


def watch_parent(parent: int, until: threading.Event) -> None:
    """End this process without a line, from now on, `GRACE` seconds after the one that has started it.

    parent: its id. until: ends the watch.
    """
    _watch(lambda: os.getppid() != parent, until, ())


def first_to_end(children: Children) -> str:
    """Describe the first failure: `rank 1 was killed by SIGKILL` or `ended with exit code 1`; empty without any."""
    for rank, code in enumerate((child.poll() for child in children), 1):
        if code:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            return f"rank {rank} {how}"
    return ""


def _watch(is_gone: Callable[[], Any], until: threading.Event, children: Children) -> None:
    def watch() -> None:
        while not is_gone():
            if until.wait(POLL_SECONDS):
                return
        time.sleep(GRACE)  # lets the rank notice itself that another is gone, and say what is saved
        _end_all(children, first_to_end(children))

    threading.Thread(target=watch, daemon=True).start()


def _end_all(children: Children, reason: str) -> None:
    if reason:
        os.write(2, f"error: {reason}; resume with --ckpt_path last\n".encode())
    for child in children:
        child.kill()
    os._exit(1)


def _server(address: str, backlog: int) -> socket.socket:
    """Listen at any free port: of this machine if the ranks meet there, else of IPv4 and, if possible, IPv6."""
    if address in ("127.0.0.1", "localhost"):
        return socket.create_server(("127.0.0.1", 0), backlog=backlog)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=backlog)


_monitors: WeakSet[RankMonitor] = WeakSet()


def _close_in_child() -> None:
    """Close connections in a forked process, such as a DataLoader worker: open ones would hide that a rank is gone."""
    for monitor in _monitors:
        for connection in monitor._connections:
            connection.close()


os.register_at_fork(after_in_child=_close_in_child)
