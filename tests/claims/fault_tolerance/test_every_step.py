"""A run goes on from every one of its 15 steps as if it had never stopped: metrics, weights and optimizer, bit for bit.

Each set-up trains once, with a checkpoint after every step, and then again from some of them, in this process.
`make test-full` draws three steps of each set-up; RADIXTRAIN_TRIES=250 takes all.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from batch_contents import write_overflowing
from outcomes import EXACT, assert_same_run, conclusions, num_batches, steps_saved
from tiers import FULL, cases, tries

from radixtrain.__main__ import main

STEPS = 15  # three epochs
RESUMED = tries(3, STEPS)
DROPOUT = {"model__use_peft": "true", "model__lora_dropout": 0.3, "model__allow_dropout": "[lora_dropout]"}
VALIDATED = {"validates": True, "trainer__val_check_interval": 2}
SET_UPS: dict[str, dict[str, Any]] = {
    "schedule with warm-up": {"model__lr_scheduler_type": "cosine", "model__warmup_steps": 0.2},
    "one worker": {"data__dataloader_num_workers": 1},
    "two workers": {"data__dataloader_num_workers": 2},
    "max_steps": {"trainer__max_steps": STEPS, "trainer__max_epochs": None},
    "max_steps inside an epoch": {"trainer__max_steps": STEPS - 3, **VALIDATED},
    "grouped by prefix": {"data__group_by_prefix": 3},
    "validations inside epochs": VALIDATED,
    "validations after two epochs": {"validates": True, "trainer__check_val_every_n_epoch": 2},
    "validations of no epoch": {
        **{"validates": True, "trainer__val_check_interval": 4, "trainer__check_val_every_n_epoch": None}
    },
    "dropout": DROPOUT,
    "muon": {"model__optimizer": "muon", "model__weight_decay": 0.1},
    "muon on adapters": {"model__optimizer": "muon", "model__use_peft": "true"},
    "adamw_8bit": {"model__optimizer": "adamw_8bit", "model__weight_decay": 0.1, "model__dtype": "bfloat16"},
    "hybrid": {"model__model_name_or_path": "hybrid"},
    "bf16-mixed": {"trainer__precision": "bf16-mixed"},
    "ordinary batches": {"dedup": "false", "validates": True},
    "skipped steps": {"data__train_file": "overflowing", "model__on_nonfinite": "skip"},
    "save_best and early_stopping": {
        **{"validates": True, "save_best": "eval_loss", "early_stopping": 2, "trainer__val_check_interval": 1},
        # Too small to change a weight: no validation is better than the first one, on any processor.
        **{"model__learning_rate": 1e-30, "model__lr_scheduler_type": "constant"},
    },
}


@pytest.fixture(scope="module")
def hybrid(shop: Path, tiny_hybrid: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A layer with a recurrent state and one that attends, with the tokenizer of the shop."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("hybrid")
    tokenizer = AutoTokenizer.from_pretrained(shop / "model")
    tiny_hybrid("Qwen3.5", vocab_size=-(-len(tokenizer) // 64) * 64, max_position_embeddings=512).save_pretrained(
        folder
    )
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_overflowing(tmp_path_factory.mktemp("overflowing"))


@pytest.fixture
def ran(
    arguments: Callable[..., list[str]], shop: Path, hybrid: Path, overflowing: Path, tmp_path: Path
) -> Iterator[Callable[..., Path]]:
    """`ran("name", flag=...)`: trains into that folder, and gives it back."""
    places = {"hybrid": hybrid, "overflowing": overflowing}

    def run(name: str, **flags: Any) -> Path:
        flags = {"trainer__max_epochs": 3, **EXACT, **flags}
        if flags.pop("validates", False):
            flags["data__validation_file"] = shop / "validation.jsonl"
        flags = {key: places.get(value, value) if isinstance(value, str) else value for key, value in flags.items()}
        assert main(arguments(output_dir=tmp_path / name, **flags)) == 0
        return tmp_path / name

    yield run


@pytest.mark.parametrize("set_up", cases(SET_UPS, ["validations inside epochs"]))
def test_a_run_goes_on_from_every_step(ran, set_up, print_after):
    flags = SET_UPS[set_up]
    if flags.get("model__use_peft"):
        pytest.importorskip("peft", reason="pip install peft")
    if flags.get("model__optimizer") == "adamw_8bit":
        pytest.importorskip("bitsandbytes", reason="pip install bitsandbytes")
    whole = ran("whole", **flags, save_every_steps=1, save_total_limit=STEPS)
    best = link(whole, "best")
    steps = steps_saved(whole)[:-1]
    chosen = sorted(random.Random(set_up).sample(steps, min(RESUMED, len(steps))))
    for step in chosen:
        checkpoint = whole / "checkpoints" / f"step={step}"
        resumed = ran(f"from_{step}", ckpt_path=checkpoint, **flags)
        assert_same_run(resumed, whole, since=num_batches(checkpoint))
        assert conclusions(resumed) == conclusions(whole)
        assert link(whole, "best") == best, f"a run that goes on from step {step} elsewhere has moved it"
    print_after("survival", f"resumed, {set_up}: from {len(chosen)} of {len(steps)} steps, bit-equal")


@FULL
def test_the_set_ups_are_what_they_are_called(ran):
    """A step of each epoch is left out, and the best step is not the last."""
    skipped = ran("skipped", **SET_UPS["skipped steps"], save_every_steps=1, save_total_limit=STEPS)
    assert max(steps_saved(skipped)) == STEPS - 3
    judged = ran("judged", **SET_UPS["save_best and early_stopping"])
    assert conclusions(judged)["best"]["step"] < max(steps_saved(judged)) < STEPS
    assert conclusions(judged)["ended"] == "early_stopping"


def link(folder: Path, name: str) -> str:
    path = folder / "checkpoints" / name
    return os.readlink(path) if path.is_symlink() else ""
