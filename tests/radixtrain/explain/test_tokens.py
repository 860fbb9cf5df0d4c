"""One sample as text, with its loss marked: also without colour, with controls visible, and shortened."""

from collections.abc import Callable

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from radixtrain.collators.token_row import TokenRow
from radixtrain.explain.tokens import LOSS, marked, sample_tokens
from tests.support.batches import END

Build = Callable[..., TokenRow]
LONG = f"{'p' * 50} ⋯ 900 characters ⋯ {'p' * 50}⟦{'q' * 50} ⋯ 400 characters ⋯ {'q' * 50}⟧"


@pytest.mark.parametrize(
    ("prompt", "answer", "options", "shown"),
    [
        ("Where?\n", "Here.", {}, "Where?↵\n⟦Here.⟧"),
        ("", "abc", {}, "a⟦bc⟧"),  # the first token bears no loss
        ("a", "bc", {"weights": [0, 0.5, 0.5]}, "a⟦bc⟧×0.5"),
        ("a", "bc", {"weights": [0, -1, 2]}, "a⟦bc⟧×-1…2"),
        ("p" * 1000, "q" * 500, {"max_chars": 200}, LONG),
        ("a\tb\rc", "x", {}, "a⇥b␍c⟦x⟧"),
        ("\x1b[31mred", "x", {}, "\\x1b[31mred⟦x⟧"),
        ("a\u202eb\u200bc\u00a0d", "x", {}, "a\\u202eb\\u200bc\\xa0d⟦x⟧"),
        ("क्‍ष 👍", "x", {}, "क्‍ष 👍⟦x⟧"),
        ("[bold]x[/bold] :smile:", "x", {}, "[bold]x[/bold] :smile:⟦x⟧"),
    ],
)
def test_a_sample(
    prompt: str, answer: str, options: dict, shown: str, tokenizer: PreTrainedTokenizerBase, sample_of: Build,
    printed: Callable[..., str],
) -> None:  # fmt: skip
    sample = sample_of(prompt, answer, weights=options.get("weights"))
    text = marked(sample_tokens(sample, tokenizer), options.get("max_chars"))
    assert text.plain == shown and printed(text, 2000) == shown
    start = text.plain.index("⟦")
    assert {(span.start, span.end) for span in text.spans if span.style == LOSS} >= {(start, start + 1)}


@pytest.mark.parametrize(
    ("ids", "labelled", "max_chars", "shown"),
    [
        ([97, END, 98], [], None, "a<|im_end|>b"),
        ([*"a€b".encode()], [2, 3, 4], None, "a⟦€b⟧"),  # a character over the border of the loss is whole
        ([*b"ab" * 300], range(1, 600, 2), 160, "a⟦b⟧" * 300),
    ],
)
def test_ids(
    ids: list[int], labelled: list[int], max_chars: int | None, shown: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    row = np.array(ids)
    sample = TokenRow(row, np.where(np.isin(np.arange(len(ids)), labelled), row, -100), "x:1")
    tokens = sample_tokens(sample, tokenizer)
    assert marked(tokens, max_chars).plain == shown
    assert [token.is_special for token in tokens] == [token == END for token in ids]
