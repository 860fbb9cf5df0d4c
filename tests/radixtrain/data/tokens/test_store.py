"""Samples that are written and read again are the same, in any order and in another process."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from radixtrain.collators.token_row import TokenRow
from radixtrain.data.tokens.store import Corpus, Part, TokenStore, TokenWriter, packed


def write(folder: Path, blocks: list[list[list[TokenRow]]]) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    writer = TokenWriter(folder)
    for block in blocks:
        writer.add(packed(block))
    return writer.close()


def lists(sample: TokenRow) -> tuple[list[int], list[int], str, list[float] | None]:
    weights = None if sample.loss_weights is None else sample.loss_weights.tolist()
    return sample.input_ids.tolist(), sample.labels.tolist(), sample.where, weights


def sample_of(ids: list[int], labels: list[int], weights: list[float] | None = None, where: str = "a:1") -> TokenRow:
    kept = None if weights is None else np.array(weights, dtype=np.float32)
    return TokenRow(np.array(ids, dtype=np.int64), np.array(labels, dtype=np.int64), where, kept)


ANSWER = sample_of([5, 6, 7, 8], [-100, -100, 7, 8])
TWO_SPANS = sample_of([5, 6, 7, 8], [5, -100, -100, 8], where="a:2")
OTHER_LABELS = sample_of([5, 6, 7], [-100, 9, -100], where="a:3")
WEIGHTED = sample_of([1, 2], [-100, 2], [0.0, -1.5], where="ä:4")
NO_LOSS = sample_of([1, 2], [-100, -100], where="a:5")


def test_samples_come_back(tmp_path: Path) -> None:
    write(tmp_path, [[[ANSWER, TWO_SPANS], [], [OTHER_LABELS]], [[WEIGHTED]], [], [[]], [[NO_LOSS, ANSWER]]])
    store = TokenStore(tmp_path)
    expected = [[ANSWER, TWO_SPANS], [OTHER_LABELS], [WEIGHTED], [NO_LOSS, ANSWER]]
    assert len(store) == 4
    assert [[lists(s) for s in samples] for samples in store] == [[lists(s) for s in samples] for samples in expected]
    assert store.lengths.tolist() == [4, 4, 3, 2, 2, 4]
    assert store.starts.tolist() == [0, 2, 3, 4, 6]
    assert {(s.input_ids.dtype, s.labels.dtype) for samples in store for s in samples} == {(np.dtype(np.int64),) * 2}
    assert [lists(s) for s in store[-1]] == [lists(s) for s in store[3]]
    with pytest.raises(IndexError):
        store[4]


def test_a_sample_can_be_changed_without_changing_the_file(tmp_path: Path) -> None:
    write(tmp_path, [[[WEIGHTED]]])
    store = TokenStore(tmp_path)
    for name in ("input_ids", "labels", "loss_weights"):
        getattr(store[0][0], name)[:] = 9
    assert lists(store[0][0]) == lists(WEIGHTED)


def test_it_travels_as_the_name_of_its_folder(tmp_path: Path) -> None:
    write(tmp_path, [[[ANSWER]] * 1000])
    store = TokenStore(tmp_path)
    assert lists(store[999][0]) == lists(ANSWER)  # all of it is open
    copy = pickle.dumps(store)
    assert len(copy) < 400
    assert lists(pickle.loads(copy)[999][0]) == lists(ANSWER)


def unlabelled(*ids: int) -> TokenRow:
    return sample_of([*ids], [-100] * len(ids))


DIFFERENT: dict[str, list[list[list[TokenRow]]]] = {
    "a sample": [[[ANSWER]]],
    "a token": [[[sample_of([5, 6, 7, 9], [-100, -100, 7, 9])]]],
    "a label": [[[sample_of([5, 6, 7, 8], [-100, 6, 7, 8])]]],
    "a weight": [[[sample_of([5, 6, 7, 8], [-100, -100, 7, 8], [1.0] * 4)]]],
    "another sample": [[[ANSWER, ANSWER]]],
    "another conversation": [[[ANSWER], [ANSWER]]],
    "a border": [[[unlabelled(1, 2), unlabelled(3)]]],
    "another border": [[[unlabelled(1), unlabelled(2, 3)]]],
}


def test_the_digest_tells_samples_apart(tmp_path: Path) -> None:
    digests = {name: write(tmp_path / name, blocks) for name, blocks in DIFFERENT.items()}
    assert len(set(digests.values())) == len(DIFFERENT), digests
    assert write(tmp_path / "again", [[[ANSWER]]]) == digests["a sample"]


# Several sources back to back, and selections of them


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


def test_the_digest_depends_on_sources_weights_and_selection(corpus: Corpus, tmp_path: Path) -> None:
    a, b = corpus.parts
    heavier = Part(name=b.name, conversations=b.conversations, weight=2.0, digest=b.digest)
    renamed = Part(name="another name", conversations=b.conversations, weight=0.5, digest=b.digest)
    others = [Corpus([b, a]), Corpus([a, heavier]), corpus.select(np.array([0, 1])), corpus.select(np.array([1, 0]))]
    assert len({corpus.digest, *(other.digest for other in others)}) == 5
    assert Corpus([a, renamed]).digest == corpus.digest
