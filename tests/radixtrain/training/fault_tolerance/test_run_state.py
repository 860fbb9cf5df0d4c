"""What the random generators would draw next is kept and set; weights are loaded if they are this model's."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

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
from tests.support.runs import a_run


def test_random_generators_go_on_where_they_were() -> None:
    def drawn() -> list[float]:
        return [random.random(), random.gauss(0, 1), *np.random.rand(2), np.random.randn(), *torch.rand(3).tolist()]  # noqa: NPY002

    drawn()
    states = json.loads(json.dumps(generator_states()))
    first = drawn()
    assert drawn() != first
    set_generator_states(states)
    assert drawn() == first


@pytest.mark.parametrize(
    ("was", "now", "is_initialized", "said"),
    [
        (2, 2, True, ""),
        (1, 2, True, "the run was on 1 CUDA devices and is on 2: dropout will draw"),
        (0, 8, False, ""),  # on the CPU of a machine with GPUs, perhaps in a forked process, which could not start them
    ],
)
def test_cuda(monkeypatch: Any, caplog: Any, was: int, now: int, is_initialized: bool, said: str) -> None:
    """Every device goes on, and none is started."""
    given: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_initialized)
    for module in (torch.cuda, torch.cuda.random):
        monkeypatch.setattr(module, "device_count", lambda: now)
    states = [torch.tensor([7 + number], dtype=torch.uint8) for number in range(now)]
    monkeypatch.setattr(torch.cuda.random, "get_rng_state", lambda device="cuda": states[device])
    monkeypatch.setattr(torch.cuda.random, "set_rng_state", lambda state, device="cuda": given.append(int(state)))
    kept = generator_states()
    assert kept["cuda"] == (["07", "08"] if is_initialized else [])
    set_generator_states({**kept, "cuda": kept["cuda"][:was]})
    assert given == ([7, 8] if was == now else []) and said in caplog.text and bool(said) == bool(caplog.text)


@pytest.fixture
def module(shop: Path) -> RadixModule:
    """With adapters that change something."""
    module = RadixModule(str(shop / "model"), use_peft=True, lora_r=2)
    module.configure_model()
    for weight in trained_weights(module).values():
        torch.nn.init.normal_(weight, std=0.2)
    return module


@pytest.fixture
def checkpoint(module: RadixModule) -> Checkpoint:
    """It holds what is trained; everything else is the base model's."""
    weights = trained_weights(module)
    assert 0 < len(weights) < len(module.state_dict()) and all(".lora_" in name for name in weights)
    return Checkpoint(weights, {}, a_run(model=dict(module.hparams), base="0"))


def test_nothing_is_exported_into_a_model_that_is_being_written(
    checkpoint: Checkpoint, tmp_path: Path, capsys: Any
) -> None:
    write_checkpoint(tmp_path / "x", checkpoint)
    with locked_model(tmp_path / "new", "fit"):
        assert main(["export", f"--ckpt_path={tmp_path / 'x'}", f"--output_dir={tmp_path / 'new'}"]) == 1
    assert f"error: {tmp_path / 'new'} is in use by" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("change", ["one is missing", "one too many", "another shape", "said to be whole"])
def test_other_weights_are_refused(module: RadixModule, checkpoint: Checkpoint, change: str) -> None:
    name = next(iter(checkpoint.weights))
    other = next(each for each in module.state_dict() if ".lora_" not in each)
    if change == "one is missing":
        del checkpoint.weights[name]
    elif change == "one too many":
        name, checkpoint.weights[other] = other, module.state_dict()[other]
    elif change == "another shape":
        checkpoint.weights[name] = torch.zeros(1)
    else:
        name, checkpoint.run["base"] = other, None
    before = {each: weight.clone() for each, weight in module.state_dict().items()}
    with pytest.raises(UserError, match="of another model than the configuration's") as caught:
        load_weights(module, checkpoint)
    assert name in str(caught.value)
    assert all(torch.equal(weight, before[each]) for each, weight in module.state_dict().items())
