"""What ranks tell one another beside torch.distributed: which of them says why the run ends.

That ranks notice one that is gone or hangs, and end: `tests/claims/devices/test_kills.py`.
"""

import os
import socket
import subprocess
import threading
import time

import pytest
from forked_ranks import on_ranks
from tiers import FULL

from radixtrain.distributed import ranks
from radixtrain.errors import EndedElsewhere, UserError
from radixtrain.training.devices import rank_monitor
from radixtrain.training.devices.launch import local_rank0_reports
from radixtrain.training.devices.rank_monitor import RankMonitor, watch_children, watch_parent


@FULL
def test_one_rank_tells_what_rank_0_has_not_found():
    def work(rank):
        monitor = RankMonitor()
        ranks().barrier()
        if rank == 0:
            monitor.is_reported.wait(60.0)
            said = monitor.claim_report(0.0)  # of what it finds then, such as a closed connection
        else:
            said = monitor.claim_report(0.2)
        ranks().barrier()
        return said

    said = on_ranks(3, work)
    assert said[0] is False and sorted(said[1:]) == [False, True]


@FULL
@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2", "::1"])
def test_rank_0_always_tells_and_the_others_hear_it(address):
    """On this machine, and as from others, which connect by either protocol."""
    if ":" in address and not socket.has_dualstack_ipv6():
        pytest.skip("needs a machine with IPv6")

    def work(rank):
        os.environ["MASTER_ADDR"] = address
        monitor = RankMonitor()
        ranks().barrier()
        said = monitor.claim_report(10.0)
        ranks().barrier()
        return said

    assert on_ranks(3, work) == [True, False, False]


@pytest.mark.parametrize(("local_rank", "error"), [("0", UserError), ("1", EndedElsewhere)])
def test_before_there_is_a_group_one_process_of_a_machine_tells(monkeypatch, local_rank, error):
    names = {"TORCHELASTIC_RUN_ID": "x", "RANK": "4", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
    for name, value in {**names, "LOCAL_RANK": local_rank}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(error), local_rank0_reports():
        raise UserError("a key")


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
    monkeypatch.setattr(rank_monitor, "GRACE", 0.05)
    monkeypatch.setattr(rank_monitor, "POLL_SECONDS", 0.01)


def test_the_first_to_fail_is_named_and_the_others_end():
    def work():
        watch_children([shell("exit 0"), shell("exit 3"), shell("exec sleep 600")], threading.Event())
        time.sleep(600.0)

    assert in_a_process(work) == (1, "error: rank 2 ended with exit code 3; resume with --ckpt_path last\n")


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
