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


def test_another_number_of_cuda_devices_is_said(caplog: pytest.LogCaptureFixture) -> None:
    states = {**generator_states(), "cuda": [torch.zeros(16, dtype=torch.uint8)] * (torch.cuda.device_count() + 1)}
    set_generator_states(states)
    here = torch.cuda.device_count()
    assert f"the run was on {here + 1} CUDA devices and is on {here}: dropout will draw" in caplog.text
