"""The section `data`."""

from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, ClassVar, Literal

from radixtrain.errors import UserError
from radixtrain.settings.fields import FINITE, LARGEST, FilledBy, Limits, Section

Files = str | list[str | dict[str, Any]] | None
Count = Annotated[int, Limits(1, LARGEST)]
# More than a thousand processes exhaust the machine before any of them reads a row.
MOST_PROCESSES = 1024


@dataclass
class DataSettings(Section):
    """Rows, and how they become optimizer steps: the settings of an `SFTData`.

    train_file: rows to train on: a file, a pattern such as `data/*.jsonl`, a data set's name, or a list of those. An
        entry may say more: `{path: ..., weight: 2, name: ..., split: ..., subset: ..., columns: {...}}`;
        weight is how often each of its rows occurs in an epoch.
    validation_file: rows for the validation loss. Without it, see `val_size`.
    test_file: rows for `test` and, without `predict_file`, for `predict`.
    predict_file: rows for `predict`.
    columns: ours: theirs, if names do not say what a column holds: `{user: question, assistant: answer}`; null leaves
        one out, `messages.KEY` is a key of all messages.
    val_size: rows of `train_file` to validate on without a `validation_file`: a share below 1, or a number of
        conversations.
    batch_size: conversations in one optimizer step. Its gradient does not depend on how the step is cut.
    max_tokens: unique tokens in a micro-batch, which decide its memory; a longer sample is a micro-batch by itself.
    max_length: longest sample, in tokens.
    excess_length_strategy: for a longer sample: raise, drop, or truncate (keeps the start).
    on_bad_row: a row that cannot be used: raise stops with `file:line: reason`, skip reports and continues.
    on_unrendered: thinking that the chat template leaves out of a trained turn: raise refuses the row, drop trains the
        turn without it.
    assistant_only_loss: loss on the assistant's turns only; otherwise on every token of a chat.
    completion_only_loss: loss on the completion only, in rows that have one.
    split_turns: a sample for each assistant turn, rendered as the model will see it at inference; false, a sample for
        each chat, needs a template with generation markers.
    train_on: with split_turns, distinct_turns trains a turn once that several rows repeat after the same messages, as a
        log of an agent's requests does; every_turn trains it in each of them, last_turn only the last of a row.
    system_prompt: a system turn for conversations that begin without one.
    chat_template_path: a Jinja file in place of the tokenizer's own chat template.
    chat_template_kwargs: variables for the template, for instance `enable_thinking: false`.
    template_date: the date that a chat template writes, YYYY-MM-DD; null: the day on which the run began, or today.
    shuffle_dataset: draw the steps of every epoch in a new order, seeded.
    group_by_prefix: draw steps in which conversations with a common prompt meet. A number is how many of a prompt stay
        together; true takes the smallest that reaches 80 % of the largest r, at most half of a step.
    seed: for the order of the steps and `val_size`; on the command line it is `seed_everything`, and 42 if that is
        true or false and not a number.
    min_shared_tokens: merge branches that would save fewer tokens than this.
    shared_targets: weight of a label that several sequences of a step share: every, once for each, as in an ordinary
        trainer; once, once with the mean of their loss weights.
    pad_to_multiple_of: pad the unique tokens of a micro-batch to a multiple of it.
    dataset_num_proc: processes that tokenise; null: one for each core if the file is large.
    cache_dir: folder of tokenised rows; null is `tokens` in `$RADIXTRAIN_CACHE`.
    overwrite_cache: tokenise again, even if cached.
    dataloader_num_workers: processes that collate and plan ahead of the training step.
    model_name_or_path: the model whose tokenizer and vocabulary to use; on the command line the trained one.
    dedup: False for the ordinary padded baseline on the same batches.
    sp_size: ranks that compute each micro-batch together, which has as many times `max_tokens`.
    predict_prompts: rows for `predict` are prompts, up to their last answer if they have one; on the command line it is
        `model.generate`.
    """

    SECTION: ClassVar[str] = "data"

    train_file: Files = None
    validation_file: Files = None
    test_file: Files = None
    predict_file: Files = None
    columns: dict[str, str | None] | None = None
    val_size: Annotated[float, Limits(0, FINITE, "a share below 1 or a number of conversations")] = 0.0
    batch_size: Annotated[int, Limits(1, 2**24)] = 32  # to draw steps of 16 million conversations takes a second
    max_tokens: Count = 16384
    max_length: Annotated[int | None, Limits(2, LARGEST)] = 4096
    excess_length_strategy: Literal["raise", "drop", "truncate"] = "raise"
    on_bad_row: Literal["raise", "skip"] = "raise"
    on_unrendered: Literal["raise", "drop"] = "raise"
    assistant_only_loss: bool = True
    completion_only_loss: bool = True
    split_turns: bool = True
    train_on: Literal["distinct_turns", "every_turn", "last_turn"] = "distinct_turns"
    system_prompt: str | None = None
    chat_template_path: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    template_date: str | None = None
    shuffle_dataset: bool = True
    group_by_prefix: bool | int = False
    seed: Annotated[int, Limits(0, 2**32 - 1), FilledBy("seed_everything")] = 42
    min_shared_tokens: Count = 4
    shared_targets: Literal["every", "once"] = "every"
    pad_to_multiple_of: Count | None = None
    dataset_num_proc: Annotated[int | None, Limits(1, MOST_PROCESSES)] = None
    cache_dir: str | None = None
    overwrite_cache: bool = False
    dataloader_num_workers: Annotated[int, Limits(0, MOST_PROCESSES)] = 1
    model_name_or_path: Annotated[str | None, FilledBy("model.model_name_or_path")] = None
    dedup: Annotated[bool, FilledBy("dedup")] = True
    sp_size: Annotated[int, Limits(1, LARGEST), FilledBy("sp_size")] = 1
    predict_prompts: Annotated[bool, FilledBy("model.generate")] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.train_on == "last_turn" and not (self.split_turns and self.assistant_only_loss):
            raise UserError("data.train_on: last_turn needs split_turns: true and assistant_only_loss: true")
        if self.template_date is not None:
            date_of(self.template_date)
        self._check_group_by_prefix()
        self._check_padding()

    def _check_group_by_prefix(self) -> None:
        number = self.group_by_prefix
        if number is not False and not self.shuffle_dataset:
            raise UserError(
                "data.group_by_prefix draws the steps of every epoch, and data.shuffle_dataset: false keeps the order "
                "of the file; leave one of them out"
            )
        if not isinstance(number, bool) and not 1 <= number <= self.batch_size:
            raise UserError(
                f"data.group_by_prefix must be true, false or a number of conversations from 1 to data.batch_size "
                f"({self.batch_size}); got {number}"
            )

    def _check_padding(self) -> None:
        multiple, together = self.pad_to_multiple_of, f" x sp_size {self.sp_size}" if self.sp_size > 1 else ""
        if multiple is not None and multiple > self.max_tokens * self.sp_size:
            raise UserError(
                f"data.pad_to_multiple_of {multiple} exceeds data.max_tokens {self.max_tokens}{together}: rows padded "
                f"to it have no micro-batch to go into; raise max_tokens or lower pad_to_multiple_of"
            )


def date_of(text: str) -> datetime:
    """Parse a date, YYYY-MM-DD, as its midnight. Raises UserError for anything else."""
    try:
        return datetime.strptime(text, "%Y-%m-%d")
    except ValueError:
        raise UserError(f"data.template_date must be a date such as 2026-11-27; got {text[:40]!r}") from None
