"""Passwords and access tokens in settings, found by the name of their key or by how they look, and left out.

A run writes its settings into many files: config.yaml, checkpoints, model cards, logs that are sent elsewhere. What was
typed as a password reaches the class that needs it, and none of these files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from radixtrain.errors import UserError

__all__ = ["MASK", "check_unmasked", "masked", "masked_arguments"]

MASK = "***"
SECRET_KEYS = re.compile(
    r"(^|_)(key|token|secret|passw(or)?d|passphrase|pwd|credential|authorization|bearer"
    r"|secrets|passw(or)?ds|credentials|api_?keys|access_tokens|access_keys)$"
    r"|(api|access|secret|private)_?key$|accesstoken$"
)
OF_TEXT = re.compile(  # tokens of a vocabulary, not of access
    r"(^|_)(bos|eos|pad|unk|sep|cls|mask|image|video|audio|boi|eoi|special|start|end|stop|think|num|max|min)_tokens?$"
)
NUMBERS = re.compile(r"(secret|passw(or)?d|passphrase|pwd|credential)s?$")  # keys whose number is a secret as well
SECRET_TEXT = re.compile(
    r"""
    hf_\w{16,} | sk-[\w-]{16,} | gh[pousr]_\w{16,} | github_pat_\w{16,} | glpat-[\w-]{16,} | xox[abpr]-[\w-]{10,}
    | A[KS]IA[0-9A-Z]{16} | AIza[\w-]{30,} | wandb_v\d_\w{16,} | pypi-\w{16,} | npm_\w{30,}
    | eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*                       # a JSON web token
    | (?<![\w/\\@.-])[0-9a-f]{40}(?![\w/\\.-])                # a key of Weights & Biases; in a path, a commit
    | -----BEGIN[ ][A-Z ]*PRIVATE[ ]KEY-----[\s\S]*?(?:-----END[ ][A-Z ]*-----|\Z)
    | (?<=://)[^/\s]+(?=@)                                    # user:password@ of an address
    | (?i:(?<=bearer[ ]))[\w.~+/=-]{8,}
    """,
    re.VERBOSE,
)
# Inside of a text, such as the query of an address or a connection string: `...?token=abc&x=1`, `password=abc;`.
ASSIGNED = re.compile(
    r"(?i)((?<![a-z])(?:[\w-]*[_-])?(?:token|api_?key|secret|passw(?:or)?d|pwd|signature|sig|credential)=)[^&;\s\"']+"
)


def masked(value: Any, name: str = "") -> Any:
    """The same settings with `***` for what looks like a password or an access token, by its key or its text.

    value: mappings and lists of texts and numbers; what is none of these becomes text.
    name: the key that it is the value of.
    """
    return _masked(value, _is_secret(name), name)


def masked_arguments(arguments: Sequence[str]) -> list[str]:
    """A command line with `***` for what `masked` leaves out, in `--api_key=x`, `--api_key x` and `--logger={...}`."""
    shown: list[str] = []
    key = ""
    for word in arguments:
        name, equals, value = word.partition("=")
        is_key = word.startswith("--")
        if is_key and equals:
            shown.append(f"{name}={_masked_text(value, name)}")
        else:
            shown.append(word if is_key else _masked_text(word, key))
        key = "" if equals or not is_key else word
    return shown


def check_unmasked(config: Mapping[str, Any]) -> None:
    """UserError if a value is `***`, as in the settings that a run has saved: the secret is not there."""
    for key, value in _texts(config, ""):
        if value == MASK or f"://{MASK}@" in value:
            raise UserError(
                f"{key} is {value}: {MASK} stands for a secret, which a run does not save; write it there again, or "
                f"give it in the environment, as WANDB_API_KEY and HF_TOKEN"
            )


def _masked(value: Any, is_secret: bool, name: str) -> Any:
    if isinstance(value, Mapping):
        return {key: _masked(entry, is_secret or _is_secret(str(key)), str(key)) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_masked(entry, is_secret, name) for entry in value]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return MASK if is_secret and NUMBERS.search(_words(name)) else value
    text = str(value)
    return MASK if is_secret and text else ASSIGNED.sub(rf"\1{MASK}", SECRET_TEXT.sub(MASK, text))


def _masked_text(text: str, key: str) -> str:
    """A value of the command line, which may be a mapping or a list in YAML."""
    name = key.rstrip("+").rpartition(".")[2].lstrip("-")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = text
    if isinstance(value, Mapping | list):
        clean = masked(value, name)
        return text if clean == value else _as_one_line(clean)
    return str(masked(text, name))


def _as_one_line(value: Any) -> str:
    return str(yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=float("inf"))).strip()


def _is_secret(name: str) -> bool:
    words = _words(name)
    return SECRET_KEYS.search(words) is not None and OF_TEXT.search(words) is None


def _words(name: str) -> str:
    """`hubToken`, `hub-token` and `HUB_TOKEN` as `hub_token`."""
    return re.sub(r"[\W_]+", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)).lower()


def _texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Every text of nested settings with its dotted key."""
    if isinstance(value, Mapping):
        for name, entry in value.items():
            yield from _texts(entry, f"{key}.{name}".lstrip("."))
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _texts(entry, key)
    elif isinstance(value, str):
        yield key, value
