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
from tiers import FULL

from radixtrain.__main__ import main
from radixtrain.commands.lightning import Command
from radixtrain.errors import UserError

GOOD = {"messages": [{"role": "user", "content": "Where is the pear?"}, {"role": "assistant", "content": "Shelf one."}]}
ROBOT = {"messages": [{"role": "robot", "content": "x"}]}
NO_KEY = " (`radixtrain fit --help` lists the keys)"
NOT_IMPORTED = "class_path 'evil.Callback' is not imported: a configuration may name only classes of radixtrain, "
LONG = "x" * 99
NO_KEYS = "--config: expected keys with their values, such as `output_dir: runs/a`; got "
MONITOR = json.dumps([{"class_path": "EarlyStopping", "init_args": {"monitor": "eval_los"}}])

KEYS = {
    "--model.learning_rte=1": "no key model.learning_rte, did you mean model.learning_rate?",
    "--output-dir runs/x": "no key output-dir, did you mean output_dir?",
    "--learning_rate 1e-4": "no key learning_rate, did you mean model.learning_rate?",
    "--max_epoch 2": "no key max_epoch, did you mean trainer.max_epochs?",
    "--data.max_token=1": "no key data.max_token, did you mean data.max_tokens?",  # argparse would complete it
    "--zzz=1": f"no key zzz{NO_KEY}",
    "--data.zzz 1": f"no key data.zzz{NO_KEY}",  # whose section is near to that of others
    "--dta.batch_size=1 --model.dtyp=2": "no key dta.batch_size, did you mean data.batch_size?; no key model.dtyp, did "
    "you mean model.dtype?",
    "stray": "stray is not a key: write --key value, and --config FILE for a YAML file",
    "--save_best": "save_best needs a value: --save_best VALUE",
    "--config": "config needs a value: --config VALUE",
    "--num_train_epochs 3 --bf16 true": "no key num_train_epochs: here it is trainer.max_epochs; no key bf16: "
    "here it is trainer.precision, bf16-mixed",
    "--model.dedup true": "no key model.dedup, did you mean dedup?",  # which fills it in
    "--model.lora_r 16": "model.lora_r is set without model.use_peft, so all weights would be trained: add",
    "--model.use_dora --model.use_rslora": "model.use_dora is set without model.use_peft",
    "--data.columns " + "[" * 100_000: "more than 50 lists or sections inside of one another",
    "--seed_everything " + "9" * 5000: "a number of 5,000 digits; as a text, write it in quotes",
    "--output_dir \udcff": "a value is not UTF-8 text: '\"\\udcff\"'",
    "--trainer.callbacks+ Timer": "no key trainer.callbacks+: write the whole value of trainer.callbacks",
    "--data.columns.user question": "no key data.columns.user: write the whole value of data.columns",
    "--overwrite --model.nope 1": f"no key model.nope{NO_KEY}",  # a switch takes no value, and not the next key
}
VALUES = {
    "--data.excess_length_strategy=dropp": "data.excess_length_strategy must be one of raise, drop, truncate; got "
    "dropp, did you mean drop?",
    "--model.attention=ring": "model.attention must be one of auto, cascade, path, expand, reference, tree; got ring",
    "--model.learning_rate=abc": "model.learning_rate must be a number; got abc",
    "--save_every_steps=0.5": "save_every_steps must be an integer or null; got 0.5",
    "--save_every_steps=": "save_every_steps must be an integer or null; got an empty text",
    "--data.batch_size=1e30": "data.batch_size must be an integer; got 1e30",
    "--model.max_skipped_steps=true": "model.max_skipped_steps must be an integer; got true",
    "--data.split_turns=maybe": "data.split_turns must be true or false; got maybe",
    "--model.allow_dropout='{a: 1}'": "model.allow_dropout must be list of text or null; got {a: 1} (`radixtrain "
    "fit --help model.allow_dropout` says more)",
    f"--data.batch_size={LONG}": f"data.batch_size must be an integer; got {LONG[:80]} ...",
    "--sp_size=some": "sp_size must be an integer; got some",
}
CLASSES = {
    "--trainer.logger=tensorbord": "trainer.logger: no 'tensorbord', did you mean tensorboard?",
    "--trainer.logger=wandbb": "trainer.logger: no 'wandbb', did you mean wandb?",
    "--trainer.callbacks=EarlyStoping": "trainer.callbacks: no 'EarlyStoping', did you mean EarlyStopping?",
    "--trainer.callbacks='[{class_path: EarlyStoping}]'": "trainer.callbacks: no 'EarlyStoping', did you mean EarlyS",
    "--trainer.callbacks='[{class_path: EarlyStopping}]'": "trainer.callbacks: EarlyStopping needs monitor, under its",
    "--trainer.callbacks=evil.Callback": NOT_IMPORTED,
    """--trainer.callbacks='[{"class_path": "evil.Callback"}]'""": NOT_IMPORTED,
    """--trainer.callbacks='[{"class_path": "torch.hub.load"}]'""": "trainer.callbacks: class_path 'torch.hub.load' is "
    "not accepted: expected a subclass of Callback",
    "--trainer.callbacks='{class_path: Timer, a: 1}'": "no key a in trainer.callbacks: write options of a class in it",
    "--trainer.callbacks='{class_path: Timer, init_args: [a]}'": "trainer.callbacks: init_args must be a mapping of na",
    "--trainer.callbacks='{class_path: Timer, init_args: {1: 2}}'": "trainer.callbacks: init_args must be a mapping of",
    "--trainer.callbacks='{class_path: Timer, dict_kwargs: {a: 1}}'": "no key dict_kwargs in trainer.callbacks: write ",
    "--trainer.callbacks='{class_path: Timer, init_args: {verbose: some}}'": "trainer.callbacks: Timer: verbose must b",
}
FILES = {
    "": f"{NO_KEYS}an empty file",
    "model:\n": "model is a section: expected keys with their values; got null",
    "hello": f"{NO_KEYS}a text",
    "config: /etc/passwd\n": "--config {config}: the key config names another file, which is not read",
    "trainer: {callbacks: [/etc/passwd]}\n": "trainer.callbacks: no '/etc/passwd'; there are EarlyStopping, Model",
    "model: {learning_rate: null}\n": "model.learning_rate must be a number; got null; the default is 2e-05",
    "a: [\n": "{config}:2: not YAML: did not find expected node content",
    "a:\n\t b: 1\n": "{config}:2: not YAML: found character that cannot start any token",
    "[" * 100_000: "{config}:1: more than 50 lists or sections inside of one another",
    "a: &x [*x]\n": "{config}:1: `&`, `*` and `<<` are not read: write the value out, or a text in quotes",
    "data:\n  columns+: {user: q}\n": "no key data.columns+.user: write the whole value of data.columns",
    "trainer:\n  callbacks+: Timer\n": "no key trainer.callbacks+: write the whole value of trainer.callbacks",
    "model: {learning_rate: "
    + "9" * 5000
    + "}\n": "{config}:1: a number of 5,000 digits; as a text, write it in quotes",
    "#" * (1 << 20) + "\n": "{config} has 1,048,577 characters, settings at most 1,048,576",
    "model: {lora_r: 8, use_peft: false}\n": "model.lora_r is set without model.use_peft",
    "fit:\n  model:\n    learning_rate: 1\n": "no key fit.model.learning_rate, did you mean model.learning_rate?",
    "model:\n  learning_rte: 1\n": "no key model.learning_rte, did you mean model.learning_rate?",
    "savebest: loss\n": "no key savebest, did you mean save_best?",
    "data: rows.jsonl\n": "data is a section: expected keys with their values; got rows.jsonl",
    "trainer:\n  logger: [{class_path: CSVLoger}]\n": "trainer.logger: no 'CSVLoger', did you mean CSVLogger?",
    "trainer:\n  callbacks:\n  - class_path: evil.Callback\n": NOT_IMPORTED,
    "data:\n  batch_size: 8\n  batch_size: 4\n": "{config}:3: the key batch_size is given twice, first in {config}:2; ",
}
COMMANDS = {
    "fit": "model.model_name_or_path is missing: write --model.model_name_or_path VALUE, or the key in the file of",
    "fit --print_config": "model.model_name_or_path is missing: write --model.model_name_or_path VALUE, or the key",
    "fit --config=nope.yaml": "--config: no such file: ",
    "fit --config=/": "--config: not a file: /",
    "export --outputdir=1": "no key outputdir, did you mean output_dir?",
    "export --overwrite": "no key overwrite (`radixtrain export --help` lists the keys)",
    "doctor --json --nope": "no key nope (`radixtrain doctor --help` lists the keys)",
}
SETTINGS = {
    "--seed_everything=-1": "seed_everything must be from 0 to 4294967295; got -1",
    "--save_total_limit=0": "save_total_limit must be at least 1",
    "--save_best=eval_los --data.validation_file={shop}/validation.jsonl": "save_best: no metric 'eval_los', did you",
    "--model.adam_beta2=1.0": "model.adam_beta2 must be at least 0 and below 1; got 1.0",
    "--model.learning_rate=.inf": "model.learning_rate must be from 0 to 1e+38; got inf",
    "--model.activation_checkpointing=1.5": "model.activation_checkpointing must be true, false or a share of the",
    "--model.kernel=flash_attn": "kernel='flash_attn' cannot be used: needs CUDA",
    "--dedup=false --model.attn_implementation=sdpaa": "model.model_name_or_path",
    "--model.model_name_or_path={shop}/nowhere": "model.model_name_or_path: no such folder: {shop}/nowhere",
    "--model.use_peft=true --model.lora_target_modules=[nope]": "model.lora_target_modules: no layer has a name of ['n",
    "--model.use_peft=true --model.lora_target_modules=[lm_head]": "model.lora_target_modules: lm_head shares its weig",
    "--data.train_file={shop}/none.jsonl": "no such file: {shop}/none.jsonl",
    "--data.split_turns=false": "split_turns: false: the chat template has no generation markers; set split",
    "--data.max_length=20": "{shop}/train.jsonl:1: 74 tokens exceed max_length 20, and so do 19 more, the longest of ",
    "--data.pad_to_multiple_of=100000": "data.pad_to_multiple_of 100000 exceeds data.max_tokens 4096",
    "--data.val_size=.nan": "data.val_size must be a share below 1",
    "--ckpt_path=best": "ckpt_path best: none in ",
    "--ckpt_path=": "ckpt_path",
    "--ckpt_path={shop}/train.jsonl": "ckpt_path {shop}/train.jsonl: a file; a checkpoint of radixtrain is a folder",
    "--ckpt_path={shop}": "ckpt_path {shop}: no whole checkpoint in {shop}",
}
SCALED = "{class_path: lightning.pytorch.plugins.MixedPrecision, init_args: {precision: 16-mixed, device: cpu}}"
TRAINER = {
    "--trainer.callbacks=" + shlex.quote(MONITOR): "trainer.callbacks: EarlyStopping: monitor: no metric 'eval_los', d",
    "--trainer.callbacks=BackboneFinetuning": "trainer.callbacks: BackboneFinetuning: the model has no ",
    "--trainer.callbacks=BatchSizeFinder": "trainer.callbacks: BatchSizeFinder: data.max_tokens limits the memory",
    "--trainer.callbacks='{class_path: GradientAccumulationScheduler, init_args: {scheduling: {0: 2}}}'": "trainer.",
    "--trainer.callbacks=LearningRateFinder": "trainer.callbacks: LearningRateFinder: Lightning sees no loss of a step",
    "--trainer.callbacks='{class_path: ModelPruning, init_args: {pruning_fn: l1_unstructured}}'": "trainer.callbacks: ",
    "--trainer.callbacks=SpikeDetection": "trainer.callbacks: SpikeDetection: Lightning sees no loss of a step",
    "--trainer.callbacks='{class_path: StochasticWeightAveraging, init_args: {swa_lrs: 0.1}}'": "trainer.callbacks: St",
    "--trainer.callbacks=WeightAveraging": "trainer.callbacks: WeightAveraging: a checkpoint of a validation, or",
    "--trainer.callbacks=EMAWeightAveraging": "trainer.callbacks: EMAWeightAveraging: a checkpoint of a validation, or",
    "--trainer.accumulate_grad_batches=4": "trainer.accumulate_grad_batches: a step is cut by",
    "--trainer.barebones=true": "trainer.barebones: a run logs its steps and saves them; leave it out",
    "--trainer.gradient_clip_val=1.0": "trainer.gradient_clip_val: set model.max_grad_norm instead",
    "--trainer.precision=16-mixed": "trainer.precision 16-mixed: float16 needs a loss scale",
    "--trainer.plugins=" + shlex.quote(SCALED): "trainer.precision 16-mixed: float16 needs a loss scale",
    "--trainer.num_nodes=2": "trainer.num_nodes 2: start the command on each machine with torchrun, or with srun",
    "--trainer.val_check_interval=0": "trainer.val_check_interval must be above 0, or null; got 0",
    "--trainer.val_check_interval=6 --data.validation_file={shop}/validation.jsonl": "trainer.val_check_interval 6: an "
    "epoch has 5 steps; set a smaller one, or",
    "--trainer.check_val_every_n_epoch=0": "trainer.check_val_every_n_epoch must be at least 1, or null; got 0",
    "--trainer.log_every_n_steps=-1": "trainer.log_every_n_steps must be at least 0, or null; got -1",
    "--trainer.devices=9223372036854775808": "trainer.devices 9,223,372,036,854,775,808: at most 1,000 on a machine",
    "--trainer.max_time=soon": "trainer.max_time must be DD:HH:MM:SS",
    "--trainer.max_time='{fortnights: 1}'": "trainer.max_time must be DD:HH:MM:SS",
    "--trainer.accelerator=cpu --trainer.devices=0": "trainer: `Trainer(devices=0)` value is not a valid input",
    "--trainer.precision=transformer-engine": "trainer: Requirement 'transformer_engine",
    "--trainer.strategy=nonsense": "trainer.strategy nonsense: no such strategy; there are auto, ddp, ",
    "--trainer.limit_train_batches=1.5": "trainer: ",
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


@pytest.mark.parametrize("table", [KEYS, pytest.param(VALUES, marks=FULL), pytest.param(CLASSES, marks=FULL)])
def test_keys_and_values(fit: Any, table: dict[str, str]) -> None:
    for typed, expected in table.items():
        assert fit(2, typed).startswith(expected), typed


def test_files(fit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "evil.py").write_text("from pathlib import Path\nPath(__file__).with_suffix('.ran').touch()\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = tmp_path / "my.yaml"
    for text, expected in FILES.items():
        config.write_text(text)
        assert fit(2, f"--config={config}").startswith(expected.format(config=config)), text
    assert not (tmp_path / "evil.ran").exists()


def test_commands(said_of: Any) -> None:
    for typed, expected in COMMANDS.items():
        assert said_of(2, shlex.split(typed)).startswith(expected), typed


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


def test_an_error_of_our_own_is_not_blamed_on_the_trainer(arguments: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(Command, "make_trainer", broken)
    with pytest.raises(ValueError, match=r"^a bug$") as raised:
        main(arguments())
    assert not isinstance(raised.value, UserError)
