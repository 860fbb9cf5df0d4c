"""Under `fsdp2` each rank holds a part, and errors reach all. That its steps are right: `tests/claims/devices`."""

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import on_ranks
from tiers import FULL

from radixtrain.checkpoints.folder import read_checkpoint
from radixtrain.checkpoints.sharded import part_of
from radixtrain.data.datamodule import SFTData
from radixtrain.distributed import ranks
from radixtrain.errors import UserError
from radixtrain.training.devices.fsdp2 import FSDP2Strategy
from radixtrain.training.module import RadixModule
from radixtrain.training.results.model_folder import save_hf_folder
from radixtrain.training.survival.checkpoint_io import FolderCheckpointIO
from radixtrain.training.survival.finite import NonFinite, nonfinite_weight
from radixtrain.training.survival.weights import load_weights
from radixtrain.training.trainer import Trainer


@pytest.fixture
def fit(shop: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Trainer]:
    """`fit(num_steps)`: trains on as many ranks as there are, in steps of several micro-batches."""
    monkeypatch.delenv(
        "PL_GLOBAL_SEED", raising=False
    )  # of an earlier test: Lightning would seed again on several ranks

    def run(num_steps: int) -> Trainer:
        size = ranks().size
        module = RadixModule(str(shop / "model"), dtype="float64")
        data = SFTData(
            train_file=str(shop / "train.jsonl"), batch_size=5, max_tokens=120, max_length=120,
            dataloader_num_workers=0,
            model_name_or_path=str(shop / "model"),
        )  # fmt: skip
        trainer = Trainer(
            accelerator="cpu", devices=size, strategy=FSDP2Strategy(), max_steps=num_steps,
            max_epochs=-1, use_distributed_sampler=False, logger=False, deterministic=True,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.strategy.checkpoint_io = FolderCheckpointIO()
        trainer.fit(module, data)
        return trainer

    return run


pytestmark = FULL


def test_each_rank_holds_a_part(fit: Callable[..., Trainer]) -> None:
    """Of weights, gradients and moments; nothing whole is kept."""

    def bytes_of(rank: int) -> tuple[int, int]:
        trainer = fit(1)
        weights = list(trainer.lightning_module.parameters())
        (optimizer,) = trainer.optimizers
        held = [*weights, *(weight.grad for weight in weights)]
        held += [moment for own in optimizer.state.values() for name, moment in own.items() if name != "step"]
        whole = sum(each.numel() * each.element_size() for each in weights)
        memory = [part_of(each).untyped_storage() for each in held]
        return sum({each.data_ptr(): each.nbytes() for each in memory}.values()), whole

    for held, whole in on_ranks(2, bytes_of):
        assert 0.5 <= held / (4 * whole) <= 0.51  # rows that pad a part


def test_a_disk_that_is_full_ends_all_ranks(
    fit: Callable[..., Trainer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 has what it needs from the others to the end; then they can gather again."""

    def full(file: Any, data: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def save(rank: int) -> str:
        trainer = fit(1)
        strategy, (optimizer,) = trainer.strategy, trainer.optimizers
        state = {
            "state_dict": strategy.lightning_module_state_dict(),
            "optimizer_states": [strategy.optimizer_state(optimizer)],
        }
        with monkeypatch.context() as patch:
            patch.setattr("radixtrain.checkpoints.sums.SummedFile.write", full)
            try:
                strategy.save_checkpoint(state, tmp_path / "x")
                said = ""
            except UserError as error:
                said = str(error)
        trainer.save_checkpoint(tmp_path / "y")
        return said

    first, second = on_ranks(2, save)
    assert first.startswith("no room for the checkpoint") and not second
    assert sorted(path.name for path in tmp_path.iterdir()) == ["y"]
    read_checkpoint(tmp_path / "y")


def test_what_one_rank_holds_is_seen_by_all(fit: Callable[..., Trainer], shop: Path, tmp_path: Path) -> None:
    """A number that is not finite, in the part of the second rank, and weights that are put back."""
    names = "model.model.embed_tokens.weight"

    def spoil(rank: int) -> tuple[str | None, str | None, bool]:
        trainer = fit(1)
        module = trainer.lightning_module
        trainer.save_checkpoint(tmp_path / "whole")
        with torch.no_grad():
            if rank == 1:
                part_of(module.get_parameter(names))[0, 0] = float("nan")
        spoilt = nonfinite_weight(module)
        with pytest.raises(NonFinite, match="embed_tokens"):
            save_hf_folder(module.model, None, tmp_path / "model")
        load_weights(module, read_checkpoint(tmp_path / "whole"))
        return spoilt, nonfinite_weight(module), (tmp_path / "model").exists()

    assert on_ranks(2, spoil) == [(names, None, False)] * 2
