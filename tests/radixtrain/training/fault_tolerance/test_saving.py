"""When checkpoints are written, and what a request to save or to stop does, with a trainer that only counts."""

import time
from pathlib import Path

import lightning as L
import pytest
import torch
from counting_trainer import CountingTrainer, written
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel

from radixtrain.checkpoints.folder import read_checkpoint
from radixtrain.checkpoints.manifest import MANIFEST
from radixtrain.errors import Stopped, UserError
from radixtrain.training.fault_tolerance.nonfinite_guard import NonFinite
from radixtrain.training.fault_tolerance.position import Position
from radixtrain.training.fault_tolerance.saving import FolderCheckpointIO
from radixtrain.training.fault_tolerance.signals import Stop

TERM = Stop("SIGTERM", 143)


def position_of(folder: Path, step: int) -> dict:
    return read_checkpoint(folder / "checkpoints" / f"step={step}")["position"]


def test_every_few_steps_and_at_the_end(tmp_path):
    trainer = CountingTrainer(tmp_path, every_steps=2, total_limit=9).start()
    trainer.steps(5)
    assert written(tmp_path) == ["step=2", "step=4"]
    trainer.saver.on_train_end(trainer, trainer.module)
    assert written(tmp_path) == ["step=2", "step=4", "step=5"]
    assert (tmp_path / "checkpoints" / "last").resolve().name == "step=5" == trainer.saver.last.name


def test_every_few_minutes(tmp_path, monkeypatch):
    trainer = CountingTrainer(tmp_path, every_minutes=10).start()
    trainer.steps(3)
    assert written(tmp_path) == []
    now = time.monotonic() + 601
    monkeypatch.setattr(time, "monotonic", lambda: now)
    trainer.steps(2)
    assert written(tmp_path) == ["step=3"]


def test_at_an_end_of_an_epoch_and_when_asked_one_checkpoint_is_enough(tmp_path):
    trainer = CountingTrainer(tmp_path).start()
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


def test_older_ones_go_but_not_those_to_keep(tmp_path):
    trainer = CountingTrainer(tmp_path, every_steps=1, total_limit=2).start()
    trainer.saver.keep.add(tmp_path / "checkpoints" / "step=1")
    trainer.steps(6)
    assert written(tmp_path) == ["step=1", "step=4", "step=5"]


def test_what_a_run_went_on_from_is_not_written_again(tmp_path):
    trainer = CountingTrainer(tmp_path, every_steps=2)
    trainer.module.position = Position(4, 4)
    trainer.start().steps(1)
    assert written(tmp_path) == []
    trainer.steps(2)
    assert written(tmp_path) == ["step=6"]


@pytest.mark.parametrize(("options", "writes"), [({"is_enabled": False}, []), ({"is_scheduled": False}, ["step=3"])])
def test_a_stop_between_two_steps(tmp_path, options, writes):
    """A run whose checkpoints another callback writes is saved, too; one without checkpoints says so."""
    trainer = CountingTrainer(tmp_path, **options).start()
    trainer.steps(3)
    trainer.requests.stop = TERM
    with pytest.raises(Stopped, match="stopped by SIGTERM after step 3") as stopped:
        trainer.steps(1)
    assert stopped.value.code == 143
    assert written(tmp_path) == writes
    assert ("which is saved" if writes else "nothing was saved") in str(stopped.value)


@pytest.mark.parametrize("is_enabled", [True, False])
def test_a_stop_of_a_run_that_goes_on_from_elsewhere(tmp_path, is_enabled):
    """Before a new step, what it came from is what is saved; after one, only a new checkpoint is."""
    trainer = CountingTrainer(tmp_path, is_enabled=is_enabled)
    trainer.module.position, trainer.ckpt_path = Position(4, 4), "elsewhere/step=4"
    trainer.saver.on_fit_start(trainer, trainer.module)
    trainer.start().requests.stop = TERM
    with pytest.raises(Stopped, match="after step 4, which is saved; go on with --ckpt_path elsewhere/step=4"):
        trainer.steps(1)
    trainer.module.position = Position(5, 5)
    with pytest.raises(Stopped, match="step=5" if is_enabled else "nothing was saved, since"):
        trainer.steps(1)


def test_a_stop_before_the_first_step(tmp_path):
    trainer = CountingTrainer(tmp_path).start()
    trainer.requests.stop = TERM
    with pytest.raises(Stopped, match="before the first step: nothing to save"):
        trainer.steps(1)
    assert written(tmp_path) == []


def test_requests_in_a_validation(tmp_path):
    """One to save waits for its end; one to stop leaves it to be done."""
    trainer = CountingTrainer(tmp_path).start()
    trainer.steps(3)
    trainer.requests.save = True
    trainer.validate()
    assert written(tmp_path) == []
    trainer.steps(1)
    assert not position_of(tmp_path, 3)["validation_pending"] and not trainer.requests.save
    trainer.requests.stop = TERM
    with pytest.raises(Stopped):
        trainer.validate()
    assert position_of(tmp_path, 4) == Position(4, 4, validation_pending=True).as_dict()


@pytest.mark.parametrize("error", [NonFinite("the loss"), Stopped("while answers were generated", 143)], ids=str)
@pytest.mark.parametrize("validating", [False, True])
def test_an_error_leaves_the_last_good_step_once(tmp_path, error, validating):
    """A signal while answers are generated passes by as an error, too."""
    trainer = CountingTrainer(tmp_path).start()
    trainer.steps(3)
    trainer.validating = validating
    trainer.fail(error)
    assert position_of(tmp_path, 3)["validation_pending"] == validating
    told: list[Path] = []
    trainer.saver.on_saved.append(told.append)
    trainer.fail(error)
    assert told == []


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
    trainer.fail(raised.value)  # as Lightning does
    assert len(tried) == 1


def trainer(folder, max_steps, *callbacks):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    limits = {"limit_train_batches": 3, "limit_val_batches": 1, "max_steps": max_steps}
    return L.Trainer(
        default_root_dir=folder, callbacks=list(callbacks), plugins=[FolderCheckpointIO()], **quiet, **limits
    )


def test_a_callback_of_lightning_writes_links_and_removes_folders(tmp_path):
    """Its `last.ckpt` is a link, and the best ones replace each other."""
    keeper = ModelCheckpoint(tmp_path, "{step}", monitor="x", save_top_k=1, save_last="link", every_n_train_steps=1)

    class Improving(BoringModel):
        def training_step(self, batch, index):
            self.log("x", float(-self.global_step))
            return super().training_step(batch, index)

    trainer(tmp_path, 5, keeper).fit(Improving())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.ckpt", "step=5.ckpt"]
    assert (tmp_path / "last.ckpt" / MANIFEST).is_file() and (tmp_path / "last.ckpt").is_symlink()
    assert read_checkpoint(tmp_path / "last.ckpt")["global_step"] == 5


def test_a_run_of_lightning_goes_on_from_a_folder(tmp_path):
    first, second = BoringModel(), BoringModel()
    saving = trainer(tmp_path, 2)
    saving.fit(first)
    saving.save_checkpoint(tmp_path / "x.ckpt")
    going_on = trainer(tmp_path, 2)
    going_on.fit(second, ckpt_path=tmp_path / "x.ckpt", weights_only=False)
    assert going_on.global_step == 2
    assert all(torch.equal(one, other) for one, other in zip(first.parameters(), second.parameters(), strict=True))


def test_only_a_local_disk(tmp_path):
    io = FolderCheckpointIO()
    for act in (lambda: io.save_checkpoint({}, "s3://bucket/x"), lambda: io.load_checkpoint("gs://bucket/x")):
        with pytest.raises(UserError, match="local disk"):
            act()
    with pytest.raises(UserError, match="storage_options"):
        io.save_checkpoint({}, tmp_path / "x", storage_options={"key": 1})
