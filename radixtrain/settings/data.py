"""The section `data`."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from radixtrain.errors import UserError
from radixtrain.settings.section import FINITE, Limits, Section

Files = str | list[str | dict[str, Any]] | None
Count = Annotated[int, Limits(1)]
# More than a thousand processes exhaust the machine before any of them reads a row.
MOST_PROCESSES = 1024


@dataclass
class DataSettings(Section):
    """Rows, and how they become optimizer steps: the settings of an `SFTData`."""

    SECTION: ClassVar[str] = "data"

    train_file: Annotated[
        Files,
        "rows to train on: a file, a folder, a pattern such as `data/*.jsonl`, a data set's name, or a list of those. "
        "An entry may say more: `{path: ..., weight: 2, name: ..., split: ..., subset: ..., columns: {...}}`; weight "
        "is how often each of its rows occurs in an epoch.",
    ] = None
    validation_file: Annotated[Files, "rows for the validation loss. Without it, see `val_size`."] = None
    test_file: Annotated[Files, "rows for `test` and, without `predict_file`, for `predict`."] = None
    predict_file: Annotated[Files, "rows for `predict`."] = None
    columns: Annotated[
        dict[str, str | None] | None,
        "ours: theirs, if names do not say what a column holds: `{user: question, assistant: answer}`.",
    ] = None
    val_size: Annotated[
        float,
        Limits(0, FINITE, "a share below 1 or a number of conversations"),
        "rows of `train_file` to validate on without a `validation_file`: a share below 1, or a number of "
        "conversations.",
    ] = 0.0
    batch_size: Annotated[
        int,
        Limits(1, 2**24),  # to draw steps of 16 million conversations takes a second
        "conversations in one optimizer step. Its gradient does not depend on how the step is cut.",
    ] = 32
    max_tokens: Annotated[Count, "unique tokens in a micro-batch: what memory is spent on."] = 16384
    max_length: Annotated[int | None, Limits(2), "longest sample, in tokens."] = 4096
    excess_length_strategy: Annotated[
        Literal["raise", "drop", "truncate"],
        "what is done with a longer one: raise, drop, or truncate (keeps the start).",
    ] = "raise"
    on_bad_row: Annotated[
        Literal["raise", "skip"],
        "a row that cannot be used: raise stops with `file:line: reason`, skip reports and goes on.",
    ] = "raise"
    assistant_only_loss: Annotated[bool, "loss on the assistant's turns only; otherwise on every token of a chat."] = (
        True
    )
    completion_only_loss: Annotated[bool, "loss on the completion only, in rows that have one."] = True
    split_turns: Annotated[
        bool, "a sample for each assistant turn, rendered as the model will see it at inference."
    ] = True
    train_on: Annotated[
        Literal["distinct_turns", "every_turn", "last_turn"],
        "distinct_turns trains a turn once that several rows repeat after the same messages, as a log of an agent's "
        "requests does; every_turn trains it in each of them, last_turn only the last of a row.",
    ] = "distinct_turns"
    system_prompt: Annotated[
        str | None,
        "a system turn for conversations that begin without one: a text, or a file that holds it. A row's own wins.",
    ] = None
    chat_template_path: Annotated[str | None, "a Jinja file in place of the tokenizer's own chat template."] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, "variables for the template, for instance `enable_thinking: false`."
    ] = None
    shuffle_dataset: Annotated[bool, "draw the steps of every epoch in a new order, seeded."] = True
    group_by_prefix: Annotated[
        bool | int,
        "draw steps in which conversations with a common prompt meet. A number is how many of a prompt stay together; "
        "true takes the smallest that reaches 80 % of the largest r, at most half of a step.",
    ] = False
    seed: Annotated[
        int,
        Limits(0, 2**32 - 1),
        "of the order of the steps and of `val_size`; on the command line it is `seed_everything`, and 42 if that is "
        "true or false and not a number.",
    ] = 42
    min_shared_tokens: Annotated[
        Count | Literal["auto"],
        "a branch point that saves fewer tokens gets no branch; auto chooses for each batch by what a layer costs.",
    ] = "auto"
    shared_targets: Annotated[
        Literal["every", "once"],
        "what a label counts that several sequences of a step share: every, once for each, as in an ordinary trainer; "
        "once, once with the mean of their loss weights.",
    ] = "every"
    share_across_micro_batches: Annotated[
        bool | Literal["auto"],
        "compute a prefix once that several micro-batches of a step continue, and a sequence of more than max_tokens "
        "in several of them; auto: where it pays.",
    ] = "auto"
    pad_to_multiple_of: Annotated[Count | None, "pad the unique tokens of a micro-batch to a multiple of it."] = None
    dataset_num_proc: Annotated[
        int | None,
        Limits(1, MOST_PROCESSES),
        "processes that tokenise; null: one for each core if the file is large.",
    ] = None
    cache_dir: Annotated[str | None, "of tokenised rows; null is `tokens` in `$RADIXTRAIN_CACHE`."] = None
    overwrite_cache: Annotated[bool, "tokenise again, whatever is kept."] = False
    dataloader_num_workers: Annotated[
        int, Limits(0, MOST_PROCESSES), "processes that collate and plan ahead of the training step."
    ] = 1
    model_name_or_path: Annotated[
        str | None, "whose tokenizer and vocabulary; on the command line it is the model's."
    ] = None
    dedup: Annotated[bool, "False for the ordinary padded baseline on the same batches."] = True
    sp_size: Annotated[
        Count | Literal["auto"],
        "ranks that compute each micro-batch together, which has as many times `max_tokens`; auto: maybe one.",
    ] = 1
    predict_unlabelled: Annotated[
        bool,
        "rows for `predict` need no answer, and each is one sequence; on the command line it is true if no score of "
        "`model.scores` is of labelled tokens.",
    ] = False
    predict_prompts: Annotated[
        bool,
        "rows for `predict` are prompts, up to their last answer if they have one; on the command line it is "
        "`model.generate`.",
    ] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.train_on == "last_turn" and not (self.split_turns and self.assistant_only_loss):
            raise UserError("data.train_on: last_turn needs split_turns: true and assistant_only_loss: true")
        self._check_group_by_prefix()
        self._check_sizes()

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

    def _check_sizes(self) -> None:
        """What is cut into micro-batches may be longer than one."""
        sp_size = 1 if self.sp_size == "auto" else self.sp_size
        together = f" x sp_size {sp_size}" if sp_size > 1 else ""
        sizes = {"max_length": (self.max_length, "a sequence that long has")}
        if self.dedup and self.share_across_micro_batches:
            sizes = {}
        sizes["pad_to_multiple_of"] = (self.pad_to_multiple_of, "rows padded to it have")
        for name, (size, what) in sizes.items():
            if size is not None and size > self.max_tokens * sp_size:
                raise UserError(
                    f"data.{name} {size} exceeds data.max_tokens {self.max_tokens}{together}: {what} no micro-batch to "
                    f"go into; raise max_tokens or lower {name}"
                )
