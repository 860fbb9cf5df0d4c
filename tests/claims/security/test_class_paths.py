"""A configuration names classes, and to import a module runs it: only modules of four packages are imported."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tiers import FULL, cases

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
FOLDER = "hub"  # replaced by the folder with the code
HUB = {"class_path": "torch.hub.load", "init_args": {"repo_or_dir": FOLDER, "model": "f", "source": "local"}}
REMOTE = {"model": FOLDER, "task": "text-generation", "trust_remote_code": True}
PIPELINE = {"class_path": "transformers.pipeline", "init_args": REMOTE}
FROM = {"pretrained_model_name_or_path": FOLDER, "trust_remote_code": True}
METHOD = {"class_path": "transformers.AutoModelForCausalLM.from_pretrained", "init_args": FROM}
PICKLE = {"class_path": "torch.load", "init_args": {"f": f"{FOLDER}/x.pt", "weights_only": False}}
WANDB = {"class_path": "lightning.pytorch.loggers.WandbLogger"}
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
    "a hub of torch": {"callbacks": [{"class_path": LAMBDA, "init_args": {"setup": HUB}}]},
    "a hub of torch, by its short name": {"callbacks": [{"class_path": "LambdaCallback", "init_args": {"setup": HUB}}]},
    "a pipeline": {"callbacks": [{"class_path": LAMBDA, "init_args": {"setup": PIPELINE}}]},
    "a method": {"callbacks": [{"class_path": LAMBDA, "init_args": {"setup": METHOD}}]},
    "a pickle": {"callbacks": [{"class_path": LAMBDA, "init_args": {"setup": PICKLE}}]},
    "the name of a function": {"callbacks": [{"class_path": LAMBDA, "init_args": {"setup": "torch.hub.load"}}]},
    "a callback that is a function": {"callbacks": [HUB]},
    "a value of any type": {"logger": [{**WANDB, "init_args": {"experiment": HUB}}]},
    "a callable class": {
        "callbacks": [{"class_path": LAMBDA, "init_args": {"setup": {"class_path": "torch.nn.Relu"}}}]
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


@pytest.mark.parametrize("name", cases(OTHERS, ["a hub of torch", "a method", "the name of a function"]))
def test_other_ways(
    name: str, ran: Path, evil_folder: Path, arguments: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    config = evil_folder.parent / "c.yaml"
    config.write_text(json.dumps({"trainer": OTHERS[name]}).replace('"hub', f'"{evil_folder}'))
    assert main([*arguments(), f"--config={config}"]) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert "class_path" in line or "must be Callable" in line
    assert not ran.exists()


@pytest.fixture
def evil_folder(tmp_path: Path, ran: Path) -> Path:
    """What `torch.hub.load`, `transformers.pipeline`, `from_pretrained` and `torch.load` would run code of."""
    code = f"import pathlib\npathlib.Path({str(ran)!r}).touch()\ndef f(*_): ...\n"
    folder = tmp_path / "hub"
    folder.mkdir()
    for name in ("hubconf.py", "evil.py"):
        (folder / name).write_text(code)
    auto = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM"), "evil.Evil")
    (folder / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": auto}))
    torch.save(Touches(ran), folder / "x.pt")
    return folder


class Touches:
    """A pickle of it makes a file when it is read."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.touch, (self.path,)


def test_options_that_a_class_does_not_take(
    arguments: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    for options, said in (
        ({"init_args": {"monitor": "loss", "nope": 1}}, "no key nope in trainer.callbacks "),
        ({"init_args": {"monitor": "loss", "mode": "up"}}, "trainer: EarlyStopping: `mode` can be min, max, got up"),
    ):
        value = json.dumps([{"class_path": "lightning.pytorch.callbacks.EarlyStopping", **options}])
        assert main([*arguments(), f"--trainer.callbacks={value}"]) == 2
        [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert line.startswith(f"error: {said}")
