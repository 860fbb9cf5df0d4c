"""A run goes on from a checkpoint of any step: bit for bit, and to rounding on another number of ranks or strategy.

`make test-full` goes on from two steps of each set-up; RADIXTRAIN_TRIES=300 from every one.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from radixtrain.checkpoints.folder import read_run
from tests.support import FULL, cases, tries
from tests.support.processes import FLOAT64
from tests.support.runs import assert_same_run, assert_same_trajectory, steps_saved, summary


def num_batches(checkpoint: Path) -> int:
    """Until a checkpoint; they are what a logger counts by."""
    return int(read_run(checkpoint)["position"]["num_batches"])


def conclusions(folder: Path) -> dict[str, Any]:
    """Of the weights in `model/`, of the best ones, why the run ended, and the steps that were left out."""
    found = summary(folder)
    best = {key: value for key, value in (found["best"] or {}).items() if key != "path"}
    skipped = read_run(folder / "checkpoints" / "last")["num_skipped"]
    return {"best": best, "exported": found["exported"], "ended": found["ended"]["reason"], "num_skipped": skipped}


def write_overflowing(folder: Path) -> Path:
    """20 rows of tokens, of which the 8th makes its step overflow: with `on_nonfinite: skip`, one of each epoch."""
    draw = random.Random(0)
    path = folder / "rows.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for number in range(20):
            ids = [*range(40, 60), *(draw.randrange(40, 200) for _ in range(6))]
            weights = [0.0] * 20 + [2e38 if number == 7 else 1.0] * 6
            file.write(f"{json.dumps({'input_ids': ids, 'labels': ids, 'loss_weights': weights})}\n")
    return path


STEPS = 12
RESUMED = tries(2, STEPS)
ALL_SAVED = {"save_every_steps": 1, "save_total_limit": STEPS}
LORA = {"model__use_peft": "true", "model__learning_rate": 1e-3}
DROPOUT = {**LORA, "model__lora_dropout": 0.3, "model__allow_dropout": "[lora_dropout]"}
SKIPS = {"data__train_file": "overflowing", "model__on_nonfinite": "skip"}
JUDGED = {
    **{"data__validation_file": "rows", "trainer__val_check_interval": 1, "save_best": "eval_loss"},
    **{"early_stopping": 2, "model__learning_rate": 0.1, "model__lr_scheduler_type": "constant"},
}
VALIDATED = {"data__validation_file": "rows", "trainer__val_check_interval": 2}


def on(ranks: int, strategy: str, sp_size: int = 1) -> dict[str, Any]:
    return {"ranks": ranks, "strategy": strategy, "sp_size": sp_size}


ONE: dict[str, Any] = {}
RECOMPUTED = "model__activation_checkpointing"
# The flags of all parts, and those of each. The steps are divided among the parts, which begin inside an epoch.
CHAINS = {
    "2, 1 and 4 ranks": ({}, [on(2, "fsdp2"), ONE, on(4, "ddp")]),
    "2, 1 and 4 ranks, LoRA": (LORA, [on(2, "fsdp2"), ONE, on(4, "ddp")]),
    "fsdp2, ddp and fsdp2": ({}, [on(2, "fsdp2"), on(4, "ddp"), on(2, "fsdp2")]),
    "4, 1 and 2 ranks": ({}, [on(4, "fsdp2"), ONE, on(2, "fsdp2")]),
    "splits by 1, 2, 2 x 2, 1": ({}, [ONE, on(2, "ddp", 2), on(4, "fsdp2", 2), on(2, "ddp")]),
    "half, all, a quarter recomputed": (
        {"model__model_name_or_path": "deep"},
        [{RECOMPUTED: 0.5}, {RECOMPUTED: "true"}, {RECOMPUTED: 0.25}],
    ),
}
SET_UPS: dict[str, dict[str, Any]] = {
    "schedule with warm-up": {"model__lr_scheduler_type": "cosine", "model__warmup_steps": 0.2},
    "one worker": {"data__dataloader_num_workers": 1},
    "two workers": {"data__dataloader_num_workers": 2},
    "epochs": {"trainer__max_epochs": 2, "trainer__max_steps": None},
    "max_steps inside an epoch": {"trainer__max_steps": STEPS - 3, **VALIDATED},
    "grouped by prefix": {"data__group_by_prefix": 3},
    "validations inside epochs": VALIDATED,
    "validations of no epoch": {"data__validation_file": "rows", "trainer__val_check_interval": 4},
    "dropout": DROPOUT,
    "muon, decayed": {"model__optimizer": "muon", "model__weight_decay": 0.1},
    "muon on adapters": {"model__optimizer": "muon", "model__use_peft": "true"},
    "adamw_8bit": {"model__optimizer": "adamw_8bit", "model__weight_decay": 0.1, "model__dtype": "bfloat16"},
    "hybrid": {"model__model_name_or_path": "hybrid"},
    "bf16-mixed": {"trainer__precision": "bf16-mixed"},
    "ordinary batches": {"dedup": "false", "data__validation_file": "rows"},
    "four ranks": {**on(4, "ddp"), **DROPOUT},
    "a worker of each rank": {**on(2, "ddp"), "data__dataloader_num_workers": 1},
    "skipped steps": {**on(2, "fsdp2"), **SKIPS},
    "skipped steps, ddp": {**on(2, "ddp"), **SKIPS},
    "skipped steps, split": {**on(2, "ddp", 2), **SKIPS},
    "dropout, split": {**on(4, "fsdp2", 2), **DROPOUT},
    "muon on ranks": {**on(2, "ddp"), "model__optimizer": "muon"},
    "save_best": {**on(2, "ddp"), **JUDGED},
    "four sharded ranks": on(4, "fsdp2"),
    "sharded dropout": {**on(2, "fsdp2"), **DROPOUT},
}
DECIDED = ["skipped steps", "skipped steps, ddp", "skipped steps, split", "save_best"]


@FULL
@pytest.mark.parametrize("chain", CHAINS)
def test_other_ranks_go_on(train, reference, deep_model, print_after, chain):
    """The trajectory of one process that keeps all activations."""
    flags, parts = CHAINS[chain]
    flags = FLOAT64 | {key: deep_model if value == "deep" else value for key, value in flags.items()}
    whole, checkpoint, steps = reference(**flags), None, STEPS // len(parts)
    for number, part in enumerate(parts):
        run = train(f"part_{number}", ckpt_path=checkpoint, **part, **flags, **ALL_SAVED)
        told = assert_same_trajectory(run, whole, since=steps * number)
        checkpoint = run / "checkpoints" / f"step={steps * (number + 1)}"
    print_after("devices", f"resumed with {chain}: the trajectory of one process; {told}")


@pytest.fixture(scope="session")
def overflowing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_overflowing(tmp_path_factory.mktemp("overflowing"))


@pytest.fixture(scope="session")
def hybrid(shop: Path, tiny_hybrid: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A layer with a recurrent state and one that attends, with the tokenizer of the shop."""
    folder, tokenizer = tmp_path_factory.mktemp("hybrid"), AutoTokenizer.from_pretrained(shop / "model")
    vocab_size = -(-len(tokenizer) // 64) * 64
    tiny_hybrid("Qwen3.5", vocab_size=vocab_size, max_position_embeddings=512).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def flags_of(rows: Path, overflowing: Path, hybrid: Path) -> Callable[[str], dict[str, Any]]:
    """The flags of a set-up, with the files that they name."""
    files = {"rows": rows, "overflowing": overflowing, "hybrid": hybrid}

    def build(set_up: str) -> dict[str, Any]:
        flags = SET_UPS[set_up]
        if flags.get("model__optimizer") == "adamw_8bit":
            pytest.importorskip("bitsandbytes", reason="pip install bitsandbytes")
        return {key: files.get(value, value) if isinstance(value, str) else value for key, value in flags.items()}

    return build


@pytest.mark.parametrize("set_up", cases(SET_UPS, ["validations inside epochs"]))
def test_the_same_ranks_go_on_bit_for_bit(train, flags_of, print_after, set_up):
    options = flags_of(set_up)
    whole = train("whole", **options, **ALL_SAVED)
    steps, best = steps_saved(whole)[:-1], best_of(whole)
    chosen = sorted(random.Random(set_up).sample(steps, min(RESUMED, len(steps))))
    for step in chosen:
        checkpoint = whole / "checkpoints" / f"step={step}"
        resumed = train(f"from_{step}", ckpt_path=checkpoint, **options)
        assert_same_run(resumed, whole, since=num_batches(checkpoint))
        assert conclusions(resumed) == conclusions(whole)
        assert best_of(whole) == best, f"a run that goes on from step {step} elsewhere has moved it"
    print_after("survival", f"resumed, {set_up}: from {len(chosen)} of {len(steps)} steps, bit-equal")


def best_of(folder: Path) -> str:
    path = folder / "checkpoints" / "best"
    return os.readlink(path) if path.is_symlink() else ""


@FULL
@pytest.mark.parametrize("set_up", DECIDED)
def test_ranks_decide_as_one_process(train, flags_of, set_up):
    """Which steps are left out, which are best, when training ends."""
    flags = {**flags_of(set_up), **(FLOAT64 if set_up == "save_best" else {})}  # in which no weight overflows
    whole, run = train("whole", **{**flags, **on(1, "auto")}), train("ranks", **flags)
    here, there = conclusions(run), conclusions(whole)
    for name in ("ended", "num_skipped"):
        assert here[name] == there[name], name
    # The loss of a validation is summed in another order.
    judged, as_one = (of_run["exported"].pop("validation") or {} for of_run in (here, there))
    assert here["exported"] == there["exported"] and judged == pytest.approx(as_one, rel=1e-12)
    assert (here["best"] or {}).get("step") == (there["best"] or {}).get("step")
    assert bool(here["best"]) == (set_up == "save_best") and bool(here["num_skipped"]) == ("skipped" in set_up)
    assert set_up != "save_best" or here["best"]["step"] < max(steps_saved(run)) < STEPS
