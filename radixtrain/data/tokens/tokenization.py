"""Prompt and target texts to token ids, and which special tokens begin and end them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import takewhile
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from radixtrain import text_files
from radixtrain.collators.token_row import IGNORE_INDEX, TokenRow
from radixtrain.data.tokens.pretokenize import PieceTokenizer, TokenizerFailed, failures_of
from radixtrain.errors import DataError, UserError

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

    def _ended(self, draft: Draft) -> str:
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
        targets = [self._ended(draft) for draft in drafts]
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
        raise UserError(f"no tokenizer in {path}: {expected}; {_why_none(path) or reason_of(error)}") from error
    if chat_template_path is not None:
        tokenizer.chat_template = read_text(chat_template_path, "chat_template_path", "a Jinja file")
    return tokenizer


def _why_none(path: str) -> str:
    """Say what is wrong with a path that is a folder without a tokenizer, or is neither a folder nor a hub name."""
    if os.path.isdir(path):
        return "" if any(name.startswith("tokenizer") for name in os.listdir(path)) else "the folder has none"
    return "" if path.count(os.sep) < 2 and not path.startswith((".", "~", os.sep)) else "there is no such folder"


def read_text(path: str | os.PathLike[str], key: str, kind: str) -> str:
    """Read a text file. Raises UserError that names the key of the configuration, and the expected kind."""
    try:
        return text_files.read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        path = os.fspath(path)
        raise UserError(f"{key}: cannot read {path}: {reason}; expected {kind}") from error
