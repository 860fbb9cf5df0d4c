"""Under `fsdp2` each rank holds a part, and errors reach all. That its steps are right: `tests/claims/devices`."""

import errno
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn

from radixtrain.checkpoints.folder import read_checkpoint
from radixtrain.checkpoints.tensors import part_of
from radixtrain.data.datamodule import SFTData
from radixtrain.distributed import ranks
from radixtrain.errors import EndedElsewhere, UserError
from radixtrain.settings.sections import TrainerSettings
from radixtrain.training.answers.evaluate_generation import EvaluateGeneration
from radixtrain.training.devices.fabric import Sharded
from radixtrain.training.devices.fsdp2 import check_shardable
from radixtrain.training.fault_tolerance.nonfinite_guard import NonFinite, nonfinite_weight
from radixtrain.training.fault_tolerance.run_state import load_weights
from radixtrain.training.fault_tolerance.saving import SaveCheckpoints
from radixtrain.training.fault_tolerance.signals import Requests
from radixtrain.training.loop import Loop
from radixtrain.training.module import RadixModule
from radixtrain.training.results.model_folder import save_hf_folder
from radixtrain.training.results.record import Record
from tests.support import FULL
from tests.support.processes import on_ranks


@pytest.fixture
def fit(shop: Path) -> Callable[..., Loop]:
    """`fit(num_steps)`: trains on as many ranks as there are, in steps of several micro-batches."""

    def run(num_steps: int) -> Loop:
        module = RadixModule(str(shop / "model"), dtype="float64")
        data = SFTData(
            train_file=str(shop / "train.jsonl"), batch_size=5, max_tokens=120, max_length=120,
            dataloader_num_workers=0,
            model_name_or_path=str(shop / "model"),
        )  # fmt: skip
        strategy = Sharded(timeout=timedelta(minutes=5))
        fabric = Fabric(accelerator="cpu", strategy=strategy, devices=ranks().size)
        folder = Path(mkdtemp())
        record = Record(folder, SaveCheckpoints(folder / "checkpoints", Requests(), is_enabled=False))
        given = TrainerSettings(max_steps=num_steps, max_epochs=-1, deterministic=True, enable_progress_bar=False)
        loop = Loop(fabric, given, folder, [], EvaluateGeneration(), {}, record=record)
        loop.fit(module, data)
        return loop

    return run


pytestmark = FULL


def test_each_rank_holds_a_part(fit: Callable[..., Loop]) -> None:
    """Of weights, gradients and moments; nothing whole is kept."""

    def bytes_of(rank: int) -> tuple[int, int]:
        loop = fit(1)
        weights, optimizer = list(loop.module.parameters()), loop.optimizer
        held = [*weights, *(weight.grad for weight in weights)]
        held += [moment for own in optimizer.state.values() for name, moment in own.items() if name != "step"]
        num_whole = sum(each.numel() * each.element_size() for each in weights)
        memory = [part_of(each).untyped_storage() for each in held]
        return sum({each.data_ptr(): each.nbytes() for each in memory}.values()), num_whole

    for held, num_whole in on_ranks(2, bytes_of):
        assert 0.5 <= held / (4 * num_whole) <= 0.51  # rows that pad a part


def test_a_full_disk_ends_all_ranks(fit: Callable[..., Loop], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After some tensors, the rest of which rank 0 still takes from the others; then they can gather again."""

    def full(path: Path, chunks: Any) -> None:
        next(chunks), next(chunks), next(chunks)  # the head of the file, and a tensor
        raise OSError(errno.ENOSPC, "No space left on device")

    def save(rank: int) -> str:
        loop = fit(1)
        with monkeypatch.context() as patch, pytest.raises((OSError, EndedElsewhere)) as caught:
            patch.setattr("radixtrain.checkpoints.tensors.write_file", full)
            loop.save_checkpoint(tmp_path / "x")
        loop.save_checkpoint(tmp_path / "y")
        return type(caught.value).__name__

    assert on_ranks(2, save) == ["OSError", "EndedElsewhere"]
    assert [path.name for path in tmp_path.iterdir()] == ["y"]
    read_checkpoint(tmp_path / "y")


def test_a_checkpoint_after_a_validation_holds_all_moments(fit: Callable[..., Loop], tmp_path: Path) -> None:
    """FSDP2 leaves some weights whole after a pass, in other parameters than those of the optimizer."""

    def save(rank: int) -> list[str]:
        loop = fit(1)
        step = next(iter(loop.datamodule.train_dataloader()))
        with torch.no_grad():
            loop.module.loss_sum(step.micro_batches[0])
        weights = [type(each) for each in loop.module.parameters()]
        assert len(set(weights)) == 2, "some are whole"
        loop.save_checkpoint(tmp_path / "x")
        return [name for name, _ in loop.module.named_parameters()]

    names, _ = on_ranks(2, save)
    moments = {f"{name}.{moment}" for name in names for moment in ("exp_avg", "exp_avg_sq", "step")}
    assert read_checkpoint(tmp_path / "x").moments.keys() == moments


def test_what_one_rank_holds_is_seen_by_all(fit: Callable[..., Loop], shop: Path, tmp_path: Path) -> None:
    """A number that is not finite, in the part of the second rank, and weights that are put back."""
    names = "model.model.embed_tokens.weight"

    def spoil(rank: int) -> tuple[str | None, str | None, bool]:
        loop = fit(1)
        module = loop.module
        loop.save_checkpoint(tmp_path / "whole")
        with torch.no_grad():
            if rank == 1:
                part_of(module.get_parameter(names))[0, 0] = float("nan")
        spoilt = nonfinite_weight(module)
        with pytest.raises(NonFinite, match="embed_tokens"):
            save_hf_folder(module.model, None, tmp_path / "model")
        load_weights(module, read_checkpoint(tmp_path / "whole"))
        return spoilt, nonfinite_weight(module), (tmp_path / "model").exists()

    assert on_ranks(2, spoil) == [(names, None, False)] * 2


def shared_layers(model: Any) -> None:
    model.model.layers[1].mlp = model.model.layers[0].mlp


def single_number(model: Any) -> None:
    model.model.layers[0].register_parameter("gate", nn.Parameter(torch.tensor(1.0)))


def list_of_experts(model: Any) -> None:
    model.model.layers[0].mlp.experts = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (shared_layers, r"layers 0 and 1 of Qwen3ForCausalLM share a weight.*use ddp"),
        (single_number, r"model\.layers\.0\.gate is a single number"),
        (list_of_experts, "experts is a list of modules"),
    ],
)
def test_refused(tiny_qwen3: Callable[..., Any], change: Callable[[Any], None], error: str) -> None:
    """By name, before anything is divided."""
    model = tiny_qwen3()
    change(model)
    with pytest.raises(UserError, match=error):
        check_shardable(model)
