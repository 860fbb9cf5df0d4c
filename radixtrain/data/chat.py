"""Rows to token sequences with labels: chats, prompt and completion, plain text, or tokens as given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from radixtrain.collators.token_row import IGNORE_INDEX, TokenRow
from radixtrain.data.columns import standard_row, turns_of
from radixtrain.data.conversation import FIX_MARKERS, Conversation, text_of
from radixtrain.data.files.sources import Row, UnreadRow
from radixtrain.data.messages import SYSTEM_ROLES, check_turns, read_tools
from radixtrain.data.sample import EncodeReport, check_vocabulary, sample_from_tokens
from radixtrain.data.template import (
    renders_developer,
    template_words,
    unread_variable,
    with_date,
)
from radixtrain.data.tokens.tokenization import Draft, DraftTokenizer
from radixtrain.data.tokens.tokenization import load_tokenizer as load_tokenizer  # recipes take both from here
from radixtrain.errors import DataError, UserError
from radixtrain.settings.sections import date_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LAST_TURNS = "turns after the last answer"
ROWS_PER_BLOCK = 32  # rendered and tokenised at once: a single long agent row can hold 100,000 tokens


@dataclass(frozen=True)
class ChatEncoder:
    """Turns rows into samples. The columns of a row tell its format, see `standard_row`; its forms are

    - `input_ids`, with `labels`, or `assistant_masks`, `mask` and `completion_mask` (1 = loss), else loss on every
      token; and `loss_weights`;
    - `messages` `[{role, content, tool_calls?, reasoning_content? weight? ...}]`, with `tools` and
      `chat_template_kwargs`;
    - `prompt` and `completion`, both text or both messages;
    - `text`, loss on every token.

    Plain text gets the tokenizer's BOS and EOS, as in TRL. A prompt of the tokens `5, 6` and its answer `7, 8` become
    `input_ids [5, 6, 7, 8]` and `labels [-100, -100, 7, 8]`.

    vocab_size: rows of the model's embedding, more than any token id. Default: the tokenizer's length.
    max_length: longest sample, in tokens.
    assistant_only_loss: loss only on the assistant's turns; otherwise a chat is one sample with loss on every token.
    completion_only_loss: loss only on the completion, in rows that have one.
    split_turns: one sample per assistant turn, rendered as the model sees it at inference and ending with the token at
        which it stops generating. Otherwise one sample per chat, with loss on what the template's generation markers
        enclose.
    excess_length_strategy: how to treat samples longer than `max_length`; truncate keeps their start.
    chat_template_kwargs: variables for the chat template, for instance `enable_thinking: false`. Those of a row win.
    on_unrendered: how to treat a trained turn whose thinking the template leaves out; drop trains the turn without it.
    template_date: the date, YYYY-MM-DD, that `strftime_now` gives a chat template; None: today.
    system_prompt: the system turn of chats that begin with none; other rows are refused then. Empty: no such turn.
    """

    tokenizer: PreTrainedTokenizerBase
    vocab_size: int | None = None
    max_length: int | None = None
    assistant_only_loss: bool = True
    completion_only_loss: bool = True
    split_turns: bool = True
    excess_length_strategy: Literal["raise", "drop", "truncate"] = "raise"
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    on_unrendered: Literal["raise", "drop"] = "raise"
    template_date: str | None = None
    system_prompt: str = ""
    answered: ClassVar[bool] = True
    """Whether a row needs an answer to learn from."""

    def encode(self, row: Row) -> list[TokenRow]:
        """Return the samples of one row; none if all are dropped for their length. Raises as `encode_all`."""
        return self.encode_all([row])[0]

    def encode_all(
        self,
        rows: Iterable[Row | UnreadRow],
        on_error: Callable[[DataError], None] | None = None,
        report: EncodeReport | None = None,
    ) -> list[list[TokenRow]]:
        """Return the samples of many rows, tokenised together; entry i belongs to row i.

        rows: from `read_rows` or `open_rows`.
        on_error: receives the error of a row, whose entry stays empty. Without it the first error is raised.
        report: counts that are added to.

        Raises DataError if a row cannot be used: its keys or roles are unknown, the template drops or changes a part of
        it, a token is outside the vocabulary, it is longer than `max_length`, or no token of it bears loss. Raises
        UserError if the chat template is missing or invalid, or has no generation markers and `split_turns` is false.
        """
        report = EncodeReport() if report is None else report
        remaining = iter(rows)
        encoded: list[list[TokenRow]] = []
        while block := list(islice(remaining, ROWS_PER_BLOCK)):
            encoded.extend(self._encode_block(block, on_error, report))
        return encoded

    def _encode_block(
        self,
        rows: list[Row | UnreadRow],
        on_error: Callable[[DataError], None] | None,
        report: EncodeReport,
    ) -> Iterator[list[TokenRow]]:
        drafted = [self.drafts(row, report) for row in rows]
        tokenized = self.tokenize([item for items in drafted for item in items if isinstance(item, Draft)])
        for items in drafted:
            report.num_rows += 1
            samples: list[TokenRow] = []
            try:
                samples = self._finish([_resolve(item, tokenized) for item in items], report)
            except DataError as error:
                if on_error is None:
                    raise
                report.add_bad_row(error)
                on_error(error)
            yield samples

    def drafts(self, row: Row | UnreadRow, report: EncodeReport | None = None) -> list[Draft | TokenRow | DataError]:
        """Return the drafts of a row, before tokenisation, or its samples if it has tokens, or its error.

        report: counts the columns, keys of messages and turns that nothing reads, and chats with and
            without a system turn.
        """
        try:
            standard = self.standard(row)
            items: list[Draft | TokenRow | DataError] = [*self._draft(standard)]
        except DataError as error:  # raised at its row's turn, so that errors keep the order of the file
            return [error]
        if report is not None:
            report.unused_columns.update(standard.unread.keys())
            if turns := turns_of(standard.fields):
                has_system = turns[0]["role"] in SYSTEM_ROLES
                report.num_with_system += has_system
                report.num_without_system += not has_system
                is_cut = self.assistant_only_loss and self.split_turns and self.answered
                if is_cut and turns[-1]["role"] != "assistant":
                    report.unused_columns[LAST_TURNS] += 1
        return items

    def standard(self, row: Row | UnreadRow) -> Row:
        """Return the row in a form of `standard_row`, with the system prompt. Keys of messages may be unread too.

        Raises DataError if it cannot be read, or says something about what to learn that nothing reads.
        """
        found = standard_row(row.read(), self.answered)
        keys = check_turns(turns_of(found.fields), self.template_words, found.where, self.answered)
        return self._with_system_prompt(found._replace(unread={**found.unread, **keys}))

    def _with_system_prompt(self, row: Row) -> Row:
        """Put the system prompt before a row that has no system turn."""
        if not self.system_prompt:
            return row
        turns = turns_of(row.fields)
        if not turns:
            reason = "system_prompt: only chats have a system turn, and this row is plain text or tokens"
            fix = "write it into the chats, and leave system_prompt out"
            raise DataError(row.where, f"{reason}; {fix}")
        if turns[0]["role"] in SYSTEM_ROLES:
            return row
        name = "messages" if "messages" in row.fields else "prompt"
        system = {"role": "system", "content": self.system_prompt}
        return row._replace(fields={**row.fields, name: [system, *row.fields[name]]})

    def _draft(self, row: Row) -> list[Draft] | list[TokenRow]:
        """Draft the samples of a row from `standard_row`."""
        fields, where = row.fields, row.where
        if "input_ids" in fields:
            return [sample_from_tokens(fields, where, self.completion_only_loss)]
        if turns := turns_of(fields):
            return self._draft_chat(self.conversation(turns, fields, where), len(fields.get("prompt", ())))
        if "prompt" not in fields:
            return [Draft("", text_of(fields, "text", where), where, "plain")]
        prompt, completion = (text_of(fields, name, where) for name in ("prompt", "completion"))
        return [Draft(prompt, completion, where, "plain", prompt_bears_loss=not self.completion_only_loss)]

    def conversation(self, messages: list[dict[str, Any]], fields: dict[str, Any], where: str) -> Conversation:
        """Make the chat that the template will render.

        messages: from `standard_row`. fields: with the `tools` and `chat_template_kwargs` of the row.
        """
        kwargs = fields.get("chat_template_kwargs", {})
        if not isinstance(kwargs, dict):
            raise DataError(where, f"chat_template_kwargs: expected an object, found {kwargs!r}")
        found = read_tools(fields["tools"], where) if fields.get("tools") else []
        tools = {"tools": found} if found else {}
        variables, drops = self.chat_template_kwargs | kwargs | tools, self.on_unrendered == "drop"
        template = self._template_of_a_day(tools.get("tools"))
        chat = Conversation(self.tokenizer, self._rendered(messages), where, variables, drops, template)
        if reason := unread_variable(self.chat_template_kwargs, self.tokenizer):
            raise UserError(reason)
        if reason := unread_variable(kwargs, self.tokenizer):
            raise DataError(where, reason)
        return chat

    def _template_of_a_day(self, tools: Any) -> str | None:
        """Return the chat template that sees `template_date`; None for the tokenizer's own."""
        if self.template_date is None or not self.tokenizer.chat_template:
            return None
        return with_date(self.tokenizer.get_chat_template(None, tools), date_of(self.template_date))

    def _rendered(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Turn a developer's messages into system turns, if the template leaves such turns out."""
        if all(message["role"] != "developer" for message in messages) or self.renders_developer:
            return messages
        return [{**message, "role": "system"} if message["role"] == "developer" else message for message in messages]

    def _draft_chat(self, chat: Conversation, start: int) -> list[Draft] | list[TokenRow]:
        """Draft a chat, or its completion. start: the completion's first message; 0 if the row has none."""
        if not (self.completion_only_loss if start else self.assistant_only_loss):
            return [draft_whole(chat)]
        if self.assistant_only_loss and self.split_turns:
            return [draft_turn(chat, turn, turn + 1) for turn in trained_turns(chat, start)]
        if not start:
            return [marked_chat(chat)]
        roles = [message["role"] for message in chat.messages[start:]]
        if self.assistant_only_loss and roles != ["assistant"]:
            expected = "expected a single assistant turn, or split_turns: true, or assistant_only_loss: false"
            raise DataError(chat.where, f"completion: {expected}; found the roles {', '.join(roles)}")
        refuse_weights(chat, start)
        return [draft_turn(chat, start, len(chat.messages))]

    def _finish(self, samples: list[TokenRow], report: EncodeReport) -> list[TokenRow]:
        """Return the samples that are trained, within `max_length`."""
        vocab_size = len(self.tokenizer) if self.vocab_size is None else self.vocab_size
        trained: list[TokenRow] = []
        for sample in samples:
            check_vocabulary(sample, vocab_size)
            is_long = self.max_length is not None and len(sample.input_ids) > self.max_length
            result = self._within_max_length(sample, report) if is_long else self._checked(sample)
            trained += [result] if result is not None else []
        report.num_samples += len(trained)
        report.num_tokens += sum(len(sample.input_ids) for sample in trained)
        report.num_labels += sum(sample.num_labels for sample in trained)
        return trained

    def _within_max_length(self, sample: TokenRow, report: EncodeReport) -> TokenRow | None:
        """Cut a sample to its first `max_length` tokens; None if it is dropped, or if no label is left."""
        assert self.max_length is not None
        report.add_long_sample(len(sample.input_ids), sample.where)
        if self.excess_length_strategy == "drop":
            report.num_dropped_samples += 1
            return None
        if self.excess_length_strategy != "truncate" or not self.answered:
            raise self._too_long(sample)
        short = sample.part(0, self.max_length)
        report.num_truncated_samples += bool(short.num_labels)
        report.num_without_loss += not short.num_labels
        return short if short.num_labels else None

    def _too_long(self, sample: TokenRow) -> DataError:
        excess = f"{len(sample.input_ids)} tokens exceed max_length {self.max_length}"
        strategies = "drop | truncate" if self.answered else "drop, since its end cannot be cut"
        return DataError(sample.where, f"{excess}; raise max_length or set excess_length_strategy: {strategies}")

    def _checked(self, sample: TokenRow) -> TokenRow:
        if not sample.num_labels:
            found = f"of {len(sample.labels)} tokens none after the first has a label other than {IGNORE_INDEX}"
            raise DataError(sample.where, f"no token bears loss: {found}")
        return sample

    @cached_property
    def template_words(self) -> frozenset[str]:
        return template_words(self.tokenizer)

    @cached_property
    def renders_developer(self) -> bool:
        return renders_developer(self.tokenizer)

    @cached_property
    def tokenize(self) -> DraftTokenizer:
        return DraftTokenizer(self.tokenizer)


def _resolve(item: Draft | TokenRow | DataError, tokenized: Iterator[TokenRow]) -> TokenRow:
    if isinstance(item, DataError):
        raise item
    return item if isinstance(item, TokenRow) else next(tokenized)


def draft_turn(chat: Conversation, start: int, end: int) -> Draft:
    """Draft messages `start` to `end` as the target, and those before them as the prompt."""
    prompt, target = chat.prompt_and_target(start, end)
    return Draft(prompt, target, chat.where, "turn")


def draft_whole(chat: Conversation) -> Draft:
    """Draft the chat with loss on every token."""
    refuse_weights(chat)
    text = chat.text()
    chat.check_turns(text, chat.assistant_turns())
    return Draft("", text, chat.where, "chat")


def marked_chat(chat: Conversation) -> TokenRow:
    """Make the chat one sample, with loss on what the template's generation markers enclose."""
    if not chat.has_markers:
        raise UserError(f"split_turns: false: the chat template has no generation markers; {FIX_MARKERS}")
    trained_turns(chat)  # refuses a chat without any
    refuse_weights(chat)
    input_ids, mask = chat.tokens_and_mask()
    return sample_from_tokens({"input_ids": input_ids, "assistant_masks": mask}, chat.where)


def trained_turns(chat: Conversation, first: int = 0) -> list[int]:
    """Return the assistant's turns that bear loss, from message `first` on."""
    turns = [turn for turn in chat.assistant_turns() if turn >= first]
    if not turns:
        roles = ", ".join(message["role"] for message in chat.messages[first:])
        raise DataError(chat.where, f"expected at least one assistant turn to learn from; found the roles {roles}")
    trained = [turn for turn in turns if chat.messages[turn].get("weight") != 0]
    if not trained:
        raise DataError(chat.where, "every assistant turn has weight: 0, so nothing is learned; leave the row out")
    return trained


def refuse_weights(chat: Conversation, first: int = 0) -> None:
    """Raise DataError if a message from `first` on has weight 0: here it would bear loss."""
    for number, message in enumerate(chat.messages[first:], start=first + 1):
        if message.get("weight") == 0:
            reason = f"turn {number} has weight: 0, but here it would bear loss"
            raise DataError(chat.where, f"{reason}; set assistant_only_loss: true and split_turns: true")


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
        if turns := turns_of(fields):
            chat = self.conversation(turns, fields, where)
            if turns[-1]["role"] == "assistant":
                return [draft_turn(chat, len(turns) - 1, len(turns))]
            return [Draft(chat.prompt(), "", where, "turn")]
        if "text" in fields:
            return [_sample(self._ids(text_of(fields, "text", where)), where)]
        if "prompt" in fields and "completion" not in fields:
            ids = self._ids(text_of(fields, "prompt", where), add_special_tokens=False)
            return [_sample([*self.tokenize.bos_ids, *ids], where)]
        return super()._draft(row)

    def _checked(self, sample: TokenRow) -> TokenRow:
        if not len(sample.input_ids):
            raise DataError(sample.where, "no token to read; expected a text that is not empty")
        return sample

    def _ids(self, text: str, **options: object) -> list[int]:
        ids: list[int] = self.tokenizer(text, verbose=False, **options)["input_ids"]
        return ids


def _sample(ids: list[int], where: str) -> TokenRow:
    input_ids = np.array(ids, dtype=np.int64)
    return TokenRow(input_ids, np.full_like(input_ids, IGNORE_INDEX), where)
