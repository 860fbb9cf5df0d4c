"""Every score of `predict` is an ordinary Hugging Face loop's, whatever the kind of batch and whatever the head."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GraniteConfig, GraniteForCausalLM

from radixtrain import RadixCollator, prepare_model
from radixtrain.collators.padded import PaddedCollator
from radixtrain.errors import UserError
from radixtrain.hf.head import has_plain_head
from radixtrain.hf.scores import SCORES, Scorer, _numbers, check_scores, needs_labels, needs_next_tokens
from radixtrain.testing import assert_within_reference_error

N = -100
INSTRUCTION = [7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20]
FEATURES = [
    {"input_ids": [*INSTRUCTION, 5, 6], "labels": [N] * 14 + [5, 6]},
    {"input_ids": [*INSTRUCTION, 5, 6], "labels": [N] * 15 + [6]},  # the same tokens
    {"input_ids": [*INSTRUCTION, 5], "labels": [N] * 14 + [5]},  # a prefix of the first two
    {"input_ids": INSTRUCTION, "labels": [N] * 14},  # their prompt, without a label
    {"input_ids": [3], "labels": [3]},  # never predicted
    {"input_ids": [3, 2, 1, 30, 31], "labels": [3, 2, N, 30, 31]},
]
WORDS = {"yes": 6, "no": 41, "maybe": 0}


def granite(dtype: torch.dtype) -> Any:
    """Its head divides the logits, so that it is no plain matrix."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
    return GraniteForCausalLM(GraniteConfig(**sizes, **heads, logits_scaling=3.0)).to(dtype).eval()


@pytest.fixture(params=["plain", "granite"])
def build(request: pytest.FixtureRequest, tiny_qwen3: Any) -> Callable[[torch.dtype], Any]:
    return granite if request.param == "granite" else lambda dtype: tiny_qwen3().to(dtype).eval()


def records_of(model: Any, collator: Any, scorer: Scorer) -> list[dict[str, Any]]:
    plain_head = has_plain_head(model)
    prepared = prepare_model(model) if isinstance(collator, RadixCollator) else model
    return scorer(prepared, collator(FEATURES), plain_head)


@torch.no_grad()
def by_hugging_face(model: Any) -> list[dict[str, Any]]:
    """Each sequence by itself through the model, the logits of every token, and the last hidden state."""
    records = []
    for feature in FEATURES:
        output = model(torch.tensor([feature["input_ids"]]), output_hidden_states=True)
        logits, hidden = output.logits[0], output.hidden_states[-1][0]
        labels = [(place, label) for place, label in enumerate(feature["labels"]) if place and label != N]
        logprobs = [logits.log_softmax(-1)[place - 1, label].item() for place, label in labels]
        word_logits = logits[-1, list(WORDS.values())]
        records.append(
            {
                "tokens": [label for _, label in labels],
                "logprobs": logprobs,
                "completion_logprob": sum(logprobs),
                "num_tokens": len(labels),
                "perplexity": math.exp(-sum(logprobs) / len(labels)) if labels else None,
                "next_token_logits": named(word_logits),
                "next_token_logprobs": named(logits[-1].log_softmax(-1)[list(WORDS.values())]),
                "next_token_probs": named(word_logits.softmax(-1)),
                "embedding": (hidden[-1] / hidden[-1].norm()).tolist(),
            }
        )
    return records


def named(values: Tensor) -> dict[str, float]:
    return dict(zip(WORDS, values.tolist(), strict=True))


def assert_records(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Equal in float64."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            if name in ("tokens", "num_tokens") or value is None:
                assert value == other[name]
            else:
                assert value == pytest.approx(other[name], rel=1e-12, abs=1e-12), name


def numbers_of(records: list[dict[str, Any]], name: str) -> Iterator[float]:
    for value in (record[name] for record in records):
        if value is not None:
            yield from value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]


COLLATORS = [RadixCollator(), RadixCollator(pad_to_multiple_of=8), PaddedCollator()]


@pytest.mark.parametrize("collator", COLLATORS)
def test_every_score_is_that_of_a_loop(build: Any, collator: Any) -> None:
    found = records_of(build(torch.float64), collator, Scorer(SCORES, WORDS))
    assert_records(found, by_hugging_face(build(torch.float64)))


@pytest.mark.parametrize("collator", COLLATORS)
def test_float32_is_as_exact_as_a_loop_in_float32(build: Any, collator: Any) -> None:
    found = records_of(build(torch.float32), collator, Scorer(SCORES, WORDS))
    reference, truth = (by_hugging_face(build(dtype)) for dtype in (torch.float32, torch.float64))
    for name in SCORES:
        numbers = [torch.tensor([*numbers_of(records, name)]) for records in (found, reference)]
        exact = torch.tensor([*numbers_of(truth, name)], dtype=torch.float64)
        assert_within_reference_error(*numbers, exact, names=name)


@pytest.mark.parametrize("collator", [RadixCollator(), PaddedCollator()])
def test_each_score_by_itself_is_what_it_is_beside_the_others(build: Any, collator: Any) -> None:
    model = build(torch.float64)
    plain_head, batch = has_plain_head(model), collator(FEATURES)
    model = prepare_model(model) if isinstance(collator, RadixCollator) else model
    whole = Scorer(SCORES, WORDS)(model, batch, plain_head)
    entries = {"logprobs": {"tokens", "logprobs"}, "completion_logprob": {"completion_logprob", "num_tokens"}}
    for name in SCORES:
        wanted = {**entries, "perplexity": {"perplexity", "num_tokens"}}.get(name, {name})
        expected = [{key: value for key, value in record.items() if key in wanted} for record in whole]
        assert_records(Scorer((name,), WORDS)(model, batch, plain_head), expected)


def test_an_embedding_that_is_not_normalized(tiny_qwen3: Any) -> None:
    model = tiny_qwen3().double().eval()
    hidden = [model.model(torch.tensor([each["input_ids"]])).last_hidden_state[0, -1] for each in FEATURES]
    found = records_of(model, RadixCollator(), Scorer(("embedding",), normalize_embeddings=False))
    for record, expected in zip(found, hidden, strict=True):
        assert record["embedding"] == pytest.approx(expected.tolist(), rel=1e-12, abs=1e-12)


def test_float32_numbers_keep_every_bit_in_a_file(tiny_qwen3: Any) -> None:
    [record, *_] = records_of(tiny_qwen3(), RadixCollator(), Scorer(("embedding",)))
    assert max(len(str(number)) for number in record["embedding"]) <= 15
    values = torch.tensor([1 / 3, 1e-7 / 3, 16777217.0, 0.1])
    assert torch.equal(torch.tensor(_numbers(values[None])[0]), values)


@pytest.mark.parametrize(
    ("scores", "num_rows"),
    [
        (("embedding",), 5),  # the first two end in the same row
        (("next_token_logits",), 5),
        (("perplexity",), 5),
        (("perplexity", "embedding"), 7),  # three last rows predict
    ],
)
def test_only_rows_that_are_read_come_back(
    tiny_qwen3: Any, monkeypatch: pytest.MonkeyPatch, scores: tuple[str, ...], num_rows: int
) -> None:
    """In a plain model the head is not called: its matrix makes logits in chunks, or of only the words."""
    model = prepare_model(tiny_qwen3())
    monkeypatch.setattr(model.lm_head, "forward", lambda hidden: pytest.fail("the head was called"))
    sizes: list[int] = []
    model.model.register_forward_hook(lambda module, args, output: sizes.append(output[0].shape[1]))
    Scorer(scores, WORDS)(model, RadixCollator()(FEATURES), True)
    assert sizes == [num_rows]


def test_an_embedding_needs_no_head_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    model = prepare_model(granite(torch.float32))
    monkeypatch.setattr(model.lm_head, "forward", lambda hidden: pytest.fail("the head was called"))
    assert len(Scorer(("embedding",))(model, RadixCollator()(FEATURES), False)) == len(FEATURES)


def test_what_is_needed() -> None:
    assert [name for name in SCORES if needs_labels([name])] == ["logprobs", "completion_logprob", "perplexity"]
    assert all(name.startswith("next_token") == needs_next_tokens([name]) for name in SCORES)


@pytest.mark.parametrize(
    ("scores", "words", "message"),
    [
        ([], None, r"model\.scores: expected one or more of logprobs, .*, embedding; found none"),
        (["embedding", "logprob"], None, "found logprob$"),
        (["next_token_probs", "embedding"], [], r"model\.next_tokens is missing: next_token_probs needs the words"),
        (["embedding"], ["yes"], r"none of model\.scores \(embedding\) is of these words; add next_token_logits or"),
    ],
)
def test_what_is_refused(scores: list[str], words: list[str] | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_scores(scores, words)
