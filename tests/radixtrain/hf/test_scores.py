"""Every score of `predict` is an ordinary Hugging Face loop's, whatever the kind of batch and whatever the head."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tiers import FULL
from tiny_models import tiny_model
from torch import Tensor

from radixtrain import RadixCollator, share_prefixes
from radixtrain.collators.steps import PaddedCollator
from radixtrain.errors import UserError
from radixtrain.hf.head import has_plain_head
from radixtrain.hf.scores import SCORES, Scorer, _numbers, check_scores
from radixtrain.verification.oracle import float64_throughout

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


def granite() -> Any:
    """Its head divides the logits, so that it is no plain matrix."""
    return tiny_model("GraniteForCausalLM", vocab_size=50, logits_scaling=3.0).eval()


@pytest.fixture(params=["plain", "granite"])
def model(request: pytest.FixtureRequest, tiny_qwen3: Any) -> Any:
    return granite() if request.param == "granite" else tiny_qwen3().eval()


def records_of(model: Any, collator: Any, scorer: Scorer) -> list[dict[str, Any]]:
    plain_head = has_plain_head(model)
    prepared = share_prefixes(model) if isinstance(collator, RadixCollator) else model
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


COLLATORS = [RadixCollator(), pytest.param(RadixCollator(pad_to_multiple_of=8), marks=FULL), PaddedCollator()]


@pytest.mark.parametrize("collator", COLLATORS)
def test_every_score_is_that_of_a_loop(model: Any, collator: Any) -> None:
    """Each of them by itself too, which reads fewer rows."""
    entries = {"logprobs": {"tokens", "logprobs"}, "completion_logprob": {"completion_logprob", "num_tokens"}}
    with float64_throughout(model):
        expected = by_hugging_face(model)
        assert_records(records_of(model, collator, Scorer(SCORES, WORDS)), expected)
        for name in SCORES:
            wanted = {**entries, "perplexity": {"perplexity", "num_tokens"}}.get(name, {name})
            assert_records(
                records_of(model, collator, Scorer((name,), WORDS)),
                [{key: value for key, value in record.items() if key in wanted} for record in expected],
            )


def test_an_embedding_that_is_not_normalized(tiny_qwen3: Any) -> None:
    model = tiny_qwen3().eval()
    with float64_throughout(model):
        hidden = [model.model(torch.tensor([each["input_ids"]])).last_hidden_state[0, -1] for each in FEATURES]
        found = records_of(model, RadixCollator(), Scorer(("embedding",), normalize_embeddings=False))
    for record, expected in zip(found, hidden, strict=True):
        assert record["embedding"] == pytest.approx(expected.tolist(), rel=1e-12, abs=1e-12)


def test_float32_numbers_keep_every_bit_in_a_file(tiny_qwen3: Any) -> None:
    [record, *_] = records_of(tiny_qwen3(), RadixCollator(), Scorer(("embedding",)))
    assert max(len(str(number)) for number in record["embedding"]) <= 15
    values = torch.tensor([1 / 3, 1e-7 / 3, 16777217.0, 0.1])
    assert torch.equal(torch.tensor(_numbers(values[None])[0]), values)


@pytest.mark.usefixtures("hooks_that_may_stay")
@pytest.mark.parametrize(
    ("scores", "num_rows"),
    [
        (("embedding",), 5),  # the first two end in the same row
        (("next_token_logits",), 5),
        (("perplexity",), 5),
        (("perplexity", "embedding"), 7),  # three last rows predict
    ],
)
@pytest.mark.usefixtures("without_the_trial")
def test_only_rows_that_are_read_come_back(
    tiny_qwen3: Any, monkeypatch: pytest.MonkeyPatch, scores: tuple[str, ...], num_rows: int
) -> None:
    """In a plain model the head is not called: its matrix makes logits in chunks, or of only the words."""
    model = share_prefixes(tiny_qwen3())
    monkeypatch.setattr(model.lm_head, "forward", lambda hidden: pytest.fail("the head was called"))
    sizes: list[int] = []
    model.model.register_forward_hook(lambda module, args, output: sizes.append(output[0].shape[1]))
    Scorer(scores, WORDS)(model, RadixCollator()(FEATURES), True)
    assert sizes == [num_rows]


@pytest.mark.parametrize(
    ("scores", "words", "message"),
    [
        ([], None, r"model\.scores: expected one or more of logprobs, .*, embedding; found none"),
        (["embedding", "perplexty"], None, r"found perplexty, did you mean perplexity\?$"),
        (["embedding", "nothing"], None, "found nothing$"),
        (["next_token_probs", "embedding"], [], r"model\.next_tokens is missing: next_token_probs needs the words"),
        (["embedding"], ["yes"], r"none of model\.scores \(embedding\) is of these words; add next_token_logits or"),
    ],
)
def test_what_is_refused(scores: list[str], words: list[str] | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_scores(scores, words)
