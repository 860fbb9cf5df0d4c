"""`predict` through the real command line: the scores of an ordinary Hugging Face loop, a line for each row."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from radixtrain.__main__ import main
from radixtrain.errors import UserError
from radixtrain.training.answers.predictions import PredictionWriter
from tests.support.runs import rows_in, write_rows

INSTRUCTION = "You name the shelf of a thing in the shop. Fruit is on shelf one, tools on shelf two. " * 4
THINGS = ["apple", "pear", "hammer", "saw", "apple", "card", "file"]  # one of them twice
QUESTIONS = [f"{INSTRUCTION}Where is the {thing}?" for thing in THINGS]

Predict = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def predict(arguments: Any, tmp_path: Path) -> Predict:
    """Runs `predict` on rows, two micro-batches a step and two steps, and returns the lines that it wrote."""

    def run(rows: list[dict[str, Any]], **flags: Any) -> list[dict[str, Any]]:
        file = write_rows(tmp_path / "rows.jsonl", rows)
        settings = {"data__train_file": None, "data__min_shared_tokens": 1}
        given = {"data__predict_file": file, **settings, **flags}
        assert main(arguments("predict", **given)) == 0
        records = rows_in(tmp_path / "out" / "predictions.jsonl")
        places = [f"{file}:{number}" for number in range(1, len(rows) + 1)]
        assert [record.pop("row") for record in records] == places
        return records

    return run


def test_the_closing_lines(
    predict: Predict, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.INFO, logger="radixtrain")
    predict([{"text": text} for text in QUESTIONS], data__batch_size=7)
    first, second = capsys.readouterr().out.strip().splitlines()[-2:]
    assert first == f"predictions  {tmp_path / 'out' / 'predictions.jsonl'} (7 sequences)"
    name, r, *words = second.split()
    assert name == "r" and float(r) > 4
    assert "tokens per computed token, " in second and "sequences/s," in words and second.endswith(" s")
    assert "73,984 parameters" in caplog.text and "trained" not in caplog.text


def test_an_option_that_is_refused_leaves_no_file(arguments: Any, shop: Path, tmp_path: Path, capsys: Any) -> None:
    """Nor does a killed one stay half written."""
    (tmp_path / "out" / "logs" / "version_0").mkdir(parents=True)
    (tmp_path / "out" / "logs" / "version_0" / ".validate.yaml.partial").touch()
    flags = {"model__generate": True, "evaluate_generation__generation_kwargs": "{output_attentions: true}"}
    assert main(arguments("predict", data__predict_file=shop / "validation.jsonl", **flags)) == 1
    assert "output_attentions=True is not supported" in capsys.readouterr().err
    assert not [*tmp_path.glob("out/*predictions*"), *tmp_path.rglob("*.partial")]


def test_a_number_that_is_not_finite_is_not_written(tmp_path: Path) -> None:
    for name, value in (("logprobs", [-0.5, math.nan]), ("logprob", -math.inf)):
        writer = PredictionWriter(tmp_path)
        with pytest.raises(UserError, match=f"predict: {name} of a.jsonl:3 is not finite"), writer.writing():
            writer.add([{"row": "a.jsonl:3", name: value}], None)
        assert not writer.path.exists()
