"""The keys of each command: those without a section, and the sections."""

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from radixtrain.errors import UserError
from radixtrain.settings.data import DataSettings
from radixtrain.settings.model import ModelSettings
from radixtrain.settings.section import FINITE, TINY, Limits, Section
from radixtrain.settings.trainer import TrainerSettings

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
    batch_size: prompts at once; null chooses it: at most 256, 32 if each prompt has to be computed by itself.
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

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.metric is None and self.pattern is not None:
            raise UserError("evaluate_generation.pattern needs evaluate_generation.metric: regex")


# A key that another one fills in -> that other one; only that one can be set.
LINKS = {
    "trainer.default_root_dir": "output_dir",
    "model.dedup": "dedup",
    "data.dedup": "dedup",
    "data.sp_size": "sp_size",
    "data.seed": "seed_everything",
    "data.model_name_or_path": "model.model_name_or_path",
    "data.predict_unlabelled": "model.scores",
    "data.predict_prompts": "model.generate",
}


@dataclass(kw_only=True)
class Run(Section):
    """A command that reads a model and rows.

    output_dir: where checkpoints, logs and the model go.
    dedup: false runs the ordinary baseline: stock attention, padded batches.
    overwrite: replace the run that is in output_dir.
    save_every_steps: optimizer steps between two checkpoints.
    save_every_minutes: minutes between two; the end of an epoch or the run writes one too.
    save_total_limit: checkpoints that are kept, besides the best one.
    save_best: a metric of the validations, such as eval_loss: model/ gets the weights that were best by it.
    early_stopping: end after this many validations without an improvement of save_best, or else of eval_loss.
    sp_size: ranks that compute each micro-batch together, each with a part of its unique rows.
    ddp_timeout: seconds that a rank waits for the others in a step.
    push_to_hub: upload model/ to the Hugging Face hub after training.
    hub_model_id: NAME or OWNER/NAME there; null takes the name of output_dir.
    hub_private_repo: whether a new repository is private.
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
    push_to_hub: bool = False
    hub_model_id: str | None = None
    hub_private_repo: bool = True
    seed_everything: Annotated[bool | int, Limits(0, 2**32 - 1, "from 0 to 4294967295")] = 42
    evaluate_generation: AnswerSettings = field(default_factory=AnswerSettings)
    model: ModelSettings
    data: DataSettings = field(default_factory=DataSettings)
    trainer: TrainerSettings = field(default_factory=TrainerSettings)


@dataclass(kw_only=True)
class FromCheckpoint(Run):
    """A command that may take its weights from a checkpoint.

    ckpt_path: a checkpoint to resume (fit) or take weights from: `last`, `best`, `auto` (or start anew), or a path.
    """

    ckpt_path: str | None = None
    weights_only: bool | None = None


@dataclass(kw_only=True)
class Evaluate(FromCheckpoint):
    """`validate` and `test`."""

    verbose: bool = True


@dataclass(kw_only=True)
class Predict(FromCheckpoint):
    """`predict`, which writes its results and returns none."""

    return_predictions: bool | None = None


@dataclass(kw_only=True)
class Verify(Run):
    """`verify`.

    num_steps: optimizer steps to compare, each from its own rows; the weights do not change.
    num_sequences: compare only the first ones of each step, which runs three times in float64 and twice in any other
        precision.
    ckpt_path: a checkpoint of the run, whose weights are used.
    """

    num_steps: Count = 1
    num_sequences: Count | None = None
    ckpt_path: str | None = None


@dataclass(kw_only=True)
class Inspect(Run):
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
class Report(Run):
    """`report`.

    max_seconds: for timing micro-batches of the data on a few layers with random weights, by which speed and memory are
        predicted; 0 predicts nothing.
    """

    max_seconds: Annotated[float, Limits(0, FINITE)] = 45.0


@dataclass(kw_only=True)
class Export(Section):
    """`export`.

    ckpt_path: a folder in `<output_dir>/checkpoints`, such as `step=500`, `last` or `best`; or the output_dir, for its
        newest whole one.
    output_dir: the folder to write: absent, empty, or an earlier model, which is replaced.
    chat_template_path: a Jinja file in place of the tokenizer's own chat template.
    push_to_hub: upload the folder to the Hugging Face hub.
    hub_model_id: NAME or OWNER/NAME there; null takes the name of output_dir.
    hub_private_repo: whether a new repository is private.
    """

    ckpt_path: str
    output_dir: str
    chat_template_path: str | None = None
    push_to_hub: bool = False
    hub_model_id: str | None = None
    hub_private_repo: bool = True


@dataclass
class Doctor(Section):
    """`doctor`.

    json: one JSON object for machines in place of the text for people.
    """

    json: bool = False


Family = Literal["qwen3", "qwen3_5"]
Tree = Literal["flat", "nested"]
Mode = Literal["step", "forward"]
Attention = Literal["auto", "cascade", "path", "expand", "tree"]


@dataclass(frozen=True)
class ShapeSettings:
    """The sizes of a Qwen3, or a Qwen3.5, with random weights.

    num_hidden_layers: layers.
    hidden_size: width.
    intermediate_size: width of the MLP; null is 3 x hidden_size, as in the small Qwen3.
    num_attention_heads: query heads; null is hidden_size / head_dim.
    num_key_value_heads: key and value heads; null is half of the query heads.
    head_dim: width of a head.
    vocab_size: tokens of the vocabulary.
    tie_word_embeddings: whether the head is the embedding.
    name: shown in the table; null is layers x width.
    family: qwen3; or qwen3_5, a hybrid: three of every four layers have a recurrent state, with keys and values twice
        as wide as the model, in heads of head_dim.
    """

    num_hidden_layers: int = 4
    hidden_size: int = 256
    intermediate_size: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int = 64
    vocab_size: int = 4096
    tie_word_embeddings: bool = True
    name: str | None = None
    family: Family = "qwen3"


@dataclass
class Bench(Section):
    """Which steps are timed. A list as a value makes the grid larger.

    models: Qwen3 shapes with random weights: num_hidden_layers, hidden_size, intermediate_size (null: 3 x hidden_size),
        num_attention_heads (null: hidden_size / head_dim), num_key_value_heads (null: half of those), head_dim,
        vocab_size, tie_word_embeddings, name, family (qwen3 or qwen3_5).
    prompt_length: tokens that sequences share; 0 for none.
    suffix_length: tokens of each after them, which bear the loss.
    num_sequences: sequences of the batch.
    tree: flat, one prompt for all; nested, half of it for every four sequences.
    mode: forward is without gradients.
    attention: strategies on unique tokens; auto is what `fit` chooses.
    kernel: of the attention on unique tokens.
    attn_implementation: of the ordinary arm: Hugging Face's sdpa, flash_attention_2, eager.
    device: cpu or cuda.
    dtype: of weights and computation.
    repeats: turns of each arm; medians are reported.
    float64_truth: compare gradients with the ordinary model in float64, by the bars of `verify`; always so with
        recurrent layers. Otherwise float32 is compared with the ordinary arm (1e-4, relative L2 of each tensor),
        bfloat16 with float32.
    max_teraflops: leave out cells whose ordinary step takes more than this many 1e12 floating-point operations.
    num_threads: of torch on CPU.
    csv: a file to write, a line for each cell and strategy.
    plot: a .png or .svg file: measured against ideal speed-up. Needs matplotlib.
    """

    models: ShapeSettings | list[ShapeSettings] = field(default_factory=ShapeSettings)
    prompt_length: int | list[int] = 512
    suffix_length: int | list[int] = 64
    num_sequences: int | list[int] = 16
    tree: Tree | list[Tree] = "flat"
    mode: Mode | list[Mode] = "step"
    attention: Attention | list[Attention] = "auto"
    kernel: Literal["auto", "torch", "flash_attn", "flash_attn_3", "flash_attn_4", "cudnn", "efficient"] = "auto"
    attn_implementation: str = "sdpa"
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    repeats: int = 5
    float64_truth: bool = False
    max_teraflops: float | None = None
    num_threads: int | None = None
    csv: str | None = None
    plot: str | None = None


OF_COMMAND: dict[str, type[Section]] = {
    "fit": FromCheckpoint,
    "validate": Evaluate,
    "test": Evaluate,
    "predict": Predict,
    "report": Report,
    "verify": Verify,
    "inspect": Inspect,
    "export": Export,
    "bench": Bench,
    "doctor": Doctor,
}
