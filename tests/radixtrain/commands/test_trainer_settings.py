"""Values of the right type that no run can use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from loops import loop_on

from radixtrain.__main__ import main
from radixtrain.commands.trainer_settings import check_interval
from radixtrain.errors import UserError


def test_adapters_with_the_learning_rate_of_all_weights(
    arguments: Callable[..., list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    none = {"model__use_peft": True, "data__train_file": "none.jsonl"}
    for rate, told in ((None, True), (1e-4, False)):
        caplog.clear()
        assert main(arguments(model__learning_rate=rate, **none)) == 1
        assert ("model.learning_rate is 2e-05, as for training all weights; LoRA usually needs" in caplog.text) == told


@pytest.mark.parametrize(
    ("settings", "is_taken"),
    [
        ({"val_check_interval": 5}, True),
        ({"val_check_interval": 6}, False),
        ({"val_check_interval": 1.0}, True),
        ({"val_check_interval": 60, "check_val_every_n_epoch": None}, True),
    ],
)
def test_an_interval_longer_than_an_epoch(settings: dict[str, Any], is_taken: bool) -> None:
    trainer = loop_on(**settings)
    if is_taken:
        return check_interval(trainer, steps_per_epoch=5)
    with pytest.raises(UserError, match=r"trainer\.val_check_interval \d: an epoch has \d steps; set a smaller one"):
        check_interval(trainer, steps_per_epoch=5)
