"""What a process that has started others does when one of them is gone, before there is a board."""

import os
import subprocess
import threading
import time

import pytest

from radixtrain.training.devices import watching
from radixtrain.training.devices.watching import watch_children, watch_parent


def in_a_process(work):
    """Its exit code, and what it prints on stderr. work: called in a process that is forked from this one."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        os.dup2(write, 2)
        work()
        os._exit(7)
    os.close(write)
    with os.fdopen(read) as said:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said.read()


def shell(command):
    return subprocess.Popen(["sh", "-c", command], stderr=subprocess.DEVNULL)


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    monkeypatch.setattr(watching, "GRACE", 0.05)
    monkeypatch.setattr(watching, "SECONDS_BETWEEN", 0.01)


def test_the_first_to_fail_is_named_and_the_others_end():
    def work():
        watch_children([shell("exit 0"), shell("exit 3"), shell("exec sleep 600")], threading.Event())
        time.sleep(600.0)

    assert in_a_process(work) == (1, "error: rank 2 ended with exit code 3; go on with --ckpt_path last\n")


def test_a_process_ends_after_the_one_that_has_started_it():
    assert in_a_process(lambda: (watch_parent(-1, threading.Event()), time.sleep(600.0))) == (1, "")


def test_the_watch_ends_once_there_is_a_board():
    """Which then sees that a process is gone."""

    def work():
        until = threading.Event()
        child = shell("exec sleep 600")
        watch_children([child], until)
        watch_parent(os.getppid(), until)
        until.set()
        while len(threading.enumerate()) > 1:  # forked, it has no other thread than its own and the two that watch
            time.sleep(0.01)
        child.kill()

    assert in_a_process(work) == (7, "")
