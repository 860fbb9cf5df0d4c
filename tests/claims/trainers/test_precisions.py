"""16 bits in every trainer: each trains, evaluates and predicts, under autocast or with weights of 16 bits.

The error of a shared run against float64 is at most that of the ordinary run in the same precision, times the factors
of `radixtrain.verification.report` for single tensors, and of `radixtrain.testing` for all of them as one. What is not
rounded is equal: dtypes and shapes of all that a model returns, dtypes of gradients and weights, the names of what is
logged, the steps that a loss scale skips, and the warnings. Every call is shared.
"""

import json
import re
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hf_trainer_metrics import OrdinaryEvaluation, compute_metrics
from outcomes import logged
from rollouts import COMMON, Reward, policy_of, prompts, tokenizer
from tiers import cases
from tiny_models import tiny_qwen3
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves
from trainer_harness import numbers, settings

from radixtrain import RadixCollator, share_prefixes, sharing_report
from radixtrain.__main__ import main
from radixtrain.testing import assert_within_reference_error, relative_error
from radixtrain.tree.radix_inputs import RADIX
from radixtrain.verification.equivalence import compare_gradients
from radixtrain.verification.oracle import Gradients, float64_arithmetic

STEPS, ROWS = 2, 4
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


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
    def true_name(self) -> str:
        """Of Lightning."""
        names = {FP32: "32-true", BF16: "bf16-true", FP16: "16-true"}
        return "64-true" if self.is_exact else names[self.weights]

    def context(self) -> Any:
        return torch.autocast("cpu", self.autocast, enabled=self.autocast is not None)

    def scaler(self) -> torch.amp.GradScaler:
        """One overflow takes it from any scale to one that fits."""
        return torch.amp.GradScaler("cpu", self.scale, backoff_factor=2.0**-30, enabled=self.autocast == FP16)


PRECISIONS = {
    "float32": Precision(FP32),
    "bf16 mixed": Precision(FP32, BF16),
    "fp16 mixed": Precision(FP32, FP16),
    "bf16 weights": Precision(BF16),
    "fp16 weights": Precision(FP16),
    "both bf16": Precision(BF16, BF16),  # TRL's default
}
POOLED = ("gradients", "logits")  # numbers are too few for luck to average out, weights hardly move
OVERFLOWS = Precision(FP32, FP16, scale=2.0**40)


@dataclass
class Seen:
    """What a run was seen to do.

    facts: what is equal in both. shapes: of the outputs of every call; empty for a radix batch, whose rows are others.
    gradients, weights: by step and name. values: logits by batch, and losses and metrics as one vector.
    """

    facts: list[Any] = field(default_factory=list)
    shapes: list[dict[str, Any]] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    logits: dict[str, Tensor] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)
    models: list[Any] = field(default_factory=list)
    warnings: Counter[str] = field(default_factory=Counter)
    num_steps: int = 0

    def called(self, model: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        values = {name: tree_leaves(value) for name, value in output.items() if name != "past_key_values"}
        leaves = ((name, n, x) for name, found in values.items() for n, x in enumerate(found))
        tensors = {f"{name} {n}": x for name, n, x in leaves if isinstance(x, Tensor)}
        self.facts.append({name: (x.dtype, x.requires_grad) for name, x in tensors.items()})
        is_radix = RADIX in kwargs
        self.shapes.append({} if is_radix else {name: x.shape for name, x in tensors.items()})

    def stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for place, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            self.weights[f"{place}"] = p.detach().clone()
            if p.grad is not None:
                self.gradients[f"step {self.num_steps}, {place}"] = p.grad.detach().clone()
        self.num_steps += 1

    def log(self, entry: Mapping[str, Any]) -> None:
        """Without accuracies, for rounding decides where two tokens are nearly as likely, and counts of tokens, of
        which a radix batch has fewer.
        """
        found = {name: value for name, value in entry.items() if isinstance(value, Tensor)} or numbers(dict(entry))
        for name, value in found.items():
            self.facts.append((name, getattr(value, "dtype", type(value))))
            if not re.search("accura|num_tokens", name):
                self.numbers[f"{len(self.numbers)} {name}"] = float(value)

    def predict(self, logits: Any, mask: Tensor | None) -> None:
        """mask: (B, L), the places at which there is a token."""
        logits = torch.as_tensor(logits).detach()
        self.facts.append((logits.dtype, logits.shape))
        self.logits[f"{len(self.logits)}"] = logits if mask is None else logits[mask.bool()]

    def parts(self, truth: "Seen") -> dict[str, dict[str, Tensor]]:
        """What is compared. Numbers in units of those in truth, if these are above 1."""
        assert self.numbers.keys() == truth.numbers.keys()
        scaled = [value / max(1.0, abs(truth.numbers[name])) for name, value in self.numbers.items()]
        numbers = {"numbers": torch.tensor(scaled, dtype=torch.float64)}
        parts = {"gradients": self.gradients, "weights": self.weights, "logits": self.logits, "numbers": numbers}
        return {name: part for name, part in parts.items() if part}


def wants_cache_in_training(model: Any, args: Any) -> None:
    """As by default, so that what stands for the cache is in the outputs; an evaluation with a cache is not shared."""
    model.config.use_cache = model.training


@contextmanager
def watching(seen: Seen) -> Iterator[None]:
    handle = register_optimizer_step_post_hook(seen.stepped)
    try:
        with warnings.catch_warnings(record=True, action="always") as caught:
            yield
    finally:
        handle.remove()
    seen.warnings.update(str(each.message) for each in caught)


@dataclass
class Run:
    """What a program is given. share: what is done to a model. collate: for training. ordinary: for metrics."""

    precision: Precision
    share: Callable[[Any], Any]
    collate: Any
    ordinary: Any
    folder: Path
    fixtures: Any
    seen: Seen = field(default_factory=Seen)

    def model(self, build: Callable[..., Any] = tiny_qwen3, *args: Any) -> Any:
        """Its weights are the same in all precisions, which is to say drawn in float32."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(FP32)
        model = build(*args)
        torch.set_default_dtype(before)
        return self.adopt(model)

    def adopt(self, model: Any) -> Any:
        model = model.to(self.precision.weights)
        model = model.double() if self.precision.is_exact else model
        model.register_forward_pre_hook(wants_cache_in_training)
        model.register_forward_hook(self.seen.called, with_kwargs=True)
        self.seen.models.append(model := self.share(model))
        return model

    @property
    def settings(self) -> dict[str, Any]:
        """SGD has no state that float16 cannot hold."""
        flags = {name: self.precision.autocast == dtype for name, dtype in (("bf16", BF16), ("fp16", FP16))}
        sgd = {"optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant"}
        return {"max_steps": STEPS, **sgd, **flags}


def rows_of_text(count: int = 16) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(0)
    rows = []
    for number in range(count):
        start = COMMON if number % ROWS else COMMON[:10]
        answer = torch.randint(10, 50, (3 + number % 5,), generator=generator).tolist()
        rows.append({"input_ids": start + answer, "labels": [-100] * len(start) + answer})
    return rows


def batches(rows: list[Any], collate: Any) -> Any:
    return torch.utils.data.DataLoader(rows, batch_size=ROWS, collate_fn=collate)


# The programs: each trains, evaluates and predicts.


def own_loop(run: Run, prepare: Any = None, context: Any = None) -> None:
    """A loop with autocast around model and loss."""
    context, scaler, seen = context or run.precision.context, run.precision.scaler(), run.seen
    model = run.model()
    model = prepare(model) if prepare else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches(rows_of_text(ROWS * STEPS), run.collate):
        with context():
            loss = model(**batch).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen.log({"loss": loss, "norm": norm})
    seen.facts.append(scaler.get_scale())
    with torch.no_grad(), context():
        for batch in batches(rows_of_text(), run.collate):
            seen.log({"eval_loss": model.eval()(**batch).loss})
        for batch in batches(rows_of_text(), run.ordinary):
            seen.predict(model(batch["input_ids"], batch["attention_mask"]).logits, batch["attention_mask"])


def accelerate(run: Run) -> None:
    """Accelerate casts within the model, and turns its outputs into float32."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)  # it remembers the precision of a process
    names = {None: "no", BF16: "bf16", FP16: "fp16"}
    accelerator = Accelerator(mixed_precision=names[run.precision.autocast], cpu=True)
    own_loop(run, as_on_a_gpu(accelerator, run.precision).prepare_model, nullcontext)


def as_on_a_gpu(accelerator: Any, precision: Precision) -> Any:
    """It uses float16 on accelerators only."""
    if accelerator.mixed_precision == "fp16":
        accelerator.native_amp, accelerator.scaler = True, precision.scaler()
    return accelerator


def trained(run: Run, trainer: Any) -> Any:
    """A trainer of Hugging Face, after training and evaluation."""
    as_on_a_gpu(trainer.accelerator, run.precision)
    trainer.train()
    trainer.evaluate()
    scaler = trainer.accelerator.scaler
    run.seen.facts.append(None if scaler is None else scaler.get_scale())
    for entry in trainer.state.log_history:
        run.seen.log(entry)
    return trainer


def hugging_face(run: Run, full_eval: bool = False) -> None:
    """Metrics, also of what `preprocess_logits_for_metrics` leaves, and whole logits.

    full_eval: the trainer turns the weights into 16 bits for evaluation.
    """
    from transformers import TrainingArguments

    rows, words = rows_of_text(), {"processing_class": run.fixtures("tokenizer"), "data_collator": run.collate}
    arguments = TrainingArguments(**settings(run.folder, **run.settings))
    arguments.bf16_full_eval, arguments.fp16_full_eval = full_eval and arguments.bf16, full_eval and arguments.fp16
    trainer = OrdinaryEvaluation(run.model(), arguments, train_dataset=rows, eval_dataset=rows[:6], **words)
    trained(run, trainer).compute_metrics = compute_metrics
    trainer.preprocess_logits_for_metrics = lambda logits, labels: logits.argmax(-1)
    run.seen.log(trainer.evaluate())
    trainer.compute_metrics = trainer.preprocess_logits_for_metrics = None
    found = trainer.predict(rows)
    run.seen.log(found.metrics)
    run.seen.predict(found.predictions, run.ordinary(rows)["attention_mask"])


def classes(run: Run) -> None:
    """Trainer on a class for each row."""
    from transformers import DataCollatorWithPadding, Trainer, TrainingArguments

    rows = [{"input_ids": row["input_ids"], "labels": number % 3} for number, row in enumerate(rows_of_text())]
    arguments = TrainingArguments(**settings(run.folder, **run.settings))
    collate, model = DataCollatorWithPadding(run.fixtures("tokenizer")), run.model(run.fixtures("scorer"), 0, 3)
    trainer = Trainer(model, arguments, collate, train_dataset=rows, eval_dataset=rows[:6])
    trained(run, trainer).compute_metrics = lambda seen: {"mean": seen.predictions.mean()}
    run.seen.log(trainer.evaluate())
    run.seen.predict(trainer.predict(rows).predictions, None)


def sft(run: Run, lora: bool = False) -> None:
    """lora: adapters, which PEFT keeps in float32, and activation checkpointing."""
    from datasets import Dataset

    given = {"data_collator": run.collate} if isinstance(run.collate, RadixCollator) else {}
    given |= {"peft_config": run.fixtures("lora")()} if lora else {}
    options = {"rows": Dataset.from_list(rows_of_text()), "given": given, "gradient_checkpointing": lora}
    trainer = run.fixtures("trl_trainer")("SFT", run.model(), **options, max_length=None, **run.settings)
    draw = np.random.default_rng(0)
    for name, parameter in trainer.model.named_parameters():
        if "lora" in name:
            parameter.data.copy_(torch.from_numpy(draw.normal(size=parameter.shape).astype(np.float32)) * 0.1)
    trained(run, trainer)


def preferences(run: Run, name: str, builders: tuple[str, ...]) -> None:
    models = [run.model(run.fixtures(build), seed) for seed, build in enumerate(builders)]
    trained(run, run.fixtures("trl_trainer")(name, *models, rows=run.fixtures("preferences"), **run.settings))


def roll_out(texts: list[str], trainer: Any) -> dict[str, list[Any]]:
    """The same completions in every precision."""
    generator = torch.Generator().manual_seed(0)
    made = [torch.randint(10, 50, (3 + n % 4,), generator=generator).tolist() for n in range(len(texts))]
    ids = [[int(word) for word in text.split()] for text in texts]
    return {"prompt_ids": ids, "completion_ids": made, "logprobs": [[0.0] * len(each) for each in made]}


def grpo(run: Run) -> None:
    from trl import GRPOConfig, GRPOTrainer

    sizes = {"num_generations": ROWS, "max_completion_length": 8, "beta": 0.1}
    arguments = GRPOConfig(**settings(run.folder, **run.settings, **sizes))
    model = run.model(partial(policy_of, run.fixtures("reference")))
    rows = prompts(), prompts().select(range(4))
    trainer = GRPOTrainer(model, Reward(), arguments, *rows, tokenizer(), rollout_func=roll_out)
    run.adopt(trainer.ref_model)
    trained(run, trainer)


def lightning(run: Run) -> None:
    import lightning as L
    from lightning.pytorch.plugins.precision import MixedPrecision

    seen, precision, scaler = run.seen, run.precision, run.precision.scaler()

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = run.model()
            if not precision.autocast:
                self.model.to(FP32)  # Lightning casts it

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss = self.model(**batch).loss
            seen.log({"loss": loss})
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            seen.log({"eval_loss": self.model(**batch).loss})

        def predict_step(self, batch: Any, index: int) -> None:
            seen.predict(self.model(batch["input_ids"], batch["attention_mask"]).logits, batch["attention_mask"])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    mixed = {"precision": "bf16-mixed"} if precision.autocast == BF16 else None
    mixed = {"plugins": MixedPrecision("16-mixed", "cpu", scaler)} if precision.autocast == FP16 else mixed
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    options = {"max_steps": STEPS, "gradient_clip_val": 1.0, "accelerator": "cpu", "default_root_dir": run.folder}
    trainer, module = L.Trainer(**options, **quiet, **(mixed or {"precision": precision.true_name})), Module()
    trainer.fit(module, batches(rows_of_text(ROWS * STEPS), run.collate))
    trainer.validate(module, batches(rows_of_text(), run.collate), verbose=False)
    trainer.predict(module, batches(rows_of_text(), run.ordinary))
    seen.facts.append(scaler.get_scale())


def losses(run: Run) -> None:
    """What users compute from logits and hidden states, within autocast or after it: each loss and its gradient."""
    model, batch = run.model(), run.ordinary(rows_of_text(6))
    labels = batch.pop("labels")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for name, loss in LOSSES.items():
        for is_within in (True, False):
            with run.precision.context():
                output = model(**batch, output_hidden_states=True)
                found = loss(model, output, labels[:, 1:]) if is_within else None
            if found is None:
                found = loss(model, output, labels[:, 1:])
            found.mean().backward()
            run.seen.log({name: found.detach().mean()})
            optimizer.step()
            optimizer.zero_grad()


def places(x: Tensor, labels: Tensor) -> Tensor:
    """What predicts a label, (P, W)."""
    return x[:, :-1][labels != -100]


def of_flat(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten(), **options)


def gathered(logprobs: Tensor, labels: Tensor) -> Tensor:
    found = logprobs[:, :-1].gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return -found[labels != -100].mean()


Loss = Callable[[Any, Any, Tensor], Tensor]
LOSSES: dict[str, Loss] = {
    "cross-entropy": lambda model, out, labels: of_flat(out.logits, labels),
    "sum": lambda model, out, labels: of_flat(out.logits, labels, reduction="sum") / 30,
    "none": lambda model, out, labels: of_flat(out.logits, labels, reduction="none"),
    "smoothed": lambda model, out, labels: of_flat(out.logits, labels, label_smoothing=0.1),
    "of float": lambda model, out, labels: of_flat(out.logits.float(), labels),
    "log_softmax": lambda model, out, labels: gathered(out.logits.log_softmax(-1), labels),
    "functional": lambda model, out, labels: gathered(torch.nn.functional.log_softmax(out.logits, -1), labels),
    "in float32": lambda model, out, labels: gathered(out.logits.log_softmax(-1, dtype=torch.float32), labels),
    "softmax": lambda model, out, labels: places(out.logits.softmax(-1), labels).square().sum() / 30,
    "temperature": lambda model, out, labels: gathered((out.logits / 0.7).log_softmax(-1), labels),
    "tensor": lambda model, out, labels: gathered((out.logits / torch.tensor(0.7)).log_softmax(-1), labels),
    "softcap": lambda model, out, labels: of_flat(3.0 * torch.tanh(out.logits / 3.0), labels),
    "logsumexp": lambda model, out, labels: places(out.logits, labels).logsumexp(-1).mean(),
    "entropy": lambda model, out, labels: (
        places(-(out.logits.softmax(-1) * out.logits.log_softmax(-1)), labels).sum() / 30
    ),
    "head": lambda model, out, labels: of_flat(model.lm_head(out.hidden_states[-1].to(model.dtype)), labels),
    "product": lambda model, out, labels: (
        places(out.hidden_states[-1].to(model.dtype) @ model.lm_head.weight.T, labels).logsumexp(-1).mean()
    ),
    "in its own dtype": lambda model, out, labels: of_flat(
        nn.functional.linear(out.hidden_states[-1].float(), model.lm_head.weight.float()), labels
    ),
    "states": lambda model, out, labels: places(out.hidden_states[-1], labels).square().mean(),
    "inner": lambda model, out, labels: places(out.hidden_states[1], labels).square().mean(),
    "difference": lambda model, out, labels: of_flat(out.logits - 0.5 * out.logits.detach(), labels),
}


def fit(run: Run) -> None:
    """The command, against `--dedup false`; then what `predict` writes."""
    from transformers import AutoModelForCausalLM

    arguments, shop, folder = run.fixtures("arguments"), run.fixtures("shop"), run.folder
    shutil.copytree(shop / "model", folder / "start")
    model = AutoModelForCausalLM.from_pretrained(shop / "model").to(run.precision.weights)
    model.float().save_pretrained(folder / "start")
    name = "float64" if run.precision.is_exact else str(run.precision.weights).removeprefix("torch.")
    mixed = "bf16-mixed" if run.precision.autocast else "64-true" if run.precision.is_exact else "32-true"
    flags = {"model__dtype": name, "trainer__precision": mixed, "dedup": run.collate is not run.ordinary}
    flags |= {"model__model_name_or_path": folder / "start", "output_dir": folder / "out"}
    rows = {"data__validation_file": shop / "validation.jsonl", "trainer__max_epochs": 1}
    assert main(arguments(**flags, **rows)) == 0
    for column in ("loss", "grad_norm", "eval_loss"):
        for value in logged(folder / "out", column=column).values():
            run.seen.log({column: value})
    flags |= {"data__train_file": None, "data__predict_file": shop / "validation.jsonl", "overwrite": True}
    flags |= {"model__model_name_or_path": folder / "out" / "model", "output_dir": folder / "predicted"}
    assert main(arguments("predict", **flags)) == 0
    for line in (folder / "predicted" / "predictions.jsonl").read_text().splitlines():
        run.seen.log(json.loads(line))


PROGRAMS: dict[str, Callable[[Run], None]] = {
    "loop": own_loop,
    "losses": losses,
    "Accelerate": accelerate,
    "Lightning": lightning,
    "Trainer": hugging_face,
    "Trainer, full eval": partial(hugging_face, full_eval=True),
    "Trainer, classes": classes,
    "SFTTrainer": sft,
    "SFTTrainer, LoRA": partial(sft, lora=True),
    "DPOTrainer": partial(preferences, name="DPO", builders=("model", "model")),
    "RewardTrainer": partial(preferences, name="Reward", builders=("scorer",)),
    "GRPOTrainer": grpo,
    "fit": fit,
}
BY_COLLATOR = (
    "loop",
    "Accelerate",
    "Lightning",
    "Trainer",
    "Trainer, full eval",
    "SFTTrainer",
    "SFTTrainer, LoRA",
    "fit",
)
DOORS = {"share_prefixes": partial(share_prefixes, min_ratio=0.0), "RadixCollator": share_prefixes}
CELLS = [
    *((program, "share_prefixes") for program in PROGRAMS if program != "fit"),
    *((program, "RadixCollator") for program in BY_COLLATOR),
]
QUICK = {  # in `make test`; the rest is full
    "bf16 mixed": [cell for cell in CELLS if cell[0] not in ("Lightning", "Trainer, full eval")],
    "fp16 mixed": [("losses", "share_prefixes"), ("Accelerate", "RadixCollator"), ("Trainer", "share_prefixes")],
    "bf16 weights": [("losses", "share_prefixes"), ("SFTTrainer", "RadixCollator"), ("DPOTrainer", "share_prefixes")],
    "fp16 weights": [("losses", "share_prefixes"), ("loop", "RadixCollator"), ("loop", "share_prefixes")],
}


def every_cell() -> list[tuple[str, str, str]]:
    """fit refuses float16, which has no loss scale there."""
    triples = [(precision, *cell) for precision in PRECISIONS for cell in CELLS]
    return [each for each in triples if each[1] != "fit" or "fp16" not in each[0]]


@pytest.fixture(scope="module")
def kept() -> dict[Any, Seen]:
    return {}


@pytest.fixture
def seen_of(kept, tokenizer, tmp_path_factory, request) -> Callable[..., Seen]:
    """`seen_of(program, precision, door)`: what was seen of it. door: empty for the untouched run."""
    from transformers import DataCollatorForSeq2Seq, set_seed

    ordinary = DataCollatorForSeq2Seq(tokenizer)

    def once(program: str, precision: Precision, door: str = "") -> Seen:
        if (program, precision, door) not in kept:
            collate = RadixCollator() if door == "RadixCollator" else ordinary
            share, folder = DOORS.get(door, lambda model: model), tmp_path_factory.mktemp("run")
            run = Run(precision, share, collate, ordinary, folder, request.getfixturevalue)
            set_seed(0)
            with watching(run.seen), float64_arithmetic() if precision.is_exact else nullcontext():
                PROGRAMS[program](run)
            kept[program, precision, door] = run.seen
        return kept[program, precision, door]

    return once


@pytest.mark.parametrize(
    ("precision", "program", "door"),
    cases(every_cell(), [(precision, *cell) for precision, chosen in QUICK.items() for cell in chosen]),
)
def test_as_near_to_float64(seen_of, precision, program, door, print_after):
    how = PRECISIONS[precision]
    runs = [seen_of(program, replace(how, autocast=None, is_exact=True)), seen_of(program, how)]
    runs.append(found := seen_of(program, how, door))
    parts = [run.parts(runs[0]) for run in runs]
    line = f"{door:14} {program:18} {precision:12}"
    for part in parts[0]:
        truth, ordinary, shared = (Gradients(0.0, of[part]) for of in parts)
        assert truth.tensors.keys() == ordinary.tensors.keys() == shared.tensors.keys()
        rung = compare_gradients(str(how.rounds_to).removeprefix("torch."), truth, ordinary, shared)
        assert not rung.failed, f"{part}: {rung.reason}"
        line += f" {part} {ratio_of_all(part, how, truth, ordinary, shared):.2f}" if part in POOLED else ""
    print_after("error against float64, shared / ordinary", line)
    assert_alike(runs[1], found, door)


def ratio_of_all(part: str, how: Precision, *arms: Gradients) -> float:
    """The error of all tensors as one, shared over ordinary. AssertionError if it is too large."""
    truth, ordinary, shared = (torch.cat([x.flatten() for x in arm.tensors.values()]) for arm in arms)
    assert_within_reference_error(shared, ordinary, truth.double(), names=part)
    error = relative_error(ordinary, truth)
    most = 256 if how.rounds_to is FP32 else 32  # rounding grows over steps; fewer bits begin at 512 times as much
    assert 1 / 16 < error / torch.finfo(how.rounds_to).eps < most, f"another precision: {part} is off by {error}"
    return relative_error(shared, truth) / error


def assert_alike(ordinary: Seen, shared: Seen, door: str) -> None:
    """Assert that all is equal that is not rounded, and that every call was shared."""
    for one, other in zip(ordinary.facts, shared.facts, strict=True):
        assert one == other
    for one, other in zip(ordinary.shapes, shared.shapes, strict=True):
        assert one == other or not other
    for of in ("gradients", "weights"):
        assert [x.dtype for x in vars(ordinary)[of].values()] == [x.dtype for x in vars(shared)[of].values()]
    assert ordinary.num_steps == shared.num_steps
    assert not shared.warnings - ordinary.warnings
    if door == "RadixCollator":
        assert not shared.models or not all(shared.shapes), "no radix batch came"
        return
    for model in shared.models:
        report = sharing_report(model)
        assert report.num_shared and not report.not_shared and report.compression_ratio > 1.5, report


SCALED = ("loop", "Accelerate", "Lightning", "Trainer", "SFTTrainer", "DPOTrainer", "RewardTrainer", "GRPOTrainer")


@pytest.mark.parametrize(
    ("program", "door"),
    cases([cell for cell in CELLS if cell[0] in SCALED], [("loop", "share_prefixes"), ("Trainer", "RadixCollator")]),
)
def test_a_step_that_the_scaler_skips(seen_of, program, door):
    """The first one, in both. The scale and all that is logged afterwards has the same names and types."""
    ordinary, shared = seen_of(program, OVERFLOWS), seen_of(program, OVERFLOWS, door)
    assert ordinary.num_steps == STEPS - 1
    assert_alike(ordinary, shared, door)
