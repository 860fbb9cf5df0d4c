"""When checkpoints are written, and what a request to save or to stop does, with a trainer that only counts."""

import time
from pathlib import Path

import pytest

from radixtrain.errors import Stopped, UserError
from radixtrain.training.fault_tolerance.nonfinite_guard import NonFinite
from radixtrain.training.fault_tolerance.run_state import Position
from radixtrain.training.fault_tolerance.signals import Stop
from tests.support.runs import CountingTrainer, written

TERM = Stop("SIGTERM", 143)


def test_every_few_minutes(tmp_path, monkeypatch):
    trainer = CountingTrainer(tmp_path, every_minutes=10).start()
    trainer.steps(3)
    assert written(tmp_path) == []
    now = time.monotonic() + 601
    monkeypatch.setattr(time, "monotonic", lambda: now)
    trainer.steps(2)
    assert written(tmp_path) == ["step=3"]


@pytest.mark.parametrize(
    ("steps", "is_enabled", "writes", "said"),
    [
        (3, True, ["step=3"], "after step 3, which is saved"),
        (3, False, [], "after step 3: nothing was saved, since trainer.enable_checkpointing is false"),
        (0, True, [], "before the first step: nothing to save"),
    ],
)
def test_a_stop_between_two_steps(tmp_path, steps, is_enabled, writes, said):
    trainer = CountingTrainer(tmp_path, is_enabled=is_enabled).start()
    trainer.steps(steps)
    trainer.requests.stop = TERM
    with pytest.raises(Stopped, match=f"stopped by SIGTERM {said}") as stopped:
        trainer.steps(1)
    assert stopped.value.code == 143 and written(tmp_path) == writes


@pytest.mark.parametrize("is_enabled", [True, False])
def test_a_stop_of_a_run_that_goes_on_from_elsewhere(tmp_path, is_enabled):
    """Before a new step, what it came from is what is saved; after one, only a new checkpoint is."""
    trainer = CountingTrainer(tmp_path, is_enabled=is_enabled)
    trainer.module.position = Position(4, 4)
    trainer.saver.begin("elsewhere/step=4")
    trainer.start().requests.stop = TERM
    with pytest.raises(Stopped, match="after step 4, which is saved; resume with --ckpt_path elsewhere/step=4"):
        trainer.steps(1)
    trainer.module.position = Position(5, 5)
    with pytest.raises(Stopped, match="step=5" if is_enabled else "nothing was saved, since"):
        trainer.steps(1)


def test_errors_that_leave_no_checkpoint(tmp_path):
    """Before training, in the middle of an optimizer step, and of weights that are not finite."""
    trainer = CountingTrainer(tmp_path, every_steps=1)
    trainer.module.position = Position(4, 4)  # of the checkpoint that it would have gone on from
    trainer.fail(RuntimeError("no"))
    trainer.start().steps(1)
    trainer.module.is_stepping = True
    trainer.fail(RuntimeError("out of memory"))
    trainer.module.is_stepping = False
    trainer.module.weight.data[0, 0] = float("nan")
    with pytest.raises(NonFinite, match="the checkpoint of step 5 was not written: the weight weight holds") as raised:
        trainer.steps(1)
    trainer.fail(raised.value)
    assert written(tmp_path) == []


def test_an_error_of_a_write_does_not_start_another(tmp_path, monkeypatch):
    trainer = CountingTrainer(tmp_path, every_steps=1).start()
    tried = []

    def full(path: Path) -> None:
        tried.append(path)
        raise UserError("the disk is full")

    monkeypatch.setattr(trainer, "save_checkpoint", full)
    with pytest.raises(UserError, match="the disk is full") as raised:
        trainer.steps(2)
    trainer.fail(raised.value)  # as the loop does
    assert len(tried) == 1
