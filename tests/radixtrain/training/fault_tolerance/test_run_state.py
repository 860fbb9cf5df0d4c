"""What the random generators would draw next is kept and set."""

import copy
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forged_checkpoints import a_run

from radixtrain.__main__ import main
from radixtrain.checkpoints.folder import Checkpoint, write_checkpoint
from radixtrain.errors import UserError
from radixtrain.training.fault_tolerance.run_folder import locked_model
from radixtrain.training.fault_tolerance.run_state import (
    generator_states,
    load_weights,
    set_generator_states,
    trained_weights,
)
from radixtrain.training.module import RadixModule


def test_random_generators_go_on_where_they_were():
    def drawn() -> list[float]:
        return [random.random(), random.gauss(0, 1), *np.random.rand(2), np.random.randn(), *torch.rand(3).tolist()]  # noqa: NPY002

    drawn()
    states = copy.deepcopy(generator_states())
    first = drawn()
    assert drawn() != first
    set_generator_states(states)
    assert drawn() == first


def pretend_cuda(monkeypatch: pytest.MonkeyPatch, num_devices: int, is_initialized: bool) -> list[torch.Tensor]:
    """A machine with so many CUDA devices. Returns the states that are set, in order."""
    given: list[torch.Tensor] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_initialized)
    for module in (torch.cuda, torch.cuda.random):
        monkeypatch.setattr(module, "device_count", lambda: num_devices)
    states = [torch.tensor([7 + number], dtype=torch.uint8) for number in range(num_devices)]
    monkeypatch.setattr(torch.cuda.random, "get_rng_state", lambda device="cuda": states[device])
    monkeypatch.setattr(torch.cuda.random, "set_rng_state", lambda state, device="cuda": given.append(state))
    return given


def test_every_cuda_device_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    given = pretend_cuda(monkeypatch, 2, is_initialized=True)
    states = generator_states()
    assert states["cuda"] == ["07", "08"]
    set_generator_states(states)
    assert [int(state) for state in given] == [7, 8]


def test_cuda_is_not_started(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A run on the CPU of a machine with GPUs, perhaps in a forked process, which could not start it."""
    given = pretend_cuda(monkeypatch, 8, is_initialized=False)
    states = generator_states()
    assert states["cuda"] == []
    set_generator_states(states)
    assert not given and not caplog.text


def test_another_number_of_cuda_devices_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    states = generator_states()
    given = pretend_cuda(monkeypatch, 2, is_initialized=True)
    set_generator_states({**states, "cuda": ["00" * 16]})
    assert "the run was on 1 CUDA devices and is on 2: dropout will draw" in caplog.text and not given


@pytest.fixture
def module(shop: Path) -> RadixModule:
    """With adapters that change something."""
    module = RadixModule(str(shop / "model"), use_peft=True, lora_r=2)
    module.configure_model()
    for weight in module.parameters():
        if weight.requires_grad:
            torch.nn.init.normal_(weight, std=0.2)
    return module


@pytest.fixture
def checkpoint(module: RadixModule) -> Checkpoint:
    """It holds what is trained; everything else is the base model's."""
    weights = trained_weights(module)
    assert 0 < len(weights) < len(module.state_dict()) and all(".lora_" in name for name in weights)
    return Checkpoint(weights, {}, a_run(model=dict(module.hparams), base="0"))


def test_what_is_not_exported(checkpoint: Checkpoint, tmp_path: Path, capsys: Any) -> None:
    """A damaged checkpoint, and into a model that is being written."""
    write_checkpoint(tmp_path / "x", checkpoint)
    command = ["export", f"--ckpt_path={tmp_path / 'x'}", f"--output_dir={tmp_path / 'new'}"]
    with locked_model(tmp_path / "new", "fit"):
        assert main(command) == 1
    assert f"error: {tmp_path / 'new'} is in use by" in capsys.readouterr().err
    (tmp_path / "x" / "model.safetensors").write_bytes(b"")
    assert main(command) == 1
    assert "x: model.safetensors is damaged: its checksum is not the one in checksums.txt" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("change", ["one is missing", "one too many", "another shape", "said to be whole"])
def test_other_weights_are_refused(module: RadixModule, checkpoint: Checkpoint, change: str) -> None:
    weights = checkpoint.weights
    name = next(iter(weights))
    other = next(each for each in module.state_dict() if ".lora_" not in each)
    if change == "one is missing":
        del weights[name]
    elif change == "one too many":
        name, weights[other] = other, module.state_dict()[other]
    elif change == "another shape":
        weights[name] = torch.zeros(1)
    else:
        name, checkpoint.run["base"] = other, None
    before = {each: weight.clone() for each, weight in module.state_dict().items()}
    with pytest.raises(UserError, match="of another model than the configuration's") as caught:
        load_weights(module, checkpoint)
    assert name in str(caught.value)
    assert all(torch.equal(weight, before[each]) for each, weight in module.state_dict().items())
