"""16 bits in trainers: each trains and evaluates, under autocast or with weights of 16 bits.

The error of a shared run against float64 is at most that of the ordinary run in the same precision, times the factors
of `radixtrain.verification.equivalence` for single tensors, and of `radixtrain.testing` for all of them as one. What is
not rounded is equal: dtypes and shapes of all that a model returns, the names of what is logged, the steps that a loss
scale skips, and the warnings. Every call is shared.
"""

import re
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, log_softmax
from torch.utils._pytree import tree_leaves

from radixtrain import RadixCollator, share_prefixes, sharing_report
from radixtrain.testing import assert_within_reference_error, relative_error
from radixtrain.tree.radix_inputs import RADIX
from radixtrain.verification.equivalence import compare_gradients
from radixtrain.verification.oracle import Gradients, float64_arithmetic
from tests.support import cases
from tests.support.trainers import Run, padded_batches, run

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
STEPS = 2
SGD = {"optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant", "max_steps": STEPS}  # without a state


@dataclass(frozen=True)
class Precision:
    """weights: their dtype; that of autocast. scale: the first loss scale. is_exact: float64, from the same weights."""

    weights: torch.dtype
    autocast: torch.dtype | None = None
    scale: float = 1024.0
    is_exact: bool = False

    @property
    def rounds_to(self) -> torch.dtype:
        return self.autocast or self.weights

    @property
    def dtype(self) -> torch.dtype:
        return FP64 if self.is_exact else self.weights

    @property
    def exact(self) -> "Precision":
        return Precision(self.weights, is_exact=True)

    def draw(self, model: nn.Module, seed: int) -> None:
        """The same weights in float64 as in the dtype."""
        draw = np.random.default_rng(seed)
        for weight in model.parameters():
            drawn = draw.normal(loc=weight.ndim == 1, scale=0.2, size=weight.shape)
            weight.data.copy_(torch.from_numpy(drawn).to(self.weights))


PRECISIONS = {
    "float32": Precision(FP32),
    "bf16 mixed": Precision(FP32, BF16),
    "fp16 mixed": Precision(FP32, FP16),
    "bf16 weights": Precision(BF16),
    "fp16 weights": Precision(FP16),
    "both bf16": Precision(BF16, BF16),  # TRL's default
}
OVERFLOWS = Precision(FP32, FP16, scale=2.0**40)
DOORS = {"share_prefixes": partial(share_prefixes, min_ratio=0.0), "RadixCollator": share_prefixes}


def roll_out(texts: list[str], trainer: Any) -> dict[str, list[Any]]:
    """The same completions in every precision."""
    draw = np.random.default_rng(0)
    made = [draw.integers(10, 50, 3 + n % 4).tolist() for n in range(len(texts))]
    ids = [[int(word) for word in text.split()] for text in texts]
    return {"prompt_ids": ids, "completion_ids": made, "logprobs": [[0.0] * len(each) for each in made]}


OWN: dict[str, dict[str, Any]] = {
    "SFT, LoRA": {"gradient_checkpointing": True},
    "GRPO": {"given": {"rollout_func": roll_out}},
}


@dataclass
class Seen:
    """What a run was seen to do.

    run: gradients and numbers. calls: dtypes and shapes of what was returned in every call; for a radix batch, whose
    rows are others, only dtypes. scaler: of the loss.
    """

    run: Run = field(default_factory=lambda: Run([], []))
    calls: list[Any] = field(default_factory=list)
    models: list[Any] = field(default_factory=list)
    warnings: Counter[str] = field(default_factory=Counter)
    scaler: Any = None

    def watch(self, model: Any) -> Any:
        self.models.append(model)
        model.register_forward_hook(self.called, with_kwargs=True)
        return model

    def called(self, model: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        values = {name: tree_leaves(value) for name, value in output.items() if name != "past_key_values"}
        leaves = ((f"{name} {n}", x) for name, found in values.items() for n, x in enumerate(found))
        shape = (lambda x: None) if RADIX in kwargs else (lambda x: x.shape)
        self.calls.append({name: (x.dtype, x.requires_grad, shape(x)) for name, x in leaves if isinstance(x, Tensor)})

    def parts(self, truth: "Seen") -> dict[str, Gradients]:
        """What is compared: gradients by step, and numbers in units of those in truth, if these are above 1.

        Without accuracies, for rounding decides where two tokens are nearly as likely, and counts of tokens, of which a
        radix batch has fewer.
        """
        pairs = zip(self.run.entries, truth.run.entries, strict=True)
        numbers = [
            entry[name] / max(1.0, abs(unit[name]))
            for entry, unit in pairs
            for name in unit
            if not re.search("accura|num_tokens", name)
        ]
        gradients = {f"step {n}": gradient for n, gradient in enumerate(self.run.gradients)}
        return {
            "gradients": Gradients(0.0, gradients),
            "numbers": Gradients(0.0, {"numbers": torch.tensor(numbers, dtype=FP64)}),
        }


def trained(built: Any, program: str, precision: Precision, door: str = "") -> Seen:
    """door: empty for the untouched run."""
    seen, collator = Seen(), RadixCollator() if door == "RadixCollator" else None
    flags = {name: precision.autocast == dtype for name, dtype in (("bf16", BF16), ("fp16", FP16))}

    def build(share: Callable[[Any], Any]) -> Any:
        own = OWN.get(program, {})
        trainer = built(program, lambda model: seen.watch(share(model)), collator, **SGD, **flags, **own)
        for seed, model in enumerate((trainer.model, getattr(trainer, "ref_model", None))):
            if model is not None:
                precision.draw(model, seed)
        seen.scaler = as_on_a_gpu(trainer.accelerator, precision)
        return trainer

    with warnings.catch_warnings(record=True, action="always") as caught:
        seen.run = run(build, DOORS.get(door, lambda model: model), evaluate=True, dtype=precision.dtype)
    seen.warnings.update(str(each.message) for each in caught)
    return seen


def as_on_a_gpu(accelerator: Any, precision: Precision) -> Any:
    """Accelerate uses float16 on accelerators only. One overflow takes the scale from any number to one that fits."""
    if accelerator.mixed_precision == "fp16":
        accelerator.native_amp = True
        accelerator.scaler = torch.amp.GradScaler("cpu", precision.scale, backoff_factor=2.0**-30)
    return accelerator.scaler


# What users compute from logits and hidden states.


def places(x: Tensor, labels: Tensor) -> Tensor:
    """What predicts a label, (P, W)."""
    return x[:, :-1][labels != -100]


def of_flat(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten(), **options)


def gathered(logprobs: Tensor, labels: Tensor) -> Tensor:
    found = logprobs[:, :-1].gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return -found[labels != -100].mean()


def of_trl(logits: Tensor, labels: Tensor) -> Tensor:
    """In 16 bits row by row."""
    from trl.trainer.utils import selective_log_softmax

    return -selective_log_softmax(logits[:, :-1], labels.clamp(min=0))[labels != -100].mean()


Loss = Callable[[Any, Any, Tensor], Tensor]
LOSSES: dict[str, Loss] = {
    "cross-entropy": lambda model, out, labels: of_flat(out.logits, labels),
    "none": lambda model, out, labels: of_flat(out.logits, labels, reduction="none"),
    "of float": lambda model, out, labels: of_flat(out.logits.float(), labels),
    "log_softmax": lambda model, out, labels: gathered(log_softmax(out.logits, -1), labels),
    "in float32": lambda model, out, labels: gathered(out.logits.log_softmax(-1, dtype=FP32), labels),
    "TRL's": lambda model, out, labels: of_trl(out.logits, labels),
    "softmax": lambda model, out, labels: places(out.logits.softmax(-1), labels).square().sum() / 30,
    "temperature": lambda model, out, labels: gathered((out.logits / 0.7).log_softmax(-1), labels),
    "softcap": lambda model, out, labels: of_flat(3.0 * torch.tanh(out.logits / 3.0), labels),
    "logsumexp": lambda model, out, labels: places(out.logits, labels).logsumexp(-1).mean(),
    "head": lambda model, out, labels: of_flat(model.lm_head(out.hidden_states[-1].to(model.dtype)), labels),
    "in its own dtype": lambda model, out, labels: of_flat(
        nn.functional.linear(out.hidden_states[-1].float(), model.lm_head.weight.float()), labels
    ),
    "states": lambda model, out, labels: places(out.hidden_states[-1], labels).square().mean(),
}


def losses(model: Any, precision: Precision, door: str = "") -> Seen:
    """Each loss and its gradient, within autocast and after it."""
    seen, policy = Seen(), model()
    precision.draw(policy, 0)
    policy = seen.watch(
        DOORS.get(door, lambda model: model)(policy.to(FP64 if precision.is_exact else precision.weights))
    )
    (batch,) = padded_batches("right", steps=1)
    labels = batch.pop("labels")[:, 1:]
    autocast = torch.autocast("cpu", precision.autocast, enabled=precision.autocast is not None)
    with float64_arithmetic() if precision.is_exact else nullcontext():
        for name, loss in LOSSES.items():
            for is_within in (True, False):
                with autocast:
                    output = policy(**batch, output_hidden_states=True, use_cache=False)
                with autocast if is_within else nullcontext():
                    found = loss(policy, output, labels)
                seen.calls.append(found.dtype)
                found.mean().backward()
                seen.run.entries.append({name: float(found.mean())})
                grads = (p.grad.flatten() for p in policy.parameters() if p.grad is not None)
                seen.run.gradients.append(torch.cat([*grads]))
                policy.zero_grad()
    return seen


CELLS = [
    *((program, "share_prefixes") for program in ("losses", "Trainer", "SFT", "SFT, LoRA", "DPO", "Reward", "GRPO")),
    *((program, "RadixCollator") for program in ("Trainer", "SFT, labels")),
]
EVERY = [(precision, *cell) for precision in PRECISIONS for cell in CELLS]
QUICK = [*(("bf16 mixed", *cell) for cell in CELLS), *((each, *CELLS[0]) for each in PRECISIONS if "16" in each)]


@pytest.fixture
def seen_of(built, model) -> Callable[..., Seen]:
    """`seen_of(program, precision, door)`"""
    return lambda program, *how: losses(model, *how) if program == "losses" else trained(built, program, *how)


@pytest.mark.parametrize(("precision", "program", "door"), cases(EVERY, dict.fromkeys(QUICK)))
def test_as_near_to_float64(seen_of, precision, program, door, print_after):
    how = PRECISIONS[precision]
    truth, ordinary, shared = seen_of(program, how.exact), seen_of(program, how), seen_of(program, how, door)
    line = f"{door:14} {program:18} {precision:12}"
    arms = [seen.parts(truth) for seen in (truth, ordinary, shared)]
    for part in arms[0]:
        rung = compare_gradients(str(how.rounds_to).removeprefix("torch."), *(arm[part] for arm in arms))
        assert not rung.failed, f"{part}: {rung.reason}"
    exact, one, other = (torch.cat([*arm["gradients"].tensors.values()]) for arm in arms)
    assert_within_reference_error(other, one, exact, names="gradients")
    error, most = relative_error(one, exact), 256 if how.rounds_to is FP32 else 32  # rounding grows over steps
    assert 1 / 16 < error / torch.finfo(how.rounds_to).eps < most, f"another precision: off by {error}"
    print_after("error against float64, shared / ordinary", f"{line} {relative_error(other, exact) / error:.2f}")
    assert_alike(ordinary, shared, door)


def assert_alike(ordinary: Seen, shared: Seen, door: str) -> None:
    """Assert that all is equal that is not rounded, and that every call was shared."""
    assert [entry.keys() for entry in ordinary.run.entries] == [entry.keys() for entry in shared.run.entries]
    if door == "RadixCollator":
        of_dtypes = [[{k: v[:2] for k, v in call.items()} for call in seen.calls] for seen in (ordinary, shared)]
        assert of_dtypes[0] == of_dtypes[1] and any(None in v for call in shared.calls for v in call.values())
    else:
        assert ordinary.calls == shared.calls
    assert [x.dtype for x in ordinary.run.gradients] == [x.dtype for x in shared.run.gradients]
    assert not shared.warnings - ordinary.warnings
    for model in shared.models if door == "share_prefixes" else ():
        report = sharing_report(model)
        assert report.num_shared and not report.not_shared and report.compression_ratio > 1.5, report


@pytest.mark.parametrize(("program", "door"), cases(CELLS[1:], [("Trainer", "RadixCollator")]))
def test_a_step_that_the_scaler_skips(built, program, door):
    """The first one, in both. All that is logged afterwards has the same names and types."""
    ordinary, shared = trained(built, program, OVERFLOWS), trained(built, program, OVERFLOWS, door)
    scales = [seen.scaler.get_scale() for seen in (ordinary, shared)]
    assert scales[0] == scales[1] < OVERFLOWS.scale
    assert_alike(ordinary, shared, door)
