"""The tree of a few sequences, what is left out of a small one, and characters that a branch cuts in two."""

import numpy as np
import pytest
import tiny
from transformers import PreTrainedTokenizerBase

from radixtrain.data.tokens.decode import shortened
from radixtrain.report.contents import TreeNode
from radixtrain.report.tree import MAX_CHARACTERS, prefix_tree
from radixtrain.tree.arrays import IntArray

TEXTS = ["red apple", "red apple", "red apricot", "red plum tree", "blue"]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    """Of bytes."""
    return tiny.train_tokenizer(["red"], 261)


def ids_of(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[IntArray]:
    return [np.array(tokenizer(text)["input_ids"], dtype=np.int64) for text in texts]


def outline(node: TreeNode) -> tuple:
    return node.text, node.num_sequences, *map(outline, node.children)


def leaves(node: TreeNode, above: str = "") -> list[str]:
    below = [text for child in node.children for text in leaves(child, above + node.text)]
    return below or [above + node.text]


def unique_tokens(node: TreeNode) -> int:
    return node.num_tokens + node.num_hidden_tokens + sum(map(unique_tokens, node.children))


def test_the_tree_of_a_few_texts(tokenizer: PreTrainedTokenizerBase) -> None:
    tree = prefix_tree(ids_of(TEXTS, tokenizer), tokenizer)
    assert outline(tree) == (
        "",
        5,
        ("red ", 4, ("ap", 3, ("ple", 2), ("ricot", 1)), ("plum tree", 1)),
        ("blue", 1),
    )
    assert tree.num_tokens == tree.num_hidden_children == 0


def test_what_is_left_out_is_counted(tokenizer: PreTrainedTokenizerBase) -> None:
    sequences = ids_of(TEXTS, tokenizer)
    whole, small = prefix_tree(sequences, tokenizer), prefix_tree(sequences, tokenizer, max_nodes=2)
    (red,) = small.children
    assert red.text == "red" + red.text[3:] and red.num_sequences == 4
    assert small.num_hidden_children == 1 and small.num_hidden_sequences == 1
    assert small.num_hidden_tokens == len(sequences[-1])
    assert (
        unique_tokens(small)
        == unique_tokens(whole)
        == len({tuple(ids[: n + 1]) for ids in sequences for n in range(len(ids))})
    )


def test_a_sequence_that_ends_inside_another(tokenizer: PreTrainedTokenizerBase) -> None:
    tree = prefix_tree(ids_of(["red", "red plum"], tokenizer), tokenizer)
    assert outline(tree) == ("", 2, ("red", 2, (" plum", 1)))


def test_no_sequence_and_no_node(tokenizer: PreTrainedTokenizerBase) -> None:
    assert prefix_tree([], tokenizer) == TreeNode(text="", num_tokens=0, num_sequences=0)
    with pytest.raises(ValueError, match="max_nodes must be at least 1, got 0"):
        prefix_tree([], tokenizer, 0)


def test_a_branch_inside_a_character(tokenizer: PreTrainedTokenizerBase) -> None:
    """é and è begin with the same byte, which is a token here: the character stands in the branch that completes it."""
    sequences = ids_of(["xé!", "xè?", "x😀", "x😁"], tokenizer)
    tree = prefix_tree(sequences, tokenizer)
    assert sorted(leaves(tree)) == sorted(["xé!", "xè?", "x😀", "x😁"])
    assert "\N{REPLACEMENT CHARACTER}" not in repr(tree)
    assert any(node.num_tokens == 1 for child in tree.children for node in child.children)


def test_a_long_run_is_shortened_in_its_middle(tokenizer: PreTrainedTokenizerBase) -> None:
    tree = prefix_tree(ids_of(["begin" + " plum" * 500 + " end"], tokenizer), tokenizer)
    text = tree.children[0].text
    assert len(text) <= MAX_CHARACTERS and text.startswith("begin plum") and text.endswith("plum end") and " … " in text
    assert shortened("abc", 3) == "abc" and shortened("a" * 20 + "b" * 20, 12) == "aaaaa … bbbb"


def test_a_conversation_of_many_turns_is_deep(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = np.arange(1500, dtype=np.int64) % 200
    tree = prefix_tree([ids[:end] for end in range(1, 1500)], tokenizer, max_nodes=1500)
    depth, node = 0, tree
    while node.children:
        depth, node = depth + 1, node.children[0]
    assert depth == 1499
