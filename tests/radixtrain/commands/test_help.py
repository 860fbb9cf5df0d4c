"""The keys of the classes of settings as `--help` shows them. That it imports no torch: `tests/test_imports.py`."""

import inspect

import lightning as L

from radixtrain.__main__ import main
from radixtrain.commands import COMMANDS
from radixtrain.commands.help import TRAINER, all_keys, help_text, keys_of, topic_of

TRAINER_KEYS = [key for key in all_keys("fit") if key.name.startswith("trainer.")]


def test_the_keys_of_the_trainer_have_the_names_of_lightnings():
    """With what the loggers are called."""
    theirs = inspect.signature(L.Trainer).parameters.keys() | {"project", "run_name"}
    assert {key.name.removeprefix("trainer.") for key in TRAINER_KEYS} <= theirs


def test_every_key_has_a_meaning_and_values():
    read = COMMANDS.keys() - {"run"}  # it reads its line itself
    for key in (key for command in read for key in keys_of(command)):
        assert key.help and key.help[-1] in ".`)", key
        assert key.kind or key.name == "print_config"


def test_it_fits_on_a_page_and_has_every_key():
    page = help_text("fit")
    lines = page.splitlines()
    assert len(lines) <= 108 and max(map(len, lines)) <= 120
    for key in keys_of("fit"):
        assert sum(line.split()[:1] == [f"--{key.name}"] for line in lines) == 1
    assert {*TRAINER} <= {key.name for key in TRAINER_KEYS}
    assert page.index("--output_dir") < page.index("--model.") < page.index("--data.") < page.index("--trainer.")


def test_what_is_asked_for():
    for arguments, topic in (
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
    number = len([key for key in all_keys("validate") if key.help])
    assert main(["validate", "--help_all"]) == 0 and capsys.readouterr().out.count("\n--") + 1 == number


def test_a_name_of_two_keys_a_section_and_a_misspelt_topic():
    listed = [line for line in help_text("fit", "batch_size").splitlines() if line.startswith("--")]
    assert listed == ["--evaluate_generation.batch_size", "--data.batch_size"]
    number = sum(key.name.startswith("data.") for key in keys_of("fit"))
    assert f"\n{help_text('fit', 'data')}".count("\n--data.") == number
    assert "--trainer.val_check_interval" in help_text("fit", "trainer")
    assert help_text("fit", "bath_size") == "no key 'bath_size', did you mean batch_size?\n"
