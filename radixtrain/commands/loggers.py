"""Loggers by short names. A missing package, login or connection is found before the data are read."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies
from uuid import uuid4

from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.logger import rank_zero_experiment
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from radixtrain.checkpoints.folder import read_settings
from radixtrain.errors import UserError, first_line
from radixtrain.settings.trainer import TrainerSettings
from radixtrain.versions import to_install

PROJECT = "radixtrain"  # default; WANDB_PROJECT, TRACKIO_PROJECT or SWANLAB_PROJECT overrides it
PACKAGES = {name: (name,) for name in ("wandb", "trackio", "swanlab")} | {
    "tensorboard": ("tensorboard", "tensorboardX")
}
TRACKING = ("fit", "validate", "test", "predict")  # commands whose loggers write
SECONDS = 5.0  # to connect
OFFLINE = "WANDB_MODE=offline keeps the run on this disk"


class TrackerLogger(Logger):
    """A run at trackio or SwanLab."""

    def __init__(self, package: str, output_dir: Path):
        """Take the package, `trackio` or `swanlab`, and the folder of the run, which is named after it."""
        super().__init__()
        self.package, self.output_dir = package, output_dir
        self.run: Any = None

    @property
    def name(self) -> str:
        return os.environ.get(f"{self.package.upper()}_PROJECT", PROJECT)

    @property
    def version(self) -> str:
        return self.output_dir.name

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """Open the run. Raises UserError, before the first step, if it cannot, for instance without a login."""
        if self.run is None:
            folder = str(self.output_dir / "swanlog")  # trackio has one for all runs: TRACKIO_DIR
            own = {"resume": "allow", "embed": False} if self.package == "trackio" else {"log_dir": folder}
            try:
                start = import_module(self.package).init
                self.run = start(project=self.name, name=self.version, **own)
            except Exception as error:
                raise UserError(f"trainer.logger: {self.package}: {first_line(error)}") from error
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


def loggers_of(asked: object, output_dir: Path) -> Any:
    """Return what Lightning's trainer takes as `logger`.

    asked: the value of `trainer.logger`: a logger, a short name (`wandb`, `trackio`, `swanlab`, `tensorboard`,
        `csv`, `none`), a list of them, or null, true or false.

    A CSV file is written in addition to what a short name selects; `none` and false write nothing.
    """
    if asked in (None, True):
        asked = "csv"
    if asked in (False, "none"):
        return False
    each = asked if isinstance(asked, list) else [asked]
    named = [name for name in each if isinstance(name, str)]
    if "none" in named:
        raise UserError("trainer.logger: none must be alone, not in a list")
    if not named:
        return asked
    given = [logger for logger in each if isinstance(logger, Logger)]
    return [_made(name, output_dir) for name in dict.fromkeys(["csv", *named])] + given


def check_loggers(trainer: TrainerSettings) -> None:
    """Raise UserError in one line if a logger cannot work: it is not installed, has no login, or no network.

    trainer: with its classes described, and nothing made.
    """
    asked = trainer.logger
    loggers = [_described(each) for each in (asked if isinstance(asked, list) else [asked])]
    if trainer.fast_dev_run:  # which replaces them
        return
    names = [name for name, _ in loggers]
    for name in names:
        if name in PACKAGES and not any(map(find_spec, PACKAGES[name])):
            raise UserError(f"trainer.logger: {name} is not installed: {to_install(name)}")
    if any(name == "wandb" and not options.get("offline") for name, options in loggers):
        _check_wandb()


@contextmanager
def errors_of_wandb() -> Iterator[None]:
    """Turn an error of Weights & Biases about a key, a project or a setting, as a run starts, into one line."""
    try:
        yield
    except Exception as error:
        if type(error).__module__.startswith("wandb."):
            raise UserError(f"trainer.logger: Weights & Biases: {first_line(error)}; {OFFLINE}") from error
        raise


def continue_wandb_run(loggers: Iterable[Logger], checkpoint: str | None) -> str:
    """Give loggers of Weights & Biases the run of a checkpoint, or a new one, and return its id; not if they have one.

    checkpoint: that a run of the same folder resumes from; None for a new run.
    """
    resumed = read_settings(Path(checkpoint))["radixtrain"]["wandb_run"] if checkpoint else ""
    run_id = str(resumed or uuid4().hex[:8])
    for log in loggers:
        if isinstance(log, WandbLogger) and not (log.version or os.environ.get("WANDB_RUN_ID")):
            log._wandb_init["id"] = log._id = run_id
    return run_id


def _made(name: str, output_dir: Path) -> Logger:
    if name == "wandb":
        project = os.environ.get("WANDB_PROJECT", PROJECT)
        return WandbLogger(project=project, name=output_dir.name, save_dir=output_dir)
    if name in ("trackio", "swanlab"):
        return TrackerLogger(name, output_dir)
    if name == "tensorboard":
        return TensorBoardLogger(output_dir, name="", version="tensorboard")  # a resumed run continues in it
    return CSVLogger(output_dir, name="logs")


def _described(logger: object) -> tuple[str, dict[str, Any]]:
    """Return `wandb`, `tensorboard` or another name, and the options of a logger that is written as a class."""
    if not isinstance(logger, Mapping):
        return str(logger), {}
    return logger["class_path"].rpartition(".")[2].lower().removesuffix("logger"), logger["init_args"]


def _check_wandb() -> None:
    """Raise UserError in one line if Weights & Biases cannot work. Does not prompt; uses the network only with a login.

    Without a connection, Weights & Biases tries for a minute and a half. A proxy is trusted.
    """
    import wandb

    settings = wandb.setup().settings  # of its files and of the environment
    if settings.mode in ("offline", "dryrun", "disabled"):
        return
    if not is_logged_in(settings):
        raise UserError(
            f"trainer.logger: not logged in to Weights & Biases: run `wandb login`, or set WANDB_API_KEY; {OFFLINE}"
        )
    server = urlsplit(settings.base_url)
    if server.scheme not in getproxies() and (problem := unreachable(settings.base_url)):
        raise UserError(f"trainer.logger: no connection to Weights & Biases at {server.hostname}: {problem}; {OFFLINE}")


def unreachable(url: str) -> str:
    """Say why no connection can be opened; empty if one can. Gives up on a silent name server."""
    address = urlsplit(url)
    port = address.port or (80 if address.scheme == "http" else 443)
    found: list[str] = []

    def connect() -> None:
        try:
            socket.create_connection((address.hostname or url, port), SECONDS).close()
            found.append("")
        except OSError as error:
            found.append(error.strerror or first_line(error))

    waiting = Thread(target=connect, daemon=True)  # the look-up of a name has no timeout
    waiting.start()
    waiting.join(SECONDS)
    return found[0] if found else f"no answer in {SECONDS:.0f} s"


def is_logged_in(settings: Any) -> bool:
    from requests.utils import get_netrc_auth  # here, since wandb brings it

    return bool(settings.api_key or settings.identity_token_file or get_netrc_auth(settings.base_url))
