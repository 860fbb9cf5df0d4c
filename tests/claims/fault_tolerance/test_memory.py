"""The memory of a run does not grow with its steps, and a save does not hold the weights a second time."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support import FULL, tries
from tests.support.processes import memory, note_memory_of_saves
from tests.support.runs import EXACT

STEPS, EARLY = max(400, tries(400, 2000)), 200
LAYERS = 3  # a model of 40 MB
GROWTH = 1.03  # 1.00 is found; room for what allocators keep
SAVES = 4
pytestmark = FULL


@pytest.fixture
def many_rows(shop: Path, tmp_path: Path) -> Path:
    """200 rows, 50 steps: an epoch ends as often as a checkpoint is written."""
    path = tmp_path / "rows.jsonl"
    path.write_text((shop / "train.jsonl").read_text(encoding="utf-8") * 10, encoding="utf-8")
    return path


def test_memory_does_not_grow_with_the_steps(start, arguments, many_rows, tmp_path, print_after):
    """Of the run and of its worker, with a checkpoint every 50 steps."""
    folder = tmp_path / "run"
    flags = {"data__train_file": many_rows, "data__dataloader_num_workers": 1, "trainer__max_epochs": None}
    run = start(arguments(output_dir=folder, **flags, **EXACT, trainer__max_steps=STEPS, save_every_steps=50))
    found = []
    for step in (EARLY, STEPS - 50):
        while not (folder / "checkpoints" / f"step={step}").exists():
            assert run.is_running, run.said()
            time.sleep(0.002)
        found.append([memory(pid, "VmRSS") / 1e6 for pid in run.left()])
    assert run.wait() == 0, run.said()
    told = "; ".join(
        f"{early:.0f} MB after {EARLY} steps, {late:.0f} after {STEPS - 50}" for early, late in zip(*found, strict=True)
    )
    print_after("survival", f"memory of the run, and of its worker: {told}")
    assert len(found[0]) == len(found[1]) == 2
    for early, late in zip(*found, strict=True):
        assert late < GROWTH * early


def test_a_save_holds_no_second_copy(start, arguments, shop, tmp_path, print_after):
    import tiny
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(shop / "model")
    tiny.tiny_qwen3(tokenizer, layers=LAYERS, hidden=512, seed=0).save_pretrained(tmp_path / "large")
    tokenizer.save_pretrained(tmp_path / "large")
    size = (tmp_path / "large" / "model.safetensors").stat().st_size
    flags = {"model__model_name_or_path": tmp_path / "large", "trainer__max_steps": SAVES, "trainer__max_epochs": None}
    saves = {"save_every_steps": 1, "save_total_limit": 1}
    run = start(arguments(output_dir=tmp_path / "run", **flags, **saves, **EXACT), before=note_memory_of_saves)
    assert run.wait() == 0, run.said()
    grown = [int(line) for line in (tmp_path / "run" / "memory_of_saves").read_text().split()]
    print_after("survival", f"a model of {size / 1e6:.0f} MB: saves took up to {max(grown) / 1e6:.0f} MB more")
    assert len(grown) == SAVES and max(grown) < size / 4
