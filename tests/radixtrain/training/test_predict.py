"""`predict` through the real command line: the scores of an ordinary Hugging Face loop, a line for each row."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from radixtrain.__main__ import main
from radixtrain.errors import UserError
from radixtrain.training.answers.predictions import PredictionWriter
from radixtrain.verification.oracle import float64_arithmetic
from tests.support.runs import rows_in, write_rows

INSTRUCTION = "You name the shelf of a thing in the shop. Fruit is on shelf one, tools on shelf two. " * 4
THINGS = ["apple", "pear", "hammer", "saw", "apple", "card", "file"]  # one of them twice
QUESTIONS = [f"{INSTRUCTION}Where is the {thing}?" for thing in THINGS]
WORDS = [" one", " two"]
FLOAT64 = {"model__dtype": "float64", "trainer__precision": "64-true"}

Predict = Callable[..., list[dict[str, Any]]]


def chat(question: str, *answers: str) -> dict[str, Any]:
    turns = [{"role": "user", "content": question}]
    return {"messages": [*turns, *({"role": "assistant", "content": answer} for answer in answers)]}


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


class Loop:
    """An ordinary loop in float64: a row at a time, no padding, the whole logits."""

    def __init__(self, folder: Path):
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def prompt_of(self, messages: list[dict[str, str]]) -> list[int]:
        options = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": False}
        return self.ids(self.tokenizer.apply_chat_template(messages, **options))

    @torch.no_grad()
    def completion(self, prompt: list[int], completion: list[int]) -> dict[str, Any]:
        logprobs = self.model(torch.tensor([prompt + completion])).logits[0].log_softmax(-1)
        found = [logprobs[len(prompt) - 1 + n, token].item() for n, token in enumerate(completion)]
        return {"tokens": completion, "logprobs": found}


@float64_arithmetic()
def test_answers_to_questions(predict: Predict, shop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With and without an answer in the file; token for token those of `model.generate`, a prompt at a time."""
    loop = Loop(shop / "model")
    rows = [chat(question, "Shelf one.") if place % 2 else chat(question) for place, question in enumerate(QUESTIONS)]
    flags = {"model__generate": True, "evaluate_generation__max_new_tokens": 5, "data__batch_size": 4}
    found = predict(rows, **flags, **FLOAT64, data__chat_template_kwargs='{"enable_thinking": false}')
    for row, record in zip(rows, found, strict=True):
        prompt = loop.prompt_of(row["messages"][:1])
        if len(row["messages"]) == 2:  # the answer of a training row begins before the thinking block
            continue
        ids = loop.model.generate(torch.tensor([prompt]), max_new_tokens=5, do_sample=False)[0, len(prompt) :].tolist()
        expected = loop.completion(prompt, ids)
        assert record["answer"] == loop.tokenizer.decode(ids, skip_special_tokens=True)
        assert record["num_tokens"] == len(ids) and record["finish_reason"] in ("length", "stop")
        assert record["logprob"] == pytest.approx(math.fsum(expected["logprobs"]), rel=1e-12)
    assert list(found[1]) == ["answer", "num_tokens", "logprob", "finish_reason"]
    line = capsys.readouterr().out.strip().splitlines()[-1]
    assert line.startswith("r  ") and "tokens of prompts per computed token" in line and "answers/s" in line


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
    flags = {"model__generate": True, "evaluate_generation__generation_kwargs": "{output_attentions: true}"}
    assert main(arguments("predict", data__predict_file=shop / "validation.jsonl", **flags)) == 1
    assert "output_attentions=True is not supported" in capsys.readouterr().err
    assert not [*tmp_path.glob("out/*predictions*")]


def test_a_number_that_is_not_finite_is_not_written(tmp_path: Path) -> None:
    for name, value in (("logprobs", [-0.5, math.nan]), ("logprob", -math.inf)):
        writer = PredictionWriter(tmp_path)
        with pytest.raises(UserError, match=f"predict: {name} of a.jsonl:3 is not finite"), writer.writing():
            writer.add([{"row": "a.jsonl:3", name: value}], None)
        assert not writer.path.exists()
