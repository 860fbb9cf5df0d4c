"""Tokens as text: of a run, of a sample with its loss marked, and of the tree that samples make."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from radixtrain.collators.token_row import TokenRow
from radixtrain.explain.tokens import LOSS, TextTree, decode_runs, marked, sample_tokens
from tests.support.batches import END, VOCAB_SIZE, byte_tokenizer

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


def _metaspace() -> PreTrainedTokenizerBase:
    """Words that begin with a blank, and bytes for what they do not spell, as in Llama 2."""
    words = ["<unk>", "▁", "▁no", "w", "▁now", "here"]
    vocab = {word: i for i, word in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    backend = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend)


BYTES, WORDS = byte_tokenizer(), _metaspace()
FIRST_BYTE = 6  # of WORDS


def byte_ids(text: str) -> list[int]:
    return list(text.encode())


EURO = [FIRST_BYTE + byte for byte in "€".encode()]
RUNS = {
    "a character is in the run in which it is complete": (BYTES, byte_ids("a€b"), [0, 1, 2, 4, 5], ["a", "", "€", "b"]),
    "or with what is before it": (BYTES, np.array(byte_ids("a€b")), np.array([0, 3, 5]), ["a", "€b"]),
    "a shared run has the same text whatever follows": (BYTES, byte_ids("5 €"), [0, 4, 5], ["5 ", "€"]),
    "also before this": (BYTES, byte_ids("5 ₺"), [0, 4, 5], ["5 ", "₺"]),
    "bytes that are no character are shown at the end": (BYTES, [97, 0xE2], [0, 1, 2], ["a", "�"]),
    "and before the next one": (BYTES, [97, 0xE2, 98], [0, 2, 3], ["a", "�b"]),
    "blanks between runs stay": (WORDS, [4, 2, 3, 1, 5], range(6), ["now", " no", "w", " ", "here"]),
    "fallback bytes complete a character": (WORDS, [4, *EURO, 5], [0, 2, 4, 5], ["now", "€", "here"]),
    # This decoder reads neighbouring bytes as a whole: the first euro is not whole as long as the second one is not.
    "also several": (WORDS, [4, *EURO, *EURO, 5], [0, 2, 5, 8], ["now", "", "€€here"]),
    "special tokens are shown": (BYTES, [97, END, 98], [0, 1, 3], ["a", "<|im_end|>b"]),
    "nothing": (BYTES, [], [0], []),
    "runs of nothing": (BYTES, [97], [0, 0, 1, 1], ["", "a", ""]),
}


@pytest.mark.parametrize("promise", RUNS)
def test_the_texts_of_runs(promise: str) -> None:
    tokenizer, ids, bounds, texts = RUNS[promise]
    assert decode_runs(tokenizer, ids, bounds) == texts


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=30).map(byte_ids)
BROKEN = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=24)


@given(TEXTS | BROKEN, st.data())
def test_joined_they_are_the_text(ids: list[int], data: st.DataObject) -> None:
    cuts = [0, *sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=8))), len(ids)]
    runs = decode_runs(BYTES, ids, cuts)
    assert "".join(runs) == BYTES.decode(ids)
    assert len(runs) == len(list(pairwise(cuts)))


FRUIT = ["red apple"] * 3 + ["red apricot", "red plum tree", "red plum tree"]


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
