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
from tests.support.runs import errors_in

GOOD = {"messages": [{"role": "user", "content": "Where is the pear?"}, {"role": "assistant", "content": "Shelf one."}]}
ROBOT = {"messages": [{"role": "robot", "content": "x"}]}
USAGE = {
    "--weights_only=false": "no key weights_only: a checkpoint is always read as data, never run as code",
    "--config={shop}/none.yaml": "no such file: {shop}/none.yaml",
    "--print_config stray": "stray is not a key: write --key value, and --config FILE for a YAML file",
}
BEFORE_ROWS = {  # files of rows are not there
    "--save_best=eval_los": "save_best: no metric 'eval_los', did you mean eval_loss?",
    "--save_best=eval_contains": "save_best: eval_contains is not measured: set evaluate_generation.metric",
    "--save_best=eval_loss --data.validation_file=null": "save_best: eval_loss needs rows for it: set data.",
    "--early_stopping=2 --data.validation_file=null": "early_stopping: eval_loss needs rows for it",
    "--save_best=eval_loss --trainer.limit_val_batches=0": "save_best needs validations, and trainer.limit_val_batches",
    "--save_best=eval_loss --trainer.enable_checkpointing=false": "save_best needs checkpoints, and trainer.enable_che",
    "--evaluate_generation.metric=contains --data.validation_file=null": "evaluate_generation needs rows: set data.val",
    "--output_dir=s3://bucket/run": "output_dir s3://bucket/run: s3 is not supported; name a local folder",
    "--output_dir=s3:/bucket": "output_dir s3:/bucket: s3 is not supported",
    "--output_dir=file:///tmp/x": "output_dir file:///tmp/x: file is not supported",
    "--output_dir=": "output_dir",
    "--output_dir='a\0b'": "output_dir",
    "--output_dir={shop}/train.jsonl": "output_dir {shop}/train.jsonl: {shop}/train.jsonl is not a folder",
    "--output_dir={shop}/train.jsonl/run": "output_dir {shop}/train.jsonl/run: {shop}/train.jsonl is not a folder",
    "--output_dir=broken/run": "output_dir broken/run: /",
    "--ckpt_path=nope.ckpt": "ckpt_path: no such checkpoint: nope.ckpt",
}
SETTINGS = {
    "--model.kernel=flash_attn": "kernel='flash_attn' cannot be used: needs CUDA",
    "--dedup=false --model.attn_implementation=sdpaa": "model.model_name_or_path",
    "--model.model_name_or_path=https://hf.co/o/n": "model.model_name_or_path 'https://hf.co/o/n': expected a reposit",
    "--model.use_peft=true --model.lora_target_modules=[nope]": "model.lora_target_modules: no layer has a name of ['n",
    "--model.use_peft=true --model.lora_target_modules=[lm_head]": "model.lora_target_modules: lm_head shares its weig",
    "--model.use_peft=true --model.lora_dropout=0.1": "model.lora_dropout is 0.1: a shared token would draw once, but",
    "--data.train_file=null": "data.train_file is missing: name the file to train on",
    "--data.train_file={shop}/none.jsonl": "no such file: {shop}/none.jsonl",
    "--data.split_turns=false": "split_turns: false: the chat template has no generation markers; set split",
    "--data.max_length=20": "{shop}/train.jsonl:1: 74 tokens exceed max_length 20; raise max_length or set ",
    "--ckpt_path=best": "ckpt_path best: none in ",
    "--ckpt_path=": "ckpt_path",
    "--ckpt_path={shop}/train.jsonl": "ckpt_path {shop}/train.jsonl: a file; a checkpoint of radixtrain is a folder",
    "--ckpt_path={shop}": "ckpt_path {shop}: no whole checkpoint in {shop}",
}
METRICS = {
    "regex --evaluate_generation.pattern=[0-9]": "evaluate_generation.pattern: finds nothing in 5 of 5 targets, first",
    "contains --evaluate_generation.generation_kwargs='{top_pp: 1}'": "evaluate_generation: unknown option 'top_pp'",
}
OTHERS = {  # commands
    "report --max_seconds=-1": "max_seconds must be at least 0",
    "report --model.model_name_or_path=no/such/folder": "no tokenizer in no/such/folder",
    "inspect --step=5": "step: an epoch has the steps 0 to 4, got 5",
    "inspect --micro_batch=-1": "micro_batch: step 0 has the micro-batches 0 to 0, got -1",
    "inspect --row=0": "row: data.train_file has the rows 1 to 20, got 0",
    "inspect --row=21": "row: data.train_file has the rows 1 to 20, got 21",
    "inspect --row=train.jsonl:21": "row: no row 'train.jsonl:21' in the files of the configuration; expected a numb",
    "inspect --row=rain.jsonl:1": "row: no row 'rain.jsonl:1'",
    "inspect --dedup=false": "inspect shows what a batch shares, which is nothing with dedup: false",
    "inspect --data.train_file=null --row=1": "data.train_file is missing",
    "predict --data.predict_file=asked.jsonl": "asked.jsonl:1: expected at least one assistant turn",
}
TRAINER = {
    "--trainer.devices=9223372036854775808": "trainer.devices must be at most 1,000, or auto; got 922",
    "--trainer.max_time=soon": "trainer.max_time must be DD:HH:MM:SS",
    "--trainer.accelerator=cpu --trainer.devices=0": "trainer.devices must be at least 1, or auto; got 0",
    "--trainer.strategy=nonsense": "trainer.strategy nonsense: no such strategy; there are auto, ddp, ",
    "--trainer.limit_val_batches=1.5": "trainer.limit_val_batches 1.5: a number of steps, or a share",
}


@pytest.fixture
def said_of(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """`said_of(code, typed)`: the line that a command ends with. One that is not refused writes where it is tidied."""
    monkeypatch.chdir(tmp_path)
    Path("broken").symlink_to("nowhere")
    Path("asked.jsonl").write_text(json.dumps({"messages": GOOD["messages"][:1]}))

    def run(code: int, typed: list[str]) -> str:
        assert main(typed) == code, typed
        captured = capsys.readouterr().err
        [error] = errors_in(captured)
        assert "Traceback" not in captured and not (tmp_path / "out").exists()
        return error

    return run


@pytest.fixture
def fit(said_of: Any, arguments: Any) -> Callable[..., str]:
    """`fit(code, "--key value")`: the line that a run, or another command, ends with for what is added to its line."""
    return lambda code, typed, command="fit": said_of(code, [*arguments(command), *shlex.split(typed)])


@pytest.mark.parametrize(
    ("code", "first", "table"),
    [
        (2, "fit", USAGE),
        (1, "fit --data.train_file=none.jsonl --data.validation_file=none.jsonl", BEFORE_ROWS),
        (1, "fit", SETTINGS),
        (1, "fit --data.val_size=5 --evaluate_generation.metric", METRICS),
        (1, "", OTHERS),
        pytest.param(1, "fit", TRAINER, marks=FULL),
    ],
    ids=["usage", "before rows", "settings", "metrics", "other commands", "trainer"],
)
def test_what_cannot_be_meant_or_met(fit: Any, shop: Path, code: int, first: str, table: dict[str, str]) -> None:
    """What else is said of keys, values and files: settings/test_read.py."""
    if table is SETTINGS:
        pytest.importorskip("peft", reason="pip install peft")
    for typed, expected in table.items():
        command, _, keys = f"{first} {typed}".replace("{shop}", str(shop)).strip().partition(" ")
        said = fit(code, keys, command)
        assert said.startswith(expected.replace("{shop}", str(shop))), (typed, said)


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


def test_weights_are_looked_for_before_the_rows_are_read(fit: Any, shop: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(shop / "model", tmp_path / "model")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    flags = f"--model.model_name_or_path={folder} --data.train_file=none.jsonl"
    assert fit(1, flags).startswith(f"{path}: the weights cannot be read, the file is incomplete or damaged (")
    path.unlink()
    assert "no weights (model.safetensors or model.safetensors.index.json)" in fit(1, flags)


def test_exports(said_of: Any) -> None:
    """What else `ckpt_path` cannot name: checkpoints/test_resolve.py."""
    said = said_of(1, ["export", "--ckpt_path=last", "--output_dir=out"])
    assert said == "ckpt_path last names no run; write RUN/checkpoints/last"


def test_an_error_of_our_own_is_not_blamed_on_the_user(arguments: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(Command, "make_runner", broken)
    with pytest.raises(ValueError, match=r"^a bug$") as raised:
        main(arguments())
    assert not isinstance(raised.value, UserError)


def test_adapters_with_the_learning_rate_of_all_weights(
    arguments: Callable[..., list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    none = {"model__use_peft": True, "data__train_file": "none.jsonl"}
    for rate, told in ((None, True), (1e-4, False)):
        caplog.clear()
        assert main(arguments(model__learning_rate=rate, **none)) == 1
        assert ("model.learning_rate is 2e-05, as for training all weights; LoRA usually needs" in caplog.text) == told
