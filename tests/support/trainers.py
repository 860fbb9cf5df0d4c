"""Whole trainers, untouched and shared, and what they train on."""

import functools
import inspect
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.utils.data import IterableDataset

from radixtrain import restore_model, share_prefixes, sharing_report
from radixtrain.hf.backbone import backbone_of, model_inside
from radixtrain.hf.sharing_report import SharingReport
from radixtrain.verification.oracle import float64_arithmetic
from tests.support.batches import ROWS, Kind, Row, filled, image_batch_of, letters_of, padded
from tests.support.models import tiny_qwen3
from tests.support.steps import same_gradient

# A trainer, untouched and with `share_prefixes`: the same weights, data and seed, and every number it logs compared.
#
#     def build(share):                                  # called twice; `share` does nothing but count in the first run
#         model, reference = share(tiny_qwen3()), share(tiny_qwen3(seed=1))
#         return DPOTrainer(model, reference, args=DPOConfig(**settings(tmp_path)), ...)
#
#     found = compare(build)                             # trains both, raises AssertionError at the first difference
#     assert found.r > 3.5
#
# `share` may be called anywhere in `build`, as often as there are models, also on what the trainer made itself
# (`share(trainer.ref_model)`).
#
# Both runs compute in float64, so BAR says equal on every processor: rounding leaves 1e-15 to 1e-13. It is relative to
# the number, or absolute for one below 1, since a margin or a KL divergence is a difference of numbers of order one.


if TYPE_CHECKING:  # it imports for 4 s, so tests and their fixtures import trainers in functions
    from transformers import Trainer

BAR = 1e-10
STEPS = 3
# Not compared. `epoch`, `step`, `learning_rate` and `num_tokens` are, and agree trivially.
TIMINGS = re.compile("runtime|per_second|flos|time|memory")

Entry = dict[str, float]
Share = Callable[[Any], Any]
Build = Callable[[Share], "Trainer"]


def settings(folder: Path, **others: Any) -> dict[str, Any]:
    """Of a Hugging Face or TRL trainer: `STEPS` optimizer steps of two micro-batches of 4 rows, on the CPU."""
    return {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-4,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        **others,
    }


@dataclass(frozen=True)
class Run:
    """What one run left. gradients: one vector for every optimizer step, (number of trained weights,)."""

    entries: list[Entry]
    gradients: list[Tensor]


@dataclass
class Counts:
    """Calls of a model's backbone without a cache: how many, their tokens T, their unique tokens U.

    A placeholder of an image is a token of its own for each image (`told_apart`).
    """

    calls: int = 0
    num_tokens: int = 0
    num_unique: int = 0

    def add(self, rows: Iterable[list[Any]]) -> None:
        trie: dict[tuple[int, Any], int] = {}
        for row in rows:
            node = 0
            for token in row:
                node = trie.setdefault((node, token), len(trie) + 1)
            self.num_tokens += len(row)
        self.calls += 1
        self.num_unique += len(trie)


@dataclass(frozen=True)
class Comparison:
    """r: over all calls of all models, from the data. counts: the same for each model, in the order of `share` calls.

    worst: by name of a metric, the worst relative difference of all steps; `gradient` is that of the whole gradient.
    plain, shared: both runs, for what else a test asserts.
    """

    r: float
    counts: list[Counts]
    worst: dict[str, float]
    plain: Run = field(repr=False)
    shared: Run = field(repr=False)

    def line(self, name: str) -> str:
        """A row of the table: name, r, worst relative differences of loss, grad_norm, whole gradient, other metrics."""
        shown = {key: self.worst[key] for key in ("loss", "grad_norm", "gradient")}
        shown["others"] = max((self.worst[key] for key in self.worst.keys() - shown.keys()), default=0.0)
        return f"{name:<42} r {self.r:5.2f}" + "".join(f"   {key} {value:.1e}" for key, value in shown.items())


def compare(
    build: Build, *, share: Share = share_prefixes, evaluate: bool = False, skipped: Collection[str] = ()
) -> Comparison:
    """Run the trainer that `build` makes untouched, then with `share`, and assert that both logged the same numbers.

    share: what the second run does to a model; another one than `share_prefixes` to pass options, or to do it wrong.
    evaluate: run `trainer.evaluate()` after training, and compare what it logs too.
    skipped: metrics that are not compared.

    Raises AssertionError if a number differs, if a metric is missing, if a call of a model that `share` was called on
    was not shared, or if the report counts other tokens than the data have.
    """
    counts: list[Counts] = []
    plain = run(build, lambda model: count_calls(model, counts), evaluate)
    models: list[nn.Module] = []

    def share_and_keep(model: Any) -> Any:
        models.append(shared_model := share(model))
        return shared_model

    shared = run(build, share_and_keep, evaluate)
    worst = differences_of(plain, shared, skipped)
    assert len(models) == len(counts), "both runs call share on as many models"
    for model, expected in zip(models, counts, strict=True):
        assert_shared(model, expected)
        restore_model(model)
    return Comparison(
        sum(c.num_tokens for c in counts) / sum(c.num_unique for c in counts), counts, worst, plain, shared
    )


def run(build: Build, share: Share, evaluate: bool = False, dtype: torch.dtype = torch.float64) -> Run:
    """Train what `build` makes, from seed 0, in float64 or in another dtype."""
    from transformers import set_seed

    set_seed(0)
    gradients: list[Tensor] = []
    with float64_arithmetic() if dtype == torch.float64 else nullcontext():
        trainer = build(lambda model: share(model.to(dtype)))
        is_exact = dtype == torch.float64  # in 16 bits PEFT keeps adapters in float32
        assert {p.dtype for name, p in trainer.model.named_parameters() if is_exact or "lora" not in name} == {dtype}
        keep_gradients(trainer, gradients)
        trainer.train()
        if evaluate:
            trainer.evaluate()
    return Run([numbers(entry) for entry in trainer.state.log_history], gradients)


def keep_gradients(trainer: "Trainer", gradients: list[Tensor]) -> None:
    """Append the gradient of every optimizer step, after clipping, as one vector; of a sharded one the own part."""
    from transformers import TrainerCallback

    class Keeper(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            found = (p.grad for p in others["model"].parameters() if p.grad is not None)
            own = (grad.to_local() if isinstance(grad, DTensor) else grad for grad in found)
            gradients.append(torch.cat([grad.flatten() for grad in own]))

    trainer.add_callback(Keeper())


def gathered_weights(model: Any) -> list[Tensor]:
    """The weights that are trained, whole on every rank that has a part of them."""
    is_flat = isinstance(model, FullyShardedDataParallel)
    with FullyShardedDataParallel.summon_full_params(model) if is_flat else nullcontext():
        found = (p.detach() for p in model.parameters() if p.requires_grad)
        return [p.full_tensor() if isinstance(p, DTensor) else p.clone() for p in found]


def mean_log_probability(seen: Any) -> dict[str, float]:
    """A `compute_metrics` of the labels that whole logits `[B, L, V]` predict."""
    logits, labels = torch.tensor(seen.predictions)[:, :-1], torch.tensor(seen.label_ids)[:, 1:]
    logps = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return {"logp": float(logps[labels != -100].mean()), "rows": len(labels)}


def numbers(entry: dict[str, Any]) -> Entry:
    """The numbers of an entry of `log_history`, without timings."""
    return {k: v for k, v in entry.items() if isinstance(v, int | float) and not TIMINGS.search(k)}


def count_calls(model: Any, counts: list[Counts]) -> Any:
    """Count what could be shared in every call of the model's backbone from now on. Returns the same model."""
    counts.append(own := Counts())

    def hook(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        ids = keywords.get("input_ids", arguments[0] if arguments else None)
        if keywords.get("past_key_values") is not None or keywords.get("use_cache") or ids is None:
            return
        rows = sequences_of(ids, keywords.get("attention_mask"), keywords.get("position_ids"))
        own.add(told_apart(rows, keywords, backbone.config.image_token_id) if "pixel_values" in keywords else rows)

    backbone = backbone_of(model_inside(model))
    backbone.register_forward_pre_hook(hook, with_kwargs=True)
    return model


def sequences_of(ids: Tensor, mask: Tensor | None, positions: Tensor | None) -> list[list[int]]:
    """The sequences of a call: its rows without padding, or what one row holds whose positions start anew."""
    if mask is not None:
        return [row[keep].tolist() for row, keep in zip(ids, mask.bool(), strict=True)]
    if positions is None:
        return ids.tolist()
    starts = (positions[0].diff() != 1).nonzero().flatten().add(1).tolist()
    return [part.tolist() for part in ids[0].tensor_split(starts)] if len(ids) == 1 else ids.tolist()


def told_apart(rows: list[list[int]], given: dict[str, Any], placeholder: int) -> list[list[Any]]:
    """The rows with the bytes of its image at each placeholder, which the images of a call share by their sizes."""
    keys = image_keys(given)
    parts = given["image_grid_thw"].prod(-1).tolist() if "image_grid_thw" in given else [1] * len(keys)
    total = sum(row.count(placeholder) for row in rows)
    of_each = iter([key for key, part in zip(keys, parts, strict=True) for _ in range(total * part // sum(parts))])
    return [[next(of_each) if token == placeholder else token for token in row] for row in rows]


def image_keys(given: dict[str, Any]) -> list[bytes]:
    """The bytes of every image of a call, equal for equal images."""
    values, grids = given["pixel_values"], given.get("image_grid_thw")
    if grids is not None:
        parts = values.split(grids.prod(-1).tolist())
        return [part.numpy().tobytes() + grid.numpy().tobytes() for part, grid in zip(parts, grids, strict=True)]
    images = values.flatten(0, 1) if values.ndim == 5 and "image_sizes" not in given else values
    return [image.numpy().tobytes() for image in images]


def differences_of(
    plain: Run, shared: Run, skipped: Collection[str] = (), zero_gradient: bool = False
) -> dict[str, float]:
    """By metric, the worst difference of all steps. AssertionError at the first that is above BAR.

    zero_gradient: both have one, so there is no relative difference.
    """
    assert len(plain.entries) == len(shared.entries) > 0
    worst: dict[str, float] = {}
    for step, (one, other) in enumerate(zip(plain.entries, shared.entries, strict=True)):
        assert one.keys() == other.keys(), (
            f"entry {step}: {sorted(one.keys() ^ other.keys())} is in only one of the runs"
        )
        for name in (name for name in one if name not in skipped):
            difference = distance(one[name], other[name])
            assert difference <= BAR, f"{name}, entry {step}: {one[name]!r} untouched, {other[name]!r} shared"
            worst[name] = max(worst.get(name, 0.0), difference)
    if zero_gradient:
        assert all(gradient.norm() <= BAR for gradient in (*plain.gradients, *shared.gradients))
        return worst
    worst["gradient"] = max(gradient_distances(plain, shared))
    assert worst["gradient"] <= BAR, f"the gradients of a step differ by {worst['gradient']:.2g} of their norm"
    return worst


def distance(one: float, other: float) -> float:
    """Of two numbers, relative to the larger if that is above 1. Two NaN are equal; a NaN and a number are far."""
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    found = abs(one - other) / max(1.0, abs(one), abs(other))
    return math.inf if math.isnan(found) else found


def gradient_distances(plain: Run, shared: Run) -> list[float]:
    """For every step, the L2 norm of the difference of the two gradients over the norm of the first."""
    assert len(plain.gradients) == len(shared.gradients) > 0
    pairs = zip(plain.gradients, shared.gradients, strict=True)
    return [float((one - other).norm() / one.norm()) for one, other in pairs]


def assert_shared(model: Any, expected: Counts) -> None:
    """Assert that every call was shared, and that the report counts the tokens that the data have."""
    report = sharing_report(model)
    assert expected.calls > 0, "the model was never called"
    found = Counts(report.num_shared, report.num_tokens, report.num_unique_tokens)
    assert found == expected, f"the report says {found}, the data {expected}: {report}"


# The padded batches of a training loop of a user's own.


LOOP_PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
EOS = 2
IGNORED = -100

Batch = dict[str, Tensor]


def padded_batches(side: str = "right", pad: int = 0, seed: int = 0, steps: int = STEPS) -> list[Batch]:
    """Six rows a batch, five of which begin with one prompt and one with half of it; two are equal.

    Every row ends with EOS, which is also what fills the padding if pad is EOS. labels: (B, L), -100 on the prompt and
    on padding.
    """
    rng = np.random.default_rng(seed)
    batches = []
    for _ in range(steps):
        tails = [[*rng.integers(10, 50, length).tolist(), EOS] for length in (2, 9, 5, 3, 7)]
        rows = [LOOP_PROMPT + tail for tail in (*tails[:4], tails[3])] + [LOOP_PROMPT[:6] + tails[4]]
        starts = [len(LOOP_PROMPT)] * 5 + [6]
        labels = [[IGNORED] * start + row[start:] for start, row in zip(starts, rows, strict=True)]
        batches.append(padded_with_labels(rows, labels, side, pad))
    return batches


def padded_with_labels(rows: list[list[int]], labels: list[list[int]], side: str, pad: int) -> Batch:
    """input_ids, attention_mask, labels: (B, L), int64. side: right, left or both."""
    return {**padded(rows, side, pad), "labels": filled(labels, side, IGNORED)}


class Stream(IterableDataset):
    """Rows without a length."""

    def __init__(self, rows: list[Any]):
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


# What trainers that generate need in tests: prompts with a common beginning, a reward, a policy, both arms.
#
# Both runs of a comparison must draw the same completions: in float64 a probability moves by 1e-15, so they do.


VOCAB_SIZE = 50
COMMON = [3, 11, 4, 14, 5, 9, 2, 6, 5, 35, 8, 9, 7, 9, 32, 38, 46, 26, 43, 38, 32, 7, 9, 5]  # begins every prompt
GENERATIONS = 4
MAX_COMPLETION = 8
ENDS = [1, 12, 20, 28, 39]  # tokens that end a completion: many, so that completions differ in length
LORA = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False, "task_type": "CAUSAL_LM"}


def save_reference(folder: Path) -> Path:
    """The folder from which trainers load the reference, which is another model than the policy."""
    reference = tiny_qwen3(seed=1)
    reference.generation_config.eos_token_id = ENDS
    reference.save_pretrained(folder)
    return folder


def policy_of(folder: Path, make: Callable[[int], Any] = tiny_qwen3, ends: list[int] = ENDS) -> Any:
    """A policy whose reference is in `folder`. ends: tokens that end a completion."""
    policy = make(0)
    policy.config._name_or_path = str(folder)
    policy.generation_config.eos_token_id = ends
    return policy


def word_tokenizer(words: Iterable[str], pad: str, eos: str, unknown: str, **options: Any) -> Any:
    """Each word between blanks is a token, whose id is its place among `words`. options: further ones of tokenizers."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token=unknown))
    known.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    own = {"pad_token": pad, "eos_token": eos, "unk_token": unknown}
    return PreTrainedTokenizerFast(tokenizer_object=known, **own, **options)


def tokenizer() -> Any:
    """Its words are numbers of two digits; 00 pads, 01 ends."""
    return word_tokenizer([f"{n:02}" for n in range(VOCAB_SIZE)], "00", "01", "02")


def prompts(common: list[int] = COMMON, own: int = 0) -> Any:
    """8 prompts: `common`, and `own` + 2 to `own` + 8 tokens more, so that batches are padded on the left."""
    from datasets import Dataset

    rng = np.random.default_rng(0)
    tails = [rng.integers(10, VOCAB_SIZE, own + length) for length in (2, 8, 5, 3, 6, 4, 7, 2)]
    return Dataset.from_list([{"prompt": " ".join(f"{token:02}" for token in [*common, *tail])} for tail in tails])


@dataclass
class Reward:
    """Small tokens are good. Keeps what it is given: prompts and completions of every call."""

    completions: list[list[int]] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)

    def __call__(self, prompts: list[str], completion_ids: list[list[int]], **columns: Any) -> list[float]:
        self.prompts += prompts
        self.completions += completion_ids
        return [sum(token < VOCAB_SIZE // 2 for token in ids) / MAX_COMPLETION for ids in completion_ids]


def arguments(configuration: Callable[..., Any], folder: Path, **others: Any) -> Any:
    """A micro-batch is a group of 4; two of them are generated together."""
    sizes = {"num_generations": GENERATIONS, "max_completion_length": MAX_COMPLETION}
    return configuration(**settings(folder, **{**sizes, **others}))


# Any trainer by its name, on rows of one prompt: Hugging Face's, or one of TRL.


NUM_ROWS = 22  # of two ranks three micro-batches of 4 each: the second accumulation over two is not full
PROMPT = list(range(30, 42))
LONG = 10  # optimizer steps
DRAWN = ("GRPO", "RLOO")

LabelledRow = dict[str, list[int]]


def row_of(answer: list[int]) -> LabelledRow:
    return {"input_ids": PROMPT + answer, "labels": [-100] * len(PROMPT) + answer}


def rollout_trainer(
    name: str, share: Share, reference: Any, folder: Any, seed: int, given: Any = None, **how: Any
) -> Any:
    """GRPO or RLOO with a reference, both shared; `LONG` steps are one epoch, since TRL 1.16.0 continues a later one in
    the order of the first. given: arguments of the trainer itself.
    """
    import trl
    from datasets import concatenate_datasets

    rows = concatenate_datasets([prompts()] * (LONG // 2))
    args = arguments(getattr(trl, f"{name}Config"), folder, beta=0.1, **how)
    policy = share(policy_of(reference, lambda _: tiny_qwen3(seed)))
    data = rows, rows.select(range(4))
    trainer = getattr(trl, f"{name}Trainer")(policy, Reward(), args, *data, tokenizer(), **(given or {}))
    share(trainer.ref_model)
    return trainer


# Padded calls with images, and whether their gradient is the ordinary one, of the tower too.
#
# Processors of tiny models that see images, made here: a word is a token, and nothing is downloaded.


def count_images(model: Any) -> list[tuple[int, int]]:
    """How many images the tower gets in each call with gradients from now on, and how many are distinct."""
    backbone, seen = backbone_of(model_inside(model)), list[tuple[int, int]]()
    real = backbone.get_image_features

    @functools.wraps(real)
    def counted(*args: Any, **given: Any) -> Any:
        given = {**inspect.signature(real).bind(*args, **given).arguments}
        given |= given.pop("kwargs", {})
        if torch.is_grad_enabled():
            keys = image_keys(given)
            seen.append((len(keys), len(set(keys))))
        return real(**given)

    backbone.get_image_features = counted
    return seen


def same_call(model: Any, inputs: dict[str, Tensor], kept: Tensor, **options: Any) -> SharingReport:
    """Assert equal gradients of a padded call that is shared, the tower's too. options: of `share_prefixes`."""

    def loss_of(model: Any) -> Tensor:
        logits = model(**inputs, use_cache=False).logits[kept]
        weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0), dtype=logits.dtype)
        return (logits.log_softmax(-1) * weights).mean()

    rung = same_gradient(model, loss_of, partial(share_prefixes, min_ratio=0.0, **options))
    reaches_tower = any("vis" in tensor.name or "tower" in tensor.name for tensor in rung.alive)
    assert reaches_tower or "pixel_values" not in inputs, "no gradient in the tower"
    report = sharing_report(model)
    assert report.num_shared == 1, str(report)
    return report


def check_padded(
    kind: Kind,
    rows: Sequence[Row] = ROWS,
    change: Callable[[Any], Any] = lambda model: model,
    left: bool = False,
    **options: Any,
) -> int:
    """Assert equal gradients, and that the tower had each distinct image once. Returns the unique tokens.

    change: what is done to the model. options: of `share_prefixes`.
    """
    model, letters = change(kind.build()), letters_of(rows)
    images = count_images(model)
    report = same_call(model, *image_batch_of(kind, rows, left), **options)
    assert images[-1] == (len(set(letters)), len(set(letters))), "each image once"
    assert (report.num_images, report.num_distinct_images) == (len(letters), len(set(letters)))
    return report.num_unique_tokens


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}IMAGE{% else %} {{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}"
    "{% if m.role == 'assistant' %} <eos>{% endif %} {% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
)
SIZE = 56  # of pictures, in pixels


def _template(image: str = "<image>") -> str:
    return TEMPLATE.replace("IMAGE", image)


def llava_processor(tokenizer: Any) -> Any:
    """Of images of 28 x 28 pixels, four placeholders each. tokenizer: has one for `<image>`."""
    from transformers import LlavaProcessor
    from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

    images = LlavaImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    own = {"patch_size": 14, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}
    return LlavaProcessor(images, tokenizer, **own, chat_template=_template())
