"""What a process that has started others does when one of them is gone, before there is a board."""

import os
import signal
import threading
import time

import pytest

from radixtrain.training.devices import watching
from radixtrain.training.devices.watching import first_to_end, watch_children, watch_parent


class Child:
    code = None

    def poll(self):
        return self.code

    def kill(self):
        self.code = -signal.SIGKILL


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


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    monkeypatch.setattr(watching, "GRACE", 0.05)
    monkeypatch.setattr(watching, "SECONDS_BETWEEN", 0.01)


@pytest.mark.parametrize("code", [None, 0])
def test_nothing_has_failed(code):
    child = Child()
    child.code = code
    assert first_to_end([child, child]) == ""


def test_the_first_to_fail_is_named():
    children = [Child(), Child()]

    def work():
        watch_children(children, threading.Event())
        time.sleep(0.1)
        children[1].code = 3
        time.sleep(30.0)

    assert in_a_process(work) == (1, "error: rank 2 ended with exit code 3; go on with --ckpt_path last\n")


def test_a_process_ends_after_the_one_that_has_started_it():
    assert in_a_process(lambda: (watch_parent(-1, threading.Event()), time.sleep(30.0))) == (1, "")


@pytest.mark.parametrize("watch", ["children", "parent"])
def test_the_watch_ends_once_there_is_a_board(monkeypatch, watch):
    """Which then sees that a process is gone."""

    def work():
        child, until = Child(), threading.Event()
        if watch == "children":
            watch_children([child], until)
        else:
            watch_parent(os.getppid(), until)
        until.set()
        time.sleep(0.2)
        child.code = -signal.SIGKILL
        monkeypatch.setattr(os, "getppid", lambda: -1)
        time.sleep(0.5)

    assert in_a_process(work) == (7, "")
