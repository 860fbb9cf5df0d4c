"""What the random generators would draw next is kept and set."""

import copy
import random

import numpy as np
import pytest
import torch

from radixtrain.training.survival.generators import generator_states, set_generator_states


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
    assert [int(state) for state in states["cuda"]] == [7, 8]
    set_generator_states(states)
    assert given == states["cuda"]


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
    set_generator_states({**states, "cuda": [torch.zeros(16, dtype=torch.uint8)]})
    assert "the run was on 1 CUDA devices and is on 2: dropout will draw" in caplog.text and not given
