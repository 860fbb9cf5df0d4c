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
    "half of the layers recomputed": {**FLOAT64, "model__activation_checkpointing": 0.5},
}
CASES = [(weights, strategy, ranks) for weights in WEIGHTS for strategy in ("ddp", "fsdp2") for ranks in (2, 4)]


@pytest.mark.parametrize(("weights", "strategy", "ranks"), cases(CASES, [("full", "ddp", 2), ("full", "fsdp2", 2)]))
def test_ranks_take_the_steps_of_one_process(train, reference, deep_model, print_after, weights, strategy, ranks):
    """That keeps all activations."""
    flags = WEIGHTS[weights] | ({"model__model_name_or_path": deep_model} if "recomputed" in weights else {})
    run = train("ranks", ranks=ranks, strategy=strategy, **flags)
    told = assert_same_trajectory(run, reference(**{**flags, "model__activation_checkpointing": None}))
    print_after("devices", f"{weights}, {ranks} ranks, {strategy}: {told}")
