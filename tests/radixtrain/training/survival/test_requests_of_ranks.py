"""What one rank is asked, all do: at the same step, with the same exit code, and one checkpoint."""

import logging
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forked_ranks import on_ranks
from torch.distributed import DistError

from radixtrain.checkpoints.folder import read_checkpoint, write_checkpoint
from radixtrain.distributed import ranks
from radixtrain.errors import EndedElsewhere, Stopped, UserError
from radixtrain.training.survival.finite import NonFinite
from radixtrain.training.survival.generators import draw_apart, generator_states, set_states_of_ranks
from radixtrain.training.survival.position import Position
from radixtrain.training.survival.requests import Requests
from radixtrain.training.survival.saving import SaveCheckpoints


class Trainer:
    """Takes steps that only count; rank 0 writes a checkpoint, and the others wait for it, as Lightning's does."""

    def __init__(self, folder: Path, **options: Any):
        self.requests = Requests(folder)
        self.saver = SaveCheckpoints(folder / "checkpoints", self.requests, **options)
        self.module: Any = torch.nn.Linear(2, 2)
        self.module.position, self.module.is_stepping = Position(0, 0), False
        self.state = SimpleNamespace(fn="fit")
        self.strategy = SimpleNamespace(barrier=lambda: ranks().barrier())
        self.sanity_checking = self.validating = False

    def save_checkpoint(self, path: Path) -> None:
        position = self.module.position.as_dict()
        if ranks().is_first:
            write_checkpoint(path, {"global_step": position["num_steps"], "state_dict": {}, "position": position})
        self.strategy.barrier()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.saver.on_train_batch_start(self, self.module)
            done = self.module.position.num_batches + 1
            self.module.position = Position(done, done)

    def run(self, before: Any) -> tuple[str, int]:
        """Three steps, then `before`, then three more: how it is stopped."""
        try:
            with self.requests, self.requests.deferred():
                self.saver.on_train_start(self, self.module)
                self.steps(3)
                before()
                self.steps(3)
        except Stopped as stopped:
            return str(stopped), stopped.code
        return "done", 0


def written(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir() if not path.is_symlink())


@pytest.mark.parametrize(
    ("sent", "name", "code"),
    [
        ({1: signal.SIGTERM}, "SIGTERM", 143),
        ({0: signal.SIGHUP}, "SIGHUP", 129),
        ({0: signal.SIGINT, 2: signal.SIGTERM}, "SIGTERM", 143),  # the same for all, whatever came first
    ],
)
def test_a_signal_at_one_rank_stops_all(tmp_path: Path, sent: dict[int, int], name: str, code: int) -> None:
    def work(rank: int) -> tuple[str, int]:
        return Trainer(tmp_path).run(lambda: rank in sent and os.kill(os.getpid(), sent[rank]))

    answers = on_ranks(3, work)
    assert [answer[1] for answer in answers] == [code] * 3
    assert len(set(answers)) == 1 and f"stopped by {name} after step 3, which is saved" in answers[0][0]
    assert written(tmp_path) == ["step=3"]


def test_a_signal_after_the_last_step_ends_all(tmp_path: Path) -> None:
    def work(rank: int) -> int:
        requests = Requests(tmp_path)
        with pytest.raises(Stopped, match="after the last step") as stopped, requests, requests.deferred():
            if rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
        return stopped.value.code

    assert on_ranks(2, work) == [143, 143]


def test_a_file_is_looked_for_by_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixtrain.training.survival.requests.POLL_SECONDS", 0.0)

    def work(rank: int) -> tuple[str, int]:
        trainer = Trainer(tmp_path)
        if rank == 1:
            trainer.requests._take = pytest.fail
        return trainer.run(lambda: rank == 1 or (tmp_path / "stop").touch())

    assert {code for _, code in on_ranks(2, work)} == {130}
    assert written(tmp_path) == ["step=3"] and not (tmp_path / "stop").exists()


def test_a_request_to_save_saves_once(tmp_path: Path) -> None:
    def work(rank: int) -> tuple[str, int]:
        return Trainer(tmp_path).run(lambda: rank == 1 and os.kill(os.getpid(), signal.SIGUSR1))

    assert on_ranks(2, work) == [("done", 0)] * 2
    assert written(tmp_path) == ["step=3"]


def test_the_clock_of_the_first_decides(tmp_path: Path) -> None:
    def work(rank: int) -> list[str]:
        trainer, told = Trainer(tmp_path, every_minutes=10), []
        trainer.saver.on_saved.append(lambda path: told.append(path.name))

        def later() -> None:
            trainer.saver._saved_when -= 601 if rank == 0 else 0

        trainer.run(later)
        return told

    assert on_ranks(2, work) == [["step=3"]] * 2


def test_answers_are_not_cut_short(tmp_path: Path) -> None:
    """One rank that left would be waited for by the others."""

    def work(rank: int) -> int:
        requests = Requests(tmp_path)
        with requests, pytest.raises(Stopped) as stopped, requests.deferred(), requests.at_once():
            if rank == 0:
                os.kill(os.getpid(), signal.SIGTERM)
            ranks().barrier()
        return stopped.value.code

    assert on_ranks(2, work) == [143, 143]


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_of_a_rank_that_saves_ends_all(tmp_path: Path, failing: int) -> None:
    def work(rank: int) -> str:
        trainer = Trainer(tmp_path, every_steps=2)

        def full(path: Path) -> None:
            raise UserError("the disk is full")

        if rank == failing:
            trainer.save_checkpoint = full
        try:
            trainer.run(lambda: None)
        except (UserError, EndedElsewhere, DistError, RuntimeError) as error:
            trainer.saver.on_exception(trainer, trainer.module, error)
            return type(error).__name__
        return "went on"

    found = on_ranks(2, work)
    assert found[failing] == "UserError"
    if failing == 0:
        assert found[1] == "EndedElsewhere"
    else:  # rank 1 leaves at once, since rank 0 may wait for it elsewhere: the closed connection ends that
        assert found[0] in ("DistBackendError", "DistError", "DistNetworkError", "RuntimeError")


def test_only_an_error_that_all_have_found_is_saved(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        trainer = Trainer(tmp_path)
        with trainer.requests:
            trainer.saver.on_train_start(trainer, trainer.module)
            trainer.steps(3)
            if rank == 1:
                trainer.saver.on_exception(trainer, trainer.module, RuntimeError("out of memory"))
            assert not (tmp_path / "checkpoints").exists()
            trainer.saver.on_exception(trainer, trainer.module, NonFinite("the loss"))

    on_ranks(2, work)
    assert read_checkpoint(tmp_path / "checkpoints" / "step=3")["position"]["num_steps"] == 3


def test_a_weight_that_one_rank_lost_is_found_by_all(tmp_path: Path) -> None:
    def work(rank: int) -> str:
        trainer = Trainer(tmp_path, every_steps=1)
        if rank == 1:
            trainer.module.bias.data[0] = float("nan")
        with pytest.raises(NonFinite) as raised:
            trainer.run(lambda: None)
        return str(raised.value)

    assert set(on_ranks(2, work)) == {
        "the checkpoint of step 1 was not written: the weight bias holds numbers that are not finite"
    }


def test_ranks_draw_apart_and_go_on_where_they_were(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(7)
    torch.rand(3)
    of_one = torch.rand(2, generator=torch.Generator().set_state(torch.get_rng_state())).tolist()

    def work(rank: int) -> tuple[list[float], list[float]]:
        draw_apart()
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
    set_states_of_ranks(answers[0][1][0])  # as a checkpoint of an earlier version has it
    assert torch.rand(2).tolist() == of_one
