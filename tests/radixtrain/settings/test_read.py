"""What a command line and its files become, and the sentence for each mistake."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from radixtrain.errors import UsageError, UserError
from radixtrain.settings.fields import value_of
from radixtrain.settings.read import as_tree, read
from radixtrain.settings.synonyms import NO_KEYS, SYNONYMS

MODEL = "--model.model_name_or_path=m"
NO_KEY = " (`radixtrain fit --help` lists the keys)"
SAVED = ": a run saves its settings, so they hold no secrets; set it in the environment, such as WANDB_API_KEY or HF_"
LOGGER = "trainer.logger must be one of csv, wandb, tensorboard, mlflow, trackio, none; got "
LONG = "x" * 99
COMMANDS = {
    "fit": "model.model_name_or_path is missing: write --model.model_name_or_path VALUE, or the key in the file of",
    "fit --config=nope.yaml": "no such file: nope.yaml",
    "fit --config=/": "/: a folder",
    "fit --config=/dev/zero": "/dev/zero: not a file but a device",
    "export --outputdir=1": "no key outputdir, did you mean output_dir?",
    "export --overwrite": "no key overwrite (`radixtrain export --help` lists the keys)",
    "export": "ckpt_path is missing: write --ckpt_path VALUE, or the key in the file of --config; output_dir is mi",
    "doctor --json --nope": "no key nope (`radixtrain doctor --help` lists the keys)",
    "inspect --row=3": "model.model_name_or_path is missing: write --model.model_name_or_path VALUE, or the key in",
}
KEYS = {
    "--model.learning_rte=1": "no key model.learning_rte, did you mean model.learning_rate?",
    "--output-dir runs/x": "no key output-dir, did you mean output_dir?",
    "--learning_rate 1e-4": "no key learning_rate, did you mean model.learning_rate?",
    "--max_epoch 2": "no key max_epoch, did you mean trainer.max_epochs?",
    "--data.max_token=1": "no key data.max_token, did you mean data.max_tokens?",
    "--zzz=1": f"no key zzz{NO_KEY}",
    "--data.zzz 1": f"no key data.zzz{NO_KEY}",  # whose section is near to that of others
    "--dta.batch_size=1 --model.dtyp=2": "no key dta.batch_size, did you mean data.batch_size?; no key model.dtyp, did "
    "you mean model.dtype?",
    "stray": "stray is not a key: write --key value, and --config FILE for a YAML file",
    "--save_best": "save_best needs a value: --save_best VALUE",
    "--config": "config needs a value: --config VALUE",
    "--data 3": "data is a section: expected keys with their values; got 3",
    "--num_train_epochs 3 --bf16 true": "no key num_train_epochs: here it is trainer.max_epochs; no key bf16: "
    "here it is trainer.precision, bf16-mixed",
    "--model.dedup true": "no key model.dedup, did you mean dedup?",  # which fills it in
    "--trainer.callbacks Timer": "no key trainer.callbacks: callbacks and plugins of Lightning are for a script with",
    "--data.no_split_turns=true": "no key data.no_split_turns, did you mean data.split_turns, negated?",
    "--data.columns.user question": "no key data.columns.user: write the whole value of data.columns",
    "--overwrite --model.nope 1": f"no key model.nope{NO_KEY}",  # a switch takes no value, and not the next key
    "--model.lora_r 16": "model.lora_r is set without model.use_peft, so all weights would be trained: add",
    "--model.use_dora --model.use_rslora": "model.use_dora is set without model.use_peft",
}
PRECISIONS = "32-true, bf16-mixed, bf16-true, 64-true"
SECRETS = {
    **{f"--{name}=x": f"{name}{SAVED}" for name in ("api_key", "trainer.wandb-api-key", "hub_token", "model.token")},
    **{f"--{name}=x": f"{name}{SAVED}" for name in ("db_password", "apiKey", "AWS_SECRET_ACCESS_KEY", "credentials")},
    "--trainer.logger='{init_args: {api_key: x}}'": f"trainer.logger.init_args.api_key{SAVED}",
    "--data.train_file='[{path: a, token: x}]'": f"data.train_file.token{SAVED}",
    "--data.chat_template_kwargs='{password: x}'": f"data.chat_template_kwargs.password{SAVED}",
}
VALUES = {
    "--data.excess_length_strategy=dropp": "data.excess_length_strategy must be one of raise, drop, truncate; got "
    "dropp, did you mean drop?",
    "--model.attention=ring": "model.attention must be one of auto, cascade, path, expand, reference, tree; got ring",
    "--model.learning_rate=abc --data.batch_size=1e30": "model.learning_rate must be a number; got abc; "
    "data.batch_size must be an integer; got 1e30",
    "--trainer.val_check_interval=00:10:00": "trainer.val_check_interval must be an integer or a number; got 00:10:00",
    **{
        f"--trainer.precision={given}": f"trainer.precision must be one of {PRECISIONS}; got {given}{meant}"
        for given, meant in {"16-mixed": ", did you mean bf16-mixed?", "bf16": "", "32": ""}.items()
    },
    "--save_every_steps=0.5": "save_every_steps must be an integer or null; got 0.5",
    "--save_every_steps=": "save_every_steps must be an integer or null; got an empty text",
    "--model.max_skipped_steps=true": "model.max_skipped_steps must be an integer; got true",
    "--data.split_turns=maybe": "data.split_turns must be true or false; got maybe",
    "--model.allow_dropout='{a: 1}'": "model.allow_dropout must be list of text or null; got {a: 1} (`radixtrain "
    "fit --help model.allow_dropout` says more)",
    f"--data.batch_size={LONG}": f"data.batch_size must be an integer; got {LONG[:80]} ...",
    "--sp_size=some": "sp_size must be an integer; got some",
    "--data.columns " + "[" * 100_000: "data.columns must be mapping or null; got [[[[",
    "--seed_everything " + "9" * 5000: "seed_everything must be an integer; got 999",
    "--output_dir \udcff": "a value is no UTF-8 text",
    "--trainer.logger=tensorbord": f"{LOGGER}tensorbord, did you mean tensorboard?",
    "--trainer.logger='[none, csv]'": f"{LOGGER}[none, csv]",
    "--trainer.logger='{class_path: evil.Logger}'": f"{LOGGER}{{class_path: evil.Logger}}",
    "--trainer.accelerator=tpuu": "trainer.accelerator must be one of auto, cpu, cuda; got tpuu",
}
FILES = {
    "": "{file}: expected keys with their values, such as `output_dir: runs/a`; got an empty file",
    "hello": "{file}: expected keys with their values, such as `output_dir: runs/a`; got hello",
    "- a": "{file}: expected keys with their values, such as `output_dir: runs/a`; got ['a']",
    "model:\n": "model is a section: expected keys with their values; got null",
    "data: rows.jsonl\n": "data is a section: expected keys with their values; got rows.jsonl",
    "config: /etc/passwd\n": "no key config: a settings file names no other one; give --config twice",
    "model: {learning_rate: null}\n": "model.learning_rate must be a number; got null; the default is 2e-05",
    "output_dir: 5\n": "output_dir must be text; got 5",
    "a: [\n": "{file}:2: not YAML: expected the node content, but found '<stream end>'",
    "a:\n\t b: 1\n": "{file}:2: not YAML: found character '\\t' that cannot start any token",
    "[" * 100_000: "{file}: not YAML of settings: ",
    "a: !!int x\n": "{file}: not YAML of settings: invalid literal for int()",
    "a: !!python/object:os.system x\n": "{file}:1: not YAML: could not determine a constructor",
    "data: {chat_template_kwargs: {a: !!set {b}}}\n": "{file}:1: not YAML: could not determine a constructor",
    "a: &x [*x]\n": "{file}:1: `&` and `*` are not read: write the value out, or a text in quotes",
    "a: 1\nb: &x 2\n": "{file}:2: `&` and `*` are not read",
    "a: 1\n<<: {b: 2}\n": f"no key a{NO_KEY}; no key <<.b{NO_KEY}",
    "model: {learning_rate: " + "9" * 5000 + "}\n": "{file}: not YAML of settings: Exceeds the limit",
    "#" * (1 << 20) + "\n": "{file}: 1,048,577 bytes, and such files have at most 1,048,576",
    "model: {lora_r: 8, use_peft: false}\n": "model.lora_r is set without model.use_peft",
    "fit:\n  model:\n    learning_rate: 1\n": "no key fit.model.learning_rate, did you mean model.learning_rate?",
    "data:\n  batch_size: 8\n  batch_size: 4\n": "{file}:3: the key batch_size is given twice, first in line 2; ",
    "data: {}\nrows: []\ndata:\n  b: 1\n": "{file}:3: the key data is given twice, first in line 1; leave one out",
    "rows:\n  - a: 1\n    b: 2\n    'a': 3\n": "{file}:4: the key a is given twice, first in line 2; leave one out",
    "trainer: {logger: wandb, api_key: x}\n": f"trainer.api_key{SAVED}",
}
UNUSABLE = {  # values of the right type
    "--seed_everything=-1": "seed_everything must be at least 0; got -1",
    "--save_total_limit=0": "save_total_limit must be at least 1",
    "--sp_size=0": "sp_size must be at least 1",  # not that data.sp_size, which it fills in, must be
    "--model.adam_beta2=1.0": "model.adam_beta2 must be at least 0 and below 1; got 1.0",
    "--model.learning_rate=.inf": "model.learning_rate must be from 0 to 1e+38; got inf",
    "--model.activation_checkpointing=1.5": "model.activation_checkpointing must be true, false or a share of the",
    "--data.val_size=.nan": "data.val_size must be a share below 1",
    "--data.group_by_prefix=true --data.shuffle_dataset=false": "data.group_by_prefix draws the steps of every epoch",
    "--data.group_by_prefix=33": "data.group_by_prefix must be true, false or a number of conversations from",
    "--data.group_by_prefix=0": "data.group_by_prefix must be true, false or a number of conversations from",
    "--evaluate_generation.temperature=0.5": "evaluate_generation.temperature 0.5 is read only with",
    "--evaluate_generation.generation_kwargs='{do_sample: true}'": "evaluate_generation.generation_kwargs: do_sample",
    "--evaluate_generation.generation_kwargs='{num_return_sequences: 2}'": "evaluate_generation.generation_kwargs: num",
    "--data.train_on=last_turn --data.split_turns=false": "data.train_on: last_turn needs split_turns: true and",
    "--trainer.val_check_interval=0": "trainer.val_check_interval must be above 0; got 0",
    "--trainer.devices=-1": "trainer.devices must be at least 1, or auto; got -1",
    "--trainer.log_every_n_steps=-1": "trainer.log_every_n_steps must be at least 0; got -1",
}
TAKEN: list[tuple[str, str, Any]] = [
    ("trainer.val_check_interval", "0.5", 0.5),
    ("trainer.devices", "[0, 1]", [0, 1]),
    ("trainer.max_time", "00:01:00:00", "00:01:00:00"),
    ("trainer.logger", "[wandb, mlflow]", ["wandb", "mlflow"]),
    ("model.learning_rate", "1e-4", 1e-4),
    ("model.learning_rate", "1", 1.0),
    ("data.batch_size", "1_000", 1000),
    ("data.train_file", "[a.jsonl, {path: b.jsonl, weight: 2}]", ["a.jsonl", {"path": "b.jsonl", "weight": 2}]),
    ("data.columns", "{password: text, '<<': '*x'}", {"password": "text", "<<": "*x"}),  # of the user's files
    ("data.chat_template_kwargs", "{image_token: x, 1: a & b}", {"image_token": "x", "1": "a & b"}),
    ("data.template_date", "2026-11-28", "2026-11-28"),
    ("evaluate_generation.generation_kwargs", "{stop_strings: ['#', '5']}", {"stop_strings": ["#", "5"]}),
    ("output_dir", "2026", "2026"),
    ("output_dir", "null", "null"),
    ("dedup", "off", False),
]
PROMPTS = [
    "# Role\nYou are kind.",
    "a\n\nb",
    "Answer #1",
    "'q'",
    "  a ",
    "a: 1\na: 2",
    "- a\n- b",
    "1",
    "yes",
    "*a",
    "",
]
ELSEWHERE = [  # a name of another tool, and a part of what is said of it
    ("mask_history loss_scale", "data.train_on, last_turn, if only"),
    ("train_on_inputs train_on_input train_on_prompt", "data.assistant_only_loss, negated"),
    ("disable_shuffling", "data.shuffle_dataset, negated"),
    ("disable_tqdm", "trainer.enable_progress_bar, negated"),
    ("mask_prompt", "here it is data.assistant_only_loss"),
    ("rl stage", "share_prefixes in a trainer (docs/any-trainer.md)"),
    ("eos_token special_tokens", "the tokens of the model's own tokenizer"),
    ("load_in_8bit", "4 bits with model.load_in_4bit, or else those of model.dtype"),
    ("accumulate_grad_batches gradient_accumulation_steps", "here it is data.batch_size, of a whole optimizer step"),
    ("gradient_clip_val", "here it is model.max_grad_norm"),
    ("wandb_project", "here it is trainer.project"),
    (
        "roles_to_train rope_scaling streaming lora_modules_to_save model_type train_on_eos hub_strategy max_samples",
        NO_KEY,
    ),
]


def said_of(kind: type, command: str, *words: str) -> str:
    with pytest.raises(kind) as raised:
        read(command, words)
    assert type(raised.value) is kind
    return str(raised.value)


@pytest.mark.parametrize("table", [KEYS, SECRETS, VALUES], ids=["keys", "secrets", "values"])
def test_mistakes(table: dict[str, str]) -> None:
    for typed, expected in table.items():
        assert said_of(UsageError, "fit", MODEL, *shlex.split(typed)).startswith(expected), typed[:99]


def test_mistakes_of_commands() -> None:
    for typed, expected in COMMANDS.items():
        assert said_of(UsageError, *shlex.split(typed)).startswith(expected), typed


def test_mistakes_of_files(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    for text, expected in FILES.items():
        file.write_text(text)
        said = said_of(UsageError, "fit", MODEL, f"--config={file}")
        assert said.startswith(expected.replace("{file}", str(file))), (text[:99], said)


def test_values_that_no_run_can_use() -> None:
    for typed, expected in UNUSABLE.items():
        assert said_of(UserError, "fit", MODEL, *shlex.split(typed)).startswith(expected), typed


@pytest.mark.parametrize(("key", "text", "value"), TAKEN)
def test_what_is_taken(key: str, text: str, value: Any, tmp_path: Path) -> None:
    """On a command line, and in quotes in a file."""
    (tmp_path / "a.yaml").write_text(json.dumps({MODEL[2:].partition("=")[0]: "m", key: text}))
    for words in ([MODEL, f"--{key}={text}"], [MODEL, f"--{key}", text], [f"--config={tmp_path / 'a.yaml'}"]):
        found = value_of(read("fit", words), key)
        assert found == value and type(found) is type(value)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_prompt_is_read_as_it_is_written(prompt: str, tmp_path: Path) -> None:
    """YAML would take comments, line breaks, blanks and quotes out of it."""
    (tmp_path / "a.yaml").write_text(json.dumps({"data": {"system_prompt": prompt}}))
    for own in (f"--config={tmp_path / 'a.yaml'}", f"--data.system_prompt={prompt}"):
        assert read("fit", [MODEL, own]).data.system_prompt == prompt


def test_the_last_one_wins_and_one_fills_in_others(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("{sp_size: 2, seed_everything: 7, data: {batch_size: 3, max_length: null}}")
    file = f"--config={tmp_path / 'a.yaml'}"
    settings = read("fit", ["--data.batch_size=5", file, MODEL, "--dedup=no", "--model.generate"], {"sp_size": 3})
    assert (settings.data.batch_size, settings.data.max_length, settings.sp_size) == (3, None, 2)
    data = settings.data
    assert (data.sp_size, data.seed, data.dedup, data.predict_prompts, data.model_name_or_path) == (
        2,
        7,
        False,
        True,
        "m",
    )
    assert settings.model.dedup is False
    assert read("fit", [MODEL], {"trainer.devices": 2}).trainer.devices == 2


def test_what_is_printed_can_be_read(tmp_path: Path) -> None:
    """It is what a run saves, too."""
    tree = as_tree(read("fit", [MODEL, "--model.adam_epsilon=1e-9", "--data.chat_template_kwargs={a: '5'}"]))
    (tmp_path / "saved.yaml").write_text(yaml.safe_dump(tree))
    assert as_tree(read("fit", [f"--config={tmp_path / 'saved.yaml'}"])) == tree
    assert tree["data"]["chat_template_kwargs"] == {"a": "5"} and "dedup" not in tree["data"]


def test_the_names_of_other_tools() -> None:
    told = {f"here it is {key.replace(':', ',')}": names for key, names in SYNONYMS.items()} | NO_KEYS
    for reason, names in told.items():
        for name in names.split():
            assert said_of(UsageError, "fit", f"--training_args.{name}=1").endswith(f"args.{name}: {reason}"), name
    for names, said in ELSEWHERE:
        for name in names.split():
            for section in ("", "data."):
                found = said_of(UsageError, "fit", f"--{section}{name}=true")
                assert said in found and "did you mean" not in found
