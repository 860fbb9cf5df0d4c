"""Wrong command lines and configurations: one line that says what is wrong, the right exit code, and nothing written.

Keys, types and files are usage, exit code 2; what the user can fix elsewhere, in values, rows, models, is 1.
"""

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from radixtrain.__main__ import main
from radixtrain.commands.fit import Command
from radixtrain.errors import UserError
from tests.support import FULL

GOOD = {"messages": [{"role": "user", "content": "Where is the pear?"}, {"role": "assistant", "content": "Shelf one."}]}
ROBOT = {"messages": [{"role": "robot", "content": "x"}]}
USAGE = {
    "--model.learning_rte=1": "no key model.learning_rte, did you mean model.learning_rate?",
    "--data.max_token=1": "no key data.max_token, did you mean data.max_tokens?",  # argparse would complete it
    "--trainer.api_key=x": "trainer.api_key: a run saves its settings, so they hold no secrets; set it in the environm",
    "--model.attention=ring": "model.attention must be one of auto, cascade, path, expand, reference, tree; got ring",
    "--trainer.logger=evil.Logger": "trainer.logger must be one of csv, wandb, tensorboard, mlflow, trackio, none; got",
    "--config={shop}/none.yaml": "no such file: {shop}/none.yaml",
    "--print_config stray": "stray is not a key: write --key value, and --config FILE for a YAML file",
}
SETTINGS = {
    "--save_best=eval_los --data.validation_file={shop}/validation.jsonl": "save_best: no metric 'eval_los', did you",
    "--model.kernel=flash_attn": "kernel='flash_attn' cannot be used: needs CUDA",
    "--dedup=false --model.attn_implementation=sdpaa": "model.model_name_or_path",
    "--model.model_name_or_path={shop}/nowhere": "model.model_name_or_path: no such folder: {shop}/nowhere",
    "--model.use_peft=true --model.lora_target_modules=[nope]": "model.lora_target_modules: no layer has a name of ['n",
    "--model.use_peft=true --model.lora_target_modules=[lm_head]": "model.lora_target_modules: lm_head shares its weig",
    "--data.train_file={shop}/none.jsonl": "no such file: {shop}/none.jsonl",
    "--data.split_turns=false": "split_turns: false: the chat template has no generation markers; set split",
    "--data.max_length=20": "{shop}/train.jsonl:1: 74 tokens exceed max_length 20; raise max_length or set ",
    "--ckpt_path=best": "ckpt_path best: none in ",
    "--ckpt_path=": "ckpt_path",
    "--ckpt_path={shop}/train.jsonl": "ckpt_path {shop}/train.jsonl: a file; a checkpoint of radixtrain is a folder",
    "--ckpt_path={shop}": "ckpt_path {shop}: no whole checkpoint in {shop}",
}
TRAINER = {
    "--trainer.devices=9223372036854775808": "trainer.devices must be at most 1,000; got 9223372036854775808",
    "--trainer.max_time=soon": "trainer.max_time must be DD:HH:MM:SS",
    "--trainer.max_time=1:2": "trainer.max_time must be DD:HH:MM:SS",
    "--trainer.accelerator=cpu --trainer.devices=0": "trainer.devices must be at least 1, or auto; got 0",
    "--trainer.strategy=nonsense": "trainer.strategy nonsense: no such strategy; there are auto, ddp, ",
    "--trainer.limit_val_batches=1.5": "trainer.limit_val_batches 1.5: a number of steps, or a share",
}


@pytest.fixture
def said_of(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """`said_of(code, typed)`: the line that a command ends with. One that is not refused writes where it is tidied."""
    monkeypatch.chdir(tmp_path)

    def run(code: int, typed: list[str]) -> str:
        assert main(typed) == code, typed
        captured = capsys.readouterr().err
        [error] = [line for line in captured.splitlines() if line.startswith("error: ")]
        assert "Traceback" not in captured and not (tmp_path / "out").exists()
        return error.removeprefix("error: ")

    return run


@pytest.fixture
def fit(said_of: Any, arguments: Any) -> Callable[..., str]:
    """`fit(code, "--key value")`: the line that a run ends with for what is added to its command line."""
    return lambda code, typed: said_of(code, [*arguments(), *shlex.split(typed)])


def test_usage(fit: Any, shop: Path) -> None:
    """What else is said of keys, values and files: settings/test_read.py."""
    for typed, expected in USAGE.items():
        assert fit(2, typed.replace("{shop}", str(shop))).startswith(expected.replace("{shop}", str(shop))), typed


@pytest.mark.parametrize("table", [SETTINGS, pytest.param(TRAINER, marks=FULL)])
def test_settings_that_cannot_be_met(fit: Any, shop: Path, table: dict[str, str]) -> None:
    if table is SETTINGS:
        pytest.importorskip("peft", reason="pip install peft")
    for typed, expected in table.items():
        message = fit(1, typed.replace("{shop}", str(shop)))
        assert message.startswith(expected.replace("{shop}", str(shop))), typed


def test_rows(fit: Any, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for rows, expected in (
        ([], f"no rows in {path}"),
        ([json.dumps(GOOD), '{"messages": ['], f"{path}:2: not valid JSON"),
        ([json.dumps(GOOD), json.dumps(GOOD), json.dumps(ROBOT)], f"{path}:3: messages: turn 1: unknown role 'robot'"),
        (['{"input_ids": [1, 2], "labels": [-100, -100]}'], f"{path}:1: no token bears loss"),
        (['{"input_ids": [1, 2], "labels": [1, 2], "advantages": 1}'], f"{path}:1: advantages: the loss here is a cro"),
        (['{"input_ids": [1, 2, 70000]}'], f"{path}:1: token id 70000 at position 2 is outside the vocabulary"),
    ):
        path.write_text("".join(f"{row}\n" for row in rows))
        assert expected in fit(1, f"--data.train_file={path}")


def test_a_file_that_is_missing_is_said_before_the_rows_are_read(fit: Any, said_of: Any, arguments: Any) -> None:
    assert said_of(1, arguments(data__train_file=None)) == "data.train_file is missing: name the file to train on"
    assert fit(1, "--ckpt_path=nope.ckpt --data.train_file=none") == "ckpt_path: no such checkpoint: nope.ckpt"


def test_weights_are_looked_for_before_the_rows_are_read(fit: Any, shop: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(shop / "model", tmp_path / "model")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    flags = f"--model.model_name_or_path={folder} --data.train_file=none.jsonl"
    assert fit(1, flags).startswith(f"{path}: the weights cannot be read, the file is incomplete or damaged (")
    path.unlink()
    assert "no weights (model.safetensors or model.safetensors.index.json)" in fit(1, flags)


def test_exports(said_of: Any, tmp_path: Path) -> None:
    (tmp_path / "x.ckpt").write_text("not a checkpoint")
    for name, expected in (
        (tmp_path / "none.ckpt", "no such checkpoint"),
        ("last", "ckpt_path last names no run; write RUN/checkpoints/last"),
        (tmp_path / "x.ckpt", "a file; a checkpoint of radixtrain is a folder"),
    ):
        assert expected in said_of(1, ["export", f"--ckpt_path={name}", f"--output_dir={tmp_path / 'out'}"])


def test_an_error_of_our_own_is_not_blamed_on_the_user(arguments: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(Command, "make_runner", broken)
    with pytest.raises(ValueError, match=r"^a bug$") as raised:
        main(arguments())
    assert not isinstance(raised.value, UserError)
