"""Requests to save or to stop a run while it trains: signals.

SLURM: SIGUSR1 before the time limit saves and requeues the job, and the requeued job resumes. With
`#SBATCH --signal=SIGUSR1@90` a job gets the signal 90 seconds before its limit, if it was started by `srun`.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType

from radixtrain.checkpoints.atomic import writing_file
from radixtrain.distributed import ranks
from radixtrain.errors import Stopped, handling
from radixtrain.training.devices.launch import ENDING, HANDLED, SAVING
from radixtrain.training.devices.launcher_env import INTERACTIVE

logger = logging.getLogger(__name__)

# `timeout`, shells and launchers send a signal to the process and to its group, so that it arrives twice.
SAME_SIGNAL_SECONDS = 1.0
JOB_RECORD = ".slurm_job"  # in the output folder: names the SLURM job that wrote it
SCONTROL_SECONDS = 60  # to answer


@dataclass(frozen=True)
class Stop:
    """Why a run ends. name: for messages. code: the exit code. requeue: whether SLURM should run the job again."""

    name: str
    code: int
    requeue: bool = False


STOPS = (
    None,
    *(Stop(number.name, 128 + number) for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)),
    *(Stop(number.name, 128 + signal.SIGUSR1, requeue=True) for number in SAVING),
)
"""Why a run may stop. Ranks exchange the index."""


class Requests:
    """A context around a run, in which signals become requests that the run looks at between its steps.

    SIGTERM, SIGHUP and Ctrl-C request a stop: exit codes 143, 129 and 130. A second one, at least a second later, exits
    at once with its own code. SIGUSR1 or SIGUSR2 requests a save; in a SLURM job a stop and a requeue (138). A signal
    that was ignored before, as SIGHUP under `nohup`, stays ignored. Outside the main thread nothing is requested. What
    is requested of one rank, all do at the same step.

    stop: set by the first request to stop on this rank. What all ranks do is what `poll` returns.
    save: set by a request to save, and reset by the saver.
    """

    def __init__(self) -> None:
        self.stop: Stop | None = None
        self.save = False
        self._signalled_at: float | None = None
        self._is_deferred = self._is_answering = False
        self._has_trained = False
        self._process = os.getpid()
        self._handling = ExitStack()

    def __enter__(self) -> Requests:
        if threading.current_thread() is threading.main_thread():
            self._handling.enter_context(handling(dict.fromkeys(HANDLED, self._on_signal)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Restore the previous signal handlers. A job that stops for SIGUSR1 or SIGUSR2 is requeued, by rank 0."""
        try:
            if isinstance(error, Stopped) and self.stop is not None and self.stop.requeue and ranks().is_first:
                requeue()
        finally:
            self._handling.close()

    def poll(self) -> tuple[Stop | None, bool]:
        """Return why the ranks stop here, and whether they save; the same on all of them. Sets `save` and `stop`.

        A signal that arrives during this call is handled by the next one.
        """
        place, save = ranks().largest(STOPS.index(self.stop), int(self.save))
        self.stop, self.save = STOPS[place] or self.stop, bool(save) or self.save
        return STOPS[place], bool(save)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Let a signal only set `stop`, so that the run stops between two steps. Outside it raises Stopped at once.

        Raises Stopped at the end, on all ranks, if a signal has not been handled.
        """
        self._is_deferred = True
        try:
            yield
            self._has_trained = True
        finally:
            self._is_deferred = False
        stop, _ = self.poll()
        if stop is not None:
            raise self._stopped(stop)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Let a signal raise Stopped even inside `deferred()`, for long work that changes nothing.

        With several ranks the signal waits for the end: the others would wait for the answers of a rank that has left.
        """
        if ranks().size > 1:
            yield
            return
        was_deferred, self._is_deferred, self._is_answering = self._is_deferred, False, True
        try:
            if self.stop is not None:
                raise self._stopped(self.stop)
            yield
        finally:
            self._is_deferred, self._is_answering = was_deferred, False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a process that the run has forked: the signal ends it
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif number in ENDING and self._signalled_at is not None:
            self._leave_at_once(number)
        elif number in SAVING and not is_batch_job():
            self.save = True
        else:
            self._request_stop(number)

    def _request_stop(self, number: int) -> None:
        """Set `stop`, and raise unless deferred. Signals that SLURM sends after its first one have no effect."""
        if number in ENDING:
            self._signalled_at = time.monotonic()
        if self.stop is not None:
            return
        self.stop = next(stop for stop in STOPS if stop and stop.name == signal.Signals(number).name)
        if not self._is_deferred:
            raise self._stopped(self.stop)

    def _leave_at_once(self, number: int) -> None:
        assert self._signalled_at is not None
        if time.monotonic() - self._signalled_at >= SAME_SIGNAL_SECONDS:
            if ranks().is_first:
                os.write(2, f"error: a second {signal.Signals(number).name}: left at once\n".encode())
            os._exit(128 + number)

    def _stopped(self, stop: Stop) -> Stopped:
        if self._is_answering:
            text = "while answers were generated; what was trained is saved, and --ckpt_path last resumes"
            return Stopped(f"stopped by {stop.name} {text}", stop.code)
        if self._has_trained:
            return Stopped(f"stopped by {stop.name} after the last step; --ckpt_path last writes the model", stop.code)
        return Stopped(f"stopped by {stop.name}; nothing was saved", stop.code)


def job_id() -> str | None:
    """Return the job's id, `123`, or `120_4` for a task of an array; None outside SLURM."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    found = f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID", "")
    return found if re.fullmatch(r"\d+(_\d+)?", found) else None


def is_batch_job() -> bool:
    """Return whether SLURM runs this process as a job that can be requeued, and not in a terminal."""
    return job_id() is not None and os.environ.get("SLURM_JOB_NAME") not in INTERACTIVE


def requeue() -> None:
    """Ask SLURM to run this job again. If it refuses, a warning says why, and how to continue."""
    job = job_id()
    assert job is not None
    try:
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, timeout=SCONTROL_SECONDS)
        reason = "" if done.returncode == 0 else done.stderr.strip() or f"exit code {done.returncode}"
    except FileNotFoundError:
        reason = "no scontrol in PATH"
    except subprocess.TimeoutExpired:
        reason = f"no answer in {SCONTROL_SECONDS} s"
    if reason:
        logger.warning("SLURM job %s was not requeued (%s); submit it again with --ckpt_path last", job, reason)
    else:
        logger.info("SLURM job %s requeued", job)


def remember_job(output_dir: Path) -> None:
    """Record which job runs in this folder, for `is_restarted`. Does nothing outside SLURM."""
    job = job_id()
    if job is None:
        return
    with writing_file(output_dir / JOB_RECORD) as partial:
        partial.write_text(f"{job}\n", encoding="utf-8")


def is_restarted(output_dir: Path) -> bool:
    """Return whether SLURM has started this job again, and the run in the folder is its own.

    Then `fit` resumes from the newest valid checkpoint there, whatever `ckpt_path` says, and starts anew if there is
    none yet. A folder that another job has written is not resumed.
    """
    count = os.environ.get("SLURM_RESTART_COUNT", "0")
    record = output_dir / JOB_RECORD
    if not (count.isdigit() and int(count)) or not record.is_file():
        return False
    return record.read_text(encoding="utf-8").strip() == job_id()
