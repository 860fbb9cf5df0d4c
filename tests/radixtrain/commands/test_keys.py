"""The keys of the classes of settings, as help and checks see them."""

import inspect

import lightning as L
import pytest
import yaml

from radixtrain.commands import COMMANDS
from radixtrain.commands.keys import keys_of, known_keys, trainer_keys
from radixtrain.commands.typed import NOTES, SYNONYMS, check_typed
from radixtrain.errors import UsageError


def test_what_is_printed_can_be_read(printed_by, tmp_path):
    """It is what a run saves, too."""
    line = ["fit", "--model.model_name_or_path=x", "--model.adam_epsilon=1e-9", "--trainer.callbacks=Timer"]
    printed = printed_by(*line, "--data.chat_template_kwargs={a: '5'}", "--print_config")
    (tmp_path / "saved.yaml").write_text(printed)
    assert printed_by("fit", "--config", str(tmp_path / "saved.yaml"), "--print_config") == printed
    assert yaml.safe_load(printed)["data"]["chat_template_kwargs"] == {"a": "5"}


def test_the_keys_of_the_trainer_are_those_of_lightning():
    theirs = inspect.signature(L.Trainer).parameters.keys() - {"default_root_dir"}  # which output_dir fills in
    assert {key.name.removeprefix("trainer.") for key in trainer_keys()} == theirs


def test_the_names_of_other_tools():
    ours = known_keys("fit")
    assert ours.keys() >= SYNONYMS.keys()
    for key, names in SYNONYMS.items():
        for name in names.split():
            assert name not in ours
            with pytest.raises(UsageError, match=rf"^no key \S*{name}: here it is {key}(, {NOTES.get(key)})?$"):
                check_typed(["fit", f"--training_args.{name}=1"])


def test_every_key_has_a_meaning_and_values():
    read = COMMANDS.keys() - {"run"}  # it reads its line itself
    for key in (key for command in read for key in keys_of(command)):
        assert key.help and key.help[-1] in ".`)", key
        assert key.kind or key.name == "print_config"


def test_a_key_in_every_part_and_keys_of_one_command():
    [key] = [key for key in keys_of("fit") if key.name == "data.excess_length_strategy"]
    assert key.kind == "raise, drop, truncate" and key.default == "raise"
    assert key.help == "what is done with a longer one: raise, drop, or truncate (keeps the start)."
    assert "num_sequences" in {key.name for key in keys_of("verify")} - {key.name for key in keys_of("fit")}
    of_hub = ["push_to_hub", "hub_model_id", "hub_private_repo"]
    names = [key.name for key in keys_of("export")]
    assert names == ["config", "ckpt_path", "output_dir", "chat_template_path", *of_hub]
