"""Why a run ended, in words: every way to end, with a step taken in this process and without one."""

from types import SimpleNamespace
from typing import Any

import pytest

from radixtrain.errors import Stopped, UserError
from radixtrain.training.results.best import StopEarly
from radixtrain.training.results.run_progress import status_of_error, status_of_run


def run_at(step: int, **changes: Any) -> tuple[Any, Any]:
    """A trainer and a module of a run of 3 epochs of 10 steps."""
    limits = {"max_steps": -1, "max_epochs": 3, "callbacks": []}
    skipped = changes.pop("skipped", 0)
    trainer = SimpleNamespace(**{**limits, **changes}, global_step=step - skipped)
    return trainer, SimpleNamespace(steps_per_epoch=10, position=SimpleNamespace(num_batches=step))


def ended_early() -> StopEarly:
    callback = StopEarly("eval_loss", 3)
    callback.best, callback.num_worse = 1.0, 3
    return callback


@pytest.mark.parametrize(
    ("step", "changes", "reason", "text"),
    [
        (30, {}, "max_epochs", "step 30 of 30: trainer.max_epochs 3 reached"),
        (30, {"skipped": 2}, "max_epochs", "step 28 of 30: trainer.max_epochs 3 reached"),
        (12, {"max_steps": 12}, "max_steps", "step 12 of 12: trainer.max_steps 12 reached"),
        (12, {"max_steps": 12, "max_epochs": -1}, "max_steps", "step 12 of 12: trainer.max_steps 12 reached"),
        (20, {"callbacks": [ended_early()]}, "early_stopping", "stopped early at step 20 of 30: eval_loss did not "),
        (18, {}, "max_time", "stopped by trainer.max_time at step 18 of 30; "),
        (18, {"max_epochs": -1}, "max_time", "stopped by trainer.max_time at"),
    ],
)
def test_after_steps(step: int, changes: dict[str, Any], reason: str, text: str) -> None:
    status = status_of_run(*run_at(step, **changes), first_step=step - 5, has_checkpoint=True)
    assert status.reason == reason and status.text.startswith(text), status
    assert status.is_complete == (reason in ("max_epochs", "max_steps", "early_stopping"))


@pytest.mark.parametrize(
    ("step", "changes", "text"),
    [
        (30, {}, "nothing left to do: step 30 of 30 was reached before; raise trainer.max_epochs to continue"),
        (12, {"max_steps": 12}, "nothing left to do: step 12 of 12 was reached before; raise trainer.max_steps to "),
        (0, {"max_steps": 0}, "no step to take: trainer.max_steps is 0"),
        (0, {"max_epochs": 0}, "no step to take: trainer.max_epochs is 0"),
        (20, {"callbacks": [ended_early()]}, "nothing left to do: stopped early at step 20 of 30: eval_loss did not"),
    ],
)
def test_without_a_step(step: int, changes: dict[str, Any], text: str) -> None:
    status = status_of_run(*run_at(step, **changes), first_step=step, has_checkpoint=True)
    assert status.text.startswith(text) and status.is_complete


def test_without_a_checkpoint_and_by_an_error() -> None:
    status = status_of_run(*run_at(18), first_step=0, has_checkpoint=False)
    assert status.text.endswith("; no checkpoint was written to resume from") and not status.is_complete
    for error, reason, text in (
        (Stopped("stopped by SIGTERM after step 12", 143), "Stopped", "stopped by SIGTERM after step 12"),
        (UserError("one\ntwo"), "UserError", "one"),
        (KeyboardInterrupt(), "KeyboardInterrupt", "KeyboardInterrupt"),
    ):
        status = status_of_error(error)
        assert (status.reason, status.text, status.is_complete) == (reason, text, False)
