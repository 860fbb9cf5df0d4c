"""Two and four ranks train the trajectory of one process: 20 steps, all weights or adapters, with both strategies.

In float32 the order of a sum changes its last digits. Weights are compared to 1e-6 of the largest of their tensor,
losses to 2e-6, moments and gradient norms to 1e-5. AdamW hardly feels the size of a gradient, but its moments do. At
ten times the learning rate two orders of sums in a single process differ by 3e-6 in a weight whose gradients nearly
vanish.

In some steps three of four ranks have no sequence, and the ranks have 1 to 24 labels. The gradients of single steps are
compared in float64 in `tests/radixtrain/training/devices`. RADIXTRAIN_TRIES=1 runs all twelve set-ups.
"""

from __future__ import annotations

from typing import Any

import pytest
from device_trajectories import assert_same_trajectory
from tiers import cases

WEIGHTS: dict[str, dict[str, Any]] = {
    "full": {},
    "LoRA": {"model__use_peft": "true", "model__learning_rate": 1e-3},
    "recomputed": {"model__activation_checkpointing": "true"},
}
DEFAULT = [("full", "ddp", 2), ("LoRA", "fsdp2", 4)]
CASES = [(weights, strategy, ranks) for weights in WEIGHTS for strategy in ("ddp", "fsdp2") for ranks in (2, 4)]


@pytest.mark.parametrize("case", cases(CASES, DEFAULT), ids=str)
def test_ranks_take_the_steps_of_one_process(train, reference, print_after, case):
    weights, strategy, ranks = case
    run = train("ranks", ranks=ranks, strategy=strategy, **WEIGHTS[weights])
    told = assert_same_trajectory(run, reference(**WEIGHTS[weights]))
    print_after("devices", f"{weights}, {ranks} ranks, {strategy}, 20 steps: {told}")
