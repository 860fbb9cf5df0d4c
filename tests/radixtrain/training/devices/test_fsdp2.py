"""A run under `fsdp2` is the run of one process: its steps, its checkpoints and its model folder."""

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import on_ranks
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer

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

LORA = {"use_peft": True, "lora_r": 3, "lora_alpha": 64}
# A schedule that does not depend on the number of steps, and an epsilon above the rounding of gradients.
SETTINGS = {"dtype": "float64", "learning_rate": 1e-2, "lr_scheduler_type": "constant", "adam_epsilon": 1e-4}
SAME = 1e-6  # of a tensor: the largest difference over the largest magnitude; Qwen3's norms compute in float32


@pytest.fixture
def fit(shop: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Trainer]:
    """`fit(num_steps)`: trains on as many ranks as there are, in steps of several micro-batches. Other settings: of
    the model.
    """
    monkeypatch.delenv(
        "PL_GLOBAL_SEED", raising=False
    )  # of an earlier test: Lightning would seed again on several ranks

    def run(num_steps: int, ckpt_path: Path | None = None, precision: Any = None, **settings: Any) -> Trainer:
        size = ranks().size
        torch.manual_seed(0)  # for new adapters
        module = RadixModule(str(shop / "model"), **{**SETTINGS, **settings})
        data = SFTData(
            train_file=str(shop / "train.jsonl"), batch_size=5, max_tokens=120, max_length=120,
            dataloader_num_workers=0,
            model_name_or_path=str(shop / "model"),
        )  # fmt: skip
        trainer = Trainer(
            accelerator="cpu", devices=size, strategy=FSDP2Strategy() if size > 1 else "auto", max_steps=num_steps,
            max_epochs=-1, precision=precision, use_distributed_sampler=False, logger=False, deterministic=True,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.strategy.checkpoint_io = FolderCheckpointIO()
        trainer.fit(module, data, ckpt_path=ckpt_path)
        return trainer

    return run


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected) and expected
    for name, there in expected.items():
        assert (found[name].dtype, found[name].shape) == (there.dtype, there.shape), name
        assert (found[name] - there).abs().max() <= SAME * there.abs().max().clamp_min(1e-30), name


def moments(state: dict[str, Any]) -> dict[str, Tensor]:
    """Of the optimizer of a checkpoint, and the count of steps of each weight."""
    (optimizer,) = state["optimizer_states"]
    return {f"{number}.{name}": each for number, own in optimizer["state"].items() for name, each in own.items()}


@pytest.mark.parametrize(("settings", "sizes"), [({}, (2, 1, 4)), (LORA, (4, 2))], ids=["full", "LoRA"])
def test_over_resumes_on_other_numbers_of_ranks(
    settings: dict[str, Any], sizes: tuple[int, ...], fit: Callable[..., Trainer], shop: Path, tmp_path: Path
) -> None:
    """Two steps on each number of ranks, from a checkpoint that any number of ranks writes and reads."""
    texts = AutoTokenizer.from_pretrained(shop / "model")
    places = [tmp_path / f"step={2 * count}" for count in range(1, len(sizes) + 1)]

    def go_on(number: int) -> None:
        trainer = fit(2 * number + 2, places[number - 1] if number else None, **settings)
        trainer.save_checkpoint(places[number])
        if number == len(sizes) - 1:
            save_hf_folder(trainer.lightning_module.model, texts, tmp_path / "model")

    for number, size in enumerate(sizes):
        if size > 1:
            on_ranks(size, lambda rank, number=number: go_on(number))
        else:
            go_on(number)
    whole = fit(2 * len(sizes), **settings)
    whole.save_checkpoint(tmp_path / "whole")
    save_hf_folder(whole.lightning_module.model, texts, tmp_path / "expected")
    found, expected = read_checkpoint(places[-1]), read_checkpoint(tmp_path / "whole")
    assert_same(found["state_dict"], expected["state_dict"])
    assert_same(moments(found), moments(expected))
    assert found.keys() == expected.keys()
    there, here = (tmp_path / name for name in ("expected", "model"))
    files = [sorted(path.relative_to(each) for path in each.rglob("*")) for each in (here, there)]
    assert files[0] == files[1]
    for path in [path for path in files[0] if path.suffix == ".safetensors"]:
        assert_same(load_file(here / path), load_file(there / path))


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
