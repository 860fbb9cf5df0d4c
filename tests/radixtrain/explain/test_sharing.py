"""r by setting, from steps that are drawn and cut as `fit` draws and cuts them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from radixtrain.collators.steps import StepCollator
from radixtrain.collators.token_row import TokenRow
from radixtrain.data.steps import StepDataset, StepSampler
from radixtrain.explain.sharing import Draw, Epoch, SampledSteps, length_quantiles, num_shared_prompts

OWN = Draw(batch_size=16, max_tokens=4096)


def conversations_of(num_prompts: int, rows_each: int, prompt: int = 64, answer: int = 16) -> list[list[TokenRow]]:
    """Rows of random tokens after prompts of this many tokens, one prompt after the other."""
    rng = np.random.default_rng(0)
    found = []
    for shared in rng.integers(0, 1000, (num_prompts, prompt)):
        for own in rng.integers(0, 1000, (rows_each, answer)):
            ids = np.concatenate([shared, own])
            found.append([TokenRow(ids, np.where(np.arange(len(ids)) < prompt, -100, ids), "x:1")])
    return found


def epoch_of(conversations: list[list[TokenRow]], shuffle: bool = True, **options: Any) -> Epoch:
    lengths = np.array([len(sample.input_ids) for samples in conversations for sample in samples])
    return Epoch(
        conversations=conversations, lengths=lengths, seed=3, shuffle=shuffle, collator=StepCollator(**options)
    )


def r_of(sampled: SampledSteps) -> float:
    return sampled.num_tokens / sampled.num_rows


def best_r_of(sampled: SampledSteps) -> float:
    return sampled.num_tokens / sampled.num_unique_tokens


def test_r_is_that_of_the_steps_of_fit() -> None:
    """Both arms are counted as they are collated."""
    conversations = conversations_of(6, 16)
    sampled = epoch_of(conversations).sampled(OWN)
    data = StepDataset(conversations, StepCollator(max_tokens=4096))
    steps = [data[indices] for indices in StepSampler(96, 16, True, 3)]
    ordinary = StepDataset(conversations, StepCollator(max_tokens=4096, dedup=False))
    padded = [batch for indices in StepSampler(96, 16, True, 3) for batch in ordinary[indices].micro_batches]
    assert sampled.num_steps == 6 and sampled.scale == 1.0
    assert sampled.num_rows == sum(step.num_computed_tokens for step in steps)
    assert sampled.num_tokens == sampled.num_whole_tokens == sum(step.num_tokens for step in steps)
    assert best_r_of(sampled) == r_of(sampled)
    assert list(sampled.ordinary) == [batch["input_ids"].numel() for batch in padded]


def test_split_chats_are_compared_with_whole_ones() -> None:
    """Three turns of one chat: the last one, with the labels of all."""
    ids = np.arange(60)
    turns = [TokenRow(ids[:end], np.where(ids[:end] < end - 5, -100, ids[:end]), "x:1") for end in (20, 40, 60)]
    epoch = epoch_of([turns] * 4)
    sampled = epoch.sampled(Draw(4, 4096))
    assert (sampled.num_tokens, sampled.num_whole_tokens, sampled.ordinary) == (4 * 120, 4 * 60, (4 * 60,))
    features = epoch.whole_chats([0, 1])
    assert [(len(each["input_ids"]), int((each["labels"] != -100).sum())) for each in features] == [(60, 15)] * 2


@pytest.mark.parametrize(
    ("num_prompts", "less", "more"),
    [
        (1, Draw(16, 128), OWN),
        (16, Draw(8, 1 << 20), Draw(64, 1 << 20)),
        (16, Draw(8, 1 << 20), Draw(8, 1 << 20, True)),
        (16, Draw(64, 1 << 20), Draw(64, 1 << 20, True)),
    ],
)
def test_what_shares_more(num_prompts: int, less: Draw, more: Draw) -> None:
    """A larger budget, a larger batch, prompts that meet."""
    epoch = epoch_of(conversations_of(num_prompts, 64 // num_prompts + 12))
    assert r_of(epoch.sampled(less)) < r_of(epoch.sampled(more))


def test_settings_are_compared_on_the_same_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampled by their tokens: 3 steps of 1,280 tokens, however they are cut; not the last short one of several."""
    assert epoch_of(conversations_of(1, 40)).sampled(OWN).num_tokens == 2 * 16 * 80
    assert epoch_of(conversations_of(1, 5)).sampled(OWN).num_tokens == 5 * 80
    monkeypatch.setattr("radixtrain.explain.sharing.COUNTED_TOKENS", 3000)
    epoch = epoch_of(conversations_of(1, 200))
    whole, cut = epoch.sampled(OWN), epoch.sampled(Draw(16, 128))
    for sampled in (whole, cut):
        assert (sampled.num_steps, sampled.num_tokens) == (3, 3 * 16 * 80)
        assert sampled.scale == pytest.approx(200 / 48)
    assert best_r_of(whole) == best_r_of(cut) == r_of(whole) > r_of(cut) == pytest.approx(16 * 80 / (4 * (64 + 4 * 16)))


def test_sources_with_weights() -> None:
    """The rows of the first prompt come three times in an epoch, those of the second once."""
    conversations = conversations_of(2, 16)
    epoch = replace(epoch_of(conversations), weights=np.repeat([3.0, 1.0], 16))
    sampled = epoch.sampled(Draw(16, 4096))
    assert (epoch.size, sampled.num_steps, sampled.scale) == (64, 4, 1.0)
    assert r_of(sampled) > r_of(epoch_of(conversations).sampled(Draw(16, 4096)))


class TestSettingsGrid:
    def test_other_batch_sizes_and_other_budgets(self) -> None:
        grid = epoch_of(conversations_of(1, 100)).settings_grid(Draw(24, 256))
        assert [draw.batch_size for draw in grid if draw.max_tokens == 256] == [8, 16, 24, 32, 64]
        assert [draw.max_tokens for draw in grid if draw.batch_size == 24] == [128, 256, 512, 1024], "80 tokens a row"

    def test_grouping_is_left_out_where_a_shuffle_is_good_enough(self) -> None:
        grid = epoch_of(conversations_of(1, 100)).settings_grid(OWN)
        assert not any(draw.group_by_prefix for draw in grid)
        grid = epoch_of(conversations_of(16, 16)).settings_grid(OWN)
        assert Draw(16, 4096, True) in grid and OWN in grid
        grid = epoch_of(conversations_of(16, 16), shuffle=False).settings_grid(OWN)
        assert not any(draw.group_by_prefix for draw in grid)

    def test_the_users_own_is_there_even_if_no_other_is_like_it(self) -> None:
        own = Draw(500, 50, 4)
        assert own in epoch_of(conversations_of(2, 10)).settings_grid(own)


class TestPrompts:
    @pytest.mark.parametrize(
        ("conversations", "number"),
        [
            (lambda: conversations_of(1, 50), 1),
            (lambda: conversations_of(7, 5), 7),
            (lambda: conversations_of(50, 1), 0),
            (lambda: conversations_of(3, 4) + conversations_of(0, 0), 3),
            (lambda: nested(), 4),
        ],
    )
    def test_number(self, conversations: Callable[[], list[list[TokenRow]]], number: int) -> None:
        assert num_shared_prompts(epoch_of(conversations()).groups) == number


def nested() -> list[list[TokenRow]]:
    """One beginning of 64 tokens; after it four of 64, with five rows each."""
    trunk = np.arange(64)
    rows = [sample for (sample,) in conversations_of(4, 5)]
    return [[TokenRow(np.concatenate([trunk, each.input_ids]), np.arange(144), "x:1")] for each in rows]


def test_quantiles() -> None:
    found = length_quantiles(np.arange(1, 102))
    assert found == {"min": 1, "10 %": 11, "50 %": 51, "90 %": 91, "99 %": 100, "max": 101}
