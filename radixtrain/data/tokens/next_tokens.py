"""Words -> the ids of tokens whose probabilities are read at the end of a text, such as a reranker's `yes` and `no`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from radixtrain.data.tokens.tokenization import DraftTokenizer
from radixtrain.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["next_token_ids"]


def next_token_ids(tokenizer: PreTrainedTokenizerBase, words: Iterable[str]) -> dict[str, int]:
    """The token id of each word as it continues a text: without the space that some tokenizers put before a first word.

    A blank in the word counts: " yes" and "yes" are different tokens.

    Raises UserError for a word that is not one token; the error names the tokens that it becomes. Raises UserError for
    two words that are the same token, and for one that the tokenizer does not know.
    """
    marks_text_start = DraftTokenizer(tokenizer).marks_text_start
    found: dict[str, int] = {}
    for word in words:
        ids = _ids_after_newline(tokenizer, word) if marks_text_start else _ids(tokenizer, word)
        _check(tokenizer, word, ids, found)
        found[word] = ids[0]
    return found


def _check(tokenizer: PreTrainedTokenizerBase, word: str, ids: list[int], found: dict[str, int]) -> None:
    """found: the earlier words, with their ids."""
    if len(ids) != 1:
        tokens = ", ".join(repr(tokenizer.decode([token])) for token in ids) or "none"
        raise UserError(f"model.next_tokens: {word!r} is {len(ids)} tokens ({tokens}); expected words of one token")
    if ids[0] == tokenizer.unk_token_id and word != tokenizer.unk_token:
        raise UserError(f"model.next_tokens: the tokenizer does not know {word!r}; expected words of its vocabulary")
    same = [other for other, token in found.items() if token == ids[0]]
    if same:
        raise UserError(f"model.next_tokens: {same[0]!r} and {word!r} are the same token; leave one of them out")


def _ids_after_newline(tokenizer: PreTrainedTokenizerBase, word: str) -> list[int]:
    newline, both = _ids(tokenizer, "\n"), _ids(tokenizer, f"\n{word}")
    return both[len(newline) :] if both[: len(newline)] == newline else both


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids
