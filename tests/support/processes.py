"""Processes of their own: commands, ranks, and what either does otherwise in a test."""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import inspect
import json
import os
import pickle
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

# Only Python's own packages are imported above: this file is also the script of a server.
#
# Real commands in processes of their own, without the seconds that a new process spends on imports.
#
#     with Server() as server:
#         run = server.start(["fit", "--config", ...], stderr=folder / "stderr")
#         run.send(signal.SIGTERM)
#         assert run.wait() == 143
#
# A server, which is this file as a script, has imported everything and computed nothing. Each run is forked from it, is
# the leader of a process group of its own, and ends as a process of Python ends: exit handlers and all. A server that
# has imported only other packages than ours starts Python code, which finds what a new process finds.
#
# Whether a process that is not ours to wait for has ended.


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
        before: functions at the top level of a file, which are called in the new process first, such as `pause`.
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


# One command on several ranks: as many forked processes, with the environment that torchrun gives to each.


class Launched:
    """The ranks of one command. runs: the process of each, by rank. store: by which they meet.

    No agent watches over them, as torchrun would: what ends a rank when another is gone is the command itself.
    """

    def __init__(self, runs: Sequence[Run], store: Any):
        self.runs, self.store = list(runs), store

    def send(self, number: int, *ranks: int) -> None:
        """A signal to the processes of these ranks; of all if none is named. One that has ended is passed over."""
        for rank in ranks or range(len(self.runs)):
            if self.runs[rank].is_running:
                self.runs[rank].send(number)

    def send_groups(self, number: int) -> None:
        """A signal to every rank and its workers, as a terminal and a scheduler send it."""
        for run in self.runs:
            if run.is_running:
                run.send_group(number)

    @property
    def is_running(self) -> bool:
        """Whether every rank is."""
        return all(run.is_running for run in self.runs)

    def wait(self, seconds: float = SECONDS) -> list[int]:
        """The exit codes by rank. After `seconds` all are killed, and TimeoutError raised as `Run.wait` raises it."""
        deadline = time.monotonic() + seconds
        hanging = [
            rank
            for rank, run in enumerate(self.runs)
            if not run.server.wait(run.pid, max(0.0, deadline - time.monotonic()))
        ]
        if hanging:
            for run in self.runs:
                run.abort()
            raise TimeoutError(f"ranks {hanging} still running after {seconds} s:\n{self.said()}")
        return [run.wait() for run in self.runs]

    def kill(self) -> None:
        for run in self.runs:
            if run.left():
                run.send_group(signal.SIGKILL)

    def said(self) -> str:
        """What the ranks have printed on stderr, one after the other."""
        return "\n".join(f"[rank {rank}]\n{run.said()}" for rank, run in enumerate(self.runs))

    def errors(self) -> list[str]:
        """The lines on the stderr of any rank that tell why it ended."""
        lines = [line for run in self.runs for line in run.said().splitlines()]
        return [line for line in lines if line.startswith(("error: ", "stopped by ")) or "Traceback" in line]

    def wait_for_workers(self) -> None:
        """AssertionError if a process of a rank outlives it by more than a moment."""
        for run in self.runs:
            run.wait_for_workers()


# Ranks of `fit --trainer.devices N` that are forked from the process that starts them, not new interpreters.


class Forked:
    """What `launch` uses of `subprocess.Popen`."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], stdin: Any):
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid:
            return
        from radixtrain.__main__ import main

        os.closerange(3, 1024)  # as a new interpreter has them: among others, the store's
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(env)
        sys.argv = ["radixtrain", *command[3:]]
        code = main()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def fork_children() -> None:
    """For `Server.start(before=...)`."""
    import subprocess

    subprocess.Popen = Forked  # type: ignore[misc,assignment]


def rank_1_finds_an_error() -> None:
    """The same, and in its third step rank 1 raises what no other rank does."""
    from radixtrain.errors import UserError

    fork_children()
    _fail_on_rank_1(2, UserError("what only this rank can see"))


# Ranks of a process group on this machine, forked from the test: what has been imported need not be imported again.


SECONDS_OF_RANKS = 180.0
SECONDS_AFTER_A_FAILURE = 5.0  # for the other ranks, which may wait for the one that failed


def on_ranks(
    count: int,
    work: Callable[[int], Any],
    seconds: float = SECONDS_OF_RANKS,
    timeout: timedelta = timedelta(seconds=60),
    has_group: bool = True,
    sp_size: int = 1,
) -> list[Any]:
    """What `work(rank)` returns on each of `count` ranks, in processes that are forked from this one and use gloo.

    work: any function; what it returns is pickled. It finds torchrun's environment variables, an initialised process
        group, and `distributed.join` called. Its tensors are its own copies.
    timeout: of the process group. has_group: False leaves it to `work` to make one. sp_size: of
        `distributed.form_groups`.

    AssertionError with the tracebacks of the ranks that failed, or if one takes longer than `seconds`.
    """
    import torch.distributed as dist

    assert not dist.is_initialized(), "a group that is there already would be that of the forked processes, too"
    context, port = get_context("fork"), free_port()
    pipes, processes, all_answered = [], [], context.Event()
    for rank in range(count):
        pipe, end = context.Pipe(duplex=False)
        process = context.Process(
            target=_run, args=(rank, count, port, work, timeout if has_group else None, end, all_answered, sp_size)
        )
        process.start()
        end.close()  # now, so that no other rank has it: it is closed when this one dies
        pipes.append(pipe)
        processes.append(process)
    codes = []
    try:
        answers = _answers(pipes, seconds)
    finally:
        all_answered.set()
        for process in processes:
            process.join(1.0)
            codes.append(process.exitcode)
            process.kill()
            process.join()
    failed = [
        f"rank {rank} (exit code {code}): {told}"
        for rank, (code, (is_done, told)) in enumerate(zip(codes, answers, strict=True))
        if not is_done
    ]
    assert not failed, "\n".join(failed)
    return [value for _, value in answers]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def _answers(pipes: Sequence[Any], seconds: float) -> list[tuple[bool, Any]]:
    """By rank, whether it has come to its end, and what it returned; otherwise why not."""
    found: dict[Any, tuple[bool, Any]] = {}
    deadline = time.monotonic() + seconds
    while left := [pipe for pipe in pipes if pipe not in found]:
        ready = wait(left, max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        found |= {pipe: _answer(pipe) for pipe in ready}
        if not all(is_done for is_done, _ in found.values()):
            deadline = min(deadline, time.monotonic() + SECONDS_AFTER_A_FAILURE)
    return [found.get(pipe, (False, f"no answer after {seconds} s, or after another one failed")) for pipe in pipes]


def _answer(pipe: Any) -> tuple[bool, Any]:
    try:
        return pickle.loads(pipe.recv_bytes())
    except EOFError:
        return False, "ended without an answer"


def _run(
    rank: int,
    count: int,
    port: int,
    work: Callable[[int], Any],
    timeout: timedelta | None,
    pipe: Any,
    all_answered: Any,
    sp_size: int,
) -> None:
    import torch
    import torch.distributed as dist

    from radixtrain import distributed

    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(170.0)  # what a rank is doing that hangs, shortly before `on_ranks` gives up
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "GROUP_RANK": 0}
    there = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test"}
    os.environ.update({name: str(value) for name, value in (here | there).items()})
    try:
        if timeout is not None:
            dist.init_process_group("gloo", timeout=timeout)
            distributed.join(timeout)
            distributed.form_groups(sp_size, timeout)
        answer = True, work(rank)
    except BaseException:
        answer = False, traceback.format_exc()
    pipe.send_bytes(pickle.dumps(answer))
    if answer[0] and rank == 0:  # it has the store by which the others may still be joining; these leave at once,
        all_answered.wait(
            SECONDS_OF_RANKS
        )  # since only a closed connection ends the wait of a rank for one that failed
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # pytest's exit handlers are the parent's, and the destructors of gloo and DDP hung in 2 runs of 24


# What a run does otherwise in a test: functions for `Server.start(before=...)`, called in its process first.
#
# run = start(arguments, {"PAUSE": "save 3"}, before=pause)
# wait_until_paused(folder, run)          # it is in the middle of writing its third checkpoint
# run.send(signal.SIGTERM)
# go_on_after_pause(folder)


def compute_in_float64() -> None:
    """What this process would cast to float32 stays float64, until it ends."""
    from radixtrain.verification.oracle import float64_arithmetic

    arithmetic = float64_arithmetic()
    arithmetic.__enter__()
    atexit.register(arithmetic.__exit__, None, None, None)  # which also keeps it: collected, it would end


FLOAT64: dict[str, Any] = {
    **{"model__dtype": "float64", "trainer__precision": "64-true"},
    "before": [compute_in_float64],
}
"""Options of a run that is to agree with one that adds in another order: rounding leaves 1e-15 to 1e-13."""


def pause() -> None:
    """Wait at the place in the variable PAUSE, until `go_on_after_pause`.

    "step 3": before the third training step. "validation 3": before a validation that follows the third, and before
    each of its batches. "save 3": in the checkpoint of the third, with the weights written and not the optimizer.
    "load": before the weights are loaded. "step 3 0", "load 0 0": only on rank 0, which "save" always is.
    """
    from radixtrain.checkpoints import tensors
    from radixtrain.training import module

    place, *numbers = os.environ["PAUSE"].split()
    number, rank = [*map(int, numbers), None, None][:2]
    if rank not in (None, int(os.environ.get("RANK", "0"))):
        return
    model = module.RadixModule
    if place == "load":
        vars(module)["load_trainable"] = _paused_before(module.load_trainable, lambda *_: True)
    elif place == "step":
        _replace(model, "take_step", lambda run, *_: run.global_step + 1 == number)
    elif place == "validation":
        _replace(model, "evaluated", lambda run, *_: run.global_step == number)
    else:
        parts = "optimizer.safetensors", f"step={number}"
        _replace(tensors, "write_file", lambda path, _: path.name == parts[0] and parts[1] in path.parent.name)


def wait_until_paused(folder: Path, run: Any, count: int = 1) -> None:
    """Until so many ranks are. AssertionError if the run, a `Run` or a `Launched`, ends before, or takes minutes."""
    deadline = time.monotonic() + 180.0
    while len(list(folder.glob("paused_*"))) < count:
        assert run.is_running and time.monotonic() < deadline, run.said()
        time.sleep(0.002)


def go_on_after_pause(folder: Path) -> None:
    for path in folder.glob("paused_*"):
        path.unlink()


def limit_open_files() -> None:
    """To as many as the variable FILES says, which cannot be raised."""
    count = int(os.environ["FILES"])
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, count))


def lose_screen() -> None:
    """Nobody reads what is printed, as after `| tee` has ended."""
    read, write = os.pipe()
    os.close(read)
    os.dup2(write, 1)
    os.dup2(write, 2)


def signal_early() -> None:
    """The signal in the variable SIGNAL comes before the command is imported."""
    import radixtrain.__main__ as entrance

    vars(entrance)["check_versions"] = lambda *_: os.kill(os.getpid(), int(os.environ["SIGNAL"]))


def stop_in_lock() -> None:
    """Stop the process (SIGSTOP) as soon as the model's folder is locked for it."""
    from radixtrain.training.fault_tolerance import run_folder

    lock = run_folder._lock

    @contextmanager
    def stopping(path: Path, *arguments: Any) -> Iterator[None]:
        with lock(path, *arguments):
            if path.name == ".model.lock":
                os.kill(os.getpid(), signal.SIGSTOP)
            yield

    vars(run_folder)["_lock"] = stopping


def work_in_folder_of_rank() -> None:
    """In the folder `0` or `1` of the one in the variable FOLDERS."""
    os.chdir(os.path.join(os.environ["FOLDERS"], os.environ["RANK"]))


def fail_on_rank_1() -> None:
    """The second step of rank 1 raises an error that nobody expects."""
    _fail_on_rank_1(1, OSError(5, "the disk of rank 1 is broken"))


def _fail_on_rank_1(after: int, error: Exception) -> None:
    """After so many steps."""
    from radixtrain.training.module import RadixModule

    step = RadixModule.take_step

    def failing(module: Any, *arguments: Any) -> Any:
        if os.environ["RANK"] == "1" and module.global_step == after:
            raise error
        return step(module, *arguments)

    setattr(RadixModule, "take_step", failing)  # noqa: B010  # mypy refuses the plain assignment


def note_memory_of_saves() -> None:
    """Write into `memory_of_saves` in the run's folder how many bytes each save holds more than there were before."""
    from radixtrain.training.loop import Loop

    path, save = _folder() / "memory_of_saves", Loop.save_checkpoint

    def noting(*arguments: Any, **options: Any) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        before = memory("self", "VmRSS")
        save(*arguments, **options)
        with path.open("a") as file:
            file.write(f"{memory('self', 'VmHWM') - before}\n")

    setattr(Loop, "save_checkpoint", noting)  # noqa: B010  # as above


def memory(pid: int | str, what: str) -> int:
    """Bytes that a process holds, `VmRSS`, or the most that it has held, `VmHWM`."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{what}:"))


def _folder() -> Path:
    return next(Path(each.partition("=")[2]) for each in sys.argv if each.startswith("--output_dir="))


def _replace(owner: Any, name: str, is_there: Callable[..., bool]) -> None:
    setattr(owner, name, _paused_before(getattr(owner, name), is_there))


def _paused_before(function: Callable[..., Any], is_there: Callable[..., bool]) -> Callable[..., Any]:
    """The function, which waits while there is a file `paused_RANK` in the run's folder, that it writes."""
    mark = _folder() / f"paused_{os.environ.get('RANK', '0')}"

    def paused(*arguments: Any, **options: Any) -> Any:
        if is_there(*arguments):
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()
            while mark.exists():
                time.sleep(0.002)
        return function(*arguments, **options)

    return paused


# Mistakes that were made in data-parallel trainers, each as a function that a rank calls before it trains.
