"""Token ids to text, run by run: joined, the texts of the runs are the text of the whole."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from radixtrain.data.tokens.tokenization import DraftTokenizer
from radixtrain.errors import UserError
from radixtrain.tree.arrays import IntArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BROKEN = "\N{REPLACEMENT CHARACTER}"  # what a decoder writes for bytes that are not, or not yet, a character
CONTEXT = 8  # tokens before a run that are decoded with it: a character has at most 4 bytes


def decode_runs(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int] | IntArray, bounds: Iterable[int]) -> list[str]:
    """Return the text of each run of a sequence, special tokens included.

    ids: (L,). the whole sequence; a run deep in a prefix tree is given with the tokens above it.
    bounds: (n + 1,). rising, from 0 to L: run i is `ids[bounds[i] : bounds[i + 1]]`.

    A character whose bytes lie on both sides of a bound is in the run that completes it, so that a shared run
    has the same text whatever follows it. Each token is decoded a constant number of times.
    """
    tokens, ends = [*map(int, ids)], [*map(int, bounds)]
    texts: list[str] = []
    context = start = 0  # ends of the last two runs that ended with a whole character
    written = ""  # text of the runs since `context`
    for end in ends[1:]:
        text = _decode(tokenizer, tokens[context:end])
        whole = text if end == len(tokens) else text.rstrip(BROKEN)
        texts.append(whole[len(written) :])
        written = max(written, whole, key=len)
        if whole == text and end > start:
            written = _decode(tokenizer, tokens[start:end])
            context, start = start, end
    return texts


def text_of_run(tokenizer: PreTrainedTokenizerBase, ids: IntArray, start: int, end: int) -> str:
    """Return the text of the tokens [start, end) of a sequence, its special tokens included.

    ids: (L,), int64. the whole sequence, since the text of a run depends on what precedes it.

    A character that a border cuts belongs to the run that completes it, so the runs of a sequence join to its text.
    """
    first = max(0, start - CONTEXT)
    return decode_runs(tokenizer, ids[first:end], [0, start - first, end - first])[-1].rstrip(BROKEN)


def shortened(text: str, max_characters: int) -> str:
    """Replace the middle of a text by an ellipsis if it has more characters."""
    if len(text) <= max_characters:
        return text
    end = max_characters // 3
    return f"{text[: max_characters - end - 3]} … {text[len(text) - end :]}"


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


def next_token_ids(tokenizer: PreTrainedTokenizerBase, words: Iterable[str]) -> dict[str, int]:
    """Return the token id of each word as it continues a text, without the space that some tokenizers put before it.

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
    """Refuse a word that is not a token of its own. found: the earlier words, with their ids."""
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
