"""Rows of which only the last token is read: a query to rerank, a text to embed. They need no answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from radixtrain.collators.token_row import IGNORE_INDEX, TokenRow
from radixtrain.data.chat import ChatEncoder
from radixtrain.data.formats import Row
from radixtrain.data.rendering.conversation import text_of
from radixtrain.data.rows.columns import turns_of
from radixtrain.data.sample import TooLongError
from radixtrain.data.tokens.tokenization import Draft
from radixtrain.errors import DataError


@dataclass(frozen=True)
class UnlabelledEncoder(ChatEncoder):
    """A `ChatEncoder` that makes one sample of each row, with or without labels. A row's keys decide where it ends:

    - a chat, in `messages` or otherwise: after the generation prompt, at which the model would answer; or after the end
        token of the last message, if that is the assistant's;
    - `prompt` without `completion`: after its last token, for text; as `messages`, for messages;
    - `prompt` and `completion`: after the completion and its end token, as in training;
    - `text`: after its last token, or an end token if the tokenizer adds one itself, as an embedding model's may;
    - `input_ids`: after the last one.

    `assistant_only_loss`, `completion_only_loss` and `split_turns` have no effect.
    """

    answered = False

    def _draft(self, row: Row) -> list[Draft] | list[TokenRow]:
        fields, where = row.fields, row.where
        messages = turns_of(fields)
        if messages:
            return [self._draft_whole(messages, fields, where)]
        if "text" in fields:
            return [_sample(self._ids(text_of(fields, "text", where)), where)]
        if "prompt" in fields and "completion" not in fields:
            ids = self._ids(text_of(fields, "prompt", where), add_special_tokens=False)
            return [_sample([*self.tokenize.bos_ids, *ids], where)]
        return super()._draft(row)

    def _draft_whole(self, messages: list[dict[str, Any]], fields: dict[str, Any], where: str) -> Draft:
        chat = self.conversation(messages, fields, where)
        if messages[-1]["role"] != "assistant":
            return Draft(chat.prompt(), "", where, "turn")
        prompt, target = chat.prompt_and_target(len(messages) - 1, len(messages))
        return Draft(prompt, target, where, "turn")

    def _checked(self, sample: TokenRow) -> TokenRow:
        if not len(sample.input_ids):
            raise DataError(sample.where, "no token to read; expected a text that is not empty")
        return sample

    def _too_long(self, sample: TokenRow) -> TooLongError:
        return TooLongError(
            sample.where,
            f"{len(sample.input_ids)} tokens exceed max_length {self.max_length}; the end of a row is what its scores "
            f"are read from, so it cannot be truncated: raise max_length or set excess_length_strategy: drop",
        )

    def _ids(self, text: str, **options: object) -> list[int]:
        ids: list[int] = self.tokenizer(text, verbose=False, **options)["input_ids"]
        return ids


def _sample(ids: list[int], where: str) -> TokenRow:
    input_ids = np.array(ids, dtype=np.int64)
    return TokenRow(input_ids, np.full_like(input_ids, IGNORE_INDEX), where)
