"""Variables that nothing reads."""

import logging
import re
from pathlib import Path
from typing import Any

import pytest

from radixtrain.__main__ import main
from radixtrain.commands.quiet import PREFIX, VARIABLES, warn_of_variables

DOCS = Path(__file__).parents[3] / "docs" / "configuration.md"


def test_variables_that_were_meant_for_us(caplog: Any) -> None:
    meant, by_key = "did you mean RADIXTRAIN_CACHE?", "give keys in the file of --config, or as --key value"
    told = {
        "CASHE": f", {meant}",
        "CACHE_DIR": f", {meant}",
        "FIT__MODEL__LEARNING_RATE": f": {by_key}",
        "MODEL__DTYPE": f": {by_key}",
    }
    warn_of_variables({**{f"{PREFIX}{name}": "x" for name in told}, "HOME": "/"})
    assert sorted(caplog.messages) == sorted(f"{PREFIX}{name} is not read{text}" for name, text in told.items())


def test_documented_variables_and_those_of_others_are_not_warned_of(caplog: Any) -> None:
    documented = re.findall(r"`(RADIXTRAIN_\w+)", DOCS.read_text(encoding="utf-8").partition("## Environment")[2])
    assert {f"{PREFIX}{name}" for name in VARIABLES} < set(documented)
    others = [name for name in documented if name != "RADIXTRAIN_MODEL__DTYPE"]  # the example of a key
    warn_of_variables(dict.fromkeys([*others, "CACHE", "MY_CASHE", f"{PREFIX}IMAGE"], "x"))
    assert caplog.messages == []


def test_a_command_warns(caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"{PREFIX}CASHE", "1")
    with caplog.at_level(logging.WARNING):
        assert main(["fit", "--model.model_name_or_path=x/y/z"]) == 1
    assert f"{PREFIX}CASHE is not read, did you mean RADIXTRAIN_CACHE?" in caplog.messages
