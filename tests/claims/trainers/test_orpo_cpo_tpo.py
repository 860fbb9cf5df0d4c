"""Preference trainers of TRL without a reference model, which it keeps under `trl.experimental`."""

import importlib
import math

import pytest
from harness import Entry, compare, settings
from preference_bars import differences


def read_padding(entry: Entry) -> float:
    """ORPO and CPO log the mean of the logits over padding too, where the shared run has zeros: not compared."""
    return math.inf


OVER_PADDING = {"logits/chosen": read_padding, "logits/rejected": read_padding}


@pytest.mark.parametrize("name", ["orpo", "cpo", "tpo"])
def test_equal(model, tokenizer, preferences, tmp_path, table, name):
    """TPO wants a third answer, its gold standard; here it is a longer chosen one."""
    try:
        module = importlib.import_module(f"trl.experimental.{name}")
    except ModuleNotFoundError:
        pytest.skip(f"this TRL has no trl.experimental.{name}; `pip install trl==1.16.0` has it")
    config, trainer = (getattr(module, name.upper() + end) for end in ("Config", "Trainer"))
    rows = preferences.map(lambda row: {"reference": row["chosen"] + " w1"}) if name == "tpo" else preferences

    def build(share):
        arguments = config(**settings(tmp_path))
        return trainer(model=share(model()), args=arguments, train_dataset=rows, processing_class=tokenizer)

    found = compare(build, differences={**differences(), **({} if name == "tpo" else OVER_PADDING)})
    assert found.r > 3.5
    table(f"{name.upper()}Trainer", found)
