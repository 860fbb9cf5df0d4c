"""Samples that are written and read again are the same, in any order and in another process; selections of them."""

from __future__ import annotations

import pickle
from dataclasses import replace
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
    given = None if weights is None else np.array(weights, dtype=np.float32)
    return TokenRow(np.array(ids, dtype=np.int64), np.array(labels, dtype=np.int64), where, given)


ANSWER = sample_of([5, 6, 7, 8], [-100, -100, 7, 8])
TWO_SPANS = sample_of([5, 6, 7, 8], [5, -100, -100, 8], where="a:2")
OTHER_LABELS = sample_of([5, 6, 7], [-100, 9, -100], where="a:3")
WEIGHTED = sample_of([1, 2], [-100, 2], [0.0, -1.5], where="ä:4")
NO_LOSS = sample_of([1, 2], [-100, -100], where="a:5")


def test_samples_come_back(tmp_path: Path) -> None:
    write(tmp_path, [[[ANSWER, TWO_SPANS], [], [OTHER_LABELS]], [[WEIGHTED]], [], [[]], [[NO_LOSS, ANSWER]]])
    store = TokenStore(tmp_path)
    expected = [[ANSWER, TWO_SPANS], [OTHER_LABELS], [WEIGHTED], [NO_LOSS, ANSWER]]
    for _ in range(2):  # what has been read can be changed
        found = [*store]
        assert [[lists(s) for s in samples] for samples in found] == [[lists(s) for s in each] for each in expected]
        for name in ("input_ids", "labels", "loss_weights"):
            getattr(found[2][0], name)[:] = 9
    assert (store.lengths.tolist(), store.starts.tolist()) == ([4, 4, 3, 2, 2, 4], [0, 2, 3, 4, 6])
    assert {(s.input_ids.dtype, s.labels.dtype) for samples in store for s in samples} == {(np.dtype(np.int64),) * 2}
    with pytest.raises(IndexError):
        store[4]


def test_it_travels_as_the_name_of_its_folder(tmp_path: Path) -> None:
    write(tmp_path, [[[ANSWER]] * 1000])
    store = TokenStore(tmp_path).opened()
    copy = pickle.dumps(store)
    assert len(copy) < 400 and lists(pickle.loads(copy)[999][0]) == lists(ANSWER)


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


def part(folder: Path, first: int, sizes: list[int], weight: float = 1.0) -> Part:
    """Conversation i has `sizes[i]` samples; its tokens are all `first + i`, and sample j has j + 1 of them."""
    ids = [[[first + place] * (number + 1) for number in range(size)] for place, size in enumerate(sizes)]
    digest = write(folder, [[[sample_of(each, each, where=folder.name) for each in samples] for samples in ids]])
    return Part(name=folder.name, conversations=TokenStore(folder), weight=weight, digest=digest)


def test_several_sources_and_a_selection_of_them(tmp_path: Path) -> None:
    a, b = part(tmp_path / "a", 10, [1, 2]), part(tmp_path / "b", 20, [3], weight=0.5)
    corpus = Corpus([a, b])
    chosen = corpus.select(np.array([2, 0]))
    for each, names, lengths, weights in (
        (corpus, [10, 11, 20], [1, 1, 2, 1, 2, 3], [1.0, 1.0, 0.5]),
        (chosen, [20, 10], [1, 2, 3, 1], [0.5, 1.0]),
        (chosen.select(np.array([1])), [10], [1], [1.0]),
    ):
        assert [int(samples[0].input_ids[0]) for samples in each] == names and len(each) == len(names)
        assert each.lengths.tolist() == lengths
        assert each.weights is not None and each.weights.tolist() == weights
    assert corpus[-1][0].where == "b" and Corpus([a]).weights is None
    with pytest.raises(IndexError):
        corpus[3]
    others = [
        Corpus([b, a]),
        Corpus([a, replace(b, weight=2.0)]),
        *(corpus.select(np.array(i)) for i in ([0, 1], [1, 0])),
    ]
    assert len({corpus.digest, *(other.digest for other in others)}) == 5
    assert Corpus([a, replace(b, name="another name")]).digest == corpus.digest
