"""What `group_by_prefix` chooses and is expected to bring; which conversations make a step, and where a run goes on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from radixtrain.collators.prefix_sampler import GroupedOrder
from radixtrain.collators.steps import StepCollator
from radixtrain.collators.token_row import TokenRow
from radixtrain.data.datamodule import SFTData
from radixtrain.data.steps import (
    StepDataset,
    StepLoader,
    StepSampler,
    draw_epoch,
    epoch_size,
    grouped_order,
)
from radixtrain.tree.groups import find_prefix_groups
from tests.support.runs import write_rows


def conversations_of(prompts: int, each: int, own: int = 30) -> list[list[TokenRow]]:
    """Conversations of one sample, in turns of the prompts."""
    generator = np.random.default_rng(0)
    starts = generator.integers(0, 30_000, (prompts, 280))
    found = []
    for index in range(prompts * each):
        ids = np.concatenate([starts[index % prompts], generator.integers(0, 30_000, own)])
        found.append([TokenRow(ids, ids, f"chats.jsonl:{index + 1}")])
    return found


@pytest.fixture(scope="module")
def twenty() -> list[list[TokenRow]]:
    return conversations_of(20, 160)


def test_what_is_a_plain_shuffle(twenty):
    for given in (False, 1):
        assert grouped_order(twenty, 32, given, 42) is None
    for prompts in (1, 2, 200):  # two meet often enough
        assert grouped_order(conversations_of(prompts, 200 // prompts), 32, True, 42) is None
    assert [grouped_order(twenty, 32, given, 42).together for given in (True, 8)] == [16, 8]


def test_later_turns_count(twenty):
    """The same prompt and first turn, then another way: the last sample tells."""
    first = twenty[0][0].input_ids
    ways = [[first, np.concatenate([first, each[0].input_ids])] for each in twenty[:40]]
    conversations = [[TokenRow(ids, ids, "a:1") for ids in ids_of_one] for ids_of_one in ways]
    assert len(grouped_order(conversations, 8, 4, 42).groups) == 20


@pytest.fixture
def file(tmp_path) -> Path:
    """60 rows of tokens, three prompts in turns."""
    rows = [{"input_ids": [*range(50 * (index % 3), 50 * (index % 3) + 48), 150 + index]} for index in range(60)]
    return write_rows(tmp_path / "rows.jsonl", rows)


def data_of(file: Path, shop: Path, **settings) -> SFTData:
    data = SFTData(str(file), model_name_or_path=str(shop / "model"), batch_size=6, **settings)
    data.setup("fit")
    return data


def test_fit_draws_by_it(file, shop):
    plain, data = (data_of(file, shop, group_by_prefix=given) for given in (False, 6))
    steps = [step.where for step in data.train_dataloader()]
    prompts = [{(int(where.rpartition(":")[2]) - 1) % 3 for where in step} for step in steps]
    assert sum(len(each) == 1 for each in prompts) >= 9
    assert sorted(where for step in steps for where in step) == sorted(
        where for step in plain.train_dataloader() for where in step.where
    )
    assert data.features_of_step(0)[0]["input_ids"][0] == data.features_of_step(0)[5]["input_ids"][0]


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


def test_every_epoch_is_another_permutation_by_the_seed(grouping):
    one, same, other = (StepSampler(45, 6, True, seed, grouping) for seed in (42, 42, 43))
    epochs = []
    for epoch in range(3):
        for sampler in (one, same, other):
            sampler.set_epoch(epoch)
        steps = list(one)
        assert steps == list(same) != list(other)
        assert [len(step) for step in steps] == [6] * 7 + [3] and len(one) == 8
        epochs.append([index for step in steps for index in step])
        assert sorted(epochs[-1]) == list(range(45)) and epochs[-1] == one.order().tolist()
    assert epochs[0] != epochs[1] != epochs[2]
    if grouping is None:
        assert epochs[1] == np.random.default_rng([42, 1]).permutation(45).tolist()
        assert StepSampler(45, 6, False, 42).order().tolist() == list(range(45))


@pytest.mark.parametrize("done", [0, 5])
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
    one, resumed = (StepSampler(10, 4, shuffle, seed=3, weights=weights) for _ in range(2))
    steps = list(one)
    drawn = np.concatenate(steps)
    counts = np.bincount(drawn, minlength=10)
    assert counts[6:].tolist() == [2] * 4 and counts[:6].sum() == 3 and len(steps) == len(one) == 3
    assert (sorted(drawn) == drawn).all() != shuffle
    resumed.start = 2
    assert list(resumed) == steps[2:]


def test_a_broken_weight_draws_another_share_in_every_epoch() -> None:
    weights = np.repeat([0.25, 1.5], [40, 10])
    drawn = [draw_epoch(weights, np.random.default_rng([7, epoch])) for epoch in range(400)]
    assert {len(indices) for indices in drawn} == {epoch_size(weights)} == {10 + 15}
    times = np.mean([np.bincount(indices, minlength=len(weights)) for indices in drawn], axis=0)
    error = (0.25 * 0.75 / 400) ** 0.5, (0.5 * 0.5 / 400) ** 0.5  # of the mean of 400 epochs that draw it or do not
    assert np.abs(times[:40] - 0.25).max() <= 5 * error[0] and np.abs(times[40:] - 1.5).max() <= 5 * error[1]
    assert drawn[0].tolist() != drawn[1].tolist()
