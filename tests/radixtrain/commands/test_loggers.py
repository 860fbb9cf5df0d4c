"""Loggers by name; what they lack is one line before a row is read."""

import json
import sys
from types import SimpleNamespace

import pytest
from lightning.pytorch.loggers import CSVLogger, WandbLogger

from radixtrain.__main__ import main
from radixtrain.commands import loggers
from radixtrain.commands.loggers import errors_of_services, make_loggers
from radixtrain.errors import UserError
from radixtrain.settings.sections import TrainerSettings
from tests.support import FULL
from tests.support.runs import errors_in

OFFLINE = "WANDB_MODE=offline keeps the run on this disk"


@pytest.fixture
def nobody(monkeypatch, tmp_path):
    """Nobody is logged in to Weights & Biases, and nothing says where it is."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    for name in ("NETRC", "HOME", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "nobody"))
    yield
    pytest.importorskip("wandb", reason="pip install wandb").teardown()  # it remembers the environment


@pytest.fixture
def says(arguments, shop, capsys, monkeypatch):
    """Runs `fit` on rows that do not exist, and returns its one line."""

    def run(**flags):
        assert main(arguments(data__train_file=shop / "none.jsonl", **flags)) == 1
        (line,) = errors_in(capsys.readouterr().err)
        return line

    return run


@pytest.mark.parametrize(
    ("asked", "kinds"),
    [
        ("csv", ["CSVLogger"]),
        ("none", []),
        ([], ["CSVLogger"]),
        ("wandb", ["CSVLogger", "WandbLogger"]),
        ("trackio", ["CSVLogger", "TrackioLogger"]),
        (["wandb", "trackio", "csv", "wandb"], ["CSVLogger", "WandbLogger", "TrackioLogger"]),
    ],
)
def test_loggers_by_name(asked, kinds, tmp_path, nobody, monkeypatch):
    """What they call the run: by its settings, or their environment, or the folder."""
    folder = tmp_path / "my_run"
    for settings, variables, project, run_name in (
        ({}, {}, "radixtrain", "my_run"),
        ({}, {"WANDB_PROJECT": "theirs", "TRACKIO_PROJECT": "theirs"}, "theirs", "my_run"),
        ({"project": "ours", "run_name": "r"}, {"WANDB_PROJECT": "theirs"}, "ours", "r"),
    ):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        made = make_loggers(TrainerSettings(logger=asked, **settings), folder)
        assert [type(logger).__name__ for logger in made] == kinds
        for logger in made:
            if isinstance(logger, CSVLogger):
                assert logger.root_dir == str(folder / "logs")
            elif isinstance(logger, WandbLogger):
                assert (logger.name, logger._name, logger.save_dir) == (project, run_name, str(folder))
            else:
                assert (logger.name, logger.version) == (project, run_name)


def test_nobody_is_logged_in(says, nobody, monkeypatch):
    expected = "trainer.logger: not logged in to Weights & Biases: run `wandb login`, or set WANDB_API_KEY; "
    for logger in ("wandb", "[wandb, csv]"):
        assert says(trainer__logger=logger) == expected + OFFLINE
    assert says(trainer__logger="csv").startswith("no such file: ")
    pytest.importorskip("wandb").teardown()  # it remembers the environment
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert says(trainer__logger="wandb").startswith("no such file: ")


def test_mlflow_has_its_server_from_its_environment(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(loggers, "MLFlowLogger", lambda *given: made.append(given) or CSVLogger(tmp_path))
    server = SimpleNamespace(get_tracking_uri=lambda: "http://me:pw@example.com")
    monkeypatch.setitem(sys.modules, "mlflow", server)
    make_loggers(TrainerSettings(logger="mlflow", project="p"), tmp_path / "my_run")
    assert made == [("p", "my_run", "http://me:pw@example.com")]


def test_what_a_service_refuses_later():
    import wandb

    refused = type("MlflowException", (Exception,), {"__module__": "mlflow.exceptions"})
    for error, said in (
        (wandb.errors.CommError("no such project\nmore"), rf"trainer\.logger: wandb: no such project; {OFFLINE}"),
        (refused("no such server\nmore"), r"trainer\.logger: mlflow: no such server; MLFLOW_TRACKING_URI names"),
    ):
        with pytest.raises(UserError, match=said), errors_of_services():
            raise error
    with pytest.raises(json.JSONDecodeError), errors_of_services():
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
        (3, [f"--ckpt_path={last}", elsewhere]),
        (1, ["--overwrite=true"]),
        (2, ["--ckpt_path=last"]),
    ):
        assert main([*line, f"--trainer.max_steps={steps}", *more]) == 0
        ids.append(wandb.run.id)
        wandb.finish()
    first, _, other, new, _ = ids
    assert ids == [first, first, other, new, new] and len({first, other, new}) == 3


class Run:
    """Of a stand-in for trackio, with its calls."""

    def __init__(self, **options):
        self.options, self.config, self.logged, self.is_finished = options, {}, [], False

    def log(self, metrics, step):
        assert not self.is_finished
        self.logged.append((step, metrics))

    def finish(self):
        self.is_finished = True


def test_a_run_at_trackio(arguments, tmp_path, monkeypatch):
    """It has the settings of the run, and each step once."""
    runs = []
    package = SimpleNamespace(init=lambda **options: runs.append(Run(**options)) or runs[-1], __spec__=object())
    monkeypatch.setitem(sys.modules, "trackio", package)
    monkeypatch.delenv("TRACKIO_PROJECT", raising=False)
    assert main(arguments(output_dir=tmp_path / "my_run", trainer__logger="trackio", trainer__max_steps=3)) == 0
    (run,) = runs
    assert run.options == {"project": "radixtrain", "name": "my_run", "resume": "allow", "embed": False}
    assert run.config["optimizer"] == "adamw" and run.config["batch_size"] == 4 and run.is_finished
    losses = [(step, metrics["loss"]) for step, metrics in run.logged if "loss" in metrics]
    assert [step for step, _ in losses] == [1, 2, 3] and all(loss > 0 for _, loss in losses)


def test_a_tracker_that_is_missing_or_opens_no_run(says, arguments, tmp_path, monkeypatch, capsys):
    def init(**options):
        raise RuntimeError("nobody is logged in\nmore")

    with monkeypatch.context() as patch:
        patch.setattr(loggers, "find_spec", lambda name: None)
        for name in ("trackio", "mlflow", "tensorboard"):
            assert says(trainer__logger=name) == f"trainer.logger: {name} is not installed: pip install -U {name}"
    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(init=init, __spec__=object()))
    assert main(arguments(output_dir=tmp_path / "run", trainer__logger="trackio")) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "error: trainer.logger: trackio: nobody is logged in"
