"""Several ranks answer and score what one process does, in its order, and each gets all of it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked_ranks import on_ranks
from tiers import FULL
from transformers import AutoModelForCausalLM, AutoTokenizer

from radixtrain.collators.steps import StepCollator
from radixtrain.data.prompts import Prompt
from radixtrain.hf.head import has_plain_head
from radixtrain.hf.prepare import prepare_model
from radixtrain.hf.scores import Scorer
from radixtrain.training.answers.answering import AnswerOptions, answer_prompts
from radixtrain.training.answers.predictions import scored_records
from radixtrain.training.speed import Speed
from radixtrain.verification.oracle import float64_arithmetic


@pytest.fixture(scope="module")
def tokenizer(shop: Path) -> Any:
    return AutoTokenizer.from_pretrained(shop / "model")


@pytest.fixture(scope="module")
def model(shop: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(shop / "model", dtype=torch.float64).eval()


def prompts(count: int) -> list[Prompt]:
    """Two beginnings, one after the other; each prompt ends in its own number."""
    draw = np.random.default_rng(0)
    beginnings = draw.integers(2, 40, (2, 7))
    rows = [np.append(beginnings[number % 2], 40 + number) for number in range(count)]
    return [Prompt(ids, ids[:1], f"test.jsonl:{number + 1}") for number, ids in enumerate(rows)]


CASES = ["7 with dedup", *(pytest.param(case, marks=FULL) for case in ("7 without", "1 with dedup", "1 without"))]


@pytest.mark.parametrize("case", CASES)
def test_the_answers_of_one_process(model: Any, tokenizer: Any, case: str) -> None:
    """In float64. One prompt leaves one of two ranks without any."""
    count, dedup = int(case[0]), case.endswith("with dedup")

    def answer(*_: Any) -> Any:
        options = AnswerOptions(max_new_tokens=4)
        with float64_arithmetic():
            return answer_prompts(model, prompts(count), tokenizer, options, dedup, logprobs=True)

    expected, found = answer(), on_ranks(2, answer)
    for each in found:
        assert [(a.text, a.token_ids, a.finish_reason) for a in each.answers] == [
            (a.text, a.token_ids, a.finish_reason) for a in expected.answers
        ]
        np.testing.assert_allclose([a.logprob for a in each.answers], [a.logprob for a in expected.answers], rtol=1e-11)
        assert each.num_prompt_tokens == expected.num_prompt_tokens
        assert each.num_computed_tokens == found[0].num_computed_tokens >= expected.num_computed_tokens


@FULL
def test_a_beginning_is_computed_by_few_ranks(model: Any, tokenizer: Any) -> None:
    found = on_ranks(
        2, lambda _: answer_prompts(model, prompts(8), tokenizer, AnswerOptions(max_new_tokens=1), dedup=True)
    )
    assert found[0].num_computed_tokens == 2 * (7 + 4)  # each beginning on one rank only


@pytest.mark.parametrize("case", CASES)
def test_the_scores_of_one_process(tiny_qwen3: Callable[..., Any], case: str) -> None:
    """In float64. Embeddings are of every sequence, labelled or not."""
    count, dedup = int(case[0]), case.endswith("with dedup")
    model = tiny_qwen3().double().eval()
    if dedup:
        prepare_model(model, attention="reference")
    plain, scorer = has_plain_head(model), Scorer(("logprobs", "perplexity", "embedding"), {}, True)
    features = [{"input_ids": each.token_ids, "labels": each.token_ids} for each in prompts(count)]
    cut = StepCollator(max_tokens=16, dedup=dedup, merge_labels=False)
    where = tuple(each.where for each in prompts(count))

    def score(rank: int, size: int = 2) -> Any:
        step = replace(replace(cut, rank=rank, num_ranks=size)(features), where=where)
        speed = Speed()
        speed.start()
        with torch.no_grad(), float64_arithmetic():
            records = scored_records(scorer, model, step, plain)
        speed.add(step)
        return records, speed.num_computed_tokens

    (expected, computed), found = score(0, 1), on_ranks(2, score)
    assert [record["row"] for record in expected] == list(where)
    for records, num_computed in found:
        assert num_computed == found[0][1] >= computed
        for record, there in zip(records, expected, strict=True):
            assert record.keys() == there.keys() and record["row"] == there["row"]
            assert record["tokens"] == there["tokens"]
            for name in ("logprobs", "perplexity", "embedding"):
                np.testing.assert_allclose(record[name], there[name], rtol=1e-11, atol=1e-11)
