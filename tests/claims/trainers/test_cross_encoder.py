"""Rerankers of sentence-transformers under `share_prefixes`: candidates of one query.

The query stands before its candidates, so they share it. `ListNetLoss` and the like put all candidates of all
queries into one call only with mini_batch_size=-1; without it they call the model on as many pairs as there are queries
in a batch.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from radixtrain import share_prefixes, sharing_report
from tests.support import FULL
from tests.support.models import order_one
from tests.support.trainers import compare, settings

pytestmark = FULL

TEMPLATE = """\
Judge whether the document answers the query.
Query: {{ messages | selectattr("role", "eq", "query") | map(attribute="content") | first }}
Document: {{ messages | selectattr("role", "eq", "document") | map(attribute="content") | first }}"""
QUERIES = [f"Where is the {thing}?" for thing in ("apple", "pear", "plum", "hammer", "saw", "file", "card", "paper")]
DOCUMENTS = ["Shelf one", "Shelf two is it", "Look on shelf three, please", "Not in the shop"]


@pytest.fixture(scope="module", autouse=True)
def sentence_transformers() -> Any:
    reason = "needs sentence-transformers: pip install sentence-transformers"
    return pytest.importorskip("sentence_transformers", reason=reason)


@pytest.fixture(scope="module")
def scorer(shop, tmp_path_factory) -> str:
    """The folder of a sequence-classification model with one score, and its tokenizer."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = tmp_path_factory.mktemp("scorer")
    model = AutoModelForSequenceClassification.from_pretrained(shop / "model", num_labels=1)
    order_one(model, seed=0).save_pretrained(folder)
    AutoTokenizer.from_pretrained(shop / "model").save_pretrained(folder)
    return str(folder)


def with_a_score(scorer: str, shop: Path) -> Any:
    """A head of one score on the last token. Right padding."""
    from sentence_transformers import CrossEncoder

    return CrossEncoder(scorer, processor_kwargs={"chat_template": TEMPLATE})


def with_a_token(scorer: str, shop: Path) -> Any:
    """A causal model: the logit of one token minus that of another, at the last position. Left padding."""
    from sentence_transformers import CrossEncoder
    from sentence_transformers.cross_encoder.modules import LogitScore, Transformer

    given = {"transformer_task": "text-generation", "processor_kwargs": {"chat_template": TEMPLATE}}
    inner = Transformer(str(shop / "model"), **given)
    order_one(inner.model, seed=0)
    return CrossEncoder(modules=[inner, LogitScore(true_token_id=30, false_token_id=40)])


def lists() -> dict[str, Any]:
    """Queries with as many documents, and which of these are right."""
    labels = [[float(place == number % 4) for place in range(4)] for number in range(len(QUERIES))]
    return {"query": QUERIES, "docs": [DOCUMENTS] * len(QUERIES), "labels": labels}


def triplets() -> dict[str, Any]:
    negative = [DOCUMENTS[(number + 1) % 4] for number in range(len(QUERIES))]
    return {"query": QUERIES, "answer": DOCUMENTS * 2, "negative": negative}


def pairs() -> dict[str, Any]:
    return {"query": QUERIES, "answer": DOCUMENTS * 2, "label": [float(n % 3 == 0) for n in range(len(QUERIES))]}


WHOLE_LISTS = {"mini_batch_size": -1}


@pytest.mark.parametrize("make", [with_a_score, with_a_token])
@pytest.mark.parametrize(
    ("name", "options", "data", "at_least"),
    [
        ("ListNetLoss", WHOLE_LISTS, lists, 3),
        ("LambdaLoss", WHOLE_LISTS, lists, 3),
        ("MultipleNegativesRankingLoss", {}, triplets, 1.5),
        ("BinaryCrossEntropyLoss", {}, pairs, 1.5),
    ],
)
def test_cross_encoder(scorer, shop, tmp_path, table, name, options, data, at_least, make):
    """The hidden states are shared whatever the module after the model does with them."""
    from datasets import Dataset
    from sentence_transformers.cross_encoder import CrossEncoderTrainer, CrossEncoderTrainingArguments, losses

    def build(share: Callable[[Any], Any]) -> CrossEncoderTrainer:
        model, rows = make(scorer, shop), Dataset.from_dict(data())
        share(model.transformers_model)
        arguments, loss = CrossEncoderTrainingArguments(**settings(tmp_path)), getattr(losses, name)(model, **options)
        return CrossEncoderTrainer(model, arguments, train_dataset=rows, eval_dataset=rows, loss=loss)

    found = compare(build, evaluate=True)
    assert found.r > at_least
    table(f"CrossEncoderTrainer, {name}, {make.__name__.replace('_', ' ')}", found)


def test_an_embedding_model_is_not_reached_and_the_report_says_so(shop):
    """SentenceTransformer calls the `forward` method of its backbone, where no hook runs."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    texts = [f"Find the shelf. Query: {query}" for query in QUERIES]
    inner = Transformer(str(shop / "model"))
    model = SentenceTransformer(modules=[inner, Pooling(inner.model.config.hidden_size, pooling_mode="lasttoken")])
    plain = model.encode(texts)
    assert np.array_equal(share_prefixes(model).encode(texts), plain), "the same operations"
    assert sharing_report(model).num_shared == 0 and "never called" in str(sharing_report(model))
