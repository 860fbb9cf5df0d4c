"""Lightning's own checkpoints are our folders too."""

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel

from radixtrain.checkpoints.folder import read_checkpoint
from radixtrain.checkpoints.manifest import MANIFEST
from radixtrain.errors import UserError
from radixtrain.training.survival.checkpoint_io import FolderCheckpointIO


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
