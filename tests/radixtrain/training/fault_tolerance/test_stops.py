"""`fit` and `predict` that are asked to stop, in process: exit codes, what is saved, what is left in the folder."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from radixtrain.__main__ import main
from radixtrain.training.module import RadixModule
from tests.support import FULL
from tests.support.runs import names

Arguments = Callable[..., list[str]]
CODES = [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)]


@pytest.fixture
def at_step(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`at_step(3, act)`: call it within the third training step."""

    def register(number: int, act: Callable[[], Any], name: str = "take_step") -> None:
        original, count = getattr(RadixModule, name), [0]

        def step(*arguments: Any) -> Any:
            count[0] += 1
            if count[0] == number:
                act()
            return original(*arguments)

        monkeypatch.setattr(RadixModule, name, step)

    return register


def send(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def test_a_signal_saves_and_another_one_stops(arguments: Arguments, at_step: Any, tmp_path: Path) -> None:
    at_step(2, send(signal.SIGUSR1))
    at_step(4, send(signal.SIGINT))
    assert main(arguments(trainer__max_steps=9)) == 130
    assert names(tmp_path / "out" / "checkpoints") == ["last", "step=2", "step=4"]


@FULL
def test_predict_that_is_stopped_leaves_nothing(
    arguments: Arguments, at_step: Any, shop: Path, tmp_path: Path, capsys: Any
) -> None:
    at_step(2, send(signal.SIGTERM), "predict_step")
    assert main(arguments("predict", data__predict_file=shop / "validation.jsonl", data__batch_size=2)) == 143
    assert "stopped by SIGTERM; nothing was saved" in capsys.readouterr().err
    assert not (tmp_path / "out").exists() or not [*(tmp_path / "out").glob("*predictions*")]


@FULL
def test_a_killed_worker(arguments: Arguments, at_step: Any, tmp_path: Path, capsys: Any) -> None:
    from multiprocessing import active_children

    def kill() -> None:
        worker = active_children()[0]
        worker.kill()
        worker.join()

    at_step(3, kill)
    flags = {"data__dataloader_num_workers": 1, "save_every_steps": 1, "trainer__max_epochs": 20}
    assert main(arguments(**flags)) == 1
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert message.startswith("error: a DataLoader worker") and "The last checkpoint is" in message
