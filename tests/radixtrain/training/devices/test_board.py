"""What ranks tell one another beside torch.distributed: who tells why the run ends, and who is gone."""

import os
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
