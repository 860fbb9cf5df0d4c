"""Rows whose last token is all that is read: a query to rerank, a text to embed. They need no answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from radixtrain.collators.targets import IGNORE_INDEX
from radixtrain.data.chat import ChatEncoder
from radixtrain.data.conversation import text_of
from radixtrain.data.formats import Row
from radixtrain.data.messages import check_messages, from_sharegpt
from radixtrain.data.sample import Sample, check_vocabulary
from radixtrain.data.tokenization import Draft
from radixtrain.errors import DataError

__all__ = ["UnlabelledEncoder"]


@dataclass(frozen=True)
class UnlabelledEncoder(ChatEncoder):
    """A `ChatEncoder` that makes one sample of each row, with or without labels. Its keys decide where the sample ends:

    - `messages` and `conversations`: after the generation prompt, at which the model would answer; or after the end
        token of the last message, if that is the assistant's;
    - `prompt` without `completion`: after its last token, for text; as `messages`, for messages;
    - `prompt` and `completion`: after the completion and its end token, as in training;
    - `text`: after its last token, or an end token if the tokenizer adds one by itself, as an embedding model's may;
    - `input_ids`: after the last one.

    `assistant_only_loss`, `completion_only_loss` and `split_turns` have no effect.
    """

    def _draft(self, row: Row) -> list[Draft] | list[Sample]:
        where, fields = row.where, {key: value for key, value in row.fields.items() if value is not None}
        if "input_ids" in fields:
            return super()._draft(row)
        messages = _messages(fields, where)
        if messages is not None:
            return [self._draft_whole(messages, fields, where)]
        if {"prompt", "completion"} <= fields.keys():
            return super()._draft(row)
        if "text" in fields:
            return [_sample(self._ids(text_of(fields, "text", where)), where)]
        if "prompt" in fields:
            ids = self._ids(text_of(fields, "prompt", where), add_special_tokens=False)
            return [_sample(self.tokenize.bos_ids + ids, where)]
        return super()._draft(row)

    def _draft_whole(self, messages: list[dict[str, Any]], fields: dict[str, Any], where: str) -> Draft:
        chat = self.conversation(messages, fields, where)
        if messages[-1]["role"] != "assistant":
            return Draft(chat.prompt(), "", where, "turn")
        prompt, target = chat.prompt_and_target(len(messages) - 1, len(messages))
        return Draft(prompt, target, where, "turn")

    def _fit(self, sample: Sample) -> Sample | None:
        """The sample; None if it is dropped. Its end is what is read, so it is never truncated."""
        check_vocabulary(sample, self.num_known_tokens)
        num_tokens = len(sample.input_ids)
        if not num_tokens:
            raise DataError(sample.where, "no token to read; expected a text that is not empty")
        if self.max_length is None or num_tokens <= self.max_length:
            return sample
        if self.excess_length_strategy == "drop":
            return None
        raise DataError(
            sample.where,
            f"{num_tokens} tokens exceed max_length {self.max_length}; the end of a row is what its scores are read "
            f"from, so it cannot be truncated: raise max_length or set excess_length_strategy: drop",
        )

    def _ids(self, text: str, **options: Any) -> list[int]:
        ids: list[int] = self.tokenizer(text, verbose=False, **options)["input_ids"]
        return ids


def _messages(fields: dict[str, Any], where: str) -> list[dict[str, Any]] | None:
    """The whole conversation of a row; None if it is not one."""
    if "messages" in fields:
        return check_messages(fields["messages"], where)
    if isinstance(fields.get("prompt"), list) and isinstance(fields.get("completion", []), list):
        names = [name for name in ("prompt", "completion") if name in fields]
        return [message for name in names for message in check_messages(fields[name], where, name)]
    if "conversations" in fields and not {"prompt", "completion"} <= fields.keys():
        return check_messages(from_sharegpt(fields["conversations"], where), where, "conversations")
    return None


def _sample(ids: list[int], where: str) -> Sample:
    input_ids = np.array(ids, dtype=np.int64)
    return Sample(input_ids, np.full_like(input_ids, IGNORE_INDEX), where)
