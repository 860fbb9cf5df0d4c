"""The order of steps: seeded, a permutation in every epoch, resumed with the next step."""

from __future__ import annotations

import numpy as np
import pytest

from radixtrain.collators.prefix_sampler import GroupedOrder
from radixtrain.collators.steps import StepCollator
from radixtrain.collators.token_row import TokenRow
from radixtrain.data.steps import StepDataset, StepLoader, StepSampler, draw_epoch, epoch_size
from radixtrain.tree.groups import find_prefix_groups


@pytest.fixture(scope="module")
def conversations() -> list[list[TokenRow]]:
    """45 conversations, each of one of 3 prompts."""
    generator = np.random.default_rng(0)
    prompts = generator.integers(0, 50, (3, 32))
    ids = [np.concatenate([prompts[index % 3], generator.integers(0, 50, 4)]) for index in range(45)]
    return [[TokenRow(each, each, f"chats.jsonl:{line}")] for line, each in enumerate(ids, 1)]


@pytest.fixture(params=[None, 2, 6], ids=["shuffle", "2 together", "6 together"])
def grouping(request, conversations) -> GroupedOrder | None:
    groups = find_prefix_groups(samples[0].input_ids for samples in conversations)
    return request.param and GroupedOrder(groups, 6, request.param)


def test_every_epoch_is_another_permutation(grouping):
    sampler = StepSampler(45, 6, True, 42, grouping)
    epochs = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        steps = list(sampler)
        assert [len(step) for step in steps] == [6] * 7 + [3] and len(sampler) == 8
        epochs.append([index for step in steps for index in step])
        assert sorted(epochs[-1]) == list(range(45)) and epochs[-1] == sampler.order().tolist()
    assert epochs[0] != epochs[1] != epochs[2]


def test_the_order_depends_only_on_seed_and_epoch(grouping):
    one, other, third = (StepSampler(45, 6, True, seed, grouping) for seed in (42, 42, 43))
    list(one)
    one.set_epoch(5)
    other.set_epoch(5)
    third.set_epoch(5)
    assert list(one) == list(other) != list(third)


def test_without_a_grouping_it_is_the_plain_permutation():
    sampler = StepSampler(45, 6, True, 42)
    sampler.set_epoch(1)
    assert sampler.order().tolist() == np.random.default_rng([42, 1]).permutation(45).tolist()
    assert StepSampler(45, 6, False, 42).order().tolist() == list(range(45))


@pytest.mark.parametrize("done", [0, 1, 5, 7])
def test_a_resumed_run_takes_the_next_step(done, grouping, conversations):
    def loader() -> StepLoader:
        sampler = StepSampler(45, 6, True, 42, grouping)
        sampler.set_epoch(3)
        return StepLoader(StepDataset(conversations, StepCollator(max_tokens=500)), sampler)

    whole = [step.where for step in loader()]
    first, resumed = loader(), loader()
    for _, _step in zip(range(done), first, strict=False):
        pass
    resumed.load_state_dict({"handed_out": done})
    assert [step.where for step in resumed] == whole[done:]
    assert [step.where for step in resumed] == whole, "only the first pass starts later"


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


def times_in(weights: np.ndarray, epochs: int) -> np.ndarray:
    drawn = [draw_epoch(weights, np.random.default_rng([7, epoch])) for epoch in range(epochs)]
    assert {len(indices) for indices in drawn} == {epoch_size(weights)}
    return np.mean([np.bincount(indices, minlength=len(weights)) for indices in drawn], axis=0)


def test_a_broken_weight_draws_another_share_in_every_epoch() -> None:
    weights = np.repeat([0.25, 1.5], [40, 10])
    times = times_in(weights, epochs=400)
    assert epoch_size(weights) == 10 + 15
    error = (0.25 * 0.75 / 400) ** 0.5, (0.5 * 0.5 / 400) ** 0.5  # of the mean of 400 epochs that draw it or do not
    assert np.abs(times[:40] - 0.25).max() <= 5 * error[0] and np.abs(times[40:] - 1.5).max() <= 5 * error[1]
    first, second = (draw_epoch(weights, np.random.default_rng([7, epoch])) for epoch in (0, 1))
    assert first.tolist() != second.tolist()
