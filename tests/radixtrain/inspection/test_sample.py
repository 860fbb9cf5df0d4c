"""One sample as text, with its loss marked: also without colour, with controls visible, and shortened."""

from collections.abc import Callable

import numpy as np
import pytest
from byte_tokenizer import END
from transformers import PreTrainedTokenizerBase

from radixtrain.collators.token_row import TokenRow
from radixtrain.inspection.tokens import LOSS, marked_text, sample_tokens, token_texts

Build = Callable[..., TokenRow]


def test_loss_stands_in_brackets(tokenizer: PreTrainedTokenizerBase, sample_of: Build) -> None:
    text = marked_text(sample_of("Where?\n", "Here."), tokenizer)
    assert text.plain == "Where?↵\n⟦Here.⟧"
    start = text.plain.index("⟦")
    assert {(span.start, span.end) for span in text.spans if span.style == LOSS} >= {(start, start + 1)}


def test_the_first_token_bears_no_loss(tokenizer: PreTrainedTokenizerBase, sample_of: Build) -> None:
    assert marked_text(sample_of("", "abc"), tokenizer).plain == "a⟦bc⟧"


def test_loss_weights_follow_the_run(tokenizer: PreTrainedTokenizerBase, sample_of: Build) -> None:
    assert marked_text(sample_of("a", "bc", weights=[0, 0.5, 0.5]), tokenizer).plain == "a⟦bc⟧×0.5"
    assert marked_text(sample_of("a", "bc", weights=[0, -1, 2]), tokenizer).plain == "a⟦bc⟧×-1…2"
    assert marked_text(sample_of("a", "bc", weights=[0, 1, 1]), tokenizer).plain == "a⟦bc⟧"


def test_special_tokens_are_text(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = np.array([97, END, 98])
    text = marked_text(TokenRow(ids, np.full(3, -100), "x:1"), tokenizer)
    assert text.plain == "a<|im_end|>b"
    assert [token.is_special for token in sample_tokens(TokenRow(ids, ids, "x:1"), tokenizer)] == [False, True, False]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\tb\rc", "a⇥b␍c"),
        ("\x1b[31mred", "␛[31mred"),
        ("a\u202eb\u200bc\u00a0d", "a\\u202eb\\u200bc\\u00a0d"),
        ("क्‍ष 👍", "क्‍ष 👍"),
        ("a\U000e0001b", "a\\U000e0001b"),
        ("[bold]x[/bold] :smile:", "[bold]x[/bold] :smile:"),
    ],
)
def test_what_cannot_be_seen_is_shown(
    tokenizer: PreTrainedTokenizerBase, sample_of: Build, printed: Callable[..., str], text: str, shown: str
) -> None:
    assert printed(marked_text(sample_of(text, "x"), tokenizer)) == f"{shown}⟦x⟧"


def test_a_character_over_the_border_of_the_loss_is_whole(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = np.array([*"a€b".encode()])
    labels = np.where(np.arange(5) < 2, -100, ids)
    assert marked_text(TokenRow(ids, labels, "x:1"), tokenizer).plain == "a⟦€b⟧"


def test_long_runs_are_shortened_in_the_middle(tokenizer: PreTrainedTokenizerBase, sample_of: Build) -> None:
    text = marked_text(sample_of("p" * 1000, "q" * 500), tokenizer, max_chars=200).plain
    assert text == f"{'p' * 50} ⋯ 900 tokens ⋯ {'p' * 50}⟦{'q' * 50} ⋯ 400 tokens ⋯ {'q' * 50}⟧"


def test_a_short_run_leaves_its_room_to_the_long_one(tokenizer: PreTrainedTokenizerBase, sample_of: Build) -> None:
    text = marked_text(sample_of("p" * 1000, "yes"), tokenizer, max_chars=203).plain
    assert text == f"{'p' * 100} ⋯ 800 tokens ⋯ {'p' * 100}⟦yes⟧"


def test_many_runs_are_left_out_in_the_middle(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = np.array([*b"ab" * 300])
    labels = np.where(np.arange(600) % 2, ids, -100)
    text = marked_text(TokenRow(ids, labels, "x:1"), tokenizer, max_chars=160).plain
    assert text == "a⟦b⟧ ⋯ 596 tokens, 298 with loss ⋯ a⟦b⟧"
    assert marked_text(TokenRow(ids, labels, "x:1"), tokenizer, max_chars=None).plain == "a⟦b⟧" * 300


def test_a_token_outside_the_vocabulary_is_shown_by_its_id(tokenizer: PreTrainedTokenizerBase) -> None:
    assert token_texts([97, -6, 98, 99999], tokenizer) == ["a", "<-6>", "b", "<99999>"]
