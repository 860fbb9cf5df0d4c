"""Rerankers under `share_prefixes`: candidates of one query, in one's own loop and in sentence-transformers.

The query stands before its candidates, so they share it. `ListNetLoss` and the like put all candidates of all
queries into one call only with mini_batch_size=-1; without it they call the model on as many pairs as there are queries
in a batch.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_harness import STEPS, compare, settings
from trainer_loop import EOS, PROMPT, Batch, Loop, Metrics, order_one, padded
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForSequenceClassification

from radixtrain import share_prefixes, sharing_report

pytest.importorskip("sentence_transformers", reason="needs sentence-transformers: pip install 'radixtrain[dev]'")

from datasets import Dataset
from sentence_transformers import SentenceTransformer
from sentence_transformers.cross_encoder import (
    CrossEncoder,
    CrossEncoderTrainer,
    CrossEncoderTrainingArguments,
    losses,
)
from sentence_transformers.cross_encoder.modules import LogitScore, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling

NUM_CANDIDATES = 6
TEMPLATE = """\
Judge whether the document answers the query.
Query: {{ messages | selectattr("role", "eq", "query") | map(attribute="content") | first }}
Document: {{ messages | selectattr("role", "eq", "document") | map(attribute="content") | first }}"""
QUERIES = [f"Where is the {thing}?" for thing in ("apple", "pear", "plum", "hammer", "saw", "file", "card", "paper")]
# Their last words differ, and so do the gradients of their scores. A loss that compares candidates subtracts these from
# each other; if they are nearly equal, rounding is large beside what is left: untouched runs with eager attention and
# with sdpa then differ by 4e-6 in the first gradient, here by 1e-6.
DOCUMENTS = ["Shelf one", "Shelf two is it", "Look on shelf three, please", "Not in the shop"]


# A loop of one's own.


def listwise_softmax(model: Any, batch: Batch) -> Metrics:
    """The first candidate of each query is the right one."""
    scores = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.view(-1, NUM_CANDIDATES)
    return {"loss": -scores.log_softmax(dim=1)[:, 0].mean()}


def candidates() -> list[Batch]:
    """Three batches of two queries, each with its candidates."""
    generator = torch.Generator().manual_seed(0)

    def draw(length: int) -> list[int]:
        return torch.randint(10, 50, (length,), generator=generator).tolist()

    batches = []
    for _ in range(STEPS):
        queries = [[*PROMPT, *draw(9)] for _ in range(2)]
        rows = [[*query, *draw(2 + number), EOS] for query in queries for number in range(NUM_CANDIDATES)]
        batches.append(padded(rows, rows, "left", pad=0))
    return batches


def test_listwise_softmax_over_candidates(table):
    config = Qwen3Config(
        **{"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "num_labels": 1, "pad_token_id": 0},
    )

    def build(share: Callable[[Any], Any]) -> Loop:
        return Loop(share(order_one(Qwen3ForSequenceClassification(config))), candidates(), listwise_softmax)

    found = compare(build)
    assert found.r > 3
    table("reranker, own loop, listwise softmax", found)


# sentence-transformers.


@pytest.fixture(scope="module")
def scorer(shop, tmp_path_factory) -> str:
    """The folder of a sequence-classification model with one score, and its tokenizer."""
    folder = tmp_path_factory.mktemp("scorer")
    config = Qwen3Config.from_pretrained(shop / "model", num_labels=1)
    order_one(Qwen3ForSequenceClassification(config)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(shop / "model").save_pretrained(folder)
    return str(folder)


def with_a_score(scorer: str, shop: Path) -> CrossEncoder:
    """A head of one score on the last token. Right padding."""
    return CrossEncoder(scorer, processor_kwargs={"chat_template": TEMPLATE})


def with_a_token(scorer: str, shop: Path) -> CrossEncoder:
    """A causal model: the logit of one token minus that of another, at the last position. Left padding."""
    inner = Transformer(
        str(shop / "model"), transformer_task="text-generation", processor_kwargs={"chat_template": TEMPLATE}
    )
    order_one(inner.model)
    return CrossEncoder(modules=[inner, LogitScore(true_token_id=30, false_token_id=40)])


def lists() -> Dataset:
    """Queries with as many documents, and which of these are right."""
    labels = [[float(place == number % 4) for place in range(4)] for number in range(len(QUERIES))]
    return Dataset.from_dict({"query": QUERIES, "docs": [DOCUMENTS] * len(QUERIES), "labels": labels})


def triplets() -> Dataset:
    positive = [DOCUMENTS[number % 4] for number in range(len(QUERIES))]
    negative = [DOCUMENTS[(number + 1) % 4] for number in range(len(QUERIES))]
    return Dataset.from_dict({"query": QUERIES, "answer": positive, "negative": negative})


def pairs() -> Dataset:
    numbers = range(len(QUERIES))
    right = [float(number % 3 == 0) for number in numbers]
    return Dataset.from_dict(
        {"query": QUERIES, "answer": [DOCUMENTS[number % 4] for number in numbers], "label": right}
    )


WHOLE_LISTS = {"mini_batch_size": -1}


@pytest.mark.parametrize("make", [with_a_score, with_a_token])
@pytest.mark.parametrize(
    ("loss", "data", "at_least"),
    [
        (partial(losses.ListNetLoss, **WHOLE_LISTS), lists, 3),
        (partial(losses.LambdaLoss, **WHOLE_LISTS), lists, 3),
        (losses.MultipleNegativesRankingLoss, triplets, 1.5),
        (losses.BinaryCrossEntropyLoss, pairs, 1.5),
    ],
)
def test_cross_encoder(scorer, shop, tmp_path, table, loss, data, at_least, make):
    """The hidden states are shared whatever the module after the model does with them."""

    def build(share: Callable[[Any], Any]) -> CrossEncoderTrainer:
        model = make(scorer, shop)
        share(model.transformers_model)
        arguments = CrossEncoderTrainingArguments(**settings(tmp_path))
        return CrossEncoderTrainer(model, arguments, train_dataset=data(), eval_dataset=data(), loss=loss(model))

    found = compare(build, evaluate=True)
    assert found.r > at_least
    table(f"CrossEncoderTrainer, {getattr(loss, 'func', loss).__name__}, {make.__name__.replace('_', ' ')}", found)


def test_a_whole_cross_encoder_can_be_given(scorer, shop):
    """What predict() returns is what an untouched one returns."""
    asked = [(query, document) for query in QUERIES[:2] for document in DOCUMENTS]
    plain = with_a_score(scorer, shop).predict(asked)
    model = share_prefixes(with_a_score(scorer, shop))
    shared = model.predict(asked)
    torch.testing.assert_close(torch.tensor(shared), torch.tensor(plain), rtol=1e-5, atol=1e-6)
    assert sharing_report(model).num_shared == 1 and sharing_report(model).compression_ratio > 2


def test_an_embedding_model_is_not_reached_and_the_report_says_so(shop):
    """SentenceTransformer calls the `forward` method of its backbone, where no hook runs."""
    texts = [f"Find the shelf. Query: {query}" for query in QUERIES]
    inner = Transformer(str(shop / "model"))
    model = SentenceTransformer(modules=[inner, Pooling(inner.model.config.hidden_size, pooling_mode="lasttoken")])
    plain = model.encode(texts)
    shared = share_prefixes(model).encode(texts)
    torch.testing.assert_close(torch.tensor(shared), torch.tensor(plain), rtol=1e-5, atol=1e-5)
    assert sharing_report(model).num_shared == 0 and "never called" in str(sharing_report(model))
