"""When checkpoints are written, and what a request to save or to stop does, with a trainer that only counts."""

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from radixtrain.checkpoints.folder import read_checkpoint, write_checkpoint
from radixtrain.errors import Stopped, UserError
from radixtrain.training.survival.finite import NonFinite
from radixtrain.training.survival.position import Position
from radixtrain.training.survival.requests import Stop
from radixtrain.training.survival.saving import SaveCheckpoints


class Asked:
    """Requests without signals."""

    stop: Stop | None = None
    save = False

    def poll(self) -> tuple[Stop | None, bool]:
        return self.stop, self.save

    def install(self) -> None: ...


class Module(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.position = Position(0, 0)
        self.is_stepping = False


class Trainer:
    """Writes what a checkpoint needs, and takes steps when it is told to."""

    def __init__(self, saver: SaveCheckpoints):
        self.saver, self.module = saver, Module()
        self.state = SimpleNamespace(fn="fit")
        self.sanity_checking = self.validating = False

    def save_checkpoint(self, path: Path) -> None:
        position = self.module.position
        write_checkpoint(path, {"global_step": position.num_steps, "state_dict": {}, "position": position.as_dict()})

    def start(self) -> "Trainer":
        self.saver.on_train_start(self, self.module)
        return self

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.saver.on_train_batch_start(self, self.module)
            done = self.module.position.num_batches + 1
            self.module.position = Position(done, done)

    def validate(self) -> None:
        self.validating = True
        self.saver.on_validation_batch_end(self, self.module)
        self.validating = False


@pytest.fixture
def saver(tmp_path: Path) -> Callable[..., SaveCheckpoints]:
    return lambda **options: SaveCheckpoints(tmp_path, Asked(), **options)


def written(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.is_symlink())


def test_every_few_steps_and_at_the_end(saver, tmp_path):
    trainer = Trainer(saver(every_steps=2, total_limit=9)).start()
    trainer.steps(5)
    assert written(tmp_path) == ["step=2", "step=4"]
    trainer.saver.on_train_end(trainer, trainer.module)
    assert written(tmp_path) == ["step=2", "step=4", "step=5"]
    assert (tmp_path / "last").resolve().name == "step=5" == trainer.saver.last.name


def test_every_few_minutes(saver, tmp_path, monkeypatch):
    trainer = Trainer(saver(every_minutes=10)).start()
    trainer.steps(3)
    assert written(tmp_path) == []
    now = time.monotonic() + 601
    monkeypatch.setattr(time, "monotonic", lambda: now)
    trainer.steps(2)
    assert written(tmp_path) == ["step=3"]


def test_at_an_end_of_an_epoch_and_when_asked_one_checkpoint_is_enough(saver, tmp_path):
    trainer = Trainer(saver()).start()
    trainer.steps(2)
    trainer.saver.on_train_epoch_end(trainer, trainer.module)
    trainer.saver.ask()
    told = []
    trainer.saver.on_saved.append(told.append)
    trainer.steps(1)
    trainer.saver.ask()
    trainer.saver.on_train_end(trainer, trainer.module)
    trainer.saver.on_train_end(trainer, trainer.module)
    assert [path.name for path in told] == ["step=2", "step=3"]


def test_older_ones_go_but_not_those_to_keep(saver, tmp_path):
    trainer = Trainer(saver(every_steps=1, total_limit=2)).start()
    trainer.saver.keep.add(tmp_path / "step=1")
    trainer.steps(6)
    assert written(tmp_path) == ["step=1", "step=4", "step=5"]


def test_what_a_run_went_on_from_is_not_written_again(saver, tmp_path):
    trainer = Trainer(saver(every_steps=2))
    trainer.module.position = Position(4, 4)
    trainer.start().steps(1)
    assert written(tmp_path) == []
    trainer.steps(2)
    assert written(tmp_path) == ["step=6"]


@pytest.mark.parametrize(("options", "writes"), [({"is_enabled": False}, []), ({"is_scheduled": False}, ["step=3"])])
def test_a_stop_between_two_steps(saver, tmp_path, options, writes):
    """A run whose checkpoints another callback writes is saved, too; one without checkpoints says so."""
    trainer = Trainer(saver(**options)).start()
    trainer.steps(3)
    trainer.saver.requests.stop = Stop("SIGTERM", 143)
    with pytest.raises(Stopped, match="stopped by SIGTERM after step 3") as stopped:
        trainer.steps(1)
    assert stopped.value.code == 143
    assert written(tmp_path) == writes
    assert ("which is saved" if writes else "nothing was saved") in str(stopped.value)


@pytest.mark.parametrize("is_enabled", [True, False])
def test_a_stop_of_a_run_that_goes_on_from_elsewhere(saver, tmp_path, is_enabled):
    """Before a new step, what it came from is what is saved; after one, only a new checkpoint is."""
    trainer = Trainer(saver(is_enabled=is_enabled))
    trainer.module.position, trainer.ckpt_path = Position(4, 4), "elsewhere/step=4"
    trainer.saver.on_fit_start(trainer, trainer.module)
    trainer.start().saver.requests.stop = Stop("SIGTERM", 143)
    with pytest.raises(Stopped, match="after step 4, which is saved; go on with --ckpt_path elsewhere/step=4"):
        trainer.steps(1)
    trainer.module.position = Position(5, 5)
    with pytest.raises(Stopped, match="step=5" if is_enabled else "nothing was saved, since"):
        trainer.steps(1)


def test_a_stop_before_the_first_step(saver, tmp_path):
    trainer = Trainer(saver()).start()
    trainer.saver.requests.stop = Stop("SIGHUP", 129)
    with pytest.raises(Stopped, match="before the first step: nothing to save"):
        trainer.steps(1)
    assert written(tmp_path) == []


def test_a_stop_in_a_validation_leaves_it_to_be_done(saver, tmp_path):
    trainer = Trainer(saver()).start()
    trainer.steps(3)
    trainer.saver.requests.stop = Stop("SIGTERM", 143)
    with pytest.raises(Stopped):
        trainer.validate()
    assert read_checkpoint(tmp_path / "step=3")["position"] == Position(3, 3, validation_pending=True).as_dict()


def test_a_stop_that_came_another_way_is_saved_once(saver, tmp_path):
    """A signal while answers are generated passes by as an error."""
    trainer = Trainer(saver()).start()
    trainer.steps(3)
    trainer.validating = True
    trainer.saver.on_exception(trainer, trainer.module, Stopped("while answers were generated", 143))
    assert read_checkpoint(tmp_path / "step=3")["position"]["validation_pending"]
    told: list[Path] = []
    trainer.saver.on_saved.append(told.append)
    trainer.saver.on_exception(trainer, trainer.module, Stopped("again", 143))
    assert told == []


def test_a_request_to_save_waits_for_the_end_of_a_validation(saver, tmp_path):
    trainer = Trainer(saver()).start()
    trainer.steps(3)
    trainer.saver.requests.save = True
    trainer.validate()
    assert written(tmp_path) == []
    trainer.steps(1)
    assert written(tmp_path) == ["step=3"] and not trainer.saver.requests.save
    assert not read_checkpoint(tmp_path / "step=3")["position"]["validation_pending"]


@pytest.mark.parametrize("validating", [False, True])
def test_an_error_leaves_the_last_good_step(saver, tmp_path, validating):
    trainer = Trainer(saver()).start()
    trainer.steps(3)
    trainer.validating = validating
    trainer.saver.on_exception(trainer, trainer.module, NonFinite("the loss"))
    assert read_checkpoint(tmp_path / "step=3")["position"]["validation_pending"] == validating


def test_an_error_in_the_middle_of_an_optimizer_step_leaves_no_checkpoint(saver, tmp_path):
    trainer = Trainer(saver()).start()
    trainer.steps(3)
    trainer.module.is_stepping = True
    trainer.saver.on_exception(trainer, trainer.module, RuntimeError("out of memory"))
    assert written(tmp_path) == []


def test_weights_that_are_not_finite_are_never_saved(saver, tmp_path):
    trainer = Trainer(saver(every_steps=1)).start()
    trainer.steps(2)
    trainer.module.weight.data[0, 0] = float("nan")
    trainer.saver.ask()
    with pytest.raises(NonFinite, match="the checkpoint of step 2 was not written: the weight weight holds"):
        trainer.steps(1)
    trainer.saver.on_exception(trainer, trainer.module, NonFinite("the weight"))
    assert written(tmp_path) == ["step=1"]


def test_an_error_of_a_write_does_not_start_another(saver, tmp_path, monkeypatch):
    trainer = Trainer(saver(every_steps=1)).start()
    tried = []

    def full(path: Path) -> None:
        tried.append(path)
        raise UserError("the disk is full")

    monkeypatch.setattr(trainer, "save_checkpoint", full)
    with pytest.raises(UserError, match="the disk is full") as raised:
        trainer.steps(2)
    trainer.saver.on_exception(trainer, trainer.module, raised.value)  # as Lightning does
    assert len(tried) == 1


def test_an_error_before_training_writes_nothing(saver, tmp_path):
    trainer = Trainer(saver())
    trainer.module.position = Position(4, 4)  # of the checkpoint that it would have gone on from
    trainer.saver.on_exception(trainer, trainer.module, RuntimeError("no"))
    assert written(tmp_path) == []


def test_the_pending_validation_of_a_run_that_is_done(
    saver: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(saver())
    trainer.module.position = Position(4, 4, validation_pending=True)
    ran: list[Any] = []

    def validate(module: Any) -> None:
        ran.append(module)
        module.position = module.position.validated()

    monkeypatch.setattr("radixtrain.training.survival.saving.run_pending_validation", validate)
    trainer.saver.on_fit_end(trainer, trainer.module)
    assert ran == [trainer.module]
    assert not read_checkpoint(tmp_path / "step=4")["position"]["validation_pending"]
    trainer.saver.on_fit_end(trainer, trainer.module)
    assert len(ran) == 1
