"""Runs of tokens decoded: joined they are the text of all, and no character is broken at a border."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from radixtrain.explain.tokens import decode_runs
from tests.support.batches import END, VOCAB_SIZE, byte_tokenizer


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
