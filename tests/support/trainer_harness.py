"""A trainer, untouched and with `share_prefixes`: the same weights, data and seed, and every number it logs compared.

    def build(share):                                  # called twice; `share` does nothing but count in the first run
        model, reference = share(tiny_qwen3()), share(tiny_qwen3(seed=1))
        return DPOTrainer(model, reference, args=DPOConfig(**settings(tmp_path)), ...)

    found = compare(build)                             # trains both, raises AssertionError at the first difference
    assert found.r > 3.5

`share` may be called anywhere in `build`, as often as there are models, also on what the trainer made itself
(`share(trainer.ref_model)`).

Both runs compute in float64, so BAR says equal on every processor: rounding leaves 1e-15 to 1e-13. It is relative to
the number, or absolute for one below 1, since a margin or a KL divergence is a difference of numbers of order one.
"""

import math
import re
import statistics
from collections.abc import Callable, Collection, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from radixtrain import restore_model, share_prefixes, sharing_report
from radixtrain.hf.backbone import backbone_of, model_inside
from radixtrain.testing import relative_error
from radixtrain.verification.oracle import float64_arithmetic
from radixtrain.verification.report import MEDIAN_FACTOR

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


def assert_as_near(truth: list[Tensor], ordinary: list[Tensor], shared: list[Tensor]) -> None:
    """Assert that gradients in bfloat16 are as near to the truth in float64 as ordinary ones are.

    Those of several steps or models: a single one has luck, of both signs (`radixtrain.verification.report`).
    """
    errors = [relative_error(one, exact) for one, exact in zip(ordinary, truth, strict=True)]
    assert min(errors) > 1e-3, f"not bfloat16: {errors}"
    ratios = [relative_error(o, exact) / e for o, exact, e in zip(shared, truth, errors, strict=True)]
    assert statistics.median(ratios) <= MEDIAN_FACTOR, ratios


def assert_shared(model: Any, expected: Counts) -> None:
    """Assert that every call was shared, and that the report counts the tokens that the data have."""
    report = sharing_report(model)
    assert expected.calls > 0, "the model was never called"
    found = Counts(report.num_shared, report.num_tokens, report.num_unique_tokens)
    assert found == expected, f"the report says {found}, the data {expected}: {report}"
