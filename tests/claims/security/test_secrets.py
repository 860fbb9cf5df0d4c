"""No setting holds a secret, so no file of a run has one; a message has no password of an address that was typed."""

from collections.abc import Callable

import pytest

from radixtrain.__main__ import main
from radixtrain.screen import without_passwords
from tests.support.runs import errors_in

SECRET = "Zq7secretZq7"
ADDRESS = f"https://me:{SECRET}@example.com/x"
TYPED = (
    f"--config={ADDRESS}.yaml",
    ADDRESS,
    f"--{ADDRESS}=1",
    f"--output_dir={ADDRESS}",
    f"--model.model_name_or_path={ADDRESS}",
    f"--model.model_name_or_path=https://{SECRET}@example.com/x",
    f"--data.train_file={ADDRESS}.jsonl",
    f"--data.train_file=s3://KEY:{SECRET}@bucket/x",
    f"--data.batch_size=mysql://me:p@{SECRET}@example.com:3306/db",
    f"--ckpt_path={ADDRESS}",
    f"--trainer.api_key={SECRET}",
    f"--data.batch_size={{password: {SECRET}}}",
    f"--trainer.logger={{class_path: WandbLogger, init_args: {{api_key: {SECRET}}}}}",
    f"--data.chat_template_kwargs={{x: [{{access_token: {SECRET}}}]}}",
)


def test_no_message_has_it(arguments: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    for typed in TYPED:
        assert main([*arguments(), typed]) in (1, 2), typed
        [line] = errors_in(capsys.readouterr().err)
        assert SECRET not in line, line


ADDRESSES = {
    "https://me:pw@example.com/x?a=1": "https://***@example.com/x?a=1",
    "https:/me:pw@example.com/x": "https:/***@example.com/x",  # as a path
    "https://token@example.com/x": "https://***@example.com/x",
    "mysql://me:p@ss@example.com:3306/db": "mysql://***@example.com:3306/db",
    "(s3://KEY:SECRET@bucket) git+https://a:b@h": "(s3://***@bucket) git+https://***@h",
    "https://host:80/a@b https://example.com?to=me@example.com": "",
    "s3://bucket/folder@2/x, me@example.com, a: b@c": "",
}


def test_addresses() -> None:
    for text, shown in ADDRESSES.items():
        assert without_passwords(text) == (shown or text)
