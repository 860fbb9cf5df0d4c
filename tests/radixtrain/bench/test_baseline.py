"""How many sequences of an ordinary micro-batch are fastest, if memory holds them."""

import math
from typing import Any

import pytest
import torch

import radixtrain.bench.baseline
from radixtrain.bench.arms import OrdinaryArm
from radixtrain.bench.baseline import fastest_ordinary
from radixtrain.bench.cells import GivenBatch, ModelShape, build_model
from radixtrain.bench.work import work_of
from radixtrain.errors import UserError

SHAPE = ModelShape(num_hidden_layers=2, hidden_size=32, head_dim=8, vocab_size=97)
RAGGED = GivenBatch(SHAPE, "8 of train.jsonl", 8)


def model_of(dtype: torch.dtype = torch.float32) -> Any:
    return build_model(SHAPE, torch.device("cpu"), dtype, "sdpa")


class TestFastestOrdinary:
    def test_the_fastest_is_taken(self, monkeypatch: pytest.MonkeyPatch, ragged_features: Any) -> None:
        tried = {}

        def timed(model: Any, runs: dict[int, Any], repeats: int) -> dict[int, list[float]]:
            tried.update({size: len(work.ordinary) for size, (_, work) in runs.items()})
            return {size: [9.0, abs(size - 3.0), 0.0] for size in runs}

        monkeypatch.setattr(radixtrain.bench.baseline, "step_seconds", timed)
        work, seconds = fastest_ordinary(model_of(), work_of(RAGGED, ragged_features), (2, 3, 50, None))
        assert tried == {2: 4, 3: 3, 8: 1}  # more than there are means all of them, tried once
        assert seconds == {2: 1.0, 3: 0.0, 8: 5.0}
        assert len(work.ordinary) == 3

    def test_what_memory_does_not_hold_is_left_out(self, monkeypatch: pytest.MonkeyPatch, ragged_features: Any) -> None:
        run_step = OrdinaryArm.run_step

        def small(self: OrdinaryArm, model: Any, work: Any) -> None:
            if len(work.ordinary) == 1:
                raise torch.OutOfMemoryError
            run_step(self, model, work)

        monkeypatch.setattr(OrdinaryArm, "run_step", small)
        work, seconds = fastest_ordinary(model_of(), work_of(RAGGED, ragged_features), (4, None), repeats=1)
        assert seconds[8] == math.inf > seconds[4] > 0 and len(work.ordinary) == 2
        with pytest.raises(UserError, match=r"the device's memory holds no ordinary micro-batch of \[8\] sequences"):
            fastest_ordinary(model_of(), work, (None,))
