"""Pieces between added tokens, tokenised once, give what the whole text gives: for any text and any tokenizer."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from radixtrain.data.datamodule import SFTData
from radixtrain.data.tokens import tokenization
from radixtrain.data.tokens.tokenization import (
    PieceTokenizer,
    TokenizerFailed,
    load_tokenizer,
)
from radixtrain.errors import DataError, UserError
from tests.support import TRIES
from tests.support.runs import write_rows

ROOT = Path(__file__).resolve().parents[4]
TEXT = "The quick brown fox, 12 of them.\n\nIt's hé's ça!  Twice   blank\tand tab\n<think>\nno\n</think>"
START, END = "<|im_start|>", "<|im_end|>"
WORDS = [START, END, "<think>", "</think>", " ", "\n", "\n\n", "the", " fox", "é", "12"]
WORDS += ["<", "|>", "<|im", "_", "a b", "xy"]  # parts of them


def trained(pre_tokenizer: Any, normalizer: Any = None, added: tuple[AddedToken, ...] = ()) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        [TEXT] * 3, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    tokens = [AddedToken(START, special=True), AddedToken(END, special=True), AddedToken("<think>", normalized=False)]
    backend.add_tokens([*tokens, *added])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END)


def qwen_like(*added: AddedToken) -> PreTrainedTokenizerFast:
    split = pre_tokenizers.Split(Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|\s*[\r\n]+|\s+(?!\S)|\s+|."), "isolated")
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return trained(pre_tokenizers.Sequence([split, last]), normalizers.NFC(), added)


KINDS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "like Qwen": lambda: qwen_like(),
    "byte level with a blank before": lambda: trained(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "a token that takes the blanks around it": lambda: qwen_like(AddedToken("</think>", lstrip=True, rstrip=True)),
    "a token inside another": lambda: qwen_like(AddedToken("<|im", normalized=False)),
    "tokens of which one goes on where another ends": lambda: qwen_like(
        AddedToken("fox<|im", normalized=True), AddedToken("<|im_", normalized=False)
    ),
    "a token that looks at its neighbours": lambda: qwen_like(AddedToken("xy", single_word=True, normalized=False)),
    "blanks as marks, always": lambda: trained(pre_tokenizers.Metaspace(prepend_scheme="always")),
    "blanks as marks, at the start of the text": lambda: trained(pre_tokenizers.Metaspace(prepend_scheme="first")),
    "lower case": lambda: trained(pre_tokenizers.ByteLevel(add_prefix_space=False), normalizers.Lowercase()),
    "a mark before each piece": lambda: trained(
        pre_tokenizers.ByteLevel(add_prefix_space=False), normalizers.Prepend("_")
    ),
}  # fmt: skip


@cache
def tokenizer_of(kind: str) -> PreTrainedTokenizerFast:
    return KINDS[kind]()


def whole(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> list[list[int]]:
    return tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []


@settings(max_examples=15 * TRIES, deadline=None)
@given(
    kind=st.sampled_from(list(KINDS)),
    texts=st.lists(st.lists(st.sampled_from(WORDS), max_size=12).map("".join), max_size=5),
)
def test_equals_the_whole_text(kind: str, texts: list[str]) -> None:
    tokenize = PieceTokenizer(tokenizer_of(kind))
    tokenize.is_checked = True  # so that the pieces answer, not the comparison
    assert [ids.tolist() for ids in tokenize(texts)] == whole(tokenizer_of(kind), texts)


def test_which_are_split() -> None:
    """The others are right because their texts stay whole."""
    split = {kind for kind in KINDS if PieceTokenizer(tokenizer_of(kind)).borders is not None}
    stay_whole = {
        "a token inside another",
        "a token that looks at its neighbours",
        "blanks as marks, always",
        "blanks as marks, at the start of the text",
        "tokens of which one goes on where another ends",
    }
    assert set(KINDS) - split == stay_whole


def test_a_repeated_piece_is_tokenised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by the first call, which compares whole texts, but only the surroundings of a few added tokens."""
    asked: list[str] = []
    ask = PreTrainedTokenizerFast.__call__
    monkeypatch.setattr(
        PreTrainedTokenizerFast,
        "__call__",
        lambda self, texts, **options: asked.extend(texts) or ask(self, texts, **options),
    )
    tokenize, prompt = PieceTokenizer(tokenizer_of("like Qwen")), "long prompt" * 5000
    for question in ("one", "two"):
        tokenize([f"{START}{prompt}{END}{START}{question}{END}"] * 40)
    assert [asked.count(piece) for piece in (START, prompt, END, "one", "two")] == [1] * 5
    assert sum(map(len, asked)) < 3 * len(prompt)


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenization, "MAX_KNOWN_CHARACTERS", 60)
    tokenize = PieceTokenizer(tokenizer_of("like Qwen"))
    for number in range(50):
        tokenize([f"{START}the prompt{END}number {number}"])
        assert sum(map(len, tokenize.known)) == tokenize.num_known_characters <= 60


def test_a_tokenizer_that_sees_over_its_borders_is_found(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As if a pre-tokenizer looked at the start of the text, but was not known to."""
    monkeypatch.setattr(tokenization, "PIECEWISE", {*tokenization.PIECEWISE, "Metaspace"})
    tokenizer = tokenizer_of("blanks as marks, at the start of the text")
    tokenize = PieceTokenizer(tokenizer)
    assert tokenize.borders is not None
    tokenize(["the fox"])  # nothing to compare yet
    texts = [f"the fox{START}the fox{END}"]
    with caplog.at_level(logging.WARNING):
        first = tokenize(texts)
    assert tokenize.borders is None and "does not tokenise the text between special tokens separately" in caplog.text
    assert [ids.tolist() for ids in first] == [ids.tolist() for ids in tokenize(texts)] == whole(tokenizer, texts)


ENDLESS = "((a+)+)+c"  # Oniguruma gives up on a long row of the letter a, and the library panics
NO_CHARSMAP = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}


@pytest.fixture
def model(shop: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(shop / "model", tmp_path / "model"))


def change(model: Path, **parts: Any) -> None:
    path = model / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **parts}), encoding="utf-8")


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize("num_proc", [1, 2])
def test_a_panic_names_its_row(model: Path, tmp_path: Path, num_proc: int) -> None:
    """In this process and in one of its own, whose errors are pickled."""
    change(model, pre_tokenizer=split(ENDLESS))
    rows = [{"prompt": "b", "completion": "b"}, {"prompt": "b", "completion": "a" * 3000}]
    file = write_rows(tmp_path / "train.jsonl", rows)
    data = SFTData(str(file), model_name_or_path=str(model), dataset_num_proc=num_proc)
    with pytest.raises(DataError) as caught:
        data.setup("fit")
    assert caught.value.where == f"{file}:2"
    assert f"the tokenizer of {model} (tokenizer.json) failed: " in caught.value.reason


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"pre_tokenizer": split("(a")}, "Oniguruma error: "),
        ({"normalizer": NO_CHARSMAP}, "Precompiled: "),
    ],
)
def test_a_tokenizer_that_cannot_be_made(model: Path, parts: dict[str, Any], reason: str) -> None:
    change(model, **parts)
    with pytest.raises(TokenizerFailed, match=re.escape(f"the tokenizer of {model} (tokenizer.json) failed: {reason}")):
        load_tokenizer(str(model))


@pytest.mark.parametrize("content", [b'{"a": ', b"[1]", b"\xff\xfe"])
@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
def test_a_damaged_file_is_named(model: Path, file: str, content: bytes) -> None:
    (model / file).write_bytes(content)
    with pytest.raises(UserError, match=re.escape(f"{model / file}: expected a JSON object, ")):
        load_tokenizer(str(model))
