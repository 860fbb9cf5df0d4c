"""Words to tokens: what a model would write next, and the words that cannot be scored."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from radixtrain.data.tokens.next_tokens import next_token_ids
from radixtrain.errors import UserError


def tokenizer_of(pieces: list[str], split: pre_tokenizers.PreTokenizer, merges: list[tuple[str, str]]) -> object:
    vocab = {piece: number for number, piece in enumerate(["<unk>", "<end>", *pieces])}
    backend = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>"))
    backend.pre_tokenizer = split
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<end>")])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", unk_token="<unk>")


@pytest.fixture
def byte_level() -> object:
    """Qwen's and Llama 3's kind: a blank belongs to the word after it."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer_of(["y", "n", "o", "Ġ", "no", "Ġno"], split, [("n", "o"), ("Ġ", "no")])


def test_the_blank_before_a_word_counts(byte_level: object) -> None:
    assert next_token_ids(byte_level, ["no", " no", "y", "<end>"]) == {"no": 6, " no": 7, "y": 2, "<end>": 1}


def test_a_word_continues_a_text() -> None:
    """SentencePiece tokenizers put a blank before a text's first word. What follows a prompt is not its first word."""
    split = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer = tokenizer_of(["▁", "n", "o", "no", "▁no"], split, [("n", "o"), ("▁", "no")])
    assert tokenizer("no", add_special_tokens=False)["input_ids"] == [6]
    assert next_token_ids(tokenizer, ["no", " no"]) == {"no": 5, " no": 6}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no", "yo"], r"model\.next_tokens: 'yo' is 2 tokens \('y', 'o'\); expected words of one token"),
        ([""], r"'' is 0 tokens \(none\)"),
        (["x"], "the tokenizer does not know 'x'; expected words of its vocabulary"),
        (["no", "y", "no"], "'no' and 'no' are the same token; leave one of them out"),
    ],
)
def test_a_word_that_cannot_be_scored(byte_level: object, words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        next_token_ids(byte_level, words)
