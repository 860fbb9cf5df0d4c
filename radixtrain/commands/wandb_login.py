"""Whether a run can report to Weights & Biases: somebody is logged in, and the server can be reached."""

from __future__ import annotations

import socket
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from requests.utils import get_netrc_auth

from radixtrain.errors import UserError

__all__ = ["OFFLINE", "check_wandb", "is_logged_in", "is_online", "settings_of_wandb"]

SECONDS = 5.0  # to connect
OFFLINE = "WANDB_MODE=offline keeps the run on this disk"


def check_wandb() -> None:
    """UserError in one line if it cannot. Asks neither the terminal nor, without a login, the network."""
    settings = settings_of_wandb()
    if not is_online(settings):
        return
    if not is_logged_in(settings):
        raise UserError(
            f"trainer.logger: nobody is logged in to Weights & Biases: run `wandb login`, or set WANDB_API_KEY; "
            f"{OFFLINE}"
        )
    _check_connection(settings.base_url)


def settings_of_wandb() -> Any:
    """Those of its files and of the environment."""
    import wandb

    return wandb.setup().settings


def is_online(settings: Any) -> bool:
    return settings.mode not in ("offline", "dryrun", "disabled")


def is_logged_in(settings: Any) -> bool:
    return bool(settings.api_key or settings.identity_token_file or get_netrc_auth(settings.base_url))


def _check_connection(url: str) -> None:
    """Without it, Weights & Biases tries for a minute and a half. A proxy is taken at its word."""
    place = urlsplit(url)
    if place.scheme in getproxies():
        return
    port = place.port or (80 if place.scheme == "http" else 443)
    try:
        socket.create_connection((str(place.hostname), port), SECONDS).close()
    except OSError as error:
        raise UserError(
            f"trainer.logger: no connection to Weights & Biases at {place.hostname}: {error.strerror or error}; "
            f"{OFFLINE}"
        ) from None
