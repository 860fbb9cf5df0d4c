"""What one rank is asked, all do: at the same step, with the same exit code, and one checkpoint."""

import logging
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from radixtrain.checkpoints.folder import read_run
from radixtrain.distributed import ranks
from radixtrain.errors import Stopped
from radixtrain.training.fault_tolerance.nonfinite_guard import NonFinite
from radixtrain.training.fault_tolerance.run_state import generator_states, seed_per_rank, set_states_of_ranks
from radixtrain.training.fault_tolerance.signals import Requests
from tests.support import FULL
from tests.support.processes import on_ranks
from tests.support.runs import CountingTrainer, written

pytestmark = FULL


def test_signals_at_two_ranks_stop_all_alike(tmp_path: Path) -> None:
    """The same one for all, whatever came first."""
    sent = {0: signal.SIGINT, 2: signal.SIGTERM}

    def work(rank: int) -> tuple[str, int]:
        return CountingTrainer(tmp_path).run(lambda: rank in sent and os.kill(os.getpid(), sent[rank]))

    ((text, code),) = set(on_ranks(3, work))
    assert code == 143 and "stopped by SIGTERM after step 3, which is saved" in text
    assert written(tmp_path) == ["step=3"]


def test_the_clock_of_the_first_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(rank: int) -> list[str]:
        trainer, told = CountingTrainer(tmp_path, every_minutes=10), []
        trainer.saver.on_saved.append(lambda path: told.append(path.name))
        now = time.monotonic()
        trainer.run(lambda: rank == 0 and monkeypatch.setattr(time, "monotonic", lambda: now + 601))
        return told

    assert on_ranks(2, work) == [["step=3"]] * 2


def test_answers_are_not_cut_short(tmp_path: Path) -> None:
    """One rank that left would be waited for by the others."""

    def work(rank: int) -> int:
        requests = Requests()
        with requests, pytest.raises(Stopped) as stopped, requests.deferred(), requests.at_once():
            if rank == 0:
                os.kill(os.getpid(), signal.SIGTERM)
            ranks().barrier()
        return stopped.value.code

    assert on_ranks(2, work) == [143, 143]


def test_only_an_error_that_all_have_found_is_saved(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        trainer = CountingTrainer(tmp_path)
        with trainer.requests:
            trainer.start().steps(3)
            if rank == 1:
                trainer.fail(RuntimeError("out of memory"))
            assert not (tmp_path / "checkpoints").exists()
            ranks().barrier()
            trainer.fail(NonFinite("the loss"))

    on_ranks(2, work)
    assert read_run(tmp_path / "checkpoints" / "step=3")["position"]["num_steps"] == 3


def test_ranks_draw_apart_and_go_on_where_they_were(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(7)
    torch.rand(3)
    of_one = torch.rand(2, generator=torch.Generator().set_state(torch.get_rng_state())).tolist()

    def work(rank: int) -> tuple[list[float], list[float]]:
        seed_per_rank()
        states = ranks().gather(generator_states())
        first = torch.rand(2).tolist()
        set_states_of_ranks(states)
        assert torch.rand(2).tolist() == first
        return first, states

    answers = on_ranks(3, work)
    drawn = [first for first, _ in answers]
    assert drawn[0] == of_one and len(set(map(tuple, drawn))) == 3
    with caplog.at_level(logging.INFO, "radixtrain"):
        set_states_of_ranks(answers[1][1])
    assert torch.rand(2).tolist() == of_one
    assert "the run was on 3 ranks and is on 1: dropout will draw other numbers" in caplog.text
