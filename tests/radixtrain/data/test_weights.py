"""How often a conversation comes in an epoch, by its weight."""

import numpy as np

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
    error = (0.25 * 0.75 / 400) ** 0.5, (0.5 * 0.5 / 400) ** 0.5  # of the mean of 400 epochs that draw it or do not
    assert np.abs(times[:40] - 0.25).max() <= 5 * error[0] and np.abs(times[40:] - 1.5).max() <= 5 * error[1]
    first, second = (draw_epoch(weights, np.random.default_rng([7, epoch])) for epoch in (0, 1))
    assert first.tolist() != second.tolist()
