"""Several sources back to back, and selections of them."""

from pathlib import Path

import numpy as np
import pytest

from radixtrain.collators.token_row import TokenRow
from radixtrain.data.tokens.corpus import Corpus, Part
from radixtrain.data.tokens.store import TokenStore, TokenWriter, packed


def part(folder: Path, first: int, sizes: list[int], weight: float = 1.0) -> Part:
    """Conversation i has `sizes[i]` samples; its tokens are all `first + i`, and sample j has j + 1 of them."""
    folder.mkdir()
    writer = TokenWriter(folder)
    conversations = []
    for place, size in enumerate(sizes):
        ids = [np.full(number + 1, first + place) for number in range(size)]
        conversations.append([TokenRow(x, x.copy(), f"{folder.name}:{place}") for x in ids])
    writer.add(packed(conversations))
    digest = writer.close()
    return Part(name=folder.name, conversations=TokenStore(folder), weight=weight, digest=digest)


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    return Corpus([part(tmp_path / "a", 10, [1, 2]), part(tmp_path / "b", 20, [3], weight=0.5)])


def names(corpus: Corpus) -> list[int]:
    return [int(samples[0].input_ids[0]) for samples in corpus]


def test_sources_follow_each_other(corpus: Corpus) -> None:
    assert len(corpus) == 3
    assert names(corpus) == [10, 11, 20]
    assert corpus.starts.tolist() == [0, 1, 3, 6]
    assert corpus.lengths.tolist() == [1, 1, 2, 1, 2, 3]
    assert corpus.weights is not None and corpus.weights.tolist() == [1.0, 1.0, 0.5]
    assert corpus[-1][0].where == "b:0"
    with pytest.raises(IndexError):
        corpus[3]


def test_a_selection_is_a_corpus(corpus: Corpus) -> None:
    chosen = corpus.select(np.array([2, 0]))
    assert names(chosen) == [20, 10]
    assert chosen.starts.tolist() == [0, 3, 4]
    assert chosen.lengths.tolist() == [1, 2, 3, 1]
    assert chosen.weights is not None and chosen.weights.tolist() == [0.5, 1.0]
    assert names(chosen.select(np.array([1]))) == [10]


def test_no_weights_if_all_are_one(tmp_path: Path) -> None:
    assert Corpus([part(tmp_path / "a", 1, [1])]).weights is None


def test_the_digest_depends_on_sources_weights_and_selection(corpus: Corpus, tmp_path: Path) -> None:
    a, b = corpus.parts
    heavier = Part(name=b.name, conversations=b.conversations, weight=2.0, digest=b.digest)
    renamed = Part(name="another name", conversations=b.conversations, weight=0.5, digest=b.digest)
    others = [Corpus([b, a]), Corpus([a, heavier]), corpus.select(np.array([0, 1])), corpus.select(np.array([1, 0]))]
    assert len({corpus.digest, *(other.digest for other in others)}) == 5
    assert Corpus([a, renamed]).digest == corpus.digest
