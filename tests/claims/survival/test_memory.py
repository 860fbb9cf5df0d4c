"""The memory of a run does not grow with its steps, and a save does not hold the weights a second time.

RADIXTRAIN_TRIES=2000 takes 2,000 steps and a model of 400 MB; by default 400 steps and one of 40 MB.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from forked import Run
from outcomes import EXACT
from tiers import tries

STEPS, EARLY = max(400, tries(400, 2000)), 200
MEGABYTES = 400 if STEPS == 2000 else 40
MEGABYTES_OF_LAYER = 12.6  # of the model below
GROWTH = 1.03
SAVES = 4
ROOT = Path(__file__).resolve().parents[3]


def memory(pid: int, what: str) -> float:
    """`VmRSS`, what a process holds, or `VmHWM`, the most that it has held; MB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{what}:")) * 1024 / 1e6


def wait_for(condition: Callable[[], bool], run: Run) -> None:
    while not condition():
        assert run.is_running, run.said()
        time.sleep(0.002)


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
        wait_for((folder / "checkpoints" / f"step={step}").exists, run)
        found.append([memory(pid, "VmRSS") for pid in run.left()])
    assert run.wait() == 0, run.said()
    told = "; ".join(
        f"{early:.0f} MB after {EARLY} steps, {late:.0f} after {STEPS - 50}" for early, late in zip(*found, strict=True)
    )
    print_after("survival", f"memory of the run, and of its worker: {told}")
    assert len(found[0]) == len(found[1]) == 2
    for early, late in zip(*found, strict=True):
        assert late < GROWTH * early


@pytest.fixture
def large_model(shop: Path, tmp_path: Path) -> Path:
    import tiny
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(shop / "model")
    model = tiny.tiny_qwen3(tokenizer, layers=round(MEGABYTES / MEGABYTES_OF_LAYER), hidden=512, seed=0)
    model.save_pretrained(tmp_path / "large")
    tokenizer.save_pretrained(tmp_path / "large")
    return tmp_path / "large"


def test_a_save_holds_no_second_copy(start, arguments, large_model, tmp_path, print_after):
    """The most memory that a run holds from the metrics of a step to the end of its save, and what it held before."""
    size = (large_model / "model.safetensors").stat().st_size / 1e6
    flags = {
        "model__model_name_or_path": large_model,
        "trainer__max_steps": SAVES,
        "trainer__max_epochs": None,
        **EXACT,
    }
    run = start(arguments(output_dir=tmp_path / "run", **flags, save_every_steps=1, save_total_limit=1))
    metrics, checkpoints = tmp_path / "run" / "logs" / "version_0" / "metrics.csv", tmp_path / "run" / "checkpoints"
    grown = []
    for step in range(1, SAVES + 1):
        wait_for(lambda lines=step + 1: metrics.exists() and len(metrics.read_text().splitlines()) >= lines, run)
        Path(f"/proc/{run.pid}/clear_refs").write_text("5")  # VmHWM begins anew
        held = memory(run.pid, "VmRSS")
        is_early = not any(checkpoints.glob(f"*step={step}*"))  # this process may have been asleep
        wait_for((checkpoints / f"step={step}").exists, run)
        if is_early:
            grown.append(memory(run.pid, "VmHWM") - held)
            written = sum(path.stat().st_size for path in (checkpoints / f"step={step}").iterdir()) / 1e6
    assert run.wait() == 0, run.said()
    told = f"{len(grown)} saves of {written:.0f} MB took up to {max(grown):.0f} MB more than the run held"
    print_after("survival", f"a model of {size:.0f} MB: {told}")
    assert max(grown) < size / 4
