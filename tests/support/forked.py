"""Real commands in processes of their own, without the seconds that a new process spends on imports.

    with Server() as server:
        run = server.start(["fit", "--config", ...], stderr=folder / "stderr")
        run.send(signal.SIGTERM)
        assert run.wait() == 143

A server, which is this file as a script, has imported everything and computed nothing. Each run is forked from it, is
the leader of a process group of its own, and ends as a process of Python ends: exit handlers and all. A server that has
imported only other packages than ours starts Python code, which finds what a new process finds.

Whether a process that is not ours to wait for has ended.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import inspect
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

IMPORTED = (
    *("radixtrain.commands.fit", "radixtrain.commands.export"),
    *("peft", "safetensors.torch", "matplotlib.backends.backend_agg"),
)
NOT_OURS = ("numpy", "torch", "transformers.modeling_utils", "transformers.models.qwen3.modeling_qwen3")
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
SECONDS_TO_IMPORT = 300
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # unless the tests run with more: the same in every run, so that bits agree
SECONDS = 180  # that a run may take


class Run:
    """A command that runs. pid: of its process and of its group. stderr: the file with what it has printed there."""

    def __init__(self, server: Server, pid: int, stderr: Path):
        self.server, self.pid, self.stderr = server, pid, stderr
        self.started = time.monotonic()

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def send_group(self, number: int) -> None:
        os.killpg(self.pid, number)

    @property
    def is_running(self) -> bool:
        return self.pid not in self.server.ended

    @property
    def ended(self) -> float:
        """When it ended, on the clock `time.monotonic`."""
        return self.server.ended[self.pid][1]

    def wait(self, seconds: float = SECONDS) -> int:
        """The exit code, negative if a signal ended it. After `seconds` the run is killed, and TimeoutError raised.

        The error has what the run has said, and where each of its threads was.
        """
        if not self.server.wait(self.pid, seconds):
            self.abort()
            raise TimeoutError(f"still running after {seconds} s:\n{self.said()}")
        return self.server.ended[self.pid][0]

    def abort(self) -> None:
        """Have the run and its workers write the stacks of their threads on stderr, and end them."""
        for number in (signal.SIGABRT, signal.SIGKILL):
            if self.left():
                self.send_group(number)
                self.server.wait(self.pid, 5.0)

    def said(self) -> str:
        return self.stderr.read_text(errors="replace")

    def printed(self) -> str:
        """What it has printed on stdout."""
        return Path(f"{self.stderr}.stdout").read_text(errors="replace")

    def error(self) -> str:
        """The last line on stderr."""
        return (self.said().splitlines() or [""])[-1]

    def left(self) -> list[int]:
        """Processes of its group that are alive, the run and its workers."""
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                state, _, group = path.read_text().rpartition(")")[2].split()[:3]
            except OSError:  # it has ended
                continue
            if int(group) == self.pid and state not in "ZX":
                found.append(int(path.parent.name))
        return sorted(found)

    def wait_for_workers(self, seconds: float = 60.0) -> None:
        """Until nothing of its group is alive. AssertionError if something still is after `seconds`."""
        begin = time.monotonic()
        while self.left():
            assert time.monotonic() - begin < seconds, f"alive {seconds} s later: {self.left()}"
            time.sleep(0.02)


class Server:
    """Starts runs. A context, which kills what still runs when it ends.

    imported: modules that its runs find imported.
    """

    def __init__(self, imported: Sequence[str] = IMPORTED) -> None:
        self.imported = imported
        self.ended: dict[int, tuple[int, float]] = {}
        """Of each process that has ended: exit code and time."""
        self._changed = threading.Condition()
        self._answers: list[dict[str, Any]] = []
        self._runs: list[Run] = []

    def __enter__(self) -> Server:
        self._process = subprocess.Popen(
            [sys.executable, __file__, *self.imported],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=ONE_THREAD | os.environ,
        )
        threading.Thread(target=self._listen, daemon=True).start()
        self._answer(SECONDS_TO_IMPORT)
        return self

    def __exit__(self, *_: object) -> None:
        for run in self._runs:
            if run.left():
                run.send_group(signal.SIGKILL)
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)

    def start(
        self,
        arguments: Sequence[str],
        stderr: Path,
        environment: Mapping[str, str] | None = None,
        draws: bool = True,
        before: Callable[[], object] | Sequence[Callable[[], object]] = (),
    ) -> Run:
        """Start `python -m radixtrain` with these arguments.

        draws: False for no `loss.png`, which takes longer than a run.
        before: functions at the top level of a file, which are called in the new process first: see `changed_runs.py`.
        """
        before = [before] if callable(before) else before
        asked = {
            "arguments": list(map(str, arguments)),
            "environment": {**ONE_THREAD, **os.environ, **(environment or {})},
            "draws": draws,
            "before": [[inspect.getfile(each), each.__name__] for each in before],
        }
        return self._start(asked, stderr)

    def start_code(self, code: str, stderr: Path) -> Run:
        """Start `python -c code`."""
        return self._start({"code": code, "environment": dict(os.environ)}, stderr)

    def _start(self, asked: Mapping[str, Any], stderr: Path) -> Run:
        stderr.touch()
        assert self._process.stdin is not None
        self._process.stdin.write(f"{json.dumps({**asked, 'stderr': str(stderr)})}\n")
        self._process.stdin.flush()
        run = Run(self, self._answer(30)["started"], stderr)
        self._runs.append(run)
        return run

    def wait(self, pid: int, seconds: float) -> bool:
        """Whether the process has ended by then."""
        with self._changed:
            return self._changed.wait_for(lambda: pid in self.ended, seconds)

    def _answer(self, seconds: float) -> dict[str, Any]:
        with self._changed:
            assert self._changed.wait_for(lambda: self._answers, seconds), "the server of runs does not answer"
            return self._answers.pop(0)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message = json.loads(line)
            with self._changed:
                if "ended" in message:
                    self.ended[message["ended"]] = message["code"], message["time"]
                else:
                    self._answers.append(message)
                self._changed.notify_all()


def serve() -> None:
    """Answer each line of stdin with the process that it has started; say of each process when it has ended."""
    sys.path[0] = ""  # as `python -m` has it; in this folder, `import kernels` would find the tests of the kernels
    for name in sys.argv[1:]:
        import_module(name)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # so orphaned workers are collected here
    gc.freeze()
    _say(ready=True)
    running, waiting, text = 0, True, b""
    while waiting or running:
        readable, _, _ = select.select([0] if waiting else [], [], [], 0.004 if running else None)
        if readable:
            chunk = os.read(0, 1 << 20)
            waiting = bool(chunk)
            *lines, text = (text + chunk).split(b"\n")
            for line in lines:
                _start(json.loads(line))
                running += 1
        running = _collect()


def _start(asked: dict[str, Any]) -> None:
    pid = os.fork()
    if pid:
        os.setpgid(pid, pid)
        return _say(started=pid)
    os.setpgid(0, 0)
    _redirect(asked["stderr"])
    faulthandler.enable()  # for `Run.abort`
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup` and a shell's `&` have had them ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(asked["environment"])
    if "code" in asked:
        sys.argv = ["-c"]
        exec(compile(asked["code"], "<string>", "exec"), {"__name__": "__main__"})
        sys.exit()
    if not asked["draws"]:
        vars(sys.modules["radixtrain.training.results.record"])["write_curves"] = lambda *_: False
    sys.argv = ["radixtrain", *asked["arguments"]]
    for path, name in asked["before"]:
        runpy.run_path(path)[name]()
    from radixtrain.__main__ import main

    sys.exit(main())


def _redirect(stderr: str) -> None:
    """What is printed goes into `stderr`, and into a file beside it."""
    for number, name in ((1, f"{stderr}.stdout"), (2, stderr)):
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(descriptor, number)
        os.close(descriptor)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)


def _collect() -> int:
    """Say which processes have ended. Returns 0 if none is left, else 1."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return 0
        if not pid:
            return 1
        _say(ended=pid, code=os.waitstatus_to_exitcode(status), time=time.monotonic())


def _say(**message: Any) -> None:
    os.write(1, f"{json.dumps(message)}\n".encode())


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


if __name__ == "__main__":
    serve()
