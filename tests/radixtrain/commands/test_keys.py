"""Keys that are read from the sources are those of the parser."""

import pytest
import yaml

from radixtrain.commands import COMMANDS
from radixtrain.commands.keys import keys_of, known_keys, trainer_keys
from radixtrain.commands.typed import NOTES, SYNONYMS, check_typed
from radixtrain.errors import UsageError


def flat(config, section=""):
    return {f"{section}{name}": value for name, value in config.items()}


def value_of(default):
    """As the parser reads it; YAML itself takes 2e-05 for text."""
    try:
        return float(default)
    except ValueError:
        return yaml.safe_load(default)


def test_the_keys_of_fit_are_those_of_the_parser_with_its_defaults(printed_by):
    config = yaml.safe_load(printed_by("fit", "--model.model_name_or_path=x", "--print_config"))
    parsed = {**flat(config["model"], "model."), **flat(config["data"], "data."), **flat(config["trainer"], "trainer.")}
    parsed |= flat(config["evaluate_generation"], "evaluate_generation.")
    sections = ("model", "data", "trainer", "evaluate_generation")
    parsed |= {name: value for name, value in config.items() if name not in sections}
    options = {"config", "print_config"}
    keys = {key.name: key for key in (*keys_of("fit"), *trainer_keys()) if key.name not in options}
    assert keys.keys() | {"weights_only"} == parsed.keys() | {"weights_only"}
    assert known_keys("fit").keys() >= parsed.keys()  # a configuration that was saved can be read
    read = {name: value_of(key.default) for name, key in keys.items() if key.default}
    ours = {name: value for name, value in read.items() if not name.startswith("trainer.")}
    assert ours == {name: parsed[name] for name in ours}
    assert [key.name for key in keys.values() if key.default is None] == ["model.model_name_or_path"]


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
