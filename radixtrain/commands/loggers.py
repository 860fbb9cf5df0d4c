"""Loggers by name. A missing package or login is found before the data are read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import uuid4

from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.logger import rank_zero_experiment
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from radixtrain.checkpoints.folder import read_run
from radixtrain.errors import UserError, first_line
from radixtrain.settings.sections import TrainerSettings
from radixtrain.versions import to_install

PROJECT = "radixtrain"  # unless trainer.project or one of these variables names another
VARIABLES = {"wandb": "WANDB_PROJECT", "mlflow": "MLFLOW_EXPERIMENT_NAME", "trackio": "TRACKIO_PROJECT"}
PACKAGES = {name: (name,) for name in ("wandb", "mlflow", "trackio")} | {"tensorboard": ("tensorboard", "tensorboardX")}
TRACKING = ("fit", "validate", "test", "predict")  # commands whose loggers write
OFFLINE = "WANDB_MODE=offline keeps the run on this disk"
ADVICE = {"wandb": OFFLINE, "mlflow": "MLFLOW_TRACKING_URI names the server"}


class TrackioLogger(Logger):
    """A run of trackio, which has one folder for all runs: TRACKIO_DIR. A run of the same name is continued."""

    def __init__(self, project: str, run_name: str):
        super().__init__()
        self.project, self.run_name = project, run_name
        self.run: Any = None

    @property
    def name(self) -> str:
        return self.project

    @property
    def version(self) -> str:
        return self.run_name

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """Open the run. Raises UserError, before the first step, if it cannot."""
        if self.run is None:
            try:
                start = import_module("trackio").init
                self.run = start(project=self.project, name=self.run_name, resume="allow", embed=False)
            except Exception as error:
                raise UserError(f"trainer.logger: trackio: {first_line(error)}") from error
        return self.run

    @rank_zero_only
    def log_hyperparams(self, params: object, *_: object, **__: object) -> None:
        given = params if isinstance(params, Mapping) else vars(params)
        self.experiment.config.update(json.loads(json.dumps(dict(given), default=str)))

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.experiment.log(dict(metrics), step=step)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        if self.run is not None:
            self.run.finish()
            self.run = None


def make_loggers(settings: TrainerSettings, output_dir: Path) -> list[Logger]:
    """Make the loggers of a run: a CSV file, and those that `trainer.logger` names; an empty list for `none`."""
    if settings.logger == "none":
        return []
    project, run_name = settings.project, settings.run_name or output_dir.name
    with errors_of_services():
        return [_make_logger(name, project, run_name, output_dir) for name in dict.fromkeys(["csv", *_names(settings)])]


def check_loggers(settings: TrainerSettings) -> None:
    """Raise UserError in one line if a logger cannot work: it is not installed, or has no login."""
    for name in _names(settings):
        if name in PACKAGES and not any(map(find_spec, PACKAGES[name])):
            raise UserError(f"trainer.logger: {name} is not installed: {to_install(name)}")
        if name == "wandb":
            _check_wandb()


def _names(settings: TrainerSettings) -> list[str]:
    return [*settings.logger] if isinstance(settings.logger, list) else [settings.logger]


@contextmanager
def errors_of_services() -> Iterator[None]:
    """Turn an error of wandb or MLflow, as a run starts there, into one line: a key, a project, a server."""
    try:
        yield
    except Exception as error:
        package = type(error).__module__.partition(".")[0]
        if package in ADVICE:
            raise UserError(f"trainer.logger: {package}: {first_line(error)}; {ADVICE[package]}") from error
        raise


def continue_wandb_run(loggers: Iterable[Logger], checkpoint: str | None) -> str:
    """Give loggers of Weights & Biases the run of a checkpoint, or a new one, and return its id; not if they have one.

    checkpoint: that a run of the same folder resumes from; None for a new run.
    """
    resumed = read_run(Path(checkpoint))["wandb_run"] if checkpoint else ""
    run_id = str(resumed or uuid4().hex[:8])
    for log in loggers:
        if isinstance(log, WandbLogger) and not (log.version or os.environ.get("WANDB_RUN_ID")):
            log._wandb_init["id"] = log._id = run_id
    return run_id


def _make_logger(name: str, project: str | None, run_name: str, output_dir: Path) -> Logger:
    project = project or os.environ.get(VARIABLES.get(name, ""), PROJECT)
    if name == "wandb":
        return WandbLogger(project=project, name=run_name, save_dir=output_dir)
    if name == "mlflow":
        server = import_module("mlflow").get_tracking_uri()  # of its environment, or its own default
        return MLFlowLogger(project, run_name, server)
    if name == "trackio":
        return TrackioLogger(project, run_name)
    if name == "tensorboard":
        return TensorBoardLogger(output_dir, name="", version="tensorboard")  # a resumed run continues in it
    return CSVLogger(output_dir, name="logs")


def _check_wandb() -> None:
    """Raise UserError in one line if nobody is logged in to Weights & Biases. Does not prompt."""
    import wandb

    settings = wandb.setup().settings  # of its files and of the environment
    if settings.mode in ("offline", "dryrun", "disabled"):
        return
    from requests.utils import get_netrc_auth  # here, since wandb brings it

    if not (settings.api_key or settings.identity_token_file or get_netrc_auth(settings.base_url)):
        raise UserError(
            f"trainer.logger: not logged in to Weights & Biases: run `wandb login`, or set WANDB_API_KEY; {OFFLINE}"
        )
