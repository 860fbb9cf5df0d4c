"""Passwords and access tokens in settings, found by the name of their key or by their form, and left out.

They are arguments of loggers and other classes, under `trainer`: a password reaches the class that needs it, but not
the record of the run and its logs. Model and data have texts that are read again, such as prompts: they are not masked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from radixtrain.errors import UserError
from radixtrain.yaml_text import load_yaml

MASK = "***"
OF_CLASSES = "--trainer."  # the keys whose values may be secrets
# Names of keys, and the ends of longer ones after a `_`: `db_password`, `hf_token`.
NAMES = (
    r"token|secrets?|pass|passw(?:or)?ds?|passphrase|passcode|pwds?|pws?|psw|pin|pat|credentials?|creds|authorization|auth|bearer"
    r"|cookies?|dsn|webhook|jwt|otp|totp|mfa|sas|csrf|xsrf|sid|mnemonic|seed_phrase|signature|netrc|kubeconfig|pem"
    r"|(?:connection|conn)_?(?:string|str|uri|url)|(?:database|db|redis|mongo|postgres|amqp|broker|webhook)_?(?:url|uri)"
    r"|session_?(?:id|key)|(?:api|access)_?(?:keys|tokens)|(?:api|access|secret|private)key|service_account(?:_json)?"
    r"|(?:access|refresh|id|auth|session|bearer)token|clientsecret|secret_key_base"
)
SECRET_KEYS = re.compile(rf"(?:^|_)(?:key|{NAMES})$")
OF_TEXT = re.compile(  # vocabulary tokens, not access tokens
    r"(^|_)(bos|eos|pad|unk|sep|cls|mask|image|video|audio|boi|eoi|special|start|end|stop|think|num|max|min)_tokens?$"
)
COUNTED = ("key", "token")  # a number after these is an index
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
    | (?i:(?<=authorization:[ ]token[ ]))[\w.~+/=-]+
    | (?i:(?<=bearer[ ]))[\w.~+/=-]{8,} | (?i:(?<=basic[ ]))(?=\w+[A-Z0-9=])[\w+/]{8,}={0,2}
    """,
    re.VERBOSE,
)
SHORTEST = 4
# Inside of a text: the query of an address (`?token=abc&x=1`), a connection string (`password=abc;`), `api_key = "x"`,
# `password: 'x y'`. Possessive, and each name is looked at once: the time is linear in the text.
ASSIGNMENT = re.compile(r"(?<![\w-])([\w-]++)[\"']?[ \t]*+(:=|=>|[:=])[ \t]*+")
IN_TEXT = re.compile(
    rf"(?:^|_)(?:{NAMES}|sig|(?:api|access|secret|account|private|encryption|signing|master|service|storage|ssh)_?key)$"
)
# Ordinary words: in a text, what follows one is a secret if it stands close to a `=`, or in quotes.
WORDS = re.compile(
    r"token|secrets?|pass|pin|pat|credentials|authorization|auth|bearer|cookies?|sas|sid|signature|sig|dsn|jwt|otp|key"
    r"|webhook|pem"
)
VALUES = {
    "quoted": re.compile(r"(?P<quote>[\"'])(?:(?!(?P=quote))[^\\\n]|\\.)++"),
    "close": re.compile(r"[^&;\s\"']++"),
    "in a list": re.compile(r"[^\s,}\]]++"),
    "spaced": re.compile(r"[^\n,;&}\]\"']++"),
}


def masked(value: object, name: str = "") -> Any:
    """Return the settings with `***` for each password or access token, recognised by its key or its text.

    value: mappings and lists of texts and numbers; what is none of these becomes text.
    name: the key that it is the value of.
    """
    return _masked(value, _is_secret(name), name)


def masked_message(message: str, given: Sequence[tuple[str, Any]]) -> str:
    """Return a message without the secrets that `masked` finds in it, and in the settings that it may repeat.

    given: keys and their values, as they were typed.
    """
    values = [(_parsed(value), name) for name, value in given]
    secrets = {each for value, name in values for each in _secrets(value, masked(value, name))}
    for secret in sorted(secrets, key=len, reverse=True):
        message = message.replace(secret, MASK)
    return str(masked(_without_assigned(message, is_message=True)))


def masked_arguments(arguments: Sequence[str]) -> list[str]:
    """Return a command line that can be typed again, with `***` for each secret in `--trainer.logger={...}`."""
    shown: list[str] = []
    key = ""
    for word in arguments:
        name, equals, value = word.partition("=")
        is_key = word.startswith("--")
        if is_key and equals and name.startswith(OF_CLASSES):
            shown.append(f"{name}={_masked_text(value, name)}")
        else:
            shown.append(_masked_text(word, key) if key.startswith(OF_CLASSES) and not is_key else word)
        key = "" if equals or not is_key else word
    return shown


def check_unmasked(key: str, value: object) -> None:
    """Raise UserError if a value of `trainer` has a `***`, as in the record of a run: the secret is not there."""
    if isinstance(value, str) and MASK in value:
        raise UserError(
            f"{key} is {value}: {MASK} stands for a secret, which a run does not save; write it there again, or "
            f"give it in the environment, as WANDB_API_KEY and HF_TOKEN"
        )


def _masked(value: object, is_secret: bool, name: str) -> Any:
    if isinstance(value, Mapping):
        return {key: _masked(entry, is_secret or _is_secret(f"{name}.{key}"), str(key)) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_masked(entry, is_secret, name) for entry in value]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return MASK if is_secret and _words(name) not in COUNTED else value
    text = str(value)
    return MASK if is_secret and text else _without_assigned(SECRET_TEXT.sub(MASK, _without_users(text)))


def _without_users(text: str) -> str:
    """Mask `user:password@` of an address or a path; a password may contain `/` and `@`."""
    return re.sub(r"\S++", lambda word: _without_user(word[0]) if "@" in word[0] else word[0], text)


def _without_user(word: str) -> str:
    parts = re.split(r"(:/{1,2})", word)
    for place, part in enumerate(parts[2::2], start=1):
        user, at, host = part.rpartition("@")
        has_password = re.match(r"[^/:@?#]*:(?!\d*(?:[/?#]|$))", user)  # no port
        if at and user and ("/" not in user or has_password):
            parts[2 * place] = f"{MASK}@{host}"
    return "".join(parts)


def _without_assigned(text: str, is_message: bool = False) -> str:
    """Mask what follows the name of a secret and `=` or `:`. is_message: the text may contain broken YAML."""
    shown, end = [], 0
    for found in ASSIGNMENT.finditer(text):
        if found.start() >= end and (value := _assigned_in(text, found, is_message)):
            quote = value[0][:1] if value[0][:1] in "\"'" else ""
            shown += [text[end : found.end()], quote, MASK]
            end = value.end()
    return "".join([*shown, text[end:]])


def _assigned_in(text: str, name: re.Match[str], is_message: bool) -> re.Match[str] | None:
    """Return the value that follows a name, if it is a secret."""
    words = _words(name[1])
    is_in_list = is_message and text[max(0, name.start() - 8) : name.start()].rstrip(" \"'")[-1:] in ("{", ",")
    is_named = IN_TEXT.search(words) is not None or (is_in_list and words.endswith("key"))
    if not is_named or OF_TEXT.search(words) is not None:
        return None
    if text[name.end() : name.end() + 1] in ("'", '"'):
        return VALUES["quoted"].match(text, name.end())
    if name[0].endswith("="):
        return VALUES["close"].match(text, name.end())
    if is_in_list:
        return VALUES["in a list"].match(text, name.end())
    is_path = text[max(0, name.start() - 1) : name.start()] in ("/", "\\")  # `/etc/passwd: no such file`
    return None if is_path or WORDS.fullmatch(words) else VALUES["spaced"].match(text, name.end())


def _masked_text(text: str, key: str) -> str:
    """Mask a value of the command line, which may be a mapping or a list in YAML."""
    name, value = key.lstrip("-"), _parsed(text)
    clean = masked(value, name)
    return text if clean == value else clean if isinstance(clean, str) else _as_one_line(clean)


def _parsed(value: object) -> Any:
    """Parse a text that is a mapping or a list in YAML; return anything else unchanged."""
    try:
        found = load_yaml(value) if isinstance(value, str) else value
    except yaml.YAMLError:
        return value
    return found if isinstance(found, Mapping | list) else value


def _secrets(value: Any, clean: Any) -> Iterator[str]:
    """Yield what `masked` has replaced as a whole, if it is long enough to be a secret."""
    if isinstance(value, Mapping):
        for key in value:
            yield from _secrets(value[key], clean[key])
    elif isinstance(value, list | tuple):
        for entry, masked_entry in zip(value, clean, strict=True):
            yield from _secrets(entry, masked_entry)
    elif clean == MASK and len(str(value)) >= SHORTEST:
        yield str(value)


def _as_one_line(value: object) -> str:
    return str(yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=float("inf"))).strip()


def _is_secret(name: str) -> bool:
    *sections, last = name.split(".")
    words = _words(last)
    is_column = sections[-1:] == ["columns"]  # of a data file, which may have any name
    return SECRET_KEYS.search(words) is not None and OF_TEXT.search(words) is None and not is_column


def _words(name: str) -> str:
    """Write `hubToken`, `hub-token` and `HUB_TOKEN` as `hub_token`."""
    return re.sub(r"[\W_]+", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)).lower()
