"""A key that is true or false, without a value."""

import pytest

from radixtrain.commands.switches import with_values


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("fit --overwrite", "fit --overwrite true"),
        ("fit --overwrite --config x.yaml", "fit --overwrite true --config x.yaml"),
        ("fit --overwrite false --dedup off", "fit --overwrite false --dedup off"),
        ("fit --overwrite=false --model.use_peft", "fit --overwrite=false --model.use_peft true"),
        ("fit --save_best --data.train_file a b", "fit --save_best --data.train_file a b"),
        ("doctor --json", "doctor --json true"),
        ("doctor", "doctor"),
        ("export --overwrite", "export --overwrite"),
    ],
)
def test_values(typed, expected):
    assert with_values(typed.split()) == expected.split()
