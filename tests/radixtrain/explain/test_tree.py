"""Runs against the sequences that they were made of, and their picture as text."""

from itertools import pairwise

import numpy as np
import pytest
import tiny
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from radixtrain.explain.tokens import TextTree, run_tree

FRUIT = ["red apple"] * 3 + ["red apricot", "red plum tree", "red plum tree"]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    """Of bytes."""
    return tiny.train_tokenizer(["red"], 261)


def tree_of(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> TextTree:
    return TextTree([np.array(tokenizer(text)["input_ids"], dtype=np.int64) for text in texts], tokenizer)


@pytest.mark.parametrize(
    ("texts", "most", "lines"),  # of a line: depth, sequences, text, branches that are left out
    [
        (FRUIT, 9, [(0, 6, "red ", 0), (1, 4, "ap", 1), (2, 3, "ple", 0), (1, 2, "plum tree", 0)]),
        (FRUIT, 2, [(0, 6, "red ", 1), (1, 4, "ap", 2)]),
        (["red", "red plum"], 9, [(0, 2, "red", 1)]),
        (["red", "blue"], 9, []),
        ([], 9, []),
        (["xé!", "xé!", "xè?", "xè?"], 9, [(0, 4, "x", 0), (1, 2, "é!", 0), (1, 2, "è?", 0)]),  # a byte in common
    ],
)
def test_lines(texts: list[str], most: int, lines: list[tuple], tokenizer: PreTrainedTokenizerBase) -> None:
    found = [
        (line.depth, line.num_sequences, line.text, line.num_hidden) for line in tree_of(texts, tokenizer).lines(most)
    ]
    assert sorted(found) == sorted(lines) and found[:1] == lines[:1]


@given(texts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=8))
@hypothesis_settings(max_examples=60, deadline=None)
def test_every_sequence_is_a_path_of_runs(texts: list[list[int]]) -> None:
    rows: dict[tuple[int, ...], int] = {}
    for text in sorted(texts):
        for end in range(1, len(text) + 1):
            rows.setdefault(tuple(text[:end]), len(rows))
    paths = [np.array([rows[tuple(text[:end])] for end in range(1, len(text) + 1)]) for text in texts]
    runs, roots = run_tree(paths)
    for number, path in enumerate(paths):
        own = [run for run in runs if number in run.sequences]
        assert [row for run in own for row in range(run.start, run.end)] == path.tolist()
        assert [run.depth for run in own] == [sum(map(len, own[:n])) for n in range(len(own))]
        assert own[-1].ends.count(number) == 1 and runs.index(own[0]) in roots
        assert all(runs.index(child) in run.children for run, child in pairwise(own))
