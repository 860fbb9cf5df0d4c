"""Token ids to text, run by run: joined, the texts of the runs are the text of the whole."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

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
