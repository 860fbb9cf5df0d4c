"""Two and four ranks train the trajectory of one process: all weights or adapters, with both strategies, in float64.

In some steps three of four ranks have no sequence, and the ranks have 1 to 24 labels.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import cases
from tests.support.processes import FLOAT64
from tests.support.runs import assert_same_trajectory

WEIGHTS: dict[str, dict[str, Any]] = {
    "full": FLOAT64,
    "LoRA": {**FLOAT64, "model__use_peft": "true", "model__learning_rate": 1e-3},
    "recomputed": {**FLOAT64, "model__activation_checkpointing": "true"},
    "half of the layers recomputed": {**FLOAT64, "model__activation_checkpointing": 0.5},
}
ON_LAYERS = {"recomputed": [(2, 1)], "half of the layers recomputed": [(2, 1), (4, 2)]}  # the slow ones
CASES = [
    (weights, strategy, ranks, sp_size)
    for weights in WEIGHTS
    for strategy in ("ddp", "fsdp2")
    for ranks in (2, 4)
    for sp_size in (1, 2)
    if "recomputed" not in weights or (ranks, sp_size) in ON_LAYERS[weights]
]
QUICK = [("full", "ddp", 2, 1), ("full", "fsdp2", 2, 1), ("full", "ddp", 2, 2)]


@pytest.mark.parametrize(("weights", "strategy", "ranks", "sp_size"), cases(CASES, QUICK))
def test_ranks_take_the_steps_of_one_process(
    train, reference, deep_model, print_after, weights, strategy, ranks, sp_size
):
    """It keeps all activations. With `sp_size` 2: one or two groups."""
    flags = WEIGHTS[weights] | ({"model__model_name_or_path": deep_model} if "recomputed" in weights else {})
    run = train("ranks", ranks=ranks, strategy=strategy, sp_size=sp_size, **flags)
    told = assert_same_trajectory(run, reference(**{**flags, "model__activation_checkpointing": None}))
    print_after("devices", f"{weights}, {ranks} ranks, {strategy}, sp_size {sp_size}: {told}")
