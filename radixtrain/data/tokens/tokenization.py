"""Prompt and target texts to token ids, and which special tokens begin and end them."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from radixtrain.collators.token_row import IGNORE_INDEX, TokenRow
from radixtrain.errors import DataError, UserError, first_line
from radixtrain.text_files import read_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Draft(NamedTuple):
    """A sample before tokenisation.

    form: plain text begins and ends with the tokenizer's BOS and EOS; a chat has what its template wrote; a turn ends
        with the token at which the model stops generating.
    """

    prompt: str
    target: str
    where: str
    form: Literal["plain", "chat", "turn"]
    prompt_bears_loss: bool = False


class DraftTokenizer:
    """Turns drafts into samples. Prompt and target are tokenised separately, as the prompt is given at inference."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        self.token_ids = PieceTokenizer(tokenizer)
        self.eos = tokenizer.eos_token or ""
        with failures_of(tokenizer.name_or_path):
            first = tokenizer("")["input_ids"][:1]
        self.bos_ids = np.array([i for i in first if i == tokenizer.bos_token_id], dtype=np.int64)
        self.special_tokens = tuple(str(token) for token in tokenizer.added_tokens_decoder.values() if token.special)
        # SentencePiece puts a space before the first word of a text, but a target follows its prompt.
        newline, letter, both = self.token_ids(["\n", "a", "\na"])
        self.marks_text_start = both.tolist() != [*newline, *letter]

    def __call__(self, drafts: list[Draft]) -> Iterator[TokenRow]:
        """Yield the drafts' samples, in order. Raises DataError that names the first row on which it fails."""
        try:
            prompts = self.token_ids([draft.prompt for draft in drafts])
            targets = self._target_ids(drafts, prompts)
        except TokenizerFailed:
            self._raise_for_row(drafts)
            raise
        for draft, prompt_ids, target_ids in zip(drafts, prompts, targets, strict=True):
            bos_ids = self.bos_ids if draft.form == "plain" else self.bos_ids[:0]
            input_ids = np.concatenate([bos_ids, prompt_ids, target_ids])
            labels = input_ids.copy()
            labels[: 0 if draft.prompt_bears_loss else len(bos_ids) + len(prompt_ids)] = IGNORE_INDEX
            yield TokenRow(input_ids, labels, draft.where)

    def _raise_for_row(self, drafts: list[Draft]) -> None:
        for draft in drafts:
            try:
                self._target_ids([draft], self.token_ids([draft.prompt]))
            except TokenizerFailed as error:
                raise DataError(draft.where, str(error)) from None

    def _target_text(self, draft: Draft) -> str:
        if draft.form == "turn":
            return self.until_end_of_turn(self._without_next_prompt(draft))
        is_open = draft.form == "plain" and not draft.target.endswith(self.eos)
        return draft.target + self.eos if is_open else draft.target

    def _without_next_prompt(self, draft: Draft) -> str:
        """Cut the target after its end-of-turn token, if the template writes a generation prompt after every text.

        The template of the first Llama 3 does: prompt and target end alike, in more than one special token.
        """
        pairs = zip(reversed(draft.prompt), reversed(draft.target), strict=False)
        num_alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        alike = draft.target[len(draft.target) - num_alike :]
        found = sorted((alike.find(token), token) for token in self.special_tokens if token in alike)
        if len(found) < 2:
            return draft.target
        place, end = found[0]
        return draft.target[: len(draft.target) - len(alike) + place + len(end)]

    def until_end_of_turn(self, target: str) -> str:
        """Cut what a template writes after the last end-of-turn token (ChatML: a newline): it is never generated."""
        stripped = target.rstrip()
        if stripped.endswith(self.special_tokens):  # a base model's EOS is not always what ends its turns
            return stripped
        head, eos, _ = target.rpartition(self.eos) if self.eos else ("", "", target)
        return head + eos or target

    def _target_ids(self, drafts: list[Draft], prompts: list[np.ndarray]) -> list[np.ndarray]:
        targets = [self._target_text(draft) for draft in drafts]
        separate = self.token_ids(targets)
        if not self.marks_text_start:
            return separate
        joint = self.token_ids([draft.prompt + target for draft, target in zip(drafts, targets, strict=True)])
        trios = zip(prompts, joint, separate, strict=True)
        return [
            both[len(ids) :] if len(ids) and np.array_equal(both[: len(ids)], ids) else target
            for ids, both, target in trios
        ]


def load_tokenizer(path: str, chat_template_path: str | os.PathLike[str] | None = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder or hub name.

    path: `model_name_or_path`.
    chat_template_path: a Jinja file whose template replaces the tokenizer's own.

    Raises UserError if either cannot be read.
    """
    from transformers import AutoTokenizer

    from radixtrain.hf.config import TOKENIZER_JSON, check_json_files, check_names, reason_of

    check_names(path, TOKENIZER_JSON[:2])
    try:
        with failures_of(path):
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except TokenizerFailed:
        raise
    except Exception as error:  # from a missing file to a parse error inside the Rust library
        check_json_files(path, TOKENIZER_JSON)
        expected = "expected a model folder with tokenizer.json or a hub name"
        raise UserError(f"no tokenizer in {path}: {expected}; {reason_of(error)}") from error
    if chat_template_path is not None:
        tokenizer.chat_template = read_template(chat_template_path)
    return tokenizer


def read_template(path: str | os.PathLike[str]) -> str:
    """Read a chat template. Raises UserError if it is not a text file."""
    try:
        return read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise UserError(
            f"chat_template_path: cannot read {os.fspath(path)}: {reason}; expected a Jinja file"
        ) from error


# Texts cut where no token crosses

logger = logging.getLogger(__name__)

TEXTS_PER_CALL = 64  # the tokenizer holds about 100 bytes per token until the call returns
SAMPLED_TEXTS, SAMPLED_CHARACTERS = 16, 4096  # compared with whole texts; these characters on each side of a border
MAX_KNOWN_CHARACTERS = 16 << 20  # of pieces whose ids are remembered
NOTHING = np.zeros(0, dtype=np.int64)
# Pre-tokenizers whose output for a piece does not depend on its neighbours, as Metaspace's does on the text's start.
PIECEWISE = {
    *("BertPreTokenizer", "ByteLevel", "Digits", "FixedLength", "Punctuation", "Sequence", "Split", "UnicodeScripts"),
    *("Whitespace", "WhitespaceSplit", "CharDelimiterSplit"),
}


class PieceTokenizer:
    """Turns texts into token ids, without the tokenizer's own BOS and EOS.

    Called with texts, returns an int64 array (L,) for each: what `tokenizer(text, add_special_tokens=False)` gives.
    Texts are cut at special tokens, and the ids of each piece are remembered: turns repeat all before them. The first
    call with a special token in a text compares a bounded sample; if they differ, a line in the log says so and whole
    texts are tokenised from then on. Raises TokenizerFailed if the tokenizer breaks off.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        self.borders = _borders(tokenizer)
        self.is_checked = False
        self.known: dict[str, np.ndarray] = {}
        self.num_known_characters = 0

    def __call__(self, texts: list[str]) -> list[np.ndarray]:
        if self.borders is not None and not self.is_checked and (sample := _sample(texts, self.borders)):
            self.is_checked = True
            if not all(map(np.array_equal, self._joined(sample, self.borders), self._whole(sample))):
                logger.warning(
                    "this tokenizer does not tokenise the text between special tokens separately: rows are slow"
                )
                self.borders = None
        return self._whole(texts) if self.borders is None else self._joined(texts, self.borders)

    def _joined(self, texts: list[str], borders: re.Pattern[str]) -> list[np.ndarray]:
        """Tokenise texts in pieces: special tokens and what is between them."""
        pieces_of = [[piece for piece in borders.split(text) if piece] for text in texts]
        new = [*dict.fromkeys(piece for pieces in pieces_of for piece in pieces if piece not in self.known)]
        self.known.update(zip(new, self._whole(new), strict=True))
        joined = [np.concatenate([NOTHING, *(self.known[piece] for piece in pieces)]) for pieces in pieces_of]
        self.num_known_characters += sum(map(len, new))
        if self.num_known_characters > MAX_KNOWN_CHARACTERS:
            self.known.clear()
            self.num_known_characters = 0
        return joined

    def _whole(self, texts: list[str]) -> list[np.ndarray]:
        options: dict[str, Any] = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
        found: list[np.ndarray] = []
        for start in range(0, len(texts), TEXTS_PER_CALL):
            with failures_of(self.tokenizer.name_or_path):
                encoded = self.tokenizer(texts[start : start + TEXTS_PER_CALL], **options)["input_ids"]
            found += [np.array(ids, dtype=np.int64) for ids in encoded]
        return found


def _sample(texts: list[str], borders: re.Pattern[str]) -> list[str]:
    """Return the surroundings of the first special token of a few texts; none if no text has one."""
    firsts = islice(((text, found.start()) for text in texts if (found := borders.search(text))), SAMPLED_TEXTS)
    return [text[max(0, at - SAMPLED_CHARACTERS) : at + SAMPLED_CHARACTERS] for text, at in firsts]


def _borders(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str] | None:
    """Return the pattern at which texts are split: special tokens, found first. None if splitting is not safe."""
    if not tokenizer.is_fast or getattr(tokenizer, "split_special_tokens", False):
        return None
    backend = tokenizer.backend_tokenizer
    kinds = re.findall(r'"type": ?"(\w+)"', str(backend.pre_tokenizer and backend.pre_tokenizer.__getstate__()))
    if getattr(backend.model, "dropout", None) or not {*kinds} <= PIECEWISE:
        return None
    added = [*backend.get_added_tokens_decoder().values()]
    if any(token.single_word for token in added):  # it looks at its neighbours
        return None
    borders = [
        token.content for token in added if token.special and not (token.normalized or token.lstrip or token.rstrip)
    ]
    others = [token.content for token in added if token.content not in borders]
    if not borders or any(_may_overlap(border, others) for border in borders):
        return None
    longest_first = sorted(borders, key=len, reverse=True)  # as the library matches
    return re.compile(f"({'|'.join(map(re.escape, longest_first))})")


def _may_overlap(border: str, others: list[str]) -> bool:
    """Return whether it and one of the other tokens can cover the same characters, or white space at its ends."""
    begins = tuple(border[:end] for end in range(1, len(border)))
    ends = tuple(border[start:] for start in range(1, len(border)))
    return border != border.strip() or any(
        border in other or other in border or other.endswith(begins) or other.startswith(ends) for other in others
    )


class TokenizerFailed(UserError):
    """A tokenizer cannot tokenise a text, or cannot be made. The message does not name a place in the data."""


@contextmanager
def failures_of(name_or_path: str) -> Iterator[None]:
    """Raise an error or a panic of the library `tokenizers` as TokenizerFailed.

    A panic is not an Exception: it would pass every `except` and end a run with a traceback. It occurs, for instance,
    when a regular expression of `tokenizer.json` backtracks for too long.
    """
    try:
        yield
    except BaseException as error:
        if not _is_of_library(error):
            raise
        raise TokenizerFailed(f"the tokenizer of {name_or_path} (tokenizer.json) failed: {first_line(error)}") from None


def _is_of_library(error: BaseException) -> bool:
    """Return whether an error is the library's: they have no class of their own, and a panic's cannot be imported."""
    return type(error) is Exception or type(error).__name__ == "PanicException"
