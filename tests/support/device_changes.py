"""What a rank does otherwise in a test: functions that are called in its process before the command."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

__all__ = ["fail_on_rank_1", "read_slowly", "step_slowly"]


def read_slowly() -> None:
    """Loading the weights takes two seconds longer on rank 0."""
    from radixtrain.training import module

    load = module.load_trainable

    def slow(*arguments: Any) -> Any:
        if os.environ["RANK"] == "0":
            time.sleep(2.0)
        return load(*arguments)

    vars(module)["load_trainable"] = slow


def step_slowly() -> None:
    """A step takes a minute, and writes a file `step` when it begins."""
    from radixtrain.training.module import RadixModule

    folder = next(Path(each.partition("=")[2]) for each in sys.argv if each.startswith("--output_dir="))

    def slow(*_: Any) -> None:
        (folder / "step").touch()
        time.sleep(60.0)

    setattr(RadixModule, "training_step", slow)  # noqa: B010  # mypy refuses the plain assignment to a method


def fail_on_rank_1() -> None:
    """The second step of rank 1 raises an error that nobody expects."""
    from radixtrain.training.module import RadixModule

    step = RadixModule.training_step

    def failing(module: Any, *arguments: Any) -> None:
        if os.environ["RANK"] == "1" and module.global_step == 1:
            raise OSError(5, "the disk of rank 1 is broken")
        step(module, *arguments)

    setattr(RadixModule, "training_step", failing)  # noqa: B010  # as above
