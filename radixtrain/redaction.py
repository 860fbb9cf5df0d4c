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

MASK = "***"
# Names of keys, and the ends of longer ones after a `_`: `db_password`, `hf_token`.
NAMES = (
    r"token|secrets?|pass|passw(?:or)?ds?|passphrase|passcode|pwd|pin|pat|credentials?|creds|authorization|auth|bearer"
    r"|cookies?|dsn|webhook|jwt|otp|totp|mfa|sas|csrf|xsrf|sid|mnemonic|seed_phrase|signature|netrc|kubeconfig|pem"
    r"|(?:connection|conn)_?(?:string|str|uri|url)|(?:database|db|redis|mongo|postgres|amqp|broker|webhook)_?(?:url|uri)"
    r"|session_?(?:id|key)|(?:api|access)_?(?:keys|tokens)|(?:api|access|secret|private)key|service_account(?:_json)?"
    r"|(?:access|refresh|id|auth|session|bearer)token|clientsecret|secret_key_base"
)
SECRET_KEYS = re.compile(rf"(?:^|_)(?:key|{NAMES})$")
OF_TEXT = re.compile(  # tokens of a vocabulary, not of access
    r"(^|_)(bos|eos|pad|unk|sep|cls|mask|image|video|audio|boi|eoi|special|start|end|stop|think|num|max|min)_tokens?$"
)
COUNTED = ("key", "token")  # whose number is a place
SECRET_TEXT = re.compile(
    r"""
    hf_\w{16,} | api_org_\w{16,} | sk-[\w-]{16,} | gh[pousr]_\w{16,} | github_pat_\w{16,} | gl(?:pat|ptt|dt)-[\w-]{16,}
    | xox[abeprs]-[\w-]{10,} | xapp-[\w-]{16,} | A[KS]IA[0-9A-Z]{16} | AIza[\w-]{30,} | ya29\.[\w-]{16,}
    | GOCSPX-[\w-]{16,} | wandb_v\d_\w{16,} | pypi-\w{16,} | npm_\w{30,} | r8_\w{30,} | gsk_\w{30,} | ntn_\w{30,}
    | lin_api_\w{30,} | [spr]k_(?:live|test)_\w{16,} | whsec_\w{16,} | dapi[0-9a-f]{32} | do[opr]_v1_[0-9a-f]{32,}
    | shp(?:at|ca|pa|ss)_\w{16,} | SG\.[\w-]{16,}\.[\w-]{16,} | hv[bs]\.[\w-]{20,} | (?<!\w)(?:AC|SK)[0-9a-f]{32}(?!\w)
    | (?<!\w)\d{8,10}:[\w-]{35}(?!\w)
    | (?<=hooks\.slack\.com/)[\w/-]{8,} | (?<=/api/webhooks/)[\w/-]{8,} | (?<=webhook\.office\.com/)[\w/@-]{8,}
    | eyJ[\w-]{10,}(?:\.[\w-]+){0,2}                          # a JSON web token
    | (?<![\w/\\@.-])[0-9a-f]{40}(?![\w/\\.-])                # a key of Weights & Biases; in a path, a commit
    # A secret of AWS: upper, lower and digits, and no word in it.
    | (?<![\w/+=.-])(?=\S{0,39}[A-Z])(?=\S{0,39}[a-z])(?=\S{0,39}\d)(?!\S{0,32}[a-z]{8})[A-Za-z0-9/+]{40}(?![\w/+=.-])
    | -----BEGIN[ ][A-Z ]*PRIVATE[ ]KEY[A-Z ]*-----[\s\S]*?(?:-----END[ ][A-Z ]*-----|\Z)
    | (?<=:/)[^/\s]+(?=@) | (?<=://)[^/\s]+(?=@)              # user:password@ of an address, also as a path
    | (?i:(?<=bearer[ ]))[\w.~+/=-]{8,} | (?i:(?<=basic[ ]))(?=\w+[A-Z0-9=])[\w+/]{8,}={0,2}
    """,
    re.VERBOSE,
)
SHORTEST = 4
# Inside of a text, such as the query of an address or a connection string: `...?token=abc&x=1`, `password=abc;`.
ASSIGNED = re.compile(
    rf"(?i)((?<![a-z])(?:[\w-]*[_-])?(?:{NAMES}|sig|(?:api|access|secret|account)[_-]?key|sharedaccesskey)=)"
    r"[^&;\s\"']+"
)
# In a message: YAML that is not whole.
QUOTED = re.compile(rf"(?i)([{{,]\s*[\"']?(?:[\w-]*[_-])?(?:{NAMES}|\w+key)[\"']?\s*[:=]\s*)[^\s,}}\]]+")


def masked(value: Any, name: str = "") -> Any:
    """The same settings with `***` for what looks like a password or an access token, by its key or its text.

    value: mappings and lists of texts and numbers; what is none of these becomes text.
    name: the key that it is the value of.
    """
    return _masked(value, _is_secret(name), name)


def masked_message(message: str, given: Sequence[tuple[str, Any]]) -> str:
    """A message without what `masked` leaves out of it, and out of the settings that it may repeat.

    given: keys and their values, as they were typed.
    """
    values = [(_parsed(value), name) for name, value in given]
    secrets = {each for value, name in values for each in _secrets(value, masked(value, name))}
    for secret in sorted(secrets, key=len, reverse=True):
        message = message.replace(secret, MASK)
    return str(masked(QUOTED.sub(rf"\1{MASK}", message)))


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


def check_unmasked(key: str, value: Any) -> None:
    """UserError if a value is `***`, as in the settings that a run has saved: the secret is not there."""
    if isinstance(value, str) and (value == MASK or f"://{MASK}@" in value):
        raise UserError(
            f"{key} is {value}: {MASK} stands for a secret, which a run does not save; write it there again, or "
            f"give it in the environment, as WANDB_API_KEY and HF_TOKEN"
        )


def _masked(value: Any, is_secret: bool, name: str) -> Any:
    if isinstance(value, Mapping):
        return {key: _masked(entry, is_secret or _is_secret(f"{name}.{key}"), str(key)) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_masked(entry, is_secret, name) for entry in value]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return MASK if is_secret and _words(name) not in COUNTED else value
    text = str(value)
    return MASK if is_secret and text else ASSIGNED.sub(rf"\1{MASK}", SECRET_TEXT.sub(MASK, text))


def _masked_text(text: str, key: str) -> str:
    """A value of the command line, which may be a mapping or a list in YAML."""
    name, value = key.rstrip("+").lstrip("-"), _parsed(text)
    clean = masked(value, name)
    return text if clean == value else clean if isinstance(clean, str) else _as_one_line(clean)


def _parsed(value: Any) -> Any:
    """A text that writes a mapping or a list in YAML as what it writes, and everything else as it is."""
    try:
        found = yaml.safe_load(value) if isinstance(value, str) else value
    except yaml.YAMLError:
        return value
    return found if isinstance(found, Mapping | list) else value


def _secrets(value: Any, clean: Any) -> Iterator[str]:
    """What `masked` has replaced as a whole, if it is long enough to be a secret."""
    if isinstance(value, Mapping):
        for key in value:
            yield from _secrets(value[key], clean[key])
    elif isinstance(value, list | tuple):
        for entry, masked_entry in zip(value, clean, strict=True):
            yield from _secrets(entry, masked_entry)
    elif clean == MASK and len(str(value)) >= SHORTEST:
        yield str(value)


def _as_one_line(value: Any) -> str:
    return str(yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=float("inf"))).strip()


def _is_secret(name: str) -> bool:
    *sections, last = name.split(".")
    words = _words(last)
    is_column = sections[-1:] == ["columns"]  # of a data file, which may have any name
    return SECRET_KEYS.search(words) is not None and OF_TEXT.search(words) is None and not is_column


def _words(name: str) -> str:
    """`hubToken`, `hub-token` and `HUB_TOKEN` as `hub_token`."""
    return re.sub(r"[\W_]+", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)).lower()
