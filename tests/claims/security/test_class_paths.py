"""A configuration names classes, and to import a module runs it: only modules of four packages are imported."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tiers import FULL

from radixtrain.__main__ import main

CODE = (
    "open({ran!r}, 'w').close()\nfrom lightning.pytorch import Callback\nclass Thing(Callback): ...\ndef run(*_): ...\n"
)
LAMBDA = "lightning.pytorch.callbacks.LambdaCallback"
KEYS = ("callbacks", "logger", "plugins", "strategy", "profiler", "accelerator")
NAMES = (
    "evilthing.Thing",
    "lightning_evil.Thing",
    "torchevil.Thing",
    "radixtrain_evil.Thing",
    "transformers_evil.Thing",
)
OTHERS = {
    "a list": {"callbacks": [{"class_path": "evilthing.Thing"}]},
    "a function": {"callbacks": [{"class_path": LAMBDA, "init_args": {"on_fit_start": "evilthing.run"}}]},
    "a system call": {"callbacks": [{"class_path": LAMBDA, "init_args": {"setup": "os.system"}}]},
    "inside of another": {
        "callbacks": [
            {"class_path": "lightning.pytorch.callbacks.EarlyStopping", "init_args": {"monitor": "evilthing.run"}}
        ],
        "logger": [{"class_path": "evilthing.Thing"}],
    },
    "a process": {"callbacks": [{"class_path": "subprocess.Popen", "init_args": {"args": ["true"]}}]},
    "a built-in": {"callbacks": [{"class_path": "builtins.exec"}]},
    "a module of an allowed one": {"callbacks": [{"class_path": "torch.os.system"}]},
}


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Modules that can be imported, and the file that says that one was."""
    for name in NAMES:
        (tmp_path / f"{name.partition('.')[0]}.py").write_text(CODE.format(ran=str(tmp_path / "ran")))
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "ran"
    for name in NAMES:
        sys.modules.pop(name.partition(".")[0], None)


def test_of_other_packages(ran: Path, arguments: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    for name in NAMES:
        assert main([*arguments(), f"--trainer.callbacks={name}"]) == 2
        assert f"class_path '{name}' is not imported" in capsys.readouterr().err
        assert not ran.exists(), name


@FULL
def test_at_every_key(ran: Path, arguments: Callable[..., list[str]]) -> None:
    for key in KEYS:
        for value in (NAMES[0], json.dumps({"class_path": NAMES[0]})):
            assert main([*arguments(), f"--trainer.{key}={value}"]) in (1, 2)
            assert not ran.exists(), (key, value)


@FULL
def test_other_ways(ran: Path, tmp_path: Path, arguments: Callable[..., list[str]]) -> None:
    for name, trainer in OTHERS.items():
        (tmp_path / "c.yaml").write_text(json.dumps({"trainer": trainer}))
        for more in ([], ["--print_config"]):
            assert main([*arguments(), f"--config={tmp_path / 'c.yaml'}", *more]) in (1, 2), name
        assert not ran.exists(), name
