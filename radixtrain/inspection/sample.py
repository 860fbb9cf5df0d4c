"""One sample as text, with its loss tokens marked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from radixtrain.data.sample import Sample
from radixtrain.inspection.marks import marked
from radixtrain.inspection.tokens import sample_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["marked_text"]


def marked_text(sample: Sample, tokenizer: PreTrainedTokenizerBase, max_chars: int | None = 800) -> Text:
    """The decoded sample. Tokens that bear loss stand in `⟦ ⟧`, followed by their loss weight if it is not 1.

    max_chars: long runs with and without loss are shortened in the middle, with the number of tokens that are left
        out; None shows all.

    Line breaks are shown as `↵`, control characters as pictures, special tokens in another colour.
    """
    return marked(sample_tokens(sample, tokenizer), max_chars)
