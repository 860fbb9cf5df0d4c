"""Preference trainers of TRL without a reference model, which it keeps under `trl.experimental`."""

import importlib

import pytest
from trainer_harness import compare, settings

OVER_PADDING = (
    "logits/chosen",
    "logits/rejected",
)  # ORPO's and CPO's means are over padding too, where shared runs have zeros


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

    found = compare(build, skipped=() if name == "tpo" else OVER_PADDING)
    assert found.r > 3.5
    table(f"{name.upper()}Trainer", found)
