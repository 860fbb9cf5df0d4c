"""One flipped bit anywhere in the newest checkpoint: found, named and passed over; the run goes on from the one before.

One at a time, in each of its files in turn and anywhere in them; 50 with RADIXTRAIN_TRIES=500.
"""

from __future__ import annotations

import logging
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from radixtrain.__main__ import main
from tests.support import FULL, tries
from tests.support.runs import EXACT, assert_nothing_left, assert_same_run

TRIES = tries(5, 50)
pytestmark = FULL
FILES = ("model.safetensors", "optimizer.safetensors", "run.json", "checksums.txt")


def flip(path: Path, draw: random.Random) -> int:
    """A random bit of a file. Returns its number."""
    data = bytearray(path.read_bytes())
    bit = draw.randrange(8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    return bit


def test_one_flipped_bit(arguments: Callable[..., list[str]], tmp_path: Path, caplog: Any, print_after: Any) -> None:
    short, whole = tmp_path / "short", tmp_path / "whole"
    flags = {"save_every_steps": 1, "model__lr_scheduler_type": "constant", **EXACT}
    assert main(arguments(output_dir=whole, **flags)) == 0
    assert main(arguments(output_dir=short, **flags, trainer__max_steps=8)) == 0
    shutil.rmtree(short / "model")
    draw = random.Random(0)
    for number in range(TRIES):
        folder, name = tmp_path / "run", FILES[number % len(FILES)]
        shutil.copytree(short, folder, symlinks=True)
        bit = flip(folder / "checkpoints" / "step=8" / name, draw)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert main(arguments(output_dir=folder, **flags, ckpt_path="last")) == 0
        said = [record.getMessage() for record in caplog.records if "skipped: " in record.getMessage()]
        assert len(said) == 1 and "step=8" in said[0] and name in said[0] and "step=7" in said[0], (name, bit, said)
        assert_same_run(folder, whole)
        assert_nothing_left(folder)
        shutil.rmtree(folder)
    print_after("survival", f"flipped bits: {TRIES}, in {len(FILES)} files in turn; all found and named; bit-equal")
