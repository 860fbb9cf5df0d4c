"""Values of the right type that no run can use."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from radixtrain.__main__ import main


def test_adapters_with_the_learning_rate_of_all_weights(
    arguments: Callable[..., list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    none = {"model__use_peft": True, "data__train_file": "none.jsonl"}
    for rate, told in ((None, True), (1e-4, False)):
        caplog.clear()
        assert main(arguments(model__learning_rate=rate, **none)) == 1
        assert ("model.learning_rate is 2e-05, as for training all weights; LoRA usually needs" in caplog.text) == told
