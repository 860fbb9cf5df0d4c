"""Two and four ranks train the trajectory of one process: all weights or adapters, with both strategies, in float64.

In some steps three of four ranks have no sequence, and the ranks have 1 to 24 labels.
"""

from __future__ import annotations

from typing import Any

import pytest
from changed_runs import FLOAT64
from device_trajectories import assert_same_trajectory
from tiers import cases

WEIGHTS: dict[str, dict[str, Any]] = {
    "full": FLOAT64,
    "LoRA": {**FLOAT64, "model__use_peft": "true", "model__learning_rate": 1e-3},
    "recomputed": {**FLOAT64, "model__activation_checkpointing": "true"},
}
CASES = [(weights, strategy, ranks) for weights in WEIGHTS for strategy in ("ddp", "fsdp2") for ranks in (2, 4)]


@pytest.mark.parametrize(("weights", "strategy", "ranks"), cases(CASES, [("full", "ddp", 2), ("full", "fsdp2", 2)]))
def test_ranks_take_the_steps_of_one_process(train, reference, print_after, weights, strategy, ranks):
    run = train("ranks", ranks=ranks, strategy=strategy, **WEIGHTS[weights])
    told = assert_same_trajectory(run, reference(**WEIGHTS[weights]))
    print_after("devices", f"{weights}, {ranks} ranks, {strategy}: {told}")
