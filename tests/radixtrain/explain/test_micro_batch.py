"""The tree of a micro-batch: the text and the weights of its rows."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from transformers import PreTrainedTokenizerBase

from radixtrain.collators.token_row import TokenRow
from radixtrain.explain.micro_batch import BatchTree, MicroBatch
from radixtrain.testing import labelled_features

Part = Callable[..., MicroBatch]
Rows = list[tuple[Any, ...]]  # prompt, answer, weights

# The rows, and text, sequences and children of each run.
TREES: dict[str, tuple[Rows, list[tuple[str, int, list[int]]]]] = {
    "a character that branches inside is whole in each": (
        [("5 ", "€"), ("5 ", "₺")],  # two bytes in common
        [("5 ", 2, [1, 2]), ("€", 1, []), ("₺", 1, [])],
    ),
    "one that ends inside another": ([("a", "b"), ("a", "bc")], [("ab", 2, [1]), ("c", 1, [])]),
    "padding is no run": ([("ab", "c")], [("abc", 1, [])]),
}


@pytest.mark.parametrize("name", TREES)
def test_runs(name: str, tokenizer: PreTrainedTokenizerBase, sample_of: Callable[..., TokenRow], part_of: Part) -> None:
    rows, runs = TREES[name]
    part = part_of([sample_of(*row) for row in rows], pad_to_multiple_of=8)
    tree = BatchTree(part, tokenizer)
    found = [("".join(token.text for token in tree.tokens[slice(*run.rows)]), len(run.sequences)) for run in tree.runs]
    assert [(*each, run.children) for each, run in zip(found, tree.runs, strict=True)] == runs
    assert part.num_unique_tokens == len(tree.tokens)


def test_given_weights_are_added_up(
    tokenizer: PreTrainedTokenizerBase, sample_of: Callable[..., TokenRow], part_of: Part
) -> None:
    part = part_of([sample_of("a", "b", weights=[0, 0.5]), sample_of("a", "b", weights=[0, 2])])
    assert BatchTree(part, tokenizer).tokens[1].weight == 2.5
    assert part.num_labels == 2


def test_a_label_that_is_no_token_is_counted(tokenizer: PreTrainedTokenizerBase, part_of: Part) -> None:
    tree = BatchTree(part_of([TokenRow(np.array([97, 98, 99]), np.array([-100, 98, 100]), "x:1")]), tokenizer)
    assert tree.num_strays == 1 and [token.bears_loss for token in tree.tokens] == [False, True, False]


@pytest.mark.parametrize("min_shared_tokens", [1, 3])
@hypothesis_settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(features=labelled_features(vocab_size=4))
def test_generated_batches(
    tokenizer: PreTrainedTokenizerBase, part_of: Part, min_shared_tokens: int, features: list[dict[str, list[int]]]
) -> None:
    """The text of each sequence is that of its rows; the weights of the tokens are the labels of all sequences."""
    columns = ((np.array(f["input_ids"], np.int64), np.array(f["labels"], np.int64)) for f in features)
    samples = [TokenRow(ids, np.where(labels == -100, -100, ids), f"x:{i}") for i, (ids, labels) in enumerate(columns)]
    part = part_of(samples, min_shared_tokens=min_shared_tokens)
    tree = BatchTree(part, tokenizer)
    for sample, path in zip(part.samples, part.paths, strict=True):
        assert "".join(tree.tokens[row].text for row in path.tolist()) == tokenizer.decode(sample.input_ids)
    assert not tree.num_strays
    if min_shared_tokens == 1:  # otherwise copies of a row bear the loss of all
        labels = Counter(
            tuple(sample.input_ids[: place + 1].tolist())
            for sample in part.samples
            for place in range(1, len(sample.input_ids))
            if sample.labels[place] != -100
        )
        learned = [token.weight for token in tree.tokens if token.bears_loss]
        assert sorted(learned) == sorted(labels.values()) and sum(learned) == part.num_labels
