"""Loggers by short names; what they lack is one line before a row is read."""

import json
import socket
import sys
from types import SimpleNamespace

import pytest
import yaml
from lightning.pytorch.loggers import CSVLogger
from tiers import FULL

from radixtrain.__main__ import main
from radixtrain.commands import loggers
from radixtrain.commands.loggers import errors_of_wandb, loggers_of
from radixtrain.errors import UserError

OFFLINE = "WANDB_MODE=offline keeps the run on this disk"


@pytest.fixture
def nobody(monkeypatch, tmp_path):
    """Nobody is logged in to Weights & Biases, and nothing says where it is."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    for name in ("NETRC", "HOME", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "nobody"))
    monkeypatch.setattr(loggers, "getproxies", dict)
    yield
    pytest.importorskip("wandb", reason="pip install wandb").teardown()  # it remembers the environment


@pytest.fixture
def says(arguments, shop, capsys, monkeypatch):
    """Runs `fit` on rows that do not exist, and returns its one line."""

    def run(**flags):
        assert main(arguments(data__train_file=shop / "none.jsonl", **flags)) == 1
        (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("error: "))
        return line.removeprefix("error: ")

    return run


def test_short_names_and_other_loggers(tmp_path, nobody, monkeypatch):
    for asked, kinds in (
        (None, ["CSVLogger"]),
        (True, ["CSVLogger"]),
        ("csv", ["CSVLogger"]),
        ("wandb", ["CSVLogger", "WandbLogger"]),
        (["wandb", "csv", "wandb"], ["CSVLogger", "WandbLogger"]),
    ):
        made = loggers_of(asked, tmp_path / "my_run")
        assert [type(logger).__name__ for logger in made] == kinds
        assert made[0].root_dir == str(tmp_path / "my_run" / "logs")
        if "WandbLogger" in kinds:
            assert (made[1].name, made[1].save_dir) == ("radixtrain", str(tmp_path / "my_run"))
    own = CSVLogger(tmp_path, name="own")
    assert loggers_of(False, tmp_path) is loggers_of("none", tmp_path) is False
    assert loggers_of(own, tmp_path) is own and loggers_of([own], tmp_path) == [own]
    named, last = loggers_of(["csv", own], tmp_path)
    assert named.name == "logs" and last is own
    with pytest.raises(UserError, match=r"trainer\.logger: none must be alone, not in a list"):
        loggers_of(["none", own], tmp_path)
    monkeypatch.setenv("WANDB_PROJECT", "theirs")
    assert loggers_of("wandb", tmp_path)[1].name == "theirs"


def test_nobody_is_logged_in(says, nobody, tmp_path):
    expected = "trainer.logger: not logged in to Weights & Biases: run `wandb login`, or set WANDB_API_KEY; "
    for logger in ("wandb", "WandbLogger", "[wandb, csv]"):
        assert says(trainer__logger=logger) == expected + OFFLINE
    (tmp_path / "my.yaml").write_text(yaml.safe_dump({"trainer": {"logger": "wandb"}}))
    assert says(config=tmp_path / "my.yaml") == expected + OFFLINE


def test_a_server_that_answers_and_no_network(says, nobody, monkeypatch):
    """A socket that is bound and does not listen refuses, and nobody else gets its port."""
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    with socket.create_server(("localhost", 0)) as server:
        monkeypatch.setenv("WANDB_BASE_URL", f"http://localhost:{server.getsockname()[1]}")
        assert says(trainer__logger="wandb").startswith("no such file: ")
    with socket.socket() as refusing:
        refusing.bind(("localhost", 0))
        monkeypatch.setenv("WANDB_BASE_URL", f"http://localhost:{refusing.getsockname()[1]}")
        found = says(trainer__logger="wandb")
    assert found.startswith("trainer.logger: no connection to Weights & Biases at localhost: ") and OFFLINE in found


def test_what_needs_no_login(arguments, shop, says, nobody, capsys):
    for flags in (
        {"trainer__logger": {"class_path": "WandbLogger", "init_args": {"offline": True}}},
        {"trainer__logger": "wandb", "trainer__fast_dev_run": "true"},
        {"trainer__logger": "csv"},
        {"trainer__logger": "none"},
    ):
        assert says(**flags).startswith("no such file: ")
    assert main(arguments("inspect", trainer__logger="wandb", data__train_file=shop / "none.jsonl")) == 1
    assert "error: no such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    "logger", ["tensorboard", {"class_path": "TensorBoardLogger", "init_args": {"save_dir": "logs"}}]
)
def test_tensorboard_is_not_installed(logger, says, monkeypatch):
    monkeypatch.setattr(loggers, "find_spec", lambda name: None)
    found = says(trainer__logger=logger)
    assert found == "trainer.logger: tensorboard is not installed: pip install -U tensorboard"


def test_what_weights_and_biases_refuses_later():
    import wandb

    expected = rf"trainer\.logger: Weights & Biases: no such project; {OFFLINE}"
    with pytest.raises(UserError, match=expected), errors_of_wandb():
        raise wandb.errors.CommError("no such project\nmore")
    with pytest.raises(json.JSONDecodeError), errors_of_wandb():
        json.loads("{")


@FULL
@pytest.mark.usefixtures("wandb_offline")
def test_a_resumed_run_stays_the_same_at_weights_and_biases(arguments, tmp_path, monkeypatch):
    """A new run in the same folder is another one, and so is one that begins with the weights of a checkpoint."""
    wandb = pytest.importorskip("wandb", reason="pip install wandb")
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    ids = []
    line = arguments(output_dir=tmp_path / "run", trainer__logger="wandb", trainer__max_epochs=None)
    last, elsewhere = tmp_path / "run" / "checkpoints" / "last", f"--output_dir={tmp_path / 'other'}"
    for steps, more in (
        (1, []),
        (2, ["--ckpt_path=auto"]),
        (2, ["--ckpt_path=last"]),
        (3, [f"--ckpt_path={last}", elsewhere]),
        (1, ["--overwrite=true"]),
        (2, ["--ckpt_path=last"]),
    ):
        assert main([*line, f"--trainer.max_steps={steps}", *more]) == 0
        ids.append(wandb.run.id)
        wandb.finish()
    first, third, fourth = ids[0], ids[3], ids[4]
    assert ids == [first, first, first, third, fourth, fourth] and len({first, third, fourth}) == 3


class Run:
    """Of a stand-in for trackio and swanlab, with the calls of both."""

    def __init__(self, **options):
        self.options, self.config, self.logged, self.is_finished = options, {}, [], False

    def log(self, metrics, step):
        assert not self.is_finished
        self.logged.append((step, metrics))

    def finish(self):
        self.is_finished = True


@pytest.mark.parametrize(
    ("name", "own"), [("trackio", {"resume": "allow", "embed": False}), ("swanlab", {"log_dir": "{}/swanlog"})]
)
def test_a_run_at_a_tracker(arguments, tmp_path, monkeypatch, name, own):
    """It has the settings of the run, and each step once."""
    runs = []
    package = SimpleNamespace(init=lambda **options: runs.append(Run(**options)) or runs[-1], __spec__=object())
    monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.delenv(f"{name.upper()}_PROJECT", raising=False)
    assert main(arguments(output_dir=tmp_path / "my_run", trainer__logger=name, trainer__max_steps=3)) == 0
    (run,) = runs
    own = {key: value.format(tmp_path / "my_run") if isinstance(value, str) else value for key, value in own.items()}
    assert run.options == {"project": "radixtrain", "name": "my_run", **own}
    assert run.config["optimizer"] == "adamw" and run.config["batch_size"] == 4 and run.is_finished
    losses = [(step, metrics["loss"]) for step, metrics in run.logged if "loss" in metrics]
    assert [step for step, _ in losses] == [1, 2, 3] and all(loss > 0 for _, loss in losses)


@pytest.mark.parametrize("name", ["trackio", "swanlab"])
def test_a_tracker_that_is_missing_or_opens_no_run(says, arguments, tmp_path, monkeypatch, capsys, name):
    def init(**options):
        raise RuntimeError("nobody is logged in\nmore")

    with monkeypatch.context() as patch:
        patch.setattr(loggers, "find_spec", lambda name: None)
        assert says(trainer__logger=name) == f"trainer.logger: {name} is not installed: pip install -U {name}"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(init=init, __spec__=object()))
    assert main(arguments(output_dir=tmp_path / "run", trainer__logger=name)) == 1
    assert capsys.readouterr().err.splitlines()[-1] == f"error: trainer.logger: {name}: nobody is logged in"
