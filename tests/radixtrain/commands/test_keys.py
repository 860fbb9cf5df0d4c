"""The keys of the classes of settings, as checks see them and as `--help` shows them, without an import of torch."""

import inspect
import json
import re
import subprocess
import sys

import lightning as L
import pytest
import yaml

from radixtrain.__main__ import main
from radixtrain.commands import COMMANDS
from radixtrain.commands.keys import TRAINER, all_keys, help_text, keys_of, known_keys, topic_of
from radixtrain.commands.reading import read
from radixtrain.commands.typed import NO_KEYS, SYNONYMS, check_typed
from radixtrain.errors import UsageError

TRAINER_KEYS = [key for key in all_keys("fit") if key.name.startswith("trainer.")]


def test_what_is_printed_can_be_read(printed_by, tmp_path):
    """It is what a run saves, too."""
    line = ["fit", "--model.model_name_or_path=x", "--model.adam_epsilon=1e-9", "--trainer.callbacks=Timer"]
    printed = printed_by(*line, "--data.chat_template_kwargs={a: '5'}", "--print_config")
    (tmp_path / "saved.yaml").write_text(printed)
    assert printed_by("fit", "--config", str(tmp_path / "saved.yaml"), "--print_config") == printed
    assert yaml.safe_load(printed)["data"]["chat_template_kwargs"] == {"a": "5"}


def test_the_keys_of_the_trainer_are_those_of_lightning():
    theirs = inspect.signature(L.Trainer).parameters.keys() - {"default_root_dir"}  # which output_dir fills in
    assert {key.name.removeprefix("trainer.") for key in TRAINER_KEYS} == theirs


def test_the_names_of_other_tools():
    ours = known_keys("fit")
    assert ours.keys() >= {key.partition(":")[0] for key in SYNONYMS}
    told = {f"here it is {key.replace(':', ',')}": names for key, names in SYNONYMS.items()} | NO_KEYS
    for reason, names in told.items():
        for name in names.split():
            assert name not in ours
            with pytest.raises(UsageError, match=rf"^no key \S*{name}: {re.escape(reason)}$"):
                check_typed(["fit", f"--training_args.{name}=1"])


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("mask_history", "data.train_on, last_turn, if only"),
        ("loss_scale", "data.train_on, last_turn, if only"),
        ("train_on_inputs", "data.assistant_only_loss, negated"),
        ("train_on_prompt", "data.assistant_only_loss, negated"),
        ("disable_shuffling", "data.shuffle_dataset, negated"),
        ("disable_tqdm", "trainer.enable_progress_bar, negated"),
        ("rl", "share_prefixes in a trainer (docs/any-trainer.md)"),
        ("stage", "share_prefixes in a trainer (docs/any-trainer.md)"),
        ("eos_token", "the tokens of the model's own tokenizer"),
        ("special_tokens", "the tokens of the model's own tokenizer"),
        ("roles_to_train", "--help` lists the keys"),
        ("rope_scaling", "--help` lists the keys"),
        ("streaming", "--help` lists the keys"),
        ("lora_modules_to_save", "--help` lists the keys"),
        ("train_on_input", "data.assistant_only_loss, negated"),
        ("mask_prompt", "here it is data.assistant_only_loss"),
        ("load_in_8bit", "4 bits with model.load_in_4bit, or else those of model.dtype"),
        *((name, "--help` lists the keys") for name in ("model_type", "train_on_eos", "hub_strategy", "max_samples")),
    ],
)
@pytest.mark.parametrize("section", ["", "data."])
def test_a_name_of_another_tool_keeps_its_sense(name, told, section):
    with pytest.raises(UsageError) as raised:
        check_typed(["fit", f"--{section}{name}=true"])
    assert told in str(raised.value) and "did you mean" not in str(raised.value)


def test_a_guess_says_that_the_sense_is_another():
    with pytest.raises(UsageError, match=r"did you mean data.split_turns, negated\?"):
        check_typed(["fit", "--data.no_split_turns=true"])


@pytest.mark.parametrize("from_a_file", [True, False])
@pytest.mark.parametrize(
    "prompt",
    [
        "# Role\nYou are kind.",
        "line one\nline two",
        "a\n\nb",
        "Answer #1",
        "# a",
        "'q'",
        "  a ",
        "a: 1\na: 2",
        "- a\n- b",
        "1",
    ],
)
def test_a_prompt_is_read_as_it_is_written(prompt, from_a_file, tmp_path):
    """YAML would take comments, line breaks, blanks and quotes out of it."""
    given = ["--model.model_name_or_path=m", "--data.train_file=t", "--output_dir=o"]
    (tmp_path / "a.yaml").write_text(json.dumps({"data": {"system_prompt": prompt}}))
    own = [f"--config={tmp_path / 'a.yaml'}"] if from_a_file else [f"--data.system_prompt={prompt}"]
    typed = check_typed(["fit", *given, *own])
    assert read("fit", typed.given, {}).data.system_prompt == prompt


def test_every_key_has_a_meaning_and_values():
    read = COMMANDS.keys() - {"run"}  # it reads its line itself
    for key in (key for command in read for key in keys_of(command)):
        assert key.help and key.help[-1] in ".`)", key
        assert key.kind or key.name == "print_config"


def test_a_key_in_every_part_and_keys_of_one_command():
    [key] = [key for key in keys_of("fit") if key.name == "data.excess_length_strategy"]
    assert key.kind == "raise, drop, truncate" and key.default == "raise"
    assert key.help == "for a longer sample: raise, drop, or truncate (keeps the start)."
    assert "num_sequences" in {key.name for key in keys_of("verify")} - {key.name for key in keys_of("fit")}
    of_hub = ["push_to_hub", "hub_model_id", "hub_private_repo"]
    names = [key.name for key in keys_of("export")]
    assert names == ["config", "ckpt_path", "output_dir", "chat_template_path", *of_hub]


HEAVY = ("torch", "transformers", "lightning", "numpy", "pydantic")


def test_it_fits_on_a_page_and_has_every_key():
    page = help_text("fit")
    lines = page.splitlines()
    assert len(lines) <= 108 and max(map(len, lines)) <= 120
    for key in keys_of("fit"):
        assert sum(line.split()[:1] == [f"--{key.name}"] for line in lines) == 1
    assert TRAINER.keys() <= {key.name for key in TRAINER_KEYS}
    assert page.index("--output_dir") < page.index("--model.") < page.index("--data.") < page.index("--trainer.")


def test_it_imports_nothing_that_takes_seconds():
    code = (
        "import sys; from radixtrain.__main__ import main; main(['fit', '--help']);"
        f"sys.exit(any(name in sys.modules for name in {HEAVY}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "--model.learning_rate" in done.stdout


def test_what_is_asked_for():
    for arguments, topic in (
        ([], None),
        (["--model.scores=x"], None),
        (["--help"], ""),
        (["--config", "x.yaml", "-h"], ""),
        (["--help", "--config"], ""),
        (["--help", "batch_size"], "batch_size"),
        (["--help_all"], "all"),
    ):
        assert topic_of(arguments) == topic


def test_a_key_in_full(capsys):
    assert main(["fit", "--help", "data.batch_size"]) == 0
    assert capsys.readouterr().out == (
        "--data.batch_size\n    values: integer; default: 32\n"
        "    conversations in one optimizer step. Its gradient does not depend on how the step is cut.\n"
    )
    assert help_text("fit", "--data.max_tokens") == help_text("fit", "max_tokens")


def test_a_name_of_two_keys_a_section_and_a_misspelt_topic():
    listed = [line for line in help_text("fit", "batch_size").splitlines() if line.startswith("--")]
    assert listed == ["--evaluate_generation.batch_size", "--data.batch_size"]
    number = sum(key.name.startswith("data.") for key in keys_of("fit"))
    assert f"\n{help_text('fit', 'data')}".count("\n--data.") == number
    assert "--trainer.gradient_clip_val" in help_text("fit", "trainer")
    assert help_text("fit", "bath_size") == "no key 'bath_size', did you mean batch_size?\n"


def test_everything_on_request(printed_by):
    printed = printed_by("validate", "--help_all")
    assert printed.count("\n--") + 1 == len(keys_of("validate")) + len(TRAINER_KEYS)
