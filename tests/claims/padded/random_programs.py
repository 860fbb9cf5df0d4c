"""Random programs on hidden states and logits: with `share_prefixes` each ends as with the untouched model beside it.

A program is up to six steps, each of which takes one of the tensors so far: a view, a copy, a function, a change in
place, a reader, a hook, a loss; some under `no_grad`, `inference_mode` or autocast. Compared are what readers read,
dtypes and strides, the loss, every gradient, and the kind of an error.
"""

import copy
import pickle
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from radixtrain import share_prefixes
from radixtrain.errors import UserError
from tests.support.models import tiny_model

V = 11
IDS = torch.tensor([[7, 8, 9, 1, 2, 3], [7, 8, 9, 1, 4, 5], [7, 8, 9, 5, 3, 2], [7, 8, 9, 5, 6, 4]])
BATCH = {"input_ids": IDS}
MASK = torch.arange(6) < torch.tensor([[6], [5], [4], [6]])
PADDED = {"input_ids": IDS * MASK, "attention_mask": MASK.long()}


@dataclass
class Run:
    """A program as it runs on one model. held: what a step may take. read: what is compared beside the gradients."""

    model: Any
    batch: dict[str, Tensor]
    held: list[Tensor] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    read: list[Any] = field(default_factory=list)
    watched: list[Tensor] = field(default_factory=list)
    error: BaseException | None = None

    def note(self, values: Iterable[Any]) -> None:
        self.read.extend(each.detach().clone() if isinstance(each, Tensor) else each for each in values)


Steps = dict[str, Callable[[Tensor], Any]]


def is_token(shape: Sequence[int]) -> Tensor:
    """Which places are tokens, of a shape that has all of the batch; else all are."""
    return MASK.reshape(shape) if torch.Size(shape).numel() == MASK.numel() else torch.ones(shape, dtype=torch.bool)


def labels_for(x: Tensor) -> Tensor:
    """A label for each row, every third of which does not count."""
    shape = x.shape[:-1]
    number = torch.arange(shape.numel()).view(shape)
    return (number * 5 % x.shape[-1]).masked_fill((number % 3 == 1) | ~is_token(shape), -100)


def tokens_for(x: Tensor) -> Tensor:
    return labels_for(x).clamp(min=0)[..., None]


def factor_for(x: Tensor) -> Tensor:
    """Other numbers at each place, so that no gradient is the same at two; 0 at padding."""
    found = torch.linspace(0.5, 1.5, x.numel(), dtype=x.dtype).view(x.shape)
    if x.numel() == MASK.numel():
        return found * is_token(x.shape)
    return found * is_token(x.shape[:-1])[..., None] if x.ndim else found


class Same(torch.autograd.Function):
    """Returns what it gets, with another gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 0.5 + 0 * ctx.saved_tensors[0]


class Changed(torch.autograd.Function):
    """Changes its argument in place, with a gradient of its own. by_alias: through another tensor of its memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, by_alias: bool) -> Tensor:
        ctx.mark_dirty(x)
        (x.detach() if by_alias else x).mul_(2.0)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return 1.5 * grad, None


def plus(x: Tensor, y: Tensor) -> None:
    x += 0.3 * y.detach().reshape(x.shape)


def entropy(x: Tensor) -> Tensor:
    """As TRL has it."""
    parts = []
    for chunk in x.reshape(-1, x.shape[-1]).split(5, dim=0):
        logprobs = functional.log_softmax(chunk, dim=-1)
        parts.append(-(torch.exp(logprobs) * logprobs).sum(-1))
    return torch.cat(parts).reshape(x.shape[:-1])


def selected(x: Tensor) -> Tensor:
    """As TRL has it."""
    found = torch.gather(x, dim=-1, index=tokens_for(x))
    sums = torch.stack([torch.logsumexp(row, dim=-1) for row in x])
    return (found - sums.unsqueeze(-1)).squeeze(-1)


def cross_entropy(x: Tensor, **options: Any) -> Tensor:
    return functional.cross_entropy(x.reshape(-1, x.shape[-1]), labels_for(x).reshape(-1), **options)


def of_each(values: Tensor) -> Tensor:
    """A number that each of them has another part in."""
    return (values * factor_for(values)).sum()


# The steps of each kind, by name. What those of the first three kinds return is held for later ones.


def views(run: Run) -> Steps:
    return {
        "x[:, 1:]": lambda x: x[:, 1:],
        "x[..., :-1, :]": lambda x: x[..., :-1, :],
        "x[1]": lambda x: x[1],
        "x[None]": lambda x: x[None],
        "x[..., :3]": lambda x: x[..., :3],
        "x[:, ::2]": lambda x: x[:, ::2],
        "view(-1, W)": lambda x: x.view(-1, x.shape[-1]),
        "flatten(0, 1)": lambda x: x.flatten(0, 1),
        "transpose": lambda x: x.transpose(0, 1),
        "split": lambda x: x.split(2)[1],
        "detach": Tensor.detach,
        "data": lambda x: x.data,
    }


def copies(run: Run) -> Steps:
    return {
        "contiguous": Tensor.contiguous,
        "clone": Tensor.clone,
        "reshape": lambda x: x.reshape(-1, x.shape[-1]),
        "reshape shifted": lambda x: x[:, :-1].reshape(-1, x.shape[-1]),
        "contiguous shifted": lambda x: x[..., :-1, :].contiguous(),
        "double": Tensor.double,
        "to": lambda x: x.to(torch.float32),
        "mask": lambda x: x[labels_for(x) != -100],
        "deepcopy": copy.deepcopy,
    }


def functions(run: Run) -> Steps:
    return {
        "head": lambda x: run.model.lm_head(x),
        "softcap": lambda x: 2 * torch.tanh(x / 2),
        "log_softmax": lambda x: x.log_softmax(-1),
        "log_softmax in float64": lambda x: x.log_softmax(-1, dtype=torch.float64),
        "log_softmax of places": lambda x: x.log_softmax(0),
        "times a tensor": lambda x: x * factor_for(x),
        "square": lambda x: x * x,
        "where": lambda x: torch.where(factor_for(x) > 1.2, x, x.detach()),
        "the same": Same.apply,
        "checkpoint head": lambda x: checkpoint(run.model.lm_head, x, use_reentrant=False),
        "checkpoint": lambda x: checkpoint(lambda y: (y / 3).softmax(-1), x, use_reentrant=True),
    }


def changes_in_place(run: Run) -> Steps:
    return {
        "+=": lambda x: plus(x, run.held[0]),
        "mul_ by places": lambda x: x.mul_(factor_for(x)),
        "x[0] = 0": lambda x: x.__setitem__(0, 0.0),
        "x[:, 1:] *= 2": lambda x: x[:, 1:].mul_(2.0),
        "data.mul_": lambda x: x.data.mul_(0.5),
        "data =": lambda x: setattr(x, "data", x.data * 0.5),
        "out=": lambda x: torch.mul(x.detach(), 2.0, out=x.detach()),
        "numpy": lambda x: np.multiply(x.detach().numpy(), 0.5, out=x.detach().numpy()),
        "a function": lambda x: Changed.apply(x, False),
        "a function, by an alias": lambda x: Changed.apply(x, True),
        "a function, a view": lambda x: Changed.apply(x[:, 1:], False),
    }


# torch does not notice these. After a function that saved its input, the ordinary gradient would be wrong.
SILENT = {"data.mul_", "data =", "numpy"}


def readers(run: Run) -> Steps:
    """What they return is compared."""
    return {
        "values": lambda x: [x],
        "numpy": lambda x: [torch.from_numpy(x.detach().numpy().copy())],
        "pickle": lambda x: [pickle.loads(pickle.dumps(x.detach()))],
        "dtype": lambda x: [x.dtype, x.shape, x.requires_grad, x.is_leaf],
        "layout": lambda x: [x.stride(), x.is_contiguous(), x.storage_offset()],
        "version": lambda x: [x._version, x.is_inference(), x.grad_fn is None],
        "memory": lambda x: [x.data_ptr() == each.data_ptr() for each in run.held],
        "func.grad": lambda x: [torch.func.grad(lambda w: (x.detach() * w).sum())(torch.ones(()).to(x))],
    }


def gradients(run: Run) -> Steps:
    def watch(x: Tensor) -> None:
        x.retain_grad()
        run.watched.append(x)

    def count(x: Tensor) -> None:
        """How often a hook is called that does not look at the gradient, as those of FSDP and DeepSpeed."""

        def hook(grad: Tensor) -> Tensor:
            num_calls.add_(grad.ndim == x.ndim)
            return grad

        num_calls = torch.zeros(())
        run.read.append(num_calls)
        x.register_hook(hook)

    return {
        "count": count,
        "hook": lambda x: x.register_hook(lambda grad: grad * factor_for(grad)),
        "retain_grad": watch,
        "prehook": lambda x: x.grad_fn.register_prehook(lambda grads: tuple(grad * 2 for grad in grads)),
        "tensor hook, removed": lambda x: x.register_hook(lambda grad: grad * 3).remove(),
        "autograd.grad": lambda x: run.note(torch.autograd.grad(sum(run.losses), x, retain_graph=True)),
    }


def losses(run: Run) -> Steps:
    return {
        "mean": cross_entropy,
        "sum": lambda x: cross_entropy(x, reduction="sum") / 7,
        "none": lambda x: of_each(cross_entropy(x, reduction="none")),
        "smoothed": lambda x: cross_entropy(x, label_smoothing=0.1),
        "ignored": lambda x: cross_entropy(x, ignore_index=5),
        "weighted": lambda x: cross_entropy(x, weight=torch.linspace(1, 2, x.shape[-1]).to(x.dtype)),
        "by axis": lambda x: functional.cross_entropy(x.mT, labels_for(x)),
        "per row": lambda x: torch.stack([cross_entropy(row) * (n + 1) for n, row in enumerate(x)]).mean(),
        "z": lambda x: of_each(x.logsumexp(-1).square()),
        "entropy": lambda x: of_each(entropy(x)),
        "gather": lambda x: of_each(x.log_softmax(-1).gather(-1, tokens_for(x))),
        "selected": lambda x: of_each(selected(x)),
        "squares": lambda x: of_each(x.square()),
        "checkpoint": lambda x: checkpoint(cross_entropy, x, use_reentrant=False),
        "checkpoint z": lambda x: checkpoint(lambda y: of_each(y.logsumexp(-1)), x, use_reentrant=True),
        "labels": lambda x: run.model(**run.batch, labels=IDS.masked_fill(~MASK, -100)).loss,
    }


KINDS: dict[str, tuple[Callable[[Run], Steps], int]] = {
    "view": (views, 4),
    "copy": (copies, 4),
    "function": (functions, 4),
    "in place": (changes_in_place, 5),
    "reader": (readers, 2),
    "gradient": (gradients, 3),
    "loss": (losses, 6),
}
NAMES = {kind: [*steps(Run(None, {}))] for kind, (steps, _) in KINDS.items()}
CONTEXTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "": nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}
# In float64; in float32 with everything under autocast; and with padding, which a loss must leave alone.
WAYS: dict[str, tuple[torch.dtype, dict[str, Tensor], str]] = {
    "float64": (torch.float64, BATCH, ""),
    "autocast": (torch.float32, BATCH, "autocast"),
    "padded": (torch.float64, PADDED, ""),
}


@dataclass(frozen=True)
class Line:
    """One step of a program. pick: which of the tensors that are held, from the last one."""

    kind: str
    name: str
    pick: int = 0
    context: str = ""

    def run(self, run: Run) -> None:
        x = run.held[-1 - self.pick % len(run.held)]
        with CONTEXTS[self.context]():
            found = KINDS[self.kind][0](run)[self.name](x)
            if self.kind == "reader":
                run.note(found)
        if self.kind == "loss":
            run.losses.append(found)
        elif self.kind in ("view", "copy", "function"):
            run.held.append(found)


Program = tuple[str, list[Line]]


def hidden_of(run: Run) -> Tensor:
    """Without autocast, so that only what a program does itself is rounded to bfloat16."""
    with torch.autocast("cpu", enabled=False):
        found: Tensor = run.model.model(**run.batch).last_hidden_state
    return found


START: dict[str, Callable[[Run], Tensor]] = {
    "logits": lambda run: run.model.lm_head(hidden_of(run)),
    "hidden": hidden_of,
    "hidden, frozen head": hidden_of,
}


def program(seed: int, way: str) -> Program:
    """A start, and up to six lines, the last of which is a loss."""
    rng = Random(seed)
    chosen = [*rng.choices([*KINDS], [weight for _, weight in KINDS.values()], k=rng.randrange(6)), "loss"]
    start = rng.choices([*START], [8, 2, 2])[0]
    lines = [line(rng, each) for each in chosen]
    head = [] if start == "logits" else [Line("function", "head")]
    return start, allowed([*lines[: len(lines) // 2], *head, *lines[len(lines) // 2 :]], way)


def allowed(lines: list[Line], way: str) -> list[Line]:
    """Those of which something is known.

    Of a silent change after a function, torch makes something itself. It crashes (2.13) if a hook is registered on a
    view after the tensor that it shows was changed in place. Only a gradient shows what is read of padding. A
    checkpoint saves its arguments in C++ (2.13), which refuses an ordinary tensor with the data of an inference tensor.
    """
    kept: list[Line] = []
    for each in lines:
        before = [one.kind for one in kept]
        is_silent = each.name in SILENT and {"function", "loss"} & {*before}
        on_changed = each.kind == "gradient" and "view" in before and "in place" in before
        of_padding = (
            each.kind in ("reader", "gradient") or each.context or each.name in ("detach", "data", "where", "+=")
        )
        of_inference = (each.name, each.context) == ("data =", "inference_mode")
        mixed = each.name == "labels" and "autocast" in (each.context, way)
        unknown = is_silent, on_changed, of_inference, mixed, way == "padded" and of_padding
        if not any(unknown):
            kept.append(each)
    return kept


def line(rng: Random, kind: str) -> Line:
    usual = {"reader": [4, 2, 2, 1], "loss": [12, 1, 1, 2]}.get(kind, [12, 2, 1, 1])
    context = rng.choices([*CONTEXTS], usual)[0]
    return Line(kind, rng.choice(NAMES[kind]), rng.choice([0, 0, 0, 1, 1, 2, 3, 5]), context)


def run_program(model: Any, program: Program, batch: dict[str, Tensor], context: str) -> Run:
    """The program to its end or its error, and the gradient of the sum of its losses."""
    start, lines = program
    run = Run(model, batch)
    model.zero_grad(set_to_none=True)
    model.lm_head.weight.requires_grad_("frozen" not in start)
    try:
        with CONTEXTS[context]():
            run.held.append(START[start](run))
            for each in lines:
                each.run(run)
            run.note(each.dtype for each in (*run.held, *run.losses))
        if "attention_mask" not in batch:  # a value may be read of padding, but no gradient given to it
            run.note(run.losses)
        total = sum(loss.double() for loss in run.losses if loss.requires_grad)
        if isinstance(total, Tensor):
            total.backward()
    except Exception as error:
        found = error.__cause__ if isinstance(error, SystemError) else error  # raised while torch looked at an argument
        run.error = found and found.with_traceback(None)  # whose frames would keep the hooks of a checkpoint in place
    run.note(each.grad for each in run.watched)
    run.note([torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None] or [torch.zeros(1)])])
    return run


def difference(ordinary: Run, shared: Run, bar: float) -> str:
    """How the two end differently; empty if they do not."""
    errors = ordinary.error, shared.error
    if shared.error is None and "has been modified" in str(ordinary.error):
        return ""  # here the backward pass reads rows of before the change, which is right
    if not any(isinstance(one, type(other)) for one, other in (errors, errors[::-1])):
        return f"{errors[0]!r} is {errors[1]!r}"
    if len(ordinary.read) != len(shared.read):
        return f"{len(ordinary.read)} values are {len(shared.read)}"
    pairs = zip(ordinary.read, shared.read, strict=True)
    return next(filter(None, (difference_of(one, other, bar) for one, other in pairs)), "")


def difference_of(one: Any, other: Any, bar: float) -> str:
    if not (isinstance(one, Tensor | float) and isinstance(other, Tensor | float)):
        return "" if one is other or one == other else f"{one} is {other}"
    one, other = torch.as_tensor(one), torch.as_tensor(other)
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return f"{one.dtype} {one.shape} is {other.dtype} {other.shape}"
    if not torch.equal(one.isfinite(), other.isfinite()):
        return "what is finite"
    values = [each.masked_fill(~each.isfinite(), 0.0).double() for each in (one, other)]
    error, scale = (values[0] - values[1]).norm(), values[0].norm().clamp(min=1.0)
    return "" if error <= bar * scale else f"off by {float(error)} of {float(scale)}"


def bar_of(program: Program, context: str) -> float:
    """Of what casts to fewer bits, some units of them may be rounded otherwise: 16 of bfloat16."""
    if "autocast" in {context, *(each.context for each in program[1])}:
        return 2**-4
    return 1e-5 if {"to", "labels"} & {each.name for each in program[1]} else 1e-12


def may_refuse(program: Program, error: BaseException | None, is_padded: bool) -> bool:
    """Whether a refusal is one of these: a gradient that is wanted late, padding."""
    if "gradient at each place" in str(error):
        lines = [*enumerate(program[1])]
        reads = [n for n, line in lines if line.kind in ("function", "copy", "loss")]
        wants = [n for n, line in lines if line.kind == "gradient" or line.name == "version"]
        return bool(reads and wants) and min(reads) < max(wants)
    return is_padded and "attention_mask hides" in str(error)


def compare(pair: tuple[Any, Any], program: Program, way: str) -> str:
    """How they differ; "refused" for what may be refused."""
    _, batch, context = WAYS[way]
    ordinary, shared = (run_program(model, program, batch, context) for model in pair)
    if isinstance(shared.error, UserError) and may_refuse(program, shared.error, way == "padded"):
        return "refused"
    return difference(ordinary, shared, bar_of(program, context))


def tiny_pair(way: str = "float64") -> tuple[Any, Any]:
    """An OPT, whose arithmetic is that of its weights throughout: untouched, and shared."""
    sizes = {"vocab_size": V, "hidden_size": 16, "word_embed_proj_dim": 16, "ffn_dim": 32, "num_hidden_layers": 1}
    models = [tiny_model("OPTForCausalLM", **sizes, num_attention_heads=2).to(WAYS[way][0]).train() for _ in range(2)]
    for model in models:
        model.config.use_cache = False
    return models[0], share_prefixes(models[1], min_ratio=0.0)
