"""Rows to token sequences with labels: chats, prompt and completion, plain text, or tokens that are there already."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

from radixtrain.data.conversation import Conversation, text_of
from radixtrain.data.formats import Row
from radixtrain.data.messages import check_messages, from_sharegpt
from radixtrain.data.report import EncodeReport
from radixtrain.data.sample import Sample, check_bears_loss, check_unweighted, check_vocabulary, sample_from_tokens
from radixtrain.data.tokenization import Draft, DraftTokenizer, load_tokenizer
from radixtrain.data.trajectories import plain_rows
from radixtrain.errors import DataError, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["ChatEncoder", "load_tokenizer"]

ROWS_PER_BLOCK = 32  # rendered and tokenised at once: a single long agent row can hold 100,000 tokens

ROW_KINDS = "messages, prompt + completion, conversations, text or input_ids"


@dataclass(frozen=True)
class ChatEncoder:
    """Turns rows into samples. The keys of a row tell its kind, by the first of these that it has:

    - `input_ids`, with `labels`, or `assistant_masks`, `mask` and `completion_mask` (1 = loss), else loss on every
        token; and `loss_weights`;
    - `messages` `[{role, content, tool_calls?, reasoning_content? ...}]`;
    - `prompt` and `completion`, both text or both messages;
    - `conversations` `[{from: human|gpt|system, value}]`;
    - `text`, loss on every token;
    - a run of an agent, as verifiers, prime-rl and ART save it: see `plain_rows`.

    Chats may carry the columns `tools` (a list, or its JSON) and `chat_template_kwargs`. Plain text gets the
    tokenizer's BOS and EOS, as in TRL. A prompt of the tokens `5, 6` and its answer `7, 8` become
    `input_ids [5, 6, 7, 8]` and `labels [-100, -100, 7, 8]`.

    vocab_size: rows of the model's embedding, more than any token id. Default: the tokenizer's length.
    max_length: longest sample, in tokens.
    assistant_only_loss: loss on the assistant's turns only; otherwise a chat is one sample with loss on every token.
    completion_only_loss: loss on the completion only, in rows that have one.
    split_turns: one sample per assistant turn, rendered as the model sees it at inference and ending with the token at
        which it stops generating. Otherwise one sample per chat, with loss on what the template's generation markers
        enclose.
    excess_length_strategy: what is done with samples longer than `max_length`; truncate keeps their start.
    chat_template_kwargs: variables for the chat template, for instance `enable_thinking: false`. Those of a row win.
    """

    tokenizer: PreTrainedTokenizerBase
    vocab_size: int | None = None
    max_length: int | None = None
    assistant_only_loss: bool = True
    completion_only_loss: bool = True
    split_turns: bool = True
    excess_length_strategy: Literal["raise", "drop", "truncate"] = "raise"
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.excess_length_strategy not in ("raise", "drop", "truncate"):
            expected = "expected raise, drop or truncate"
            raise UserError(f"excess_length_strategy: {expected}, found {self.excess_length_strategy!r}")
        if self.max_length is not None and self.max_length < 2:
            raise UserError(f"max_length: expected at least 2 tokens, found {self.max_length}")

    def encode(self, row: Row) -> list[Sample]:
        """The samples of one row; none if all are dropped for their length. Raises as `encode_all`."""
        return self.encode_all([row])[0]

    def encode_all(
        self,
        rows: Iterable[Row],
        on_error: Callable[[DataError], None] | None = None,
        report: EncodeReport | None = None,
    ) -> list[list[Sample]]:
        """The samples of many rows, tokenised together; entry i belongs to row i.

        rows: from `read_rows`.
        on_error: receives what is wrong with a row, whose entry stays empty. Without it the first one raises.
        report: counts that are added to.

        Raises DataError if a row cannot be used: its keys or roles are unknown, the template drops or changes a part of
        it, a token is outside the vocabulary, it is longer than `max_length`, or no token of it bears loss. Raises
        UserError if the chat template is missing, invalid, or lacks the generation markers that are asked for.
        """
        report = EncodeReport() if report is None else report
        remaining = iter(rows)
        encoded: list[list[Sample]] = []
        while block := list(islice(remaining, ROWS_PER_BLOCK)):
            encoded.extend(self._encode_block(block, on_error, report))
        return encoded

    def _encode_block(
        self, rows: list[Row], on_error: Callable[[DataError], None] | None, report: EncodeReport
    ) -> Iterator[list[Sample]]:
        drafted = [self._draft_or_error(row) for row in rows]
        tokenized = self.tokenize([item for items in drafted for item in items if isinstance(item, Draft)])
        for items in drafted:
            report.num_rows += 1
            samples: list[Sample] = []
            try:
                samples = self._finish([_resolve(item, tokenized) for item in items], report)
            except DataError as error:
                if on_error is None:
                    raise
                report.num_bad_rows += 1
                on_error(error)
            yield samples

    def _draft_or_error(self, row: Row) -> list[Draft | Sample | DataError]:
        try:
            return [item for plain in plain_rows(row) for item in self._draft(plain)]
        except DataError as error:  # raised when its row's turn comes, so that errors keep the order of the file
            return [error]

    def _draft(self, row: Row) -> list[Draft] | list[Sample]:
        where, fields = row.where, {key: value for key, value in row.fields.items() if value is not None}
        if "input_ids" in fields:
            return [sample_from_tokens(fields, where, self.completion_only_loss)]
        check_unweighted(fields, where)
        if "messages" in fields:
            return self._draft_chat(self.conversation(check_messages(fields["messages"], where), fields, where))
        if {"prompt", "completion"} <= fields.keys():
            return self._draft_completion(fields, where)
        if "conversations" in fields:
            messages = check_messages(from_sharegpt(fields["conversations"], where), where, "conversations")
            return self._draft_chat(self.conversation(messages, fields, where))
        if "text" in fields:
            return [Draft("", text_of(fields, "text", where), where, "plain")]
        raise DataError(where, f"expected the keys {ROW_KINDS}; found {_list_keys(row.fields)}")

    def conversation(self, messages: list[dict[str, Any]], fields: dict[str, Any], where: str) -> Conversation:
        kwargs = fields.get("chat_template_kwargs", {})
        if not isinstance(kwargs, dict):
            raise DataError(where, f"chat_template_kwargs: expected an object, found {kwargs!r}")
        tools = {"tools": _tools(fields["tools"], where)} if fields.get("tools") else {}
        return Conversation(self.tokenizer, messages, where, self.chat_template_kwargs | kwargs | tools)

    def _draft_chat(self, chat: Conversation) -> list[Draft] | list[Sample]:
        if not self.assistant_only_loss:
            return [Draft("", chat.text(), chat.where, "chat")]
        if self.split_turns or not chat.assistant_turns():
            return self._draft_turns(chat)
        input_ids, mask = chat.tokens_and_mask()
        return [sample_from_tokens({"input_ids": input_ids, "assistant_masks": mask}, chat.where)]

    def _draft_completion(self, fields: dict[str, Any], where: str) -> list[Draft]:
        kinds = {type(fields["prompt"]), type(fields["completion"])}
        if kinds == {str}:
            prompt, completion = text_of(fields, "prompt", where), text_of(fields, "completion", where)
            return [Draft(prompt, completion, where, "plain", prompt_bears_loss=not self.completion_only_loss)]
        if str in kinds:
            raise DataError(where, "prompt and completion: expected both as text or both as lists of messages")
        turns = check_messages(fields["prompt"], where, "prompt")
        start = len(turns)
        turns += check_messages(fields["completion"], where, "completion")
        return self._draft_chat_completion(self.conversation(turns, fields, where), start)

    def _draft_chat_completion(self, chat: Conversation, start: int) -> list[Draft]:
        if not self.completion_only_loss:
            return [Draft("", chat.text(), chat.where, "chat")]
        roles = [message["role"] for message in chat.messages[start:]]
        if self.assistant_only_loss and self.split_turns:
            return self._draft_turns(chat, start)
        if self.assistant_only_loss and roles != ["assistant"]:
            expected = "expected a single assistant turn, or split_turns: true, or assistant_only_loss: false"
            raise DataError(chat.where, f"completion: {expected}; found the roles {', '.join(roles)}")
        return [_draft_turn(chat, start, len(chat.messages))]

    def _draft_turns(self, chat: Conversation, first: int = 0) -> list[Draft]:
        turns = [turn for turn in chat.assistant_turns() if turn >= first]
        if not turns:
            roles = ", ".join(message["role"] for message in chat.messages[first:])
            raise DataError(chat.where, f"expected at least one assistant turn to learn from; found the roles {roles}")
        return [_draft_turn(chat, turn, turn + 1) for turn in turns]

    def _finish(self, samples: list[Sample], report: EncodeReport) -> list[Sample]:
        fitted = [self._fit(sample) for sample in samples]
        kept = [sample for sample in fitted if sample is not None]
        report.num_samples += len(kept)
        report.num_dropped_samples += len(fitted) - len(kept)
        report.num_dropped_rows += not kept
        report.num_truncated_samples += len(kept) - sum(sample in kept for sample in samples)
        return kept

    def _fit(self, sample: Sample) -> Sample | None:
        """The sample within `max_length`; None if it is dropped."""
        check_vocabulary(sample, self.num_known_tokens)
        if self.max_length is None or len(sample.input_ids) <= self.max_length:
            check_bears_loss(sample)
            return sample
        if self.excess_length_strategy == "drop":
            return None
        if self.excess_length_strategy == "raise":
            excess = f"{len(sample.input_ids)} tokens exceed max_length {self.max_length}"
            raise DataError(sample.where, f"{excess}; raise max_length or set excess_length_strategy: drop | truncate")
        short = sample.truncated(self.max_length)
        check_bears_loss(short, f" once truncated to max_length {self.max_length}; raise max_length")
        return short

    @cached_property
    def num_known_tokens(self) -> int:
        return len(self.tokenizer) if self.vocab_size is None else self.vocab_size

    @cached_property
    def tokenize(self) -> DraftTokenizer:
        return DraftTokenizer(self.tokenizer)


def _draft_turn(chat: Conversation, start: int, end: int) -> Draft:
    prompt, target = chat.prompt_and_target(start, end)
    return Draft(prompt, target, chat.where, "turn")


def _resolve(item: Draft | Sample | DataError, tokenized: Iterator[Sample]) -> Sample:
    if isinstance(item, DataError):
        raise item
    return item if isinstance(item, Sample) else next(tokenized)


def _tools(tools: Any, where: str) -> list[dict[str, Any]]:
    try:
        tools = json.loads(tools) if isinstance(tools, str) else tools
    except ValueError as error:
        raise DataError(where, f"tools: not valid JSON: {error}") from None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(where, f"tools: expected a list of function descriptions, found {str(tools)[:60]!r}")
    return tools


def _list_keys(fields: dict[str, Any]) -> str:
    return ", ".join(f"{key} (null)" if value is None else str(key) for key, value in fields.items()) or "none"
