"""A checkpoint goes on with any number of ranks and with either strategy; with its own, bit for bit.

`make test-full` goes on from one step of each set-up; RADIXTRAIN_TRIES=600 from every one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from batch_contents import write_overflowing
from changed_runs import FLOAT64
from device_trajectories import assert_same_trajectory
from outcomes import assert_same_run, conclusions, num_batches, steps_saved
from tiers import FULL, tries

STEPS = 12
RESUMED = tries(1, STEPS)
ALL_SAVED = {"save_every_steps": 1, "save_total_limit": STEPS}
pytestmark = FULL

# Ranks and strategy of each part. A part begins with the 5th or the 9th step, inside an epoch, and goes on to the end.
CHAINS: dict[str, list[tuple[int, str | None]]] = {
    "2, 1 and 4 ranks": [(2, "fsdp2"), (1, None), (4, "ddp")],
    "fsdp2, ddp and fsdp2": [(2, "fsdp2"), (4, "ddp"), (2, "fsdp2")],
    "4, 1 and 2 ranks": [(4, "fsdp2"), (1, None), (2, "fsdp2")],
}
LORA = {"model__use_peft": "true", "model__learning_rate": 1e-3}
DROPOUT = {**LORA, "model__lora_dropout": 0.3, "model__allow_dropout": "[lora_dropout]"}
SKIPS = {"data__train_file": "overflowing", "model__on_nonfinite": "skip"}
JUDGED = {
    **{"data__validation_file": "rows", "trainer__val_check_interval": 1, "save_best": "eval_loss"},
    **{"early_stopping": 2, "model__learning_rate": 0.1, "model__lr_scheduler_type": "constant"},
}
SET_UPS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "four ranks": (4, "ddp", DROPOUT),
    "a worker": (2, "ddp", {"data__dataloader_num_workers": 1}),
    "skipped steps": (2, "fsdp2", SKIPS),
    "skipped steps, ddp": (2, "ddp", SKIPS),
    "skipped steps, split": (2, "ddp", {**SKIPS, "sp_size": 2}),
    "dropout, split": (4, "fsdp2", {**DROPOUT, "sp_size": 2}),
    "muon": (2, "ddp", {"model__optimizer": "muon"}),
    "save_best": (2, "ddp", JUDGED),
    "four sharded ranks": (4, "fsdp2", {}),
    "sharded dropout": (2, "fsdp2", DROPOUT),
}


@pytest.mark.parametrize(("chain", "weights"), [*((chain, "full") for chain in CHAINS), ("2, 1 and 4 ranks", "LoRA")])
def test_other_ranks_go_on(train, reference, print_after, chain, weights):
    flags = {**FLOAT64, **(LORA if weights == "LoRA" else {})}
    whole, checkpoint = reference(**flags), None
    for part, (ranks, strategy) in enumerate(CHAINS[chain]):
        run = train(f"part_{part}", ranks=ranks, strategy=strategy, ckpt_path=checkpoint, **flags, **ALL_SAVED)
        told = assert_same_trajectory(run, whole, since=4 * part)
        checkpoint = run / "checkpoints" / f"step={4 * (part + 1)}"
    print_after("devices", f"{weights}, resumed with {chain}: the trajectory of one process; {told}")


def test_another_split_goes_on(train, reference, print_after):
    """One process, two ranks as one, two groups of two, and two ranks by data parallel."""
    whole, checkpoint = reference(**FLOAT64), None
    parts = [(1, 1, None), (2, 2, "ddp"), (4, 2, "fsdp2"), (2, 1, "ddp")]
    for part, (ranks, sp_size, strategy) in enumerate(parts):
        options = {"ranks": ranks, "sp_size": sp_size, "strategy": strategy}
        run = train(f"part_{part}", ckpt_path=checkpoint, **options, **FLOAT64, **ALL_SAVED)
        told = assert_same_trajectory(run, whole, since=3 * part)
        checkpoint = run / "checkpoints" / f"step={3 * (part + 1)}"
    print_after("devices", f"resumed 1, sp 2, 2 x 2, 2: the trajectory of one process; {told}")


def test_another_share_of_recomputed_layers_goes_on(train, reference, deep_model, print_after):
    """Each part recomputes other layers: the trajectory of a run that recomputes none."""
    flags = {**FLOAT64, "model__model_name_or_path": deep_model}
    whole, checkpoint = reference(**flags), None
    for part, share in enumerate((0.5, "true", 0.25)):
        options = {"ckpt_path": checkpoint, "model__activation_checkpointing": share, **ALL_SAVED}
        run = train(f"part_{part}", **flags, **options)
        told = assert_same_trajectory(run, whole, since=4 * part)
        checkpoint = run / "checkpoints" / f"step={4 * (part + 1)}"
    print_after("devices", f"half, all and a quarter of the layers recomputed: the same trajectory; {told}")


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


@pytest.mark.parametrize("set_up", SET_UPS)
def test_the_same_ranks_go_on_bit_for_bit(train, flags_of, print_after, set_up):
    ranks, strategy, _ = SET_UPS[set_up]
    options = {"ranks": ranks, "strategy": strategy, **flags_of(set_up)}
    whole = train("whole", **options, **ALL_SAVED)
    steps = steps_saved(whole)[:-1]
    chosen = sorted(random.Random(set_up).sample(steps, min(RESUMED, len(steps))))
    for step in chosen:
        checkpoint = whole / "checkpoints" / f"step={step}"
        resumed = train(f"from_{step}", ckpt_path=checkpoint, **options)
        assert_same_run(resumed, whole, since=num_batches(checkpoint))
        assert conclusions(resumed) == conclusions(whole)
    print_after("devices", f"resumed, {set_up}: from {len(chosen)} of {len(steps)} steps, bit-equal")


@pytest.mark.parametrize("set_up", ["skipped steps", "skipped steps, ddp", "skipped steps, split", "save_best"])
def test_ranks_decide_as_one_process(train, flags_of, set_up):
    """Which steps are left out, which are best, when training ends."""
    ranks, strategy, _ = SET_UPS[set_up]
    flags = {**flags_of(set_up), **(FLOAT64 if set_up == "save_best" else {})}  # in which no weight overflows
    whole = train("whole", **{**flags, "sp_size": 1})
    run = train("ranks", ranks=ranks, strategy=strategy, **flags)
    here, there = conclusions(run), conclusions(whole)
    for name in ("ended", "num_skipped"):
        assert here[name] == there[name], name
    # The loss of a validation is summed in another order.
    judged, as_one = (of_run["exported"].pop("validation") or {} for of_run in (here, there))
    assert here["exported"] == there["exported"] and judged == pytest.approx(as_one, rel=1e-12)
    assert (here["best"] or {}).get("step") == (there["best"] or {}).get("step")
    assert bool(here["best"]) == (set_up == "save_best") and bool(here["num_skipped"]) == ("skipped" in set_up)
