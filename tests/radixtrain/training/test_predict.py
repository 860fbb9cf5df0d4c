"""`predict` through the real command line: the scores of an ordinary Hugging Face loop, a line for each row."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiers import FULL
from transformers import AutoModelForCausalLM, AutoTokenizer

from radixtrain.__main__ import main
from radixtrain.collators.steps import StepCollator
from radixtrain.errors import UserError
from radixtrain.training.answers.predictions import PredictionWriter
from radixtrain.training.module import RadixModule
from radixtrain.verification.oracle import float64_arithmetic

INSTRUCTION = "You name the shelf of a thing in the shop. Fruit is on shelf one, tools on shelf two. " * 4
THINGS = ["apple", "pear", "hammer", "saw", "apple", "card", "file"]  # one of them twice
QUESTIONS = [f"{INSTRUCTION}Where is the {thing}?" for thing in THINGS]
WORDS = [" one", " two"]
FLOAT32_EPS = torch.finfo(torch.float32).eps
FLOAT64 = {"model__dtype": "float64", "trainer__precision": "64-true"}

Predict = Callable[..., list[dict[str, Any]]]


def chat(question: str, *answers: str) -> dict[str, Any]:
    turns = [{"role": "user", "content": question}]
    return {"messages": [*turns, *({"role": "assistant", "content": answer} for answer in answers)]}


@pytest.fixture
def predict(arguments: Any, tmp_path: Path) -> Predict:
    """Runs `predict` on rows, two micro-batches a step and two steps, and returns the lines that it wrote."""

    def run(rows: list[dict[str, Any]], **flags: Any) -> list[dict[str, Any]]:
        (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
        settings = {"data__train_file": None, "data__min_shared_tokens": 1}
        given = {"data__predict_file": tmp_path / "rows.jsonl", **settings, **flags}
        assert main(arguments("predict", **given)) == 0
        lines = (tmp_path / "out" / "predictions.jsonl").read_text(encoding="utf-8").splitlines()
        records = [json.loads(line) for line in lines]
        assert [record.pop("row") for record in records] == [
            f"{tmp_path / 'rows.jsonl'}:{number}" for number in range(1, len(rows) + 1)
        ]
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
        total = sum(logprobs[len(prompt) - 1 + n, token].item() for n, token in enumerate(completion))
        count = len(completion)
        return {"completion_logprob": total, "num_tokens": count, "perplexity": math.exp(-total / count)}

    @torch.no_grad()
    def next_tokens(self, prompt: list[int]) -> dict[str, Any]:
        logits = self.model(torch.tensor([prompt])).logits[0, -1]
        ids = [self.ids(word)[0] for word in WORDS]
        scores = {"logits": logits[ids], "logprobs": logits.log_softmax(-1)[ids], "probs": logits[ids].softmax(-1)}
        return {f"next_token_{name}": dict(zip(WORDS, x.tolist(), strict=True)) for name, x in scores.items()}

    @torch.no_grad()
    def embedding(self, ids: list[int]) -> dict[str, Any]:
        hidden = self.model.model(torch.tensor([ids])).last_hidden_state[0, -1]
        return {"embedding": (hidden / hidden.norm()).tolist()}


def assert_equal(found: list[dict[str, Any]], expected: list[dict[str, Any]], bar: float = 1e-12) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            assert one[name] == pytest.approx(other[name], rel=bar, abs=bar), name


@float64_arithmetic()
@pytest.mark.parametrize("dedup", [True, pytest.param(False, marks=FULL)])
def test_a_completion_after_a_long_instruction(predict: Predict, shop: Path, dedup: bool) -> None:
    loop = Loop(shop / "model")
    answers = [" Shelf one.", " Shelf two.", " two", " Shelf two.", " Shelf one.", " three", " Shelf two."]
    rows = [{"prompt": q, "completion": a} for q, a in zip(QUESTIONS, answers, strict=True)]
    end = [loop.tokenizer.eos_token_id]
    expected = [loop.completion(loop.ids(row["prompt"]), loop.ids(row["completion"]) + end) for row in rows]
    scores = {"model__scores": "[completion_logprob, perplexity]", "dedup": dedup}
    found = predict(rows, **scores, **FLOAT64, data__max_tokens=256, data__max_length=256)
    assert_equal(found, expected)
    assert_equal(found[:1], found[4:5])


@float64_arithmetic()
@pytest.mark.parametrize("dedup", [True, pytest.param(False, marks=FULL)])
def test_yes_or_no_at_the_end_of_a_prompt(predict: Predict, shop: Path, dedup: bool) -> None:
    """Rows of a reranker: an instruction, a question, no answer. The next token follows the generation prompt."""
    loop = Loop(shop / "model")
    rows = [chat(question) for question in QUESTIONS]
    expected = [loop.next_tokens(loop.prompt_of(row["messages"])) for row in rows]
    flags = {
        "model__scores": "[next_token_logits, next_token_logprobs, next_token_probs]",
        "model__next_tokens": json.dumps(WORDS),
        "data__chat_template_kwargs": '{"enable_thinking": false}',
    }
    assert_equal(predict(rows, **flags, **FLOAT64, dedup=dedup), expected)


@float64_arithmetic()
@pytest.mark.parametrize("dedup", [True, pytest.param(False, marks=FULL)])
def test_the_embedding_of_a_text(predict: Predict, shop: Path, dedup: bool) -> None:
    loop = Loop(shop / "model")
    expected = [loop.embedding(loop.tokenizer(text)["input_ids"]) for text in QUESTIONS]
    rows = [{"text": text} for text in QUESTIONS]
    assert_equal(predict(rows, model__scores="[embedding]", **FLOAT64, dedup=dedup), expected)


@FULL
@pytest.mark.parametrize("precision", [{"trainer__precision": "bf16-mixed"}, {"model__dtype": "bfloat16"}])
def test_in_16_bits_the_last_steps_are_float32(predict: Predict, precision: dict[str, str]) -> None:
    """Numbers of a sum or a norm of 1 are off by a rounding of float32 each, of which bfloat16 has 65,536."""
    scores = {"model__scores": "[next_token_probs, embedding]", "model__next_tokens": json.dumps(WORDS)}
    for record in predict([{"text": text} for text in QUESTIONS[:3]], **scores, **precision):
        for total, size in (
            (math.hypot(*record["embedding"]), len(record["embedding"])),
            (sum(record["next_token_probs"].values()), len(WORDS)),
        ):
            assert abs(total - 1) <= size * FLOAT32_EPS


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
        assert record["logprob"] == pytest.approx(expected["completion_logprob"], rel=1e-12)
    assert list(found[1]) == ["answer", "num_tokens", "logprob", "finish_reason"]
    line = capsys.readouterr().out.strip().splitlines()[-1]
    assert line.startswith("r  ") and "tokens of prompts per computed token" in line and "answers/s" in line


@float64_arithmetic()
def test_scores_of_labels_and_of_the_last_token_beside_each_other(predict: Predict, shop: Path) -> None:
    """Then a row is tokenised as in training: with the end token, which is the last one."""
    loop = Loop(shop / "model")
    flags = {"model__scores": "[perplexity, embedding]", "model__normalize_embeddings": "false"}
    [found] = predict([{"text": "Where is the saw?"}], **flags, **FLOAT64)
    ids = [*loop.ids("Where is the saw?"), loop.tokenizer.eos_token_id]
    hidden = loop.model.model(torch.tensor([ids])).last_hidden_state[0, -1].tolist()
    scored = loop.completion(ids[:1], ids[1:])
    expected = {"perplexity": scored["perplexity"], "num_tokens": len(ids) - 1, "embedding": hidden}
    assert_equal([found], [expected])


def test_adapters(shop: Path) -> None:
    """LoRA with weights that matter, on unique tokens and on padded rows, against calls of the adapted model."""
    pytest.importorskip("peft", reason="pip install peft")
    features = [{"input_ids": [7, 8, 9, 10, last], "labels": [-100] * 4 + [last]} for last in (11, 12, 11)]
    found = []
    for dedup in (True, False):
        torch.manual_seed(0)
        options = {"dtype": "float64", "use_peft": True, "lora_r": 2, "dedup": dedup}
        module = RadixModule(str(shop / "model"), scores=["completion_logprob", "embedding"], **options)
        module.configure_model()
        module.eval()
        with torch.no_grad():
            for name, parameter in module.model.named_parameters():
                parameter.add_(0.1 if "lora_B" in name else 0)
        found.append(module.predict_step(StepCollator(dedup=dedup, merge_labels=False)(features), 0))
    outputs = [module.model(torch.tensor([x["input_ids"]]), output_hidden_states=True) for x in features]
    for records in found:
        for record, output, feature in zip(records, outputs, features, strict=True):
            hidden = output.hidden_states[-1][0, -1]
            logprob = output.logits[0, 3].log_softmax(-1)[feature["input_ids"][-1]].item()
            assert record.pop("row") is None and record.pop("num_tokens") == 1
            assert_equal([record], [{"completion_logprob": logprob, "embedding": (hidden / hidden.norm()).tolist()}])


def test_the_closing_lines(
    predict: Predict, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.INFO, logger="radixtrain")
    predict([{"text": text} for text in QUESTIONS], model__scores="embedding", data__batch_size=7)
    first, second = capsys.readouterr().out.strip().splitlines()[-2:]
    assert first == f"predictions  {tmp_path / 'out' / 'predictions.jsonl'} (7 sequences)"
    name, r, *words = second.split()
    assert name == "r" and float(r) > 4
    assert "tokens per computed token, " in second and "sequences/s," in words and second.endswith(" s")
    assert "73,984 parameters" in caplog.text and "trained" not in caplog.text


def test_what_ends_the_run_before_it_writes(arguments: Any, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(chat("Where?")), encoding="utf-8")
    refusals: list[tuple[dict[str, Any], int, str]] = [
        (
            {"model__scores": "[next_token_logits]", "model__next_tokens": '["yesyes"]'},
            1,
            "error: model.next_tokens: 'yesyes' is",
        ),
        (
            {"model__scores": "[next_token_logits]", "model__next_tokens": "[yes, no]"},
            2,
            "error: model.next_tokens must be list of text or null; got [yes, no]; YAML reads a bare yes or no as true",
        ),
        ({"model__scores": "[next_token_logits]"}, 1, "error: model.next_tokens is missing"),
        ({"model__generate": True, "model__scores": "[embedding]"}, 1, "error: model.generate: true writes answers"),
        ({"model__generate": True, "evaluate_generation__max_new_tokens": 0}, 1, "max_new_tokens must be at least 1"),
        (
            {"model__generate": True, "evaluate_generation__generation_kwargs": "{output_attentions: true}"},
            1,
            "no weights for",
        ),
        ({"model__scores": "[]"}, 1, "error: model.scores: expected one or more of logprobs"),
        ({"model__scores": "[embeding]"}, 1, "probs, embedding; found embeding"),
        ({"model__scores": "[perplexity, embedding]"}, 1, "rows.jsonl:1: expected at least one assistant turn"),
    ]
    for flags, code, message in refusals:
        assert main(arguments("predict", data__predict_file=tmp_path / "rows.jsonl", **flags)) == code
        assert message in capsys.readouterr().err
        assert not (tmp_path / "out" / "predictions.jsonl").exists() and not [*tmp_path.glob("out/.*partial")]


def test_a_number_that_is_not_finite_is_not_written(tmp_path: Path) -> None:
    records: list[tuple[dict[str, Any], str]] = [
        ({"row": "a.jsonl:3", "embedding": [0.5, math.nan]}, "embedding"),
        ({"row": "a.jsonl:3", "num_tokens": 1, "next_token_logits": {"yes": math.inf}}, "next_token_logits"),
        ({"row": "a.jsonl:3", "perplexity": -math.inf}, "perplexity"),
    ]
    for record, name in records:
        writer = PredictionWriter(tmp_path)
        with pytest.raises(UserError, match=f"predict: {name} of a.jsonl:3 is not finite"), writer.writing():
            writer.add([record], None)
        assert not writer.path.exists()
