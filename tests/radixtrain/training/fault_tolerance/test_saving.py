"""When checkpoints are written, and what a request to save or to stop does, with a trainer that only counts."""

import time
from pathlib import Path

import lightning as L
import pytest
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


def test_every_few_minutes(tmp_path, monkeypatch):
    trainer = CountingTrainer(tmp_path, every_minutes=10).start()
    trainer.steps(3)
    assert written(tmp_path) == []
    now = time.monotonic() + 601
    monkeypatch.setattr(time, "monotonic", lambda: now)
    trainer.steps(2)
    assert written(tmp_path) == ["step=3"]


@pytest.mark.parametrize(("options", "writes"), [({"is_enabled": False}, []), ({}, ["step=3"])])
def test_a_stop_between_two_steps(tmp_path, options, writes):
    """A run without checkpoints says so."""
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
    with pytest.raises(Stopped, match="after step 4, which is saved; resume with --ckpt_path elsewhere/step=4"):
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


def test_only_a_local_disk(tmp_path):
    io = FolderCheckpointIO()
    for act in (lambda: io.save_checkpoint({}, "s3://bucket/x"), lambda: io.load_checkpoint("gs://bucket/x")):
        with pytest.raises(UserError, match="local disk"):
            act()
    with pytest.raises(UserError, match="storage_options"):
        io.save_checkpoint({}, tmp_path / "x", storage_options={"key": 1})
