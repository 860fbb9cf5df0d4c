"""r by setting, from steps that are drawn and cut as `fit` draws and cuts them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from radixtrain.collators.steps import StepCollator
from radixtrain.collators.token_row import TokenRow
from radixtrain.data.steps import StepDataset, StepSampler
from radixtrain.report.sharing import (
    Draw,
    Epoch,
    counted_step,
    length_quantiles,
    num_distinct_tokens,
    num_shared_prompts,
    ordinary_counts,
)

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


def test_r_is_that_of_the_steps_of_fit() -> None:
    conversations = conversations_of(6, 16)
    sampled = epoch_of(conversations).sampled(OWN)
    data = StepDataset(conversations, StepCollator(max_tokens=4096))
    steps = [data[indices] for indices in StepSampler(96, 16, True, 3)]
    computed = sum(step.num_computed_tokens for step in steps)
    assert len(sampled.steps) == 6
    assert sampled.r == sum(step.num_tokens for step in steps) / computed
    assert sampled.best_r == sampled.r and sampled.scale == 1.0


def test_a_small_budget_cuts_what_is_shared() -> None:
    epoch = epoch_of(conversations_of(1, 64))
    whole, cut = epoch.sampled(OWN), epoch.sampled(Draw(16, 128))
    assert whole.best_r == cut.best_r == whole.r > cut.r == pytest.approx(16 * 80 / (4 * (64 + 4 * 16)))


def test_a_larger_batch_shares_more_and_so_do_prompts_that_meet() -> None:
    epoch = epoch_of(conversations_of(16, 16))
    r = {(size, grouped): epoch.sampled(Draw(size, 1 << 20, grouped)).r for size in (8, 64) for grouped in (0, True)}
    assert r[8, 0] < r[64, 0] < r[64, True] and r[8, 0] < r[8, True]


def test_settings_are_compared_on_the_same_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampled by their tokens: 3 steps of 1,280 tokens, however they are cut."""
    monkeypatch.setattr("radixtrain.report.sharing.COUNTED_TOKENS", 3000)
    epoch = epoch_of(conversations_of(1, 200))
    for sampled in (epoch.sampled(OWN), epoch.sampled(Draw(16, 128))):
        assert (len(sampled.steps), sampled.num_tokens) == (3, 3 * 16 * 80)
        assert sampled.scale == pytest.approx(200 / 48)


def test_the_last_short_step_is_left_out_unless_it_is_the_only_one() -> None:
    assert {step.num_tokens for step in epoch_of(conversations_of(1, 40)).sampled(OWN).steps} == {16 * 80}
    assert [step.num_tokens for step in epoch_of(conversations_of(1, 5)).sampled(OWN).steps] == [5 * 80]


def test_sources_with_weights() -> None:
    """The rows of the first prompt come three times in an epoch, those of the second once."""
    conversations = conversations_of(2, 16)
    epoch = replace(epoch_of(conversations), weights=np.repeat([3.0, 1.0], 16))
    assert epoch.size == 64
    sampled = epoch.sampled(Draw(16, 4096))
    assert (len(sampled.steps), sampled.scale) == (4, 1.0)
    assert sampled.r > epoch_of(conversations).sampled(Draw(16, 4096)).r


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

    def test_what_is_left_if_all_rows_are_one_tree(self) -> None:
        assert num_distinct_tokens(epoch_of(conversations_of(3, 10))) == (30 * 80, 3 * 64 + 30 * 16)


def nested() -> list[list[TokenRow]]:
    """One beginning of 64 tokens; after it four of 64, with five rows each."""
    trunk = np.arange(64)
    rows = [sample for (sample,) in conversations_of(4, 5)]
    return [[TokenRow(np.concatenate([trunk, each.input_ids]), np.arange(144), "x:1")] for each in rows]


def test_quantiles() -> None:
    found = length_quantiles(np.arange(1, 102))
    assert found == {"min": 1, "10 %": 11, "50 %": 51, "90 %": 91, "99 %": 100, "max": 101}


COLLATOR = StepCollator(max_tokens=60)
WHOLE = [(28, 8)]  # tokens and labels of a whole chat


@pytest.fixture
def two_prompts() -> list[dict[str, Any]]:
    """Eight sequences of 24 to 28 tokens after two prompts of 20, four each."""
    rng = np.random.default_rng(0)
    found = []
    for prompt in rng.integers(0, 97, (2, 20)):
        for length in (4, 5, 6, 8):
            ids = np.concatenate([prompt, rng.integers(0, 97, length)])
            found.append({"input_ids": ids, "labels": np.where(np.arange(len(ids)) < 20, -100, ids)})
    return found


def test_both_arms_are_counted_as_they_are_collated(two_prompts: list[dict[str, Any]]) -> None:
    counted = counted_step(two_prompts, COLLATOR, WHOLE)
    radix, ordinary = COLLATOR(two_prompts), replace(COLLATOR, dedup=False)(two_prompts)
    assert [counts.rows for counts in counted.radix] == [batch["input_ids"].numel() for batch in radix.micro_batches]
    assert list(counted.ordinary) == [ordinary_counts(batch) for batch in ordinary.micro_batches]
    assert (counted.num_tokens, counted.num_rows) == (radix.num_tokens, radix.num_computed_tokens)
    assert counted.num_unique_tokens == radix.num_unique_tokens == 2 * 20 + 2 * (4 + 5 + 6 + 8)
    assert sum(counts.predictions for counts in counted.ordinary) == ordinary.num_labels


def test_a_padded_batch(two_prompts: list[dict[str, Any]]) -> None:
    (counts,) = counted_step(two_prompts, StepCollator(), WHOLE).ordinary
    assert counts == (8 * 28, 8 * 28 * 28, 2 * (4 + 5 + 6 + 8))


def test_attention_is_pairs() -> None:
    sequences = [
        {"input_ids": [1, 2, 3], "labels": [-100, 2, 3]},
        {"input_ids": [1, 2, 4, 5], "labels": [-100, 2, 4, 5]},
    ]
    (counts,) = counted_step(sequences, StepCollator(), WHOLE).radix
    # unique tokens at depths 1, 2, 3 and 3, 4; the second token predicts 3 and 4, the first 2, and 4 predicts 5
    assert counts == (5, 1 + 2 + 3 + 3 + 4, 3)
