"""The tree of a micro-batch, read from its arrays, against the sequences that it was made of."""

from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from transformers import PreTrainedTokenizerBase

from radixtrain.collators.token_row import TokenRow
from radixtrain.inspection.micro_batch import MicroBatch, run_tree
from radixtrain.testing import labelled_features

Build, Part = Callable[..., TokenRow], Callable[..., MicroBatch]


def texts(part: MicroBatch, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, int, list[int]]]:
    runs = run_tree(part, tokenizer).runs
    return [("".join(token.text for token in run.tokens), len(run.sequences), run.children) for run in runs]


def test_a_character_that_branches_inside_is_whole_in_each_branch(
    tokenizer: PreTrainedTokenizerBase, sample_of: Build, part_of: Part
) -> None:
    part = part_of([sample_of("5 ", "€"), sample_of("5 ", "₺")])  # two bytes in common
    assert [text for text, *_ in texts(part, tokenizer)] == ["5 ", "€", "₺"]


def test_given_weights_are_added_up(tokenizer: PreTrainedTokenizerBase, sample_of: Build, part_of: Part) -> None:
    part = part_of([sample_of("a", "b", weights=[0, 0.5]), sample_of("a", "b", weights=[0, 2])])
    assert run_tree(part, tokenizer).runs[0].tokens[1].weight == 2.5
    assert part.num_labels == 2


def test_a_label_that_is_no_token_is_a_stray(tokenizer: PreTrainedTokenizerBase, part_of: Part) -> None:
    part = part_of([TokenRow(np.array([97, 98, 99]), np.array([-100, 98, 100]), "x:1")])
    tree = run_tree(part, tokenizer)
    assert [(one.row, one.text, one.weight) for one in tree.strays] == [(1, "d", 1)]
    assert [token.bears_loss for token in tree.runs[0].tokens] == [False, True, False]


def test_padding_is_no_run(tokenizer: PreTrainedTokenizerBase, sample_of: Build, part_of: Part) -> None:
    part = part_of([sample_of("ab", "c")], pad_to_multiple_of=8)
    assert (part.num_unique_tokens, part.num_padding) == (3, 5)
    assert texts(part, tokenizer) == [("abc", 1, [])]


@pytest.mark.parametrize("min_shared_tokens", [1, 3])
@hypothesis_settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(features=labelled_features(vocab_size=4))
def test_generated_batches(
    tokenizer: PreTrainedTokenizerBase,
    part_of: Part,
    min_shared_tokens: int,
    features: list[dict[str, list[int]]],
) -> None:
    """Every sequence is a path of runs; the weights of the tokens are the labels of all sequences."""
    columns = ((np.array(f["input_ids"], np.int64), np.array(f["labels"], np.int64)) for f in features)
    samples = [TokenRow(ids, np.where(labels == -100, -100, ids), f"x:{i}") for i, (ids, labels) in enumerate(columns)]
    part = part_of(samples, min_shared_tokens=min_shared_tokens)
    tree = run_tree(part, tokenizer)
    for number, sample in enumerate(part.samples):
        path = [run for run in tree.runs if number in run.sequences]
        assert "".join(token.text for run in path for token in run.tokens) == tokenizer.decode(sample.input_ids)
        assert path[-1].ends.count(number) == 1
        assert all(after in [tree.runs[child] for child in run.children] for run, after in pairwise(path))
    assert [run.rows[1] for run in tree.runs[:-1]] == [run.rows[0] for run in tree.runs[1:]]
    assert not tree.strays
    if min_shared_tokens == 1:  # otherwise copies of a row bear the loss of all
        labels = Counter(
            tuple(sample.input_ids[: place + 1].tolist())
            for sample in part.samples
            for place in range(1, len(sample.input_ids))
            if sample.labels[place] != -100
        )
        learned = [token.weight for run in tree.runs for token in run.tokens if token.bears_loss]
        assert sorted(learned) == sorted(labels.values())
        assert sum(learned) == part.num_labels
