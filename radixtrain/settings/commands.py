"""The keys of each command: those without a section, and the sections."""

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from radixtrain.errors import UserError
from radixtrain.settings.fields import FINITE, TINY, FilledBy, Limits, Section
from radixtrain.settings.sections import DataSettings, ModelSettings, TrainerSettings

Count = Annotated[int, Limits(1)]


@dataclass
class AnswerSettings(Section):
    """Answers that a model generates and a metric judges: the settings of `EvaluateGeneration`.

    metric: judges the answers after each validation: exact_match, contains, regex, or a function of yours by its
        path, `module.function`; null generates nothing.
    pattern: for the metric regex: an answer is right if the first group, or the whole match, is that of the target.
    num_samples: rows to answer, drawn once; null answers all.
    max_new_tokens: most tokens of an answer. `predict` with `model.generate: true` reads this key and those below.
    do_sample: draw tokens, with the same seed each time; false takes the most likely one.
    temperature: of sampling; null is the model's own.
    generation_kwargs: more of Hugging Face's `GenerationConfig`, such as `{top_p: 0.9, stop_strings: ["###"]}`.
    batch_size: prompts at once; null is 256, or fewer if they are long.
    """

    SECTION: ClassVar[str] = "evaluate_generation"

    metric: str | None = None
    pattern: str | None = None
    num_samples: Count | None = None
    max_new_tokens: Count = 256
    do_sample: bool = False
    temperature: Annotated[float | None, Limits(TINY, words="above 0")] = None
    generation_kwargs: dict[str, Any] | None = None
    batch_size: Count | None = None
    seed: Annotated[int, Limits(0, 2**32 - 1), FilledBy("seed_everything")] = 42

    def __post_init__(self) -> None:
        super().__post_init__()
        key, given = self.SECTION, self.generation_kwargs or {}
        if self.temperature is not None and not self.do_sample:
            raise UserError(f"{key}.temperature {self.temperature} is read only with {key}.do_sample: true")
        for name in ("max_new_tokens", "do_sample", "temperature"):
            if name in given:
                raise UserError(f"{key}.generation_kwargs: {name} is a key of its own, {key}.{name}")
        if given.get("num_return_sequences", 1) != 1:
            raise UserError(f"{key}.generation_kwargs: num_return_sequences must be 1, since a row gets one answer")
        if self.metric is None and self.pattern is not None:
            raise UserError("evaluate_generation.pattern needs evaluate_generation.metric: regex")


@dataclass(kw_only=True)
class RunSettings(Section):
    """A command that reads a model and rows.

    output_dir: where checkpoints, logs and the model go.
    dedup: false runs the ordinary baseline: stock attention, padded batches.
    overwrite: begin a new run in output_dir; the folder of the run that is there is renamed, to NAME.1 and so on.
    save_every_steps: optimizer steps between two checkpoints.
    save_every_minutes: minutes between two; the end of an epoch or the run writes one too.
    save_total_limit: checkpoints that are kept, besides the best one.
    save_best: a metric of the validations, such as eval_loss: model/ gets the weights that were best by it.
    early_stopping: end after this many validations without an improvement of save_best, or else of eval_loss.
    sp_size: ranks that compute each micro-batch together, each with a part of its unique rows.
    ddp_timeout: seconds that a rank waits for the others in a step.
    seed_everything: seed of the initial adapters, the order of the rows and `data.val_size`.
    """

    output_dir: str = "runs/sft"
    dedup: bool = True
    overwrite: bool = False
    save_every_steps: Count | None = None
    save_every_minutes: Annotated[float | None, Limits(TINY, FINITE, "above 0")] = 10.0
    save_total_limit: Count = 2
    save_best: str | None = None
    early_stopping: Count | None = None
    sp_size: Count = 1
    ddp_timeout: Annotated[int, Limits(1, 2_000_000)] = 1800  # gloo counts milliseconds in 32 bits
    seed_everything: Annotated[int, Limits(0, 2**32 - 1)] = 42
    evaluate_generation: AnswerSettings = field(default_factory=AnswerSettings)
    model: ModelSettings
    data: DataSettings = field(default_factory=DataSettings)
    trainer: TrainerSettings = field(default_factory=TrainerSettings)


@dataclass(kw_only=True)
class FromCheckpoint(RunSettings):
    """A command that may take its weights from a checkpoint.

    ckpt_path: a checkpoint to resume (fit) or take weights from: `last`, `best`, `auto` (or start anew), or a path.
    """

    ckpt_path: str | None = None


@dataclass(kw_only=True)
class Verify(FromCheckpoint):
    """`verify`.

    num_steps: optimizer steps to compare, each from its own rows; the weights do not change.
    num_sequences: compare only the first ones of each step, which runs three times in float64 and twice in any other
        precision.
    """

    num_steps: Count = 1
    num_sequences: Count | None = None


@dataclass(kw_only=True)
class Inspect(RunSettings):
    """`inspect`.

    step: optimizer step, from 0.
    micro_batch: part of the step, from 0.
    row: instead of a micro-batch, a row of the data through every stage: N for the N-th row of `data.train_file`, from
        1, or file:line as errors name it. It may be one that is refused.
    full: shorten nothing.
    """

    step: int = 0
    micro_batch: int = 0
    row: int | str | None = None
    full: bool = False


@dataclass(kw_only=True)
class Report(RunSettings):
    """`report`.

    max_seconds: for timing a micro-batch of the data on a few layers with random weights, by which speed is predicted;
        0 predicts nothing.
    """

    max_seconds: Annotated[float, Limits(0, FINITE)] = 45.0


@dataclass(kw_only=True)
class Export(Section):
    """`export`.

    ckpt_path: a folder in `<output_dir>/checkpoints`, such as `step=500`, `last` or `best`; or the output_dir, for its
        newest whole one.
    output_dir: the folder to write: absent, empty, or an earlier model, which is replaced.
    chat_template_path: a Jinja file in place of the tokenizer's own chat template.
    """

    ckpt_path: str
    output_dir: str
    chat_template_path: str | None = None


@dataclass
class Doctor(Section):
    """`doctor`.

    json: one JSON object for machines in place of the text for people.
    """

    json: bool = False


OF_COMMAND: dict[str, type[Section]] = {
    "fit": FromCheckpoint,
    "validate": FromCheckpoint,
    "test": FromCheckpoint,
    "predict": FromCheckpoint,
    "report": Report,
    "verify": Verify,
    "inspect": Inspect,
    "export": Export,
    "doctor": Doctor,
}
