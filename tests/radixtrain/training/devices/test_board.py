"""What ranks tell one another beside torch.distributed: who tells why the run ends, and who is gone."""

import os
import signal
import socket
import struct
import time

import pytest
from forked_ranks import on_ranks

from radixtrain.distributed import ranks
from radixtrain.errors import EndedElsewhere, Stopped, UserError
from radixtrain.training.devices import board as board_module
from radixtrain.training.devices import telling
from radixtrain.training.devices.board import Board
from radixtrain.training.devices.telling import as_told, one_of_each_machine


def until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_one_rank_tells_what_rank_0_has_not_found():
    def work(rank):
        board = Board()
        ranks().barrier()
        said = board.claim(0.2) if rank else None
        until(lambda: rank == 0 or said or board.is_told.is_set())
        if rank == 0:
            until(board.is_told.is_set)
            said = board.claim(0.0)  # of what it finds then, such as a closed connection
        ranks().barrier()
        return said, board.gone

    said = on_ranks(3, work)
    assert said[0][0] is False
    assert sorted(str(tells) for tells, _ in said[1:]) == ["False", "True"]
    assert [gone for _, gone in said] == [[], [], []]


def test_rank_0_always_tells_and_the_others_hear_it():
    def work(rank):
        board = Board()
        ranks().barrier()
        said = board.claim(10.0)
        ranks().barrier()
        return said

    assert on_ranks(3, work) == [True, False, False]


@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_that_is_gone_is_noticed(lost):
    """Without a call of torch.distributed. Of the others, rank 1 tells if it is rank 0."""

    def work(rank):
        board = Board()
        ranks().barrier()
        if rank == lost:
            board.__dict__["_lines"].clear()  # closes them, as the end of the process would
            return None
        until(board.is_told.is_set)
        return board.gone, board.claim(0.0)

    said = [answer for answer in on_ranks(3, work) if answer]
    assert said == ([([0], True), ([0], False)] if lost == 0 else [([1], True), ([], False)])


def test_a_rank_that_is_gone_is_noticed_while_its_workers_live():
    """They are forked, and would hold its connection open."""

    def work(rank):
        board = Board()
        ranks().barrier()
        if rank == 0:
            until(board.is_told.is_set)
            return board.gone
        worker = os.fork()
        if not worker:
            time.sleep(60.0)
            os._exit(0)
        for line in board.__dict__["_lines"]:
            line.close()  # as the end of the process would
        ranks().barrier()
        return os.kill(worker, signal.SIGKILL)

    def both(rank):
        gone = work(rank)
        if rank == 0:
            ranks().barrier()
        return gone

    assert on_ranks(2, both) == [[1], None]


def test_a_run_that_ended_well_is_no_loss():
    def work(rank):
        board = Board()
        ranks().barrier()
        board.close()
        ranks().barrier()
        if rank == 0:
            return "ended"
        time.sleep(0.3)
        return board.is_told.is_set(), board.gone

    assert on_ranks(2, work) == ["ended", (False, [])]


def test_a_rank_that_waits_for_ever_is_ended(monkeypatch):
    monkeypatch.setattr(board_module, "GRACE", 0.2)
    read, write = os.pipe()

    def work(rank):
        board = Board()
        ranks().barrier()
        if rank == 0:
            board.claim(0.0)
            time.sleep(1.0)
            return None
        time.sleep(30.0)
        os.write(write, b"still here")
        return None

    with pytest.raises(AssertionError, match="rank 1"):
        on_ranks(2, work, seconds=10.0)
    os.close(write)
    assert os.read(read, 100) == b""
    os.close(read)


class Child:
    """A process that was killed, or one that is told so."""

    def __init__(self, code, killed):
        self.code, self.killed = code, killed

    def poll(self):
        return self.code

    def kill(self):
        self.code = -signal.SIGKILL
        os.write(self.killed, b"k")


def test_a_rank_that_hangs_ends_with_those_that_it_has_started(monkeypatch):
    """And says how the one has ended that is gone, rank 2 here: not those that it ends itself."""
    monkeypatch.setattr(board_module, "GRACE", 0.2)
    (said, stderr), (deaths, killed) = os.pipe(), os.pipe()

    def work(rank):
        board = Board([Child(None, killed), Child(-signal.SIGTERM, killed)] if rank == 0 else ())
        ranks().barrier()
        if rank == 2:
            board.__dict__["_lines"].clear()
        else:
            board.is_told.wait()
            os.dup2(stderr, 2)
            time.sleep(30.0)

    with pytest.raises(AssertionError, match="rank 0: ended without an answer"):
        on_ranks(3, work, seconds=10.0)
    assert os.read(said, 1000) == b"error: rank 2 was killed by SIGTERM; go on with --ckpt_path last\n"
    assert os.read(deaths, 1000) == b"kk"
    for end in (said, stderr, deaths, killed):
        os.close(end)


def test_a_rank_that_asks_and_is_gone_before_the_answer():
    """The others hear of it all the same, and rank 0 does not tell a second time."""

    def work(rank):
        board = Board()
        ranks().barrier()
        if rank == 1:
            (line,) = board.__dict__["_lines"]
            line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # reset, not closed in order
            line.sendall(board_module.TELL)
            line.close()
        heard = board.is_told.wait(10.0) if rank != 1 else None
        ranks().barrier()
        return heard

    def slowly(rank):
        if rank == 0:
            hear = Board.__dict__["_hear"]
            Board._hear = lambda self, line: time.sleep(0.3) or hear(self, line)
        return work(rank)

    assert on_ranks(3, slowly) == [True, None, True]


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_other_machines_connect_by_either_protocol(family):
    if family == socket.AF_INET6 and not socket.has_dualstack_ipv6():
        pytest.skip("needs a machine with IPv6")
    with board_module.__dict__["_server"]("gpu07", 1) as server, socket.socket(family) as line:
        line.connect(("127.0.0.1" if family == socket.AF_INET else "::1", server.getsockname()[1]))


def test_errors_as_they_are_told(monkeypatch):
    monkeypatch.setattr(telling, "GRACE", 300.0)
    monkeypatch.setattr(board_module, "GRACE", 300.0)
    monkeypatch.setattr(telling, "PATIENCE", 0.1)

    def work(rank):
        board = Board()
        ranks().barrier()
        stopped = as_told(Stopped("stopped by SIGTERM", 143), board)
        ended = as_told(EndedElsewhere(), board)
        ranks().barrier()
        left = as_told(SystemExit(3), board)
        ranks().barrier()
        assert isinstance(left, SystemExit) and not board.is_told.is_set()
        found = as_told(UserError("a row"), board) if rank else None
        ranks().barrier()
        return (str(stopped), stopped.code), type(ended).__name__, type(found).__name__, str(found)

    first, second = on_ranks(2, work)
    assert first[0] == ("stopped by SIGTERM", 143)
    assert second[0] == ("", 143)
    assert first[1] == second[1] == "EndedElsewhere"
    assert second[2:] == ("UserError", "rank 1: a row")


@pytest.mark.parametrize(("local_rank", "error"), [("0", UserError), ("1", EndedElsewhere)])
def test_before_there_is_a_group_one_process_of_a_machine_tells(monkeypatch, local_rank, error):
    names = {"TORCHELASTIC_RUN_ID": "x", "RANK": "4", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
    for name, value in {**names, "LOCAL_RANK": local_rank}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(error), one_of_each_machine():
        raise UserError("a key")
