"""How often a conversation comes in an epoch, by its weight."""

import numpy as np
import pytest

from radixtrain.data.steps import StepSampler
from radixtrain.data.weights import draw_epoch, epoch_size


def times_in(weights: np.ndarray, epochs: int) -> np.ndarray:
    drawn = [draw_epoch(weights, np.random.default_rng([7, epoch])) for epoch in range(epochs)]
    assert {len(indices) for indices in drawn} == {epoch_size(weights)}
    return np.mean([np.bincount(indices, minlength=len(weights)) for indices in drawn], axis=0)


def test_whole_weights_repeat() -> None:
    weights = np.array([1.0, 3.0, 0.0, 2.0])
    assert draw_epoch(weights, np.random.default_rng(0)).tolist() == [0, 1, 1, 1, 3, 3]
    assert epoch_size(weights) == 6


def test_a_broken_weight_draws_another_share_in_every_epoch() -> None:
    weights = np.repeat([0.25, 1.5], [40, 10])
    times = times_in(weights, epochs=400)
    assert epoch_size(weights) == 10 + 15
    np.testing.assert_allclose(times[:40], 0.25, atol=0.1)
    np.testing.assert_allclose(times[40:], 1.5, atol=0.15)
    first, second = (draw_epoch(weights, np.random.default_rng([7, epoch])) for epoch in (0, 1))
    assert first.tolist() != second.tolist()


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_sampler_draws_by_weight_and_the_same_on_a_resumed_run(shuffle: bool) -> None:
    weights = np.repeat([0.5, 2.0], [6, 4])

    def sampler() -> StepSampler:
        return StepSampler(10, 4, shuffle, seed=3, weights=weights)

    steps = list(sampler())
    assert len(steps) == len(sampler()) == 3
    counts = np.bincount(np.concatenate(steps), minlength=10)
    assert counts[6:].tolist() == [2] * 4 and counts[:6].sum() == 3
    assert (sorted(np.concatenate(steps)) == np.concatenate(steps)).all() != shuffle
    resumed = sampler()
    resumed.start = 2
    assert list(resumed) == steps[2:]


def test_without_weights_the_order_is_a_plain_permutation() -> None:
    expected = np.random.default_rng([3, 0]).permutation(10).tolist()
    assert np.concatenate(list(StepSampler(10, 4, True, seed=3))).tolist() == expected
