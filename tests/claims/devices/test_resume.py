"""A checkpoint goes on with any number of ranks and with either strategy; with its own, bit for bit.

RADIXTRAIN_TRIES=20 goes on from each of the 20 steps of every set-up; by default from one step of one.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from device_trajectories import assert_same_trajectory
from outcomes import assert_same_run
from overflowing import write_overflowing
from tiers import cases, tries

STEPS = 20
RESUMED = tries(1, STEPS)
ALL_SAVED = {"save_every_steps": 1, "save_total_limit": STEPS}

# Ranks and strategy of each part. A part begins with the 8th or the 15th step, inside an epoch, and goes on to the end.
CHAINS: dict[str, list[tuple[int, str | None]]] = {
    "2, 1 and 4 ranks": [(2, "fsdp2"), (1, None), (4, "ddp")],
    "fsdp2, ddp and fsdp2": [(2, "fsdp2"), (4, "ddp"), (2, "fsdp2")],
    "4, 1 and 2 ranks": [(4, "fsdp2"), (1, None), (2, "fsdp2")],
}
LORA = {"model__use_peft": "true", "model__learning_rate": 1e-3}
DROPOUT = {**LORA, "model__lora_dropout": 0.3, "model__allow_dropout": "[lora_dropout]"}
JUDGED = {
    **{"data__validation_file": "rows", "trainer__val_check_interval": 1, "save_best": "eval_loss"},
    **{"early_stopping": 4, "model__learning_rate": 0.1, "model__lr_scheduler_type": "constant"},
}
SET_UPS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "four ranks": (4, "ddp", DROPOUT),
    "four ranks, all weights": (4, "ddp", {}),
    "a worker": (2, "ddp", {"data__dataloader_num_workers": 1}),
    "dropout": (2, "ddp", DROPOUT),
    "skipped steps": (2, "fsdp2", {"data__train_file": "overflowing", "model__on_nonfinite": "skip"}),
    "skipped steps, ddp": (2, "ddp", {"data__train_file": "overflowing", "model__on_nonfinite": "skip"}),
    "save_best": (2, "ddp", JUDGED),
    "four sharded ranks": (4, "fsdp2", {}),
    "sharded dropout": (2, "fsdp2", DROPOUT),
    "sharded save_best": (2, "fsdp2", JUDGED),
}


@pytest.mark.parametrize("weights", cases(["full", "LoRA"], ["full"]))
@pytest.mark.parametrize("chain", cases(CHAINS, ["2, 1 and 4 ranks"]))
def test_other_ranks_go_on(train, reference, print_after, chain, weights):
    flags = {**(LORA if weights == "LoRA" else {}), **ALL_SAVED}
    whole, checkpoint = reference(**(LORA if weights == "LoRA" else {})), None
    for part, (ranks, strategy) in enumerate(CHAINS[chain]):
        run = train(f"part_{part}", ranks=ranks, strategy=strategy, ckpt_path=checkpoint, **flags)
        told = assert_same_trajectory(run, whole, since=7 * part)
        checkpoint = run / "checkpoints" / f"step={7 * (part + 1)}"
    print_after("devices", f"{weights}, resumed with {chain}: the trajectory of one process; {told}")


@pytest.fixture(scope="session")
def overflowing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_overflowing(tmp_path_factory.mktemp("overflowing"))


@pytest.fixture
def flags_of(rows: Path, overflowing: Path) -> Callable[[str], dict[str, Any]]:
    """The flags of a set-up, with the files that they name."""
    files = {"rows": rows, "overflowing": overflowing}

    def build(set_up: str) -> dict[str, Any]:
        flags = SET_UPS[set_up][2]
        return {key: files.get(value, value) if isinstance(value, str) else value for key, value in flags.items()}

    return build


@pytest.mark.parametrize("set_up", cases(SET_UPS, ["four ranks"]))
def test_the_same_ranks_go_on_bit_for_bit(train, flags_of, print_after, set_up):
    ranks, strategy, _ = SET_UPS[set_up]
    options = {"ranks": ranks, "strategy": strategy, **flags_of(set_up)}
    whole = train("whole", **options, **ALL_SAVED)
    steps = sorted(int(path.name.removeprefix("step=")) for path in (whole / "checkpoints").glob("step=*"))
    chosen = sorted(random.Random(set_up).sample(steps, min(RESUMED, len(steps))))
    for step in chosen:
        checkpoint = whole / "checkpoints" / f"step={step}"
        resumed = train(f"from_{step}", ckpt_path=checkpoint, **options)
        assert_same_run(resumed, whole, since=num_batches(checkpoint))
        assert conclusions(resumed) == conclusions(whole)
    print_after("devices", f"resumed, {set_up}: from {len(chosen)} of {len(steps)} steps, bit-equal")


@pytest.mark.parametrize("set_up", cases(["skipped steps", "skipped steps, ddp", "save_best"], ["save_best"]))
def test_ranks_decide_as_one_process(train, flags_of, set_up):
    """Which steps are left out, which are best, when training ends."""
    ranks, strategy, _ = SET_UPS[set_up]
    whole = train("whole", **flags_of(set_up))
    run = train("ranks", ranks=ranks, strategy=strategy, **flags_of(set_up))
    here, there = conclusions(run), conclusions(whole)
    for name in ("ended", "exported", "num_skipped"):
        assert here[name] == there[name], name
    assert (here["best"] or {}).get("step") == (there["best"] or {}).get("step")
    assert bool(here["best"]) == (set_up == "save_best") and bool(here["num_skipped"]) == ("skipped" in set_up)


def num_batches(checkpoint: Path) -> int:
    """They are what a logger counts by."""
    return json.loads((checkpoint / "state.json").read_text())["radixtrain"]["position"]["num_batches"]


def conclusions(folder: Path) -> dict[str, Any]:
    """Of the weights in `model/`, of the best ones, why the run ended, and the steps that were left out."""
    found = json.loads((folder / "summary.json").read_text())
    best = {key: value for key, value in (found["best"] or {}).items() if key != "path"}
    state = json.loads((folder / "checkpoints" / "last" / "state.json").read_text())["radixtrain"]
    return {"best": best, "exported": found["exported"], "ended": found["ended"]["reason"], **state["skipped"]}
