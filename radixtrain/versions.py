"""Installed packages that are older than radixtrain works with, each with the command that replaces it.

pip keeps the bounds of pyproject.toml when it installs radixtrain. It does not look again when another package is
installed later, and nothing looks if radixtrain is used from its folder.
"""

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from importlib.util import find_spec

from radixtrain.errors import UserError

# Package -> the oldest version that works: the bounds of pyproject.toml, which tests/test_packaging.py compares.
OLDEST = {"jinja2": "3.1", "numpy": "2", "safetensors": "0.5", "torch": "2.10", "transformers": "5.2", "xxhash": "3"}
# Package -> the same, of those that the commands need beside them: the extra `fit`.
FIT = {
    "datasets": "4",
    "lightning": "2.6.6",
    "pydantic": "2.7",
    "rich": "13",
}
# Package -> the same, of those that no command needs to start.
OLDEST_OPTIONAL = {
    "bitsandbytes": "0.46.1",
    "flash-attn": "2.7",
    "flash-attn-4": "4.0.0b36",
    "matplotlib": "3.9",
    "peft": "0.20",
    "wandb": "0.19",
}
# Package -> what is wrong with older ones, if it is more than that they lack what radixtrain calls.
WHY = {
    "lightning": "older ones run code of a checkpoint, 2.6.2 and 2.6.3 steal credentials",
    "flash-attn-4": "older ones have no backward for heads of 192 on Hopper, or for varlen calls with a soft-cap",
    "torch": "older ones can be attacked by a checkpoint file",
}

# Package -> the newest version that was tested: constraints.txt, which tests/test_packaging.py compares.
TESTED = {
    "accelerate": "1.15.0",
    "lightning": "2.6.6",
    "peft": "0.21.2",
    "torch": "2.13.0",
    "transformers": "5.24.0",
    "trl": "1.16.0",
}

# What a model of transformers does only from a version on.
SINCE = {"keyword arguments from model to backbone": "5.3", "recurrent states that fork": "5.21"}

UNKNOWN = "unknown"


def check_versions(packages: Mapping[str, str] = OLDEST) -> None:
    """Raise UserError if a package is missing or too old; import none.

    packages: name -> the oldest version that works.
    """
    problems = {name: problem for name, oldest in packages.items() if (problem := _problem(name, oldest))}
    if not problems:
        return
    raise UserError(f"{'; '.join(problems.values())}: {to_install(*problems)}")


def to_install(*names: str) -> str:
    """Return the pip command that brings packages, however radixtrain was installed: a clone, a wheel or an index."""
    oldest = OLDEST | FIT | OLDEST_OPTIONAL
    wanted = (f"'{name}>={oldest[name]}'" if name in oldest else name for name in names)
    return f"pip install -U {' '.join(wanted)}"


def _problem(name: str, oldest: str) -> str:
    """Say what is wrong with the installed version of a package; empty if nothing is."""
    version = installed(name)
    if version is None:
        return f"{name} is not installed"
    return f"{name} {version} is older than {oldest}, the oldest that works" if is_older(name, version) else ""


def installed(name: str) -> str | None:
    """Return the version of an installed package: None if there is none, `unknown` if it does not say."""
    try:
        return metadata.version(name) or UNKNOWN
    except metadata.PackageNotFoundError:
        return UNKNOWN if _is_found(name) else None


def versions() -> dict[str, str]:
    """Return the versions of the packages that make a model, by name."""
    found = {name: installed(name) for name in ("radixtrain", "torch", "transformers", "lightning", "peft")}
    return {name: version for name, version in found.items() if version not in (None, UNKNOWN)}


def before(what: str) -> str:
    """Return the end of a refusal if the installed transformers is older than what is refused; else an empty string."""
    since = SINCE[what]
    older = f" (transformers {installed('transformers')} has no {what}: pip install -U 'transformers>={since}')"
    return older if transformers_is_before(since) else ""


def untested() -> str:
    """Return the end of a refusal if the installed transformers is newer than the one last tested, else nothing."""
    tested, found = TESTED["transformers"], installed("transformers") or UNKNOWN
    ending = f" (radixtrain was last tested with transformers {tested}; this is {found})"
    return ending if is_newer_than_tested("transformers", found) else ""


@contextmanager
def saying_what_was_tested() -> Iterator[None]:
    """Add `untested` to errors about what a model does, which a newer transformers may be the reason of."""
    try:
        yield
    except Exception as error:
        if ending := untested():
            error.args = (f"{error}{ending}",)
        raise


def transformers_is_before(version: str) -> bool:
    """Return whether the installed transformers is older. One that does not say its version is not."""
    found = installed("transformers") or UNKNOWN
    return found != UNKNOWN and _numbers(found) < _numbers(version)


def _is_found(name: str) -> bool:
    """Return whether a package can be imported, say from `PYTHONPATH`. A folder without code, like `wandb/`, cannot."""
    try:
        spec = find_spec(name)
    except (ValueError, ImportError):
        return False
    return spec is not None and spec.origin is not None


def is_older(name: str, version: str) -> bool:
    """Return whether a version is older than the oldest that works. A release candidate counts as its release."""
    oldest = (OLDEST | FIT | OLDEST_OPTIONAL).get(name, "0")
    return version != UNKNOWN and _numbers(version) < _numbers(oldest)


def is_newer_than_tested(name: str, version: str) -> bool:
    """Return whether a version is newer than the one last tested."""
    return version != UNKNOWN and name in TESTED and _numbers(version) > _numbers(TESTED[name])


def _numbers(version: str) -> tuple[float, ...]:
    """Parse a version: `2.13.0+cpu` -> (2, 13, 0, inf), `4.0.0b36` -> (4, 0, 0, 36), older than its release."""
    release, _, beta = version.partition("+")[0].partition("b")
    numbers = [int(part) for part in re.findall(r"\d+", release)[:3]]
    return (*numbers, *[0] * (3 - len(numbers)), int(found[0]) if (found := re.match(r"\d+", beta)) else math.inf)
