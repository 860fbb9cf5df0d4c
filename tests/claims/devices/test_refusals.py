"""What a user gets wrong is told once, by one rank, and no rank is left waiting for another."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support import FULL
from tests.support.processes import (
    Launched,
    fail_on_rank_1,
    go_on_after_pause,
    pause,
    wait_until_paused,
    work_in_folder_of_rank,
)
from tests.support.runs import assert_nothing_left

WRONG: dict[str, tuple[int, dict[str, Any], str]] = {
    "a key": (2, {"model__learning_rat": 1}, "learning_rat"),
    "a file": (1, {"data__train_file": "nowhere.jsonl"}, "nowhere.jsonl"),
    "a row": (1, {"data__train_file": "broken"}, "rows.jsonl:3"),
    "a model": (1, {"model__model_name_or_path": "nowhere/model"}, "nowhere/model"),
    "an optimizer that cannot be sharded": (1, {"model__optimizer": "muon", "strategy": "fsdp2"}, "fsdp2 divides them"),
    "the weights": (1, {"model__lora_target_modules": "[nothing]", "model__use_peft": "true"}, "nothing"),
    "a checkpoint": (1, {"ckpt_path": "last"}, "ckpt_path"),
    "a group of no ranks": (1, {"sp_size": 3}, "sp_size 3: this run has 2 ranks, which it has to"),
    "a loss": (1, {"data__train_file": "overflowing"}, "loss"),
}


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """Rows of which the third is no row, and rows whose loss is not finite."""
    for name, weight in (("broken", 1.0), ("overflowing", 2e38)):
        row = {"input_ids": [*range(40, 50)], "labels": [*range(40, 50)], "loss_weights": [weight] * 10}
        lines = [json.dumps(row)] * 8
        if name == "broken":
            lines[2] = lines[2][:-3]
        (tmp_path / name).mkdir()
        (tmp_path / name / "rows.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return {name: tmp_path / name / "rows.jsonl" for name in ("broken", "overflowing")}


def assert_told_once(launched: Launched, code: int, text: str) -> None:
    """The first rank ends with that code, no other with success; one of them has said why, in one line."""
    codes = launched.wait()
    assert codes[0] == code and all(codes), f"{codes}\n{launched.said()}"
    (line,) = launched.errors()
    assert text in line and "Traceback" not in launched.said(), launched.said()
    launched.wait_for_workers()


@FULL
@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_told_once(launch, files, tmp_path, wrong):
    code, flags, text = WRONG[wrong]
    flags = {key: files.get(value, value) if isinstance(value, str) else value for key, value in flags.items()}
    assert_told_once(launch("run", ranks=2, **{"strategy": "ddp", **flags}), code, text)
    assert not (tmp_path / "run" / "model").exists()


def test_ranks_with_other_settings_do_not_train(launch, tmp_path):
    launched = launch("run", ranks=2, strategy="ddp", of_last=["--model.learning_rate=0.5"])
    assert_told_once(launched, 1, "model.learning_rate is 0.5 on rank 1 and 0.0001 on rank 0; start every rank with")
    assert not (tmp_path / "run").exists()


@FULL
def test_ranks_with_other_weights_do_not_train(launch, shop, tmp_path):
    """Of the same name, as on two machines: here, from two working folders."""
    for rank in range(2):
        shutil.copytree(shop / "model", tmp_path / str(rank) / "model")
    with (tmp_path / "1" / "model" / "model.safetensors").open("r+b") as file:
        file.seek(-2, os.SEEK_END)
        file.write(b"\x11")
    flags = {"model__model_name_or_path": "model", "environment": {"FOLDERS": str(tmp_path)}}
    launched = launch("run", ranks=2, strategy="ddp", before=[work_in_folder_of_rank], **flags)
    assert_told_once(launched, 1, "model.model_name_or_path model holds other files on rank 1 than on rank 0; copy")


def test_an_error_on_one_rank_ends_all(launch, tmp_path):
    """A bug or a broken disk on rank 1 only, in the middle of a step."""
    launched = launch("run", ranks=2, strategy="ddp", before=[fail_on_rank_1])
    codes = launched.wait()
    assert all(codes), launched.said()
    assert "the disk of rank 1 is broken" in launched.runs[1].said()
    assert "Traceback" not in launched.runs[0].said(), launched.said()
    launched.wait_for_workers()


@FULL
def test_a_second_run_in_the_folder_says_no(launch, tmp_path):
    """While the first waits before a step."""
    folder = tmp_path / "run"
    first = launch(folder, ranks=2, strategy="ddp", before=[pause], environment={"PAUSE": "step 2"})
    wait_until_paused(folder, first, 2)
    assert_told_once(launch(folder, ranks=2, strategy="ddp"), 1, f"process {first.runs[0].pid} on")
    go_on_after_pause(folder)
    assert first.wait() == [0, 0], first.said()
    assert_nothing_left(folder, tmp_path / "temporary")
