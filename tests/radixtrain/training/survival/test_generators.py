"""What the random generators would draw next is kept and set."""

import copy
import random

import numpy as np
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
