"""The sections `data`, `model` and `trainer`, the last with the names of Lightning's trainer."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated, Any, ClassVar, Literal

from radixtrain.errors import UserError
from radixtrain.settings.fields import BELOW_1, FINITE, LARGEST, TINY, FilledBy, Limits, Section

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
    seed: for the order of the steps and `val_size`; on the command line it is `seed_everything`.
    min_shared_tokens: merge branches that would save fewer tokens than this.
    dataset_num_proc: processes that tokenise; null: one for each core if the file is large.
    cache_dir: folder of tokenised rows; null is `tokens` in `$RADIXTRAIN_CACHE`.
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
    dataset_num_proc: Annotated[int | None, Limits(1, MOST_PROCESSES)] = None
    cache_dir: str | None = None
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


def date_of(text: str) -> datetime:
    """Parse a date, YYYY-MM-DD, as its midnight. Raises UserError for anything else."""
    try:
        return datetime.strptime(text, "%Y-%m-%d")
    except ValueError:
        raise UserError(f"data.template_date must be a date such as 2026-11-27; got {text[:40]!r}") from None


LARGEST_FLOAT = 1e38  # below the largest float32, since torch converts these numbers
Number = Annotated[float, Limits(0, LARGEST_FLOAT, "from 0 to 1e+38")]
Share = Annotated[float, Limits(0, BELOW_1, "at least 0 and below 1")]


@dataclass
class ModelSettings(Section):
    """Which model is trained or evaluated, and how: the settings of a `RadixModule`.

    model_name_or_path: a Hugging Face folder or hub name.
    dtype: of weights and computation; `auto` takes the checkpoint's. For mixed precision set `trainer.precision`.
    attention: how attention uses the tree.
    kernel: which attention kernel.
    attn_implementation: Hugging Face's attention, with `dedup: false`; `auto` is sdpa, or eager if the class has none.
    allow_dropout: dropout modules to accept by name, although a shared token then draws one mask for all its copies.
    optimizer: muon is torch's, for the matrices of hidden layers, with AdamW for the rest; adamw_8bit is that of
        bitsandbytes, with moments in 8 bits but for embeddings.
    learning_rate: the peak.
    lr_scheduler_type: the learning rate after the warm-up, by transformers' `get_scheduler`.
    warmup_steps: optimizer steps of linear warm-up; below 1, a share of all steps.
    weight_decay: on matrices; norms and biases have none.
    adam_beta1: decay of the first moment.
    adam_beta2: decay of the second moment.
    adam_epsilon: added to the root of the second moment.
    max_grad_norm: gradients are scaled down to this norm; 0 turns it off.
    on_nonfinite: a loss or gradient that is not finite: raise stops before the weights change, skip leaves the step out
        and names its rows.
    max_skipped_steps: most steps that `on_nonfinite: skip` leaves out.
    activation_checkpointing: recompute activations in the backward pass: less memory, a third more time. A number from
        0 to 1 is the share of the decoder layers that do, evenly spread.
    use_peft: train LoRA adapters instead of the weights.
    lora_r: rank of the adapters.
    lora_alpha: their scale, times `1 / lora_r`, or `1 / sqrt(lora_r)` with use_rslora.
    lora_dropout: must be 0 with dedup unless `allow_dropout` names it.
    lora_target_modules: names of layers; `all-linear` for every one but the head, which can be named if it is not tied.
    use_dora: DoRA: adapters for the direction of a weight, one number for each output's length.
    use_rslora: rank-stabilised LoRA.
    load_in_4bit: QLoRA: the weights under the adapters in 4 bits. Needs bitsandbytes.
    bnb_4bit_quant_type: how 4 bits encode a number.
    bnb_4bit_compute_dtype: of products with 4-bit weights; null takes `dtype`.
    bnb_4bit_use_double_quant: quantise their scales too: 0.4 bits less for each weight.
    dedup: False for the ordinary baseline: stock attention on padded batches.
    verify_first_batch: before training, `verify` the first optimizer step, and stop if the gradients differ.
    generate: `predict` writes answers, as `evaluate_generation` says, and not log-probabilities.
    """

    SECTION: ClassVar[str] = "model"

    model_name_or_path: str
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "float32"
    attention: Literal["auto", "cascade", "path", "expand", "reference", "tree"] = "auto"
    kernel: Literal["auto", "torch", "flash_attn", "flash_attn_3", "flash_attn_4", "cudnn", "efficient", "eager"] = (
        "auto"
    )
    attn_implementation: str = "auto"
    allow_dropout: list[str] | None = None
    optimizer: Literal["adamw", "muon", "adamw_8bit"] = "adamw"
    learning_rate: Number = 2e-05
    lr_scheduler_type: Literal["cosine", "linear", "constant", "constant_with_warmup", "inverse_sqrt"] = "cosine"
    warmup_steps: Number = 0.0
    weight_decay: Number = 0.0
    adam_beta1: Share = 0.9
    adam_beta2: Share = 0.999
    adam_epsilon: Number = 1e-08
    max_grad_norm: Number = 1.0
    on_nonfinite: Literal["raise", "skip"] = "raise"
    max_skipped_steps: Annotated[int, Limits(0, LARGEST, "from 0 to 2,147,483,647")] = 10
    activation_checkpointing: Annotated[
        bool | float, Limits(0, 1, "true, false or a share of the layers from 0 to 1")
    ] = False
    use_peft: bool = False
    # No layer has more than 65,536 inputs, and an adapter of a higher rank is larger than the layer.
    lora_r: Annotated[int, Limits(1, 2**16, "from 1 to 65,536")] = 16
    lora_alpha: Annotated[int, Limits(1, LARGEST, "from 1 to 2,147,483,647")] = 32
    lora_dropout: Share = 0.0
    lora_target_modules: list[str] | str = "all-linear"
    use_dora: bool = False
    use_rslora: bool = False
    load_in_4bit: bool = False
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = "nf4"
    bnb_4bit_compute_dtype: Literal["float32", "bfloat16"] | None = None
    bnb_4bit_use_double_quant: bool = False
    dedup: Annotated[bool, FilledBy("dedup")] = True
    verify_first_batch: bool = False
    generate: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        step_size = self.learning_rate / (1 - self.adam_beta1)  # of AdamW's first step
        if step_size > LARGEST_FLOAT:
            raise UserError(f"model.learning_rate {self.learning_rate} is too large: AdamW computes with float32")


LoggerName = Literal["csv", "wandb", "tensorboard", "mlflow", "trackio"]


@dataclass
class TrainerSettings(Section):
    """How a run goes through its steps.

    logger: csv, wandb, tensorboard, mlflow, trackio or none. Or a list. The CSV file is written with each of them.
    project: of wandb and trackio, and the experiment of mlflow; null takes that of their environment, or radixtrain.
    run_name: of wandb, trackio and mlflow; null takes the name of output_dir.
    accelerator: cpu or cuda; auto takes CUDA if available.
    strategy: ddp or fsdp2 for several devices; auto is ddp there.
    devices: how many, a list of their numbers, or auto for all; torchrun and srun set it by their processes.
    precision: the first word is the dtype of products, and of the weights if true follows; mixed keeps the weights in
        32 bits.
    max_epochs: passes over the data; null is 3, unless max_steps is set. -1 has no end.
    max_steps: optimizer steps of the run. -1 leaves the end to max_epochs.
    max_time: DD:HH:MM:SS, how long each start of the run trains before it is saved.
    limit_val_batches: steps of a validation: a number, or a share if written with a point; 0 skips validations.
    val_check_interval: validate after this many steps, counted over the epochs, or after a share of each epoch.
    log_every_n_steps: optimizer steps between two lines of the log; a shorter run logs each step.
    enable_checkpointing: false writes no checkpoint.
    enable_progress_bar: a bar on a terminal, single lines in a file.
    deterministic: use only operations that give the same bits each time; warn names those that do not.
    """

    SECTION: ClassVar[str] = "trainer"

    logger: LoggerName | Literal["none"] | list[LoggerName] = "csv"
    project: str | None = None
    run_name: str | None = None
    accelerator: Literal["auto", "cpu", "cuda"] = "auto"
    strategy: str = "auto"
    devices: Annotated[list[int] | Literal["auto"] | int, Limits(1, 1_000)] = 1
    precision: Literal["32-true", "bf16-mixed", "bf16-true", "64-true"] = "32-true"
    max_epochs: Annotated[int | None, Limits(-1)] = None
    max_steps: Annotated[int, Limits(-1)] = -1
    max_time: str | None = None
    limit_val_batches: int | float | None = None
    val_check_interval: Annotated[int | float, Limits(TINY, FINITE, "above 0")] = 1.0
    log_every_n_steps: Annotated[int, Limits(0)] = 10
    enable_checkpointing: bool = True
    enable_progress_bar: bool = True
    deterministic: bool | Literal["warn"] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        limit = self.limit_val_batches or 0
        if limit < 0 or (isinstance(limit, float) and limit > 1):
            raise UserError(f"trainer.limit_val_batches {limit}: a number of steps, or a share from 0.0 to 1.0")
        if isinstance(self.val_check_interval, float) and self.val_check_interval > 1:
            raise UserError(
                f"trainer.val_check_interval {self.val_check_interval}: a number of steps, or a share of an epoch"
            )
        try:
            _ = self.max_seconds
        except (ValueError, OverflowError):
            raise UserError(f"trainer.max_time must be DD:HH:MM:SS; got {self.max_time}") from None

    @property
    def max_seconds(self) -> float | None:
        """Return `max_time` in seconds; None without it."""
        if self.max_time is None:
            return None
        numbers = zip(("days", "hours", "minutes", "seconds"), map(int, self.max_time.split(":")), strict=True)
        return timedelta(**dict(numbers)).total_seconds()
