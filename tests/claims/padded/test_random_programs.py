"""Random programs on hidden states and logits: with `share_prefixes` each ends as with the untouched model beside it.

A program is up to six steps, each of which takes one of the tensors so far: a view, a copy, a function, a change in
place, a reader, a hook, a loss; some under `no_grad`, `inference_mode` or autocast. Compared are what readers read,
dtypes and strides, the loss, every gradient, and the kind of an error.
"""

import copy
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from random import Random, SystemRandom
from typing import Any

import numpy as np
import pytest
import torch
from tiers import FULL, TRIES
from tiny_models import tiny_model
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from radixtrain import share_prefixes, sharing_report
from radixtrain.errors import UserError
from radixtrain.testing import relative_error

V = 11
IDS = torch.tensor([[7, 8, 9, 1, 2, 3], [7, 8, 9, 1, 4, 5], [7, 8, 9, 5, 3, 2], [7, 8, 9, 5, 6, 4]])
REFUSALS = ("gradient at each place",)


@dataclass
class Run:
    """A program as it runs on one model. held: what a step may take. read: what is compared beside the gradients."""

    model: Any
    held: list[Tensor] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    read: list[Any] = field(default_factory=list)
    watched: list[Tensor] = field(default_factory=list)
    error: BaseException | None = None

    def keep(self, *tensors: Tensor) -> None:
        self.held.extend(each for each in tensors if isinstance(each, Tensor))


Step = Callable[[Run, Tensor, Random], Any]


def labels_for(x: Tensor, ignored: int = -100, part: int = 3) -> Tensor:
    """A label for each row, every third of which does not count."""
    number = torch.arange(x.shape[:-1].numel())
    return (number * 5 % x.shape[-1]).masked_fill(number % part == 1, ignored).view(x.shape[:-1])


def tokens_for(x: Tensor) -> Tensor:
    return labels_for(x).clamp(min=0)[..., None]


def factor_for(x: Tensor) -> Tensor:
    """Other numbers at each place, so that no gradient is the same at two."""
    return torch.linspace(0.5, 1.5, x.numel(), dtype=x.dtype).view(x.shape)


# What a step gives is held for later ones.

VIEWS: dict[str, Step] = {
    "x[:, 1:]": lambda run, x, rng: x[:, 1:],
    "x[:, :-1]": lambda run, x, rng: x[:, :-1],
    "x[..., :-1, :]": lambda run, x, rng: x[..., :-1, :],
    "x[n]": lambda run, x, rng: x[rng.randrange(4)],
    "x[1:3]": lambda run, x, rng: x[1:3],
    "x[None]": lambda run, x, rng: x[None],
    "x[..., :3]": lambda run, x, rng: x[..., :3],
    "x[:, ::2]": lambda run, x, rng: x[:, ::2],
    "view(-1, W)": lambda run, x, rng: x.view(-1, x.shape[-1]),
    "view(4, -1)": lambda run, x, rng: x.view(4, -1),
    "flatten(0, 1)": lambda run, x, rng: x.flatten(0, 1),
    "transpose": lambda run, x, rng: x.transpose(0, 1),
    "mT": lambda run, x, rng: x.mT,
    "unsqueeze": lambda run, x, rng: x.unsqueeze(1),
    "squeeze": lambda run, x, rng: x.squeeze(),
    "expand": lambda run, x, rng: x[:1].expand(3, *x.shape[1:]),
    "iter": lambda run, x, rng: [*x][rng.randrange(2)],
    "unbind": lambda run, x, rng: x.unbind(0)[0],
    "split": lambda run, x, rng: x.split(2)[rng.randrange(2)],
    "chunk": lambda run, x, rng: x.chunk(2, 1)[1],
    "narrow": lambda run, x, rng: x.narrow(0, 1, 2),
    "select": lambda run, x, rng: x.select(1, 2),
    "view_as": lambda run, x, rng: x.view_as(x),
    "detach": lambda run, x, rng: x.detach(),
    "data": lambda run, x, rng: x.data,
    "alias": lambda run, x, rng: x,
}
COPIES: dict[str, Step] = {
    "contiguous": lambda run, x, rng: x.contiguous(),
    "clone": lambda run, x, rng: x.clone(),
    "reshape": lambda run, x, rng: x.reshape(-1, x.shape[-1]),
    "reshape shifted": lambda run, x, rng: x[:, :-1].reshape(-1, x.shape[-1]),
    "contiguous shifted": lambda run, x, rng: x[..., :-1, :].contiguous(),
    "float": lambda run, x, rng: x.float(),
    "double": lambda run, x, rng: x.double(),
    "to": lambda run, x, rng: x.to(torch.float32),
    "to a copy": lambda run, x, rng: x.to(x.dtype, copy=True),
    "type": lambda run, x, rng: x.type(torch.float64),
    "rows": lambda run, x, rng: x[torch.tensor([2, 0, 3])],
    "mask": lambda run, x, rng: x[labels_for(x) != -100],
    "cat": lambda run, x, rng: torch.cat([x, x]),
    "stack": lambda run, x, rng: torch.stack([*x]),
    "deepcopy": lambda run, x, rng: copy.deepcopy(x),
}
FUNCTIONS: dict[str, Step] = {
    "head": lambda run, x, rng: run.model.lm_head(x),
    "temperature": lambda run, x, rng: x / 0.7,
    "scale": lambda run, x, rng: 1.5 * x,
    "softcap": lambda run, x, rng: torch.tanh(x / 2) * 2,
    "neg": lambda run, x, rng: -x,
    "exp": lambda run, x, rng: (x / 9).exp(),
    "log_softmax": lambda run, x, rng: x.log_softmax(-1),
    "F.log_softmax": lambda run, x, rng: functional.log_softmax(x, dim=-1),
    "log_softmax in float64": lambda run, x, rng: x.log_softmax(-1, dtype=torch.float64),
    "softmax": lambda run, x, rng: torch.softmax(x, dim=-1),
    "softmax of places": lambda run, x, rng: x.softmax(0),
    "centred": lambda run, x, rng: x - x.mean(-1, keepdim=True),
    "times a tensor": lambda run, x, rng: x * factor_for(x),
    "square": lambda run, x, rng: x * x,
    "masked_fill": lambda run, x, rng: x.masked_fill(factor_for(x) > 1.3, -1.0),
    "where": lambda run, x, rng: torch.where(factor_for(x) > 1.2, x, x.detach()),
    "a function": lambda run, x, rng: Doubled.apply(x),
    "the same": lambda run, x, rng: Same.apply(x),
    "checkpoint head": lambda run, x, rng: checkpoint(run.model.lm_head, x, use_reentrant=rng.random() < 0.5),
    "checkpoint": lambda run, x, rng: checkpoint(lambda y: (y / 3).softmax(-1), x, use_reentrant=rng.random() < 0.5),
    "vmap": lambda run, x, rng: torch.func.vmap(lambda row: row * 2)(x),
}


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2 + 0 * ctx.saved_tensors[0]


class Same(torch.autograd.Function):
    """Returns what it gets, with another gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 0.5


def unlike(x: Tensor, y: Tensor) -> Tensor:
    """In place, with what is held on both sides."""
    x += y.mean().detach()
    return x


IN_PLACE: dict[str, Step] = {
    "div_": lambda run, x, rng: x.div_(2.0),
    "/=": lambda run, x, rng: unlike(x, run.held[0]),
    "mul_ by places": lambda run, x, rng: x.mul_(factor_for(x)),
    "add_": lambda run, x, rng: x.add_(0.3 * factor_for(x)),
    "clamp_": lambda run, x, rng: x.clamp_(-0.5, 0.5),
    "tanh_": lambda run, x, rng: x.tanh_(),
    "masked_fill_": lambda run, x, rng: x.masked_fill_(factor_for(x) > 1.3, -1.0),
    "x[0] = 0": lambda run, x, rng: x.__setitem__(0, 0.0),
    "x[:, 1:] *= 2": lambda run, x, rng: x[:, 1:].mul_(2.0),
    "copy_": lambda run, x, rng: x[:1].copy_(factor_for(x[:1])),
    "zero_": lambda run, x, rng: x[..., -1].zero_(),
    "data.mul_": lambda run, x, rng: x.data.mul_(0.5),
    "data =": lambda run, x, rng: setattr(x, "data", x.data * 0.5),
    "out=": lambda run, x, rng: torch.mul(x.detach(), 2.0, out=x.detach()),
    "foreach": lambda run, x, rng: torch._foreach_mul_([x.detach()], 0.5),
    "numpy": lambda run, x, rng: np.multiply(x.detach().numpy(), 0.5, out=x.detach().numpy()),
    "dlpack": lambda run, x, rng: torch.from_dlpack(x.detach()).mul_(0.5),
}


# torch does not notice these. After a function that saved its input, the ordinary gradient would be wrong.
SILENT = {"data.mul_", "data =", "numpy", "dlpack"}


def note(run: Run, *values: Any) -> None:
    run.read.extend(each.detach().clone() if isinstance(each, Tensor) else each for each in values)


READERS: dict[str, Step] = {
    "argmax": lambda run, x, rng: note(run, x.argmax(-1).double()),
    "item": lambda run, x, rng: note(run, x.mean().item(), x.max().item()),
    "values": lambda run, x, rng: note(run, x),
    "sum": lambda run, x, rng: note(run, x.sum(-1), x.logsumexp(-1)),
    "numpy": lambda run, x, rng: note(run, torch.from_numpy(x.detach().numpy().copy())),
    "array": lambda run, x, rng: note(run, torch.from_numpy(np.asarray(x.detach().cpu()).copy())),
    "pickle": lambda run, x, rng: note(run, pickle.loads(pickle.dumps(x.detach()))),
    "tolist": lambda run, x, rng: note(run, torch.tensor(x.tolist())),
    "equal": lambda run, x, rng: note(run, torch.equal(x, x), (x == x).all().item()),
    "dtype": lambda run, x, rng: note(run, x.dtype, x.shape, x.requires_grad, x.is_leaf),
    "layout": lambda run, x, rng: note(run, x.stride(), x.is_contiguous(), x.storage_offset()),
    "version": lambda run, x, rng: note(run, x._version, x.is_inference(), x.grad_fn is None),
    "memory": lambda run, x, rng: note(run, [x.data_ptr() == each.data_ptr() for each in run.held]),
    "entropy": lambda run, x, rng: note(run, entropy(x)),
    "func.grad": lambda run, x, rng: note(run, torch.func.grad(lambda w: (x.detach() * w).sum())(torch.ones(()).to(x))),
}


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


def per_row(x: Tensor) -> Tensor:
    return torch.stack([cross_entropy(row) * (n + 1) for n, row in enumerate(x)]).mean()


def divergence(x: Tensor, y: Tensor) -> Tensor:
    return functional.kl_div(x.log_softmax(-1), y.detach().reshape(x.shape).softmax(-1), reduction="sum")


LOSSES: dict[str, Step] = {
    "mean": lambda run, x, rng: cross_entropy(x),
    "sum": lambda run, x, rng: cross_entropy(x, reduction="sum") / 7,
    "none": lambda run, x, rng: of_each(cross_entropy(x, reduction="none")),
    "smoothed": lambda run, x, rng: cross_entropy(x, label_smoothing=0.1),
    "ignored": lambda run, x, rng: cross_entropy(x, ignore_index=5),
    "weighted": lambda run, x, rng: cross_entropy(x, weight=torch.linspace(1, 2, x.shape[-1]).to(x.dtype)),
    "shifted": lambda run, x, rng: cross_entropy(x[..., :-1, :].contiguous()),
    "by axis": lambda run, x, rng: functional.cross_entropy(x.mT, labels_for(x)),
    "per row": lambda run, x, rng: per_row(x),
    "z": lambda run, x, rng: of_each(x.logsumexp(-1).square()),
    "z keepdim": lambda run, x, rng: x.logsumexp(-1, keepdim=True).square().mean(),
    "entropy": lambda run, x, rng: of_each(entropy(x)),
    "divergence": lambda run, x, rng: divergence(x, run.held[0] if run.held[0].shape == x.shape else x / 2),
    "gather": lambda run, x, rng: of_each(x.log_softmax(-1).gather(-1, tokens_for(x))),
    "torch.gather": lambda run, x, rng: of_each(torch.gather(functional.log_softmax(x, -1), -1, tokens_for(x))[..., 0]),
    "selected": lambda run, x, rng: of_each(selected(x)),
    "masked": lambda run, x, rng: x[labels_for(x) != -100].square().mean(),
    "squares": lambda run, x, rng: of_each(x.square()),
    "checkpoint": lambda run, x, rng: checkpoint(cross_entropy, x, use_reentrant=rng.random() < 0.5),
    "checkpoint z": lambda run, x, rng: checkpoint(
        lambda y: of_each(y.logsumexp(-1)), x, use_reentrant=rng.random() < 0.5
    ),
    "labels": lambda run, x, rng: run.model(input_ids=IDS, labels=IDS).loss,
}


def watch(run: Run, x: Tensor) -> None:
    x.retain_grad()
    run.watched.append(x)


def of_node(run: Run, x: Tensor) -> None:
    x.grad_fn.register_prehook(lambda grads: tuple(grad * 2 for grad in grads))  # type: ignore[union-attr]


GRADIENTS: dict[str, Step] = {
    "hook": lambda run, x, rng: x.register_hook(lambda grad: grad * factor_for(grad)),
    "clipped": lambda run, x, rng: x.register_hook(lambda grad: grad.clamp(-0.01, 0.01)),
    "retain_grad": lambda run, x, rng: watch(run, x),
    "prehook": lambda run, x, rng: of_node(run, x),
    "autograd.grad": lambda run, x, rng: note(run, *torch.autograd.grad(sum(run.losses), x, retain_graph=True)),
}
KINDS: dict[str, tuple[dict[str, Step], int]] = {
    "view": (VIEWS, 6),
    "copy": (COPIES, 3),
    "function": (FUNCTIONS, 4),
    "in place": (IN_PLACE, 3),
    "reader": (READERS, 3),
    "gradient": (GRADIENTS, 1),
    "loss": (LOSSES, 4),
}
CONTEXTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "": nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@dataclass(frozen=True)
class Line:
    """One step of a program. pick: which of the tensors that are held, from the last one."""

    kind: str
    name: str
    pick: int
    context: str
    seed: int

    def run(self, run: Run) -> None:
        x = run.held[-1 - self.pick % len(run.held)]
        with CONTEXTS[self.context]():
            found = KINDS[self.kind][0][self.name](run, x, Random(self.seed))
        if self.kind == "loss":
            run.losses.append(found)
        elif self.kind in ("view", "copy", "function"):
            run.keep(found)


Program = tuple[str, list[Line]]
START = {
    "logits": lambda model: [model(input_ids=IDS).logits],
    "hidden": lambda model: [model.model(input_ids=IDS).last_hidden_state],
}


def program(rng: Random) -> Program:
    """A start, and up to six lines, the last of which is a loss."""
    kinds, weights = [*KINDS], [weight for _, weight in KINDS.values()]
    chosen = [*rng.choices(kinds, weights, k=rng.randrange(6)), "loss"]
    start = "hidden" if rng.random() < 0.25 else "logits"
    lines = [line(rng, kind) for kind in chosen]
    head = [Line("function", "head", 0, "", 0)] if start == "hidden" else []
    return start, allowed([*lines[: len(lines) // 2], *head, *lines[len(lines) // 2 :]])


def allowed(lines: list[Line]) -> list[Line]:
    """Those of which torch makes something itself: no silent change after a function, no hook on a changed view.

    torch 2.13 crashes if a hook is registered on a view after the tensor that it shows was changed in place.
    """
    kept: list[Line] = []
    for each in lines:
        kinds = [one.kind for one in kept]
        is_silent = each.name in SILENT and {"function", "loss"} & {*kinds}
        on_changed = each.kind == "gradient" and "view" in kinds and "in place" in kinds
        kept += [] if is_silent or on_changed else [each]
    return kept


def line(rng: Random, kind: str) -> Line:
    usual = {"reader": [4, 2, 2, 1], "loss": [12, 1, 1, 2]}.get(kind, [12, 2, 1, 1])
    context = rng.choices([*CONTEXTS], usual)[0]
    return Line(kind, rng.choice([*KINDS[kind][0]]), rng.choice([0, 0, 0, 1, 1, 2, 3, 5]), context, rng.randrange(99))


def run_program(model: Any, program: Program, context: str = "") -> Run:
    start, lines = program
    run = Run(model)
    model.zero_grad(set_to_none=True)
    try:
        with CONTEXTS[context]():
            run.keep(*START[start](model))
            for each in lines:
                each.run(run)
            note(run, *(each.dtype for each in (*run.held, *run.losses)))
        total = sum(loss.double() for loss in run.losses if loss.requires_grad)
        note(run, *run.losses)
        if isinstance(total, Tensor):
            total.backward()
    except Exception as error:  # noqa: BLE001
        run.error = error
    note(run, *(each.grad for each in run.watched))
    note(run, *(p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()))
    return run


def difference(ordinary: Run, shared: Run, bar: float) -> str:
    """How the two end differently; empty if they do not."""
    errors = [type(each.error).__name__ for each in (ordinary, shared)]
    if not any(isinstance(each.error, type(other.error)) for each, other in ((ordinary, shared), (shared, ordinary))):
        return f"errors {errors}: {ordinary.error or shared.error}"
    if len(ordinary.read) != len(shared.read):
        return f"{len(ordinary.read)} values are {len(shared.read)}"
    for one, other in zip(ordinary.read, shared.read, strict=True):
        if not isinstance(one, Tensor | float):
            if one != other:
                return f"{one} is {other}"
            continue
        one, other = torch.as_tensor(one), torch.as_tensor(other)
        if one.dtype != other.dtype or one.shape != other.shape:
            return f"{one.dtype} {one.shape} is {other.dtype} {other.shape}"
        if not torch.allclose(one, other, rtol=bar, atol=bar * max(1.0, float(one.abs().max())) if one.numel() else 0, equal_nan=True):
            return f"off by {float((one - other).abs().max())} of {float(one.abs().max())}"
    return ""
