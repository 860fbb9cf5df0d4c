"""r from steps that are drawn and cut as `fit` does; seconds from timings that are given, and from real ones."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from radixtrain.collators.steps import StepCollator
from radixtrain.collators.token_row import TokenRow
from radixtrain.data.steps import StepDataset, StepSampler
from radixtrain.errors import UserError
from radixtrain.explain import prediction
from radixtrain.explain.prediction import (
    ARMS,
    OPTIMIZER,
    Batch,
    Draw,
    Epoch,
    RunSetup,
    SampledSteps,
    num_rows,
    predict_seconds,
    time_batches,
)

OWN = Draw(batch_size=16, max_tokens=4096)
CPU = torch.device("cpu")


def conversations_of(
    num_prompts: int, rows_each: int, prompt: int = 64, answer: int = 16, vocab: int = 1000
) -> list[list[TokenRow]]:
    """Rows of random tokens after prompts of this many tokens, one prompt after the other."""
    rng = np.random.default_rng(0)
    found = []
    for shared in rng.integers(0, 1000, (num_prompts, prompt)):
        for own in rng.integers(0, 1000, (rows_each, answer)):
            ids = np.concatenate([shared, own])
            found.append([TokenRow(ids, np.where(np.arange(len(ids)) < prompt, -100, ids), "x:1")])
    return found


def epoch_of(conversations: list[list[TokenRow]], shuffle: bool = True) -> Epoch:
    return Epoch(conversations=conversations, seed=3, shuffle=shuffle, collator=StepCollator())


def test_r_is_that_of_the_steps_of_fit() -> None:
    """Both arms are counted as they are collated."""
    conversations = conversations_of(6, 16)
    sampled = epoch_of(conversations).sampled(OWN)
    radix, ordinary = (
        StepDataset(conversations, StepCollator(max_tokens=4096, dedup=dedup)) for dedup in (True, False)
    )
    steps, padded = ([data[indices] for indices in StepSampler(96, 16, True, 3)] for data in (radix, ordinary))
    assert (sampled.num_steps, sampled.scale, sampled.rows_r) == (6, 1.0, sampled.r)
    for arm, collated in (("radix", steps), ("ordinary", padded)):
        assert sampled.num_rows[arm] == sum(num_rows(batch) for step in collated for batch in step.micro_batches)
        assert sampled.num_tokens[arm] == sum(step.num_tokens for step in collated)
    assert sampled.r == sampled.num_tokens["radix"] / sampled.num_rows["radix"]
    assert epoch_of(conversations).sampled(Draw(16, 4096, True)).r > sampled.r


def test_what_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps by their tokens, however they are cut; not the last short one of several; each row by its weight."""
    assert epoch_of(conversations_of(1, 40)).sampled(OWN).num_tokens["radix"] == 2 * 16 * 80
    assert epoch_of(conversations_of(1, 5)).sampled(OWN).num_tokens["radix"] == 5 * 80
    monkeypatch.setattr(prediction, "COUNTED_TOKENS", 3000)
    epoch = epoch_of(conversations_of(1, 200))
    for draw in (OWN, Draw(16, 128)):
        sampled = epoch.sampled(draw)
        assert (sampled.num_steps, sampled.num_tokens["radix"], sampled.scale) == (3, 3 * 16 * 80, 200 / 48)
    assert sampled.r == pytest.approx(16 * 80 / (4 * (64 + 4 * 16)))
    weighted = replace(epoch_of(conversations_of(2, 16)), weights=np.repeat([3.0, 1.0], 16))
    assert weighted.size == 64 and weighted.sampled(OWN).scale == pytest.approx(64 / 48)


@pytest.mark.parametrize(("shuffle", "grouped"), [(True, [Draw(24, 256, True)]), (False, [])])
def test_what_is_compared_with_the_users_settings(shuffle: bool, grouped: list[Draw]) -> None:
    found = epoch_of(conversations_of(1, 100), shuffle).others(Draw(24, 256))
    assert found["group_by_prefix"] == grouped
    assert [draw.batch_size for draw in found["batch_size"]] == [48, 96]
    assert [draw.max_tokens for draw in found["max_tokens"]] == [512, 1024, 2048]


# Seconds


def setup_of(build: Callable[[int, torch.device], Any], num_layers: int = 2, period: int = 1) -> RunSetup:
    return RunSetup(
        build=build,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
        forward=nullcontext,
        device=CPU,
        num_layers=num_layers,
        period=period,
    )


def linear(num_layers: int, device: torch.device) -> torch.nn.Module:
    """A model of 100 parameters for each layer."""
    return torch.nn.ModuleList(torch.nn.Linear(10, 10, bias=False, device=device) for _ in range(num_layers))


BATCHES: dict[Any, list[Batch]] = {arm: [{"input_ids": torch.zeros(1, rows)} for rows in (100, 800)] for arm in ARMS}


def seconds_of(arm: str, rows: int, num_layers: int) -> float:
    return rows * (0.01 if arm == "radix" else 0.03) + num_layers * rows * 1e-3


@pytest.mark.parametrize(
    ("num_layers", "period", "depths"), [(28, 1, [3, 1]), (3, 1, [3]), (1, 1, [1]), (34, 6, [18, 6])]
)
def test_further_layers_take_as_much_as_those_between(
    num_layers: int, period: int, depths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[int] = []

    def by_law(setup: RunSetup, num_layers: int, batches: Mapping[Any, Sequence[Batch]], *limits: float) -> Any:
        timed.append(num_layers)
        largest = {arm: batches[arm][-1] for arm in ARMS}
        seconds = {arm: seconds_of(arm, num_rows(largest[arm]), num_layers) for arm in ARMS}
        return largest, {**seconds, OPTIMIZER: 0.01 + 0.002 * num_layers}

    monkeypatch.setattr(prediction, "time_batches", by_law)
    rows = {"radix": 400, "ordinary": 3000}
    sampled = SampledSteps(draw=OWN, num_steps=2, scale=1.0, num_tokens={"radix": 1, "ordinary": 1}, num_rows=rows)
    found, layers = predict_seconds(setup_of(linear, num_layers, period), BATCHES, sampled, 50)
    assert timed == depths and layers == tuple(sorted(depths))
    overhead = 2 * (0.01 + 0.002 * num_layers + prediction.STEP_SECONDS)
    for arm, number in rows.items():
        assert found[arm] == pytest.approx(seconds_of(arm, number, num_layers) + overhead)


def test_a_model_that_memory_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction, "free_bytes", lambda device: 2.0 * 3 * 1600 - 1)
    with pytest.raises(UserError, match=r"^3 of its 28 layers with gradients and optimizer need 0\.0 GiB, and 0\.0"):
        predict_seconds(setup_of(linear, 28), BATCHES, None, 50)  # type: ignore[arg-type]


def test_what_is_timed(tiny_qwen3: Callable[..., Any]) -> None:
    """Parts of a step, cut as a step is: the largest of each arm, or only the smallest without time or memory."""
    rows = (np.concatenate([np.full(30, 1), [first], np.full(4, 2)]) for first in range(16))
    batches = epoch_of([[TokenRow(ids, ids, "x:1")] for ids in rows]).timed_batches(Draw(16, 200))
    assert [num_rows(batch) for batch in batches["radix"]] == [30 + 5 * rows for rows in (1, 2, 4, 8, 16)]
    assert [num_rows(batch) for batch in batches["ordinary"]] == [35 * rows for rows in (1, 2, 4, 5, 5)]
    setup = setup_of(lambda num_layers, device: tiny_qwen3(num_hidden_layers=num_layers).train())
    for limits, place in (((), -1), ((0.0,), 0), ((1e6, 1.0), 0)):
        chosen, seconds = time_batches(setup, 1, batches, *limits)
        for arm in ARMS:
            assert num_rows(chosen[arm]) == num_rows(batches[arm][place])
        assert set(seconds) == {*ARMS, OPTIMIZER} and min(seconds.values()) > 0
