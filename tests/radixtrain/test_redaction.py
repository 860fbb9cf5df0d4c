"""What counts as a password or a token, by its key or its text, in settings and on a command line."""

import time
from typing import Any

import pytest
import yaml

from radixtrain.errors import UserError
from radixtrain.redaction import check_unmasked, masked, masked_arguments, masked_message

HEX = "0123456789" * 4
BY_KEY: dict[str, Any] = {
    **{"hub_token": "plain words", "WANDB_API_KEY": "x", "password": "letmein", "apiKey": "x", "access-token": "x"},
    **{"Authorization": "Basic x", "client_secret": "x", "passphrase": "x", "key": "x", "api_keys": ["x", "y"]},
    **{
        "db_password": 12345,
        "credentials": {"user": "me", "pin": "x"},
        "tokenSecret": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
    },
}
NAMES = """pass auth cookies dsn connection_string conn_str slack_webhook webhook_url jwt otp totp session_id sessionid
    session_key sas database_url signature pin pat mfa csrf_token refreshToken private_key ssh_key passcode creds apikey
    netrc sid my_pw dbPw psw
    mnemonic seed_phrase encryption_key account_key service_account_json basic_auth http_proxy_pass pem"""
BY_KEY |= dict.fromkeys(NAMES.split(), "plain words") | {"api_key": 12345, "pin": 1234}
RANDOM = "x7Kq" * 12
WHOLE = (  # forms that are nothing else
    *(
        f"{start}{RANDOM}"
        for start in ("sk_live_", "rk_test_", "whsec_", "xapp-1-", "xoxe-", "hvs.", "ya29.", "GOCSPX-")
    ),
    *(f"{start}{RANDOM}" for start in ("npm_", "r8_", "gsk_", "lin_api_", "shpat_", "api_org_", "glptt-", "eyJ")),
    *(f"{start}{HEX[:32]}" for start in ("dapi", "AC", "dop_v1_")),
    f"SG.{RANDOM[:22]}.{RANDOM[:43]}",
    f"123456789:{RANDOM[:35]}",
    "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",  # AWS's own example
    "-----BEGIN PGP PRIVATE KEY BLOCK-----\nabc",
)
BY_TEXT = {
    **dict.fromkeys(WHOLE, "***"),
    f"https://hooks.slack.com/services/T0/B0/{RANDOM}": "https://hooks.slack.com/***",
    f"https://discord.com/api/webhooks/12345/{RANDOM}": "https://discord.com/api/webhooks/***",
    "Authorization: Basic dXNlcjpwYXNz": "Authorization: Basic ***",
    f"AccountName=a;AccountKey={RANDOM}==": "AccountName=a;AccountKey=***",
    "https:/me:pw@example.com/x": "https:/***@example.com/x",  # as a path
    "hf_" + "a" * 34: "***",
    "use sk-" + "b1" * 12 + " here": "use *** here",
    HEX: "***",
    "https://me:pw@example.com/x": "https://***@example.com/x",
    "https://ghp_token@example.com/x": "https://***@example.com/x",
    "mysql://me:p@ss@example.com/x": "mysql://***@example.com/x",
    "https://example.com/x?a=1&access_token=abc&b=2": "https://example.com/x?a=1&access_token=***&b=2",
    "host=h;password=abc;user=me": "host=h;password=***;user=me",
    "Bearer abcdefgh.ijk": "Bearer ***",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.sig-x": "***",
    "-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----": "***",
    "AKIA" + "A1" * 8: "***",
    "s3://KEY:SECRET/with+slashes/@bucket/x": "s3://***@bucket/x",
    "s3://KEY:SECRET@bucket": "s3://***@bucket",
    f"https://hf_{RANDOM}:pw@host/x": "https://***@host/x",
    "(postgres://me:pa/s@s/@host:5432/db),x": "(postgres://***@host:5432/db),x",
    "git+https://me:p/w@h https://host:80/a@b": "git+https://***@h https://host:80/a@b",
    "api_key = \"x y\", a = 'b'": "api_key = \"***\", a = 'b'",
    "password: 'x y'": "password: '***'",
    "apiKey: 'it\\'s', b": "apiKey: '***', b",
    '{"client_secret": "a b", "x": 1}': '{"client_secret": "***", "x": 1}',
    "Authorization: Token abc": "Authorization: Token ***",
    "token = 'x'; token=y": "token = '***'; token=***",
    "my_pw = x y\nother: z": "my_pw = ***\nother: z",
    "db-password: x y": "db-password: ***",
    "export HF_TOKEN=abc AWS_SECRET_ACCESS_KEY=b": "export HF_TOKEN=*** AWS_SECRET_ACCESS_KEY=***",
    "PASSWORD := x": "PASSWORD := ***",
    "password => 'x'": "password => '***'",
    "password='never closed": "password='***",
    "note: 'open, password=x": "note: 'open, password=***",
}
HARMLESS: dict[str, Any] = {
    **{"max_tokens": 16384, "next_tokens": ["yes", "no"], "min_shared_tokens": 16, "tokenizer": "x", "none": None},
    **{"train_file": "tokens.jsonl", "monitor": "eval_loss", "secret": None, "save": True, "token": 7},
    **{"eos_token": "<|im_end|>", "pad_token": "x", "stop_tokens": ["x"], "lora_target_modules": ["k_proj"]},
    "model_name_or_path": f"/models/snapshots/{HEX}",
    "revision": f"org/name@{HEX}",
    "template": "*** Instructions: a=b, key: value, user@example.com",
    "path": "s3://bucket/folder@2/x",
    "columns": {"key": "id", "password": "pw"},
    "error": "/etc/passwd: no such file",
    "sentence": "the token: a word; eos_token = '</s>', max_tokens = 5, key = 3, the secret: patience",
    "address": "https://example.com/a?user=me@example.com https://example.com:8080/a@b",
    "title": "Basic Instructions, basic training, " + "chats/" * 8,
}


def test_by_its_key_and_by_its_text() -> None:
    for name, value in BY_KEY.items():
        assert set(leaves(masked({name: value}))) == {"***"}, name
    for text, shown in BY_TEXT.items():
        assert masked({"a": [{"note": text}]}) == {"a": [{"note": shown}]}, text
    assert masked(HARMLESS) == HARMLESS


LONG = 30_000  # characters
STARTS = [
    "a",
    "a_",
    "a-",
    "a.",
    " ",
    '"',
    "=",
    "a=",
    "key",
    "key=",
    "password",
    "password=",
    "password: '",
    ":/",
    "a: ",
]
STARTS += ["@", "://@", "://a", "a@", "-----BEGIN ", "SG.", "eyJ", "hf_", "0", "\\", "password='\\", "{key", "A1"]


def test_the_time_is_linear() -> None:
    """An error names a value that it repeats, such as the first line of a file that is no table."""
    for start in STARTS:
        text, started = start * (LONG // len(start)), time.process_time()
        masked_message(text, [("a", text)])
        assert time.process_time() - started < 2, start


def test_of_a_command_line() -> None:
    logger = {"class_path": "WandbLogger", "init_args": {"project": "p", "api_key": "secret words"}}
    written = yaml.safe_dump(logger, default_flow_style=True)
    typed = ["--trainer.a.api_key=x", "--trainer.b.token", "y", "--c", "z", "--trainer.logger", written]
    shown = masked_arguments([*typed, "--model.warmup_steps=0.1", "--trainer.api_keys=k", "--text=a: b"])
    assert shown[:5] == ["--trainer.a.api_key=***", "--trainer.b.token", "***", "--c", "z"]
    assert shown[-3:] == ["--model.warmup_steps=0.1", "--trainer.api_keys=***", "--text=a: b"]
    assert yaml.safe_load(shown[6])["init_args"] == {"project": "p", "api_key": "***"}
    for harmless in (
        ["--data.train_file=[a.jsonl, {path: b.jsonl, weight: 2}]", "fit", "--x", "1e-5"],
        ["--flag"],
        [],
        ["--data.columns.key", "id"],
        ["--data.system_prompt=Output pass=yes or pass=no.", "--data.system_prompt", "the password: open sesame"],
    ):
        assert masked_arguments(harmless) == harmless


def test_masked_settings_are_no_settings() -> None:
    clean = masked({"api_key": "x", "hosts": ["https://me:pw@example.com"], "notes": "for you: password=x, of May"})
    for name, value in (("api_key", clean["api_key"]), ("hosts", *clean["hosts"]), ("notes", clean["notes"])):
        with pytest.raises(
            UserError, match=rf"^trainer\.logger\.{name} is .*\*\*\*.*: \*\*\* stands for a secret, .* environment"
        ):
            check_unmasked(f"trainer.logger.{name}", value)


def leaves(value: Any) -> list[Any]:
    """What nested mappings and lists hold."""
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
        return [leaf for each in inner for leaf in leaves(each)]
    return [value]
