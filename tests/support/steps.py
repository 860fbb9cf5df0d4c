"""One step, ordinary and shared: the comparators of loss and gradients, and random programs on what a model returns."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import radixtrain.hf.attention_interface
from radixtrain import RadixCollator, restore_model, share_prefixes, sharing_report
from radixtrain.errors import UserError
from radixtrain.hf.backbone import backbone_of
from radixtrain.hf.recurrent import Mixer
from radixtrain.hf.sharing_report import SharingReport
from radixtrain.tree.radix_inputs import layout_of
from radixtrain.tree.runs import cheapest_runs
from radixtrain.verification.equivalence import compare_gradients
from radixtrain.verification.oracle import (
    Features,
    Gradients,
    float64_throughout,
    float64_truth,
    gradients_of,
    radix_batch,
)
from radixtrain.verification.report import TENSOR_FACTOR, Rung
from tests.support import cases
from tests.support.batches import PaddedBatch
from tests.support.models import tiny_model

# The one comparator: loss and every gradient are those of the ordinary model, in float64 throughout.
#
# Whatever a step is (a batch, micro-batches, passes, images, layers that fork), it is the terms of its loss.
#
# A bar for what only float32 can show: the noise of two ordinary runs, measured in the same test.
#
# Exactness belongs to float64 (`float64_arithmetic`, `float64_throughout`). Where a test has to compute in float32, no
# number is a bar for every processor: each has instructions and libraries of its own, which add in another order.
#
# Tree attention whose keys are wrong: a mistake that a comparison has to find.


BAR = 1e-12  # relative L2 of each parameter's gradient, and of the loss
Terms = Callable[[Any], Iterable[Tensor]]
"""Given a prepared model: the terms of the loss of one step, each of which goes backward by itself."""


def step_in_float64(model: Any, truth: Gradients | Features, ours: Terms, **options: Any) -> Rung:
    """The errors of a step. The model is as it came from Hugging Face afterwards.

    truth: the true gradient, or features, whose true gradient is that of each sequence by itself.
    options: of `share_prefixes`.
    """
    exact = truth if isinstance(truth, Gradients) else float64_truth(restore_model(model), truth)
    with float64_throughout(restore_model(model)):
        prepared = share_prefixes(model, **options)
        try:
            found = gradients_of(prepared, lambda: ours(prepared))
        finally:
            restore_model(model)
    return compare_gradients("float64", exact, exact, found)


def same(truth: Gradients, found: Gradients, *, what: Any = "", bar: float = BAR) -> Rung:
    """Assert that loss and every gradient of two arms are equal, and return their errors. what: for the message."""
    assert found.tensors.keys() == truth.tensors.keys(), what
    return _within(compare_gradients("float64", truth, truth, found), what, bar)


def same_gradient(model: Any, loss_of: Callable[[Any], Tensor], share: Callable[[Any], Any] = share_prefixes) -> Rung:
    """Assert that `loss_of(model)` and its gradients are the same before and after `share(model)`; return the errors.

    The report counts the calls of the second loss, and of the first one if `share` had been called before.
    """
    with float64_throughout(model):
        truth = gradients_of(model, lambda: [loss_of(model)])
        return same(truth, gradients_of(share(model), lambda: [loss_of(model)]))


def assert_same_gradient(
    model: Any, loss_of: Callable[[Any], Tensor], share: Callable[[Any], Any] = share_prefixes
) -> SharingReport:
    """Assert as `same_gradient` does, and return what was shared."""
    same_gradient(model, loss_of, share)
    return sharing_report(model)


def same_step(
    model: Any, truth: Gradients | Features, ours: Terms, *, bar: float = BAR, what: Any = "", **options: Any
) -> Rung:
    """Assert that loss and gradients are the true ones, and return their errors.

    what: for the message. The rest as for `step_in_float64`.
    """
    return _within(step_in_float64(model, truth, ours, **options), what, bar)


def _within(rung: Rung, what: Any, bar: float) -> Rung:
    assert not rung.failed, f"{what}: {rung.reason}"
    assert rung.worst.radix <= bar and rung.loss.radix <= bar, f"{what}: {rung.worst}, loss {rung.loss.radix:.1e}"
    return rung


def assert_within_noise(found: Any, ordinary: Any, again: Any, what: str = "") -> None:
    """Assert that `found` is about as close to an ordinary run as another ordinary run is.

    found, ordinary, again: numbers, sequences of them or tensors of one shape. `again` is as ordinary as `ordinary`,
    and adds in another order: another attention of Hugging Face, rows in another order, each row alone.

    The bar is TENSOR_FACTOR, 10, times the L2 distance of the two ordinary ones, plus two roundings of float32: one
    sample of the noise may be small by luck, also of numbers that happen to be equal. A NaN fails.
    """
    one, other, third = (_array(values) for values in (found, ordinary, again))
    assert one.shape == other.shape == third.shape, (one.shape, other.shape, third.shape)
    error, noise, size = (float(np.linalg.norm(x)) for x in (one - other, third - other, other))
    bar = TENSOR_FACTOR * noise + float(torch.finfo(torch.float32).eps) * size
    assert error <= bar < float("inf"), f"{what} differ by {error:.3g}, two ordinary runs by {noise:.3g}: bar {bar:.3g}"


def _array(values: Any) -> np.ndarray:
    values = values.detach().double().cpu() if isinstance(values, torch.Tensor) else values
    return np.asarray(values, dtype=np.float64)


def with_wrong_keys(patch: pytest.MonkeyPatch, by: float = 1e-3, forward: bool = False, above: int = 0) -> None:
    """Keys, or only their gradients, are off by this factor, in batches of more rows than `above`."""
    attend = radixtrain.hf.attention_interface.tree_attention

    def broken(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
        wrong = key * (1 + by) if forward else key + by * (key - key.detach())
        return attend(query, wrong if len(key) > above else key, value, *args, **options)

    patch.setattr(radixtrain.hf.attention_interface, "tree_attention", broken)


# One padded batch through an ordinary model and through its copy with `share_prefixes`: loss and every gradient.
#
# The ordinary model is the oracle: it runs on the same padded batch. Both compute in float64 throughout.
#
#     B rows, L columns, T kept tokens, D hidden, V vocabulary
#
# What a model generates, before and after `share_prefixes`.


@dataclass(frozen=True)
class Reads:
    """What a loss reads beside the last hidden states and the logits of the kept tokens.

    seed: of its random labels and weights. hidden_states: of every layer. own_loss: the model's own, of next tokens.
    router: the model's load-balancing loss. logits_to_keep: logits of only so many last columns; 0 for all.
    """

    seed: int
    hidden_states: bool = False
    own_loss: bool = False
    router: bool = False
    logits_to_keep: int = 0

    @classmethod
    def draw(
        cls, rng: np.random.Generator, width: int, *, has_own_loss: bool, can_keep: bool, has_router: bool
    ) -> Reads:
        """width: columns of the batch. The rest says what the model has."""
        keep = int(rng.integers(1, width + 1)) if can_keep and rng.random() < 0.25 else 0
        own_loss = has_own_loss and not keep and rng.random() < 0.3  # labels are of all places
        return cls(int(rng.integers(1 << 31)), rng.random() < 0.3, own_loss, has_router, keep)

    def loss(self, model: Any, batch: PaddedBatch) -> Tensor:
        """A scalar, of order one, that reads nothing at padding."""
        generator = torch.Generator().manual_seed(self.seed)
        labels = batch.labels()
        has_own_loss = self.own_loss and bool((labels[:, 1:] != -100).any())  # its mean over no label is NaN
        options: dict[str, Any] = {"output_hidden_states": True} if self.hidden_states else {}
        options |= {"labels": labels} if has_own_loss else {}
        options |= {"output_router_logits": True} if self.router else {}
        options |= {"logits_to_keep": self.logits_to_keep} if self.logits_to_keep else {}
        torch.manual_seed(self.seed)  # for dropout after the backbone, which draws for every place in both models
        with _last_hidden_states(model) as returned:
            output = model(**batch.inputs, use_cache=False, **options)
        (hidden,) = returned
        assert hidden.shape[:2] == batch.kept.shape
        terms = [_weighted(hidden, batch.kept, generator), _of_logits(output.logits, batch.kept, generator)]
        if has_own_loss:
            terms.append(output.loss)
        if self.router and getattr(output, "aux_loss", None) is not None:
            terms.append(output.aux_loss)
        if self.hidden_states:
            terms += [_weighted(each, batch.kept, generator) for each in output.hidden_states]
        return torch.stack(terms).sum()


def _of_logits(logits: Tensor, kept: Tensor, generator: torch.Generator) -> Tensor:
    """logits: (B, K, V) of the last K columns, or (B, V) of a whole row, which is weighted as it is."""
    if logits.ndim == 2:
        return _weighted(logits, torch.ones(len(logits), dtype=torch.bool), generator)
    logits_TV = logits[kept[:, -logits.shape[1] :]]
    labels_T = torch.randint(logits.shape[-1], (len(logits_TV), 1), generator=generator)
    weights_T = torch.rand(len(logits_TV), generator=generator)
    logprobs_T = logits_TV.log_softmax(-1).gather(1, labels_T)[:, 0]
    return -(logprobs_T * weights_T).sum() / max(len(logits_TV), 1)


def _weighted(x: Tensor, kept: Tensor, generator: torch.Generator) -> Tensor:
    """A random linear function of x, (..., B, L, D), at the kept places, divided by their number."""
    read = x[..., kept, :]
    return (read * torch.randn(read.shape, generator=generator)).sum() / read.shape[-2]


@contextmanager
def _last_hidden_states(model: nn.Module) -> Iterator[list[Tensor]]:
    """Inside, the list receives what the backbone returns, as a value head gets it."""
    returned: list[Tensor] = []
    handle = backbone_of(model).register_forward_hook(lambda module, args, output: returned.append(output[0]))
    try:
        yield returned
    finally:
        handle.remove()


@dataclass
class Pair:
    """An ordinary model and its copy with `share_prefixes`, as `in_float64` makes them.

    learned: whether the model has learned positions, so that left padding without `position_ids` is not shared.
    packs: whether the model separates the sequences of a packed row; else it is not shared.
    shares_all: whether every unique token is computed once, with `min_shared_tokens` 1.
    alive: parameters that had a gradient in some batch. worst: the largest error so far.
    """

    ordinary: Any
    shared: Any
    learned: bool = False
    packs: bool = True
    shares_all: bool = True
    alive: set[str] = field(default_factory=set)
    worst: float = 0.0

    def share(self, **options: Any) -> None:
        """Anew, with other options; every batch that shares anything is shared."""
        share_prefixes(self.shared, min_ratio=0.0, **options)
        self.shares_all = options.get("min_shared_tokens", 1) == 1

    def check(self, batch: PaddedBatch, reads: Reads) -> None:
        """Raises AssertionError unless loss and gradients are equal, the batch was shared and padding is finite."""
        what = f"{batch.kind}, {reads}"
        truth = gradients_of(self.ordinary, lambda: [reads.loss(self.ordinary, batch)])
        before = replace(sharing_report(self.shared))
        with _last_hidden_states(self.shared) as returned:
            found = gradients_of(self.shared, lambda: [reads.loss(self.shared, batch)])
        self._check_sharing(batch, before, returned[0], what)
        rung = same(truth, found, what=what)
        self.alive |= {tensor.name for tensor in rung.alive}
        self.worst = max(self.worst, rung.worst.radix)

    def _check_sharing(self, batch: PaddedBatch, before: SharingReport, hidden: Tensor, what: str) -> None:
        report = sharing_report(self.shared)
        expected = (self.packs or not batch.is_packed) and not (self.learned and batch.counts_padding)
        assert report.num_shared - before.num_shared == expected, f"{what}: {report}"
        if not expected:
            return
        assert hidden.isfinite().all(), f"{what}: padding is not finite"
        assert report.num_tokens - before.num_tokens == batch.kept.sum(), what
        unique, least = report.num_unique_tokens - before.num_unique_tokens, batch.num_unique_tokens
        assert unique == least or (unique > least and not self.shares_all), f"{what}: {unique} tokens for {least}"


@contextmanager
def in_float64(model: Any, **fields: Any) -> Iterator[Pair]:
    """The pair, in float64 throughout; the model is as before afterwards."""
    with float64_throughout(model):
        pair = Pair(model, deepcopy(model), **fields)
        pair.share()
        yield pair


PROMPT_IDS = torch.tensor([[0, 0, 7, 8, 9, 1], [7, 8, 9, 1, 2, 3], [0, 7, 8, 9, 1, 2]])
PROMPTS = {"input_ids": PROMPT_IDS, "attention_mask": (PROMPT_IDS != 0).long()}


def generated(model: Any, **options: Any) -> Any:
    """Tokens and scores of eight new tokens."""
    torch.manual_seed(0)
    prompts = {name: x[:1, 2:] for name, x in PROMPTS.items()} if "prompt_lookup_num_tokens" in options else PROMPTS
    fixed = {"max_new_tokens": 8, "return_dict_in_generate": True, "output_scores": True, "pad_token_id": 0}
    return model.generate(**prompts, **fixed, eos_token_id=None, disable_compile=True, **options)


def assert_generates_the_same(model: Any, **options: Any) -> None:
    """The same tokens and scores, bit for bit, and no call shared."""
    plain = generated(model, **options)
    shared = generated(share_prefixes(model, min_ratio=0.0), **options)
    report = sharing_report(model)
    assert report.num_shared == 0 and report.num_generating > 0, f"{report.num_shared} calls shared: {report}"
    assert torch.equal(plain.sequences, shared.sequences)
    assert all(map(torch.equal, plain.scores, shared.scores))


# Tiny models with recurrent layers against the stock model: rows that fork, and what equal means.
#
# The truth is the stock model on each row by itself, in float64 with every cast lifted; forks are forced, because rows
# as short as these pay for none (the fixture `free_forks`).


Build = Callable[..., Any]
KINDS = ["Qwen3.5", "Bamba", "LFM2"]
ONE_KIND = pytest.mark.parametrize("kind", cases(KINDS, ["Qwen3.5"]))  # `make test` runs only that
PROMPT = [7, 8, 9, 1, 2, 3, 11, 4, 6, 5]
ROWS = [
    [*PROMPT, 4, 5, 6, 10, 21],
    [*PROMPT, 4, 5, 12, 13],
    [*PROMPT, 31],
    [*PROMPT[:6], 17, 18, 19, 20],
    [*PROMPT[:6], 17, 22],
    [30, 33, 36, 39],
]
FEATURES = [{"input_ids": ids, "labels": [-100, *ids[1:]]} for ids in ROWS]
OTHERS = [{"input_ids": ids, "labels": [-100, *ids[1:]]} for ids in ([5, 4, 3, 2, 7, 1], [5, 4, 3, 2, 7, 9, 9], [5, 6])]


def batch_of(features: Any = FEATURES) -> dict[str, Any]:
    batch = RadixCollator()(features)
    assert cheapest_runs(*layout_of(batch).segments).num_forks, "these rows do not fork"
    return batch


def assert_exact(model: Any, truth: Any, arm: Callable[[], Iterator[Tensor]] | None = None) -> None:
    """A prepared model has the true gradient. arm: the terms of its loss, by default of one batch with forks."""
    with float64_throughout(model):
        found = gradients_of(model, arm or (lambda: radix_batch(model, batch_of())))
    same(truth, found)


def padded(rows: list[list[int]], side: str) -> dict[str, Tensor]:
    longest = max(map(len, rows))
    pads = [[0] * (longest - len(row)) for row in rows]
    ids = [row + pad if side == "right" else pad + row for row, pad in zip(rows, pads, strict=True)]
    input_ids = torch.tensor(ids)
    return {"input_ids": input_ids, "attention_mask": (input_ids != 0).long()}


def mixers_in(model: nn.Module) -> list[Mixer]:
    found = [getattr(module.__dict__.get("forward"), "__self__", None) for module in model.modules()]
    return [each for each in found if isinstance(each, Mixer)]


# Random programs on hidden states and logits: with `share_prefixes` each ends as with the untouched model beside it.
#
# A program is up to six steps, each of which takes one of the tensors so far: a view, a copy, a function, a change in
# place, a reader, a hook, a loss; some under `no_grad`, `inference_mode` or autocast. Compared are what readers read,
# dtypes and strides, the loss, every gradient, and the kind of an error.


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

    def keep(self, *tensors: Tensor) -> None:
        self.held.extend(each for each in tensors if isinstance(each, Tensor))


Step = Callable[[Run, Tensor, Random], Any]


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


# What a step gives is held for later ones.

VIEWS: dict[str, Step] = {
    "x[:, 1:]": lambda run, x, rng: x[:, 1:],
    "x[:, :-1]": lambda run, x, rng: x[:, :-1],
    "x[..., :-1, :]": lambda run, x, rng: x[..., :-1, :],
    "x[n]": lambda run, x, rng: x[rng.randrange(4)],
    "x[None]": lambda run, x, rng: x[None],
    "x[..., :3]": lambda run, x, rng: x[..., :3],
    "x[:, ::2]": lambda run, x, rng: x[:, ::2],
    "view(-1, W)": lambda run, x, rng: x.view(-1, x.shape[-1]),
    "flatten(0, 1)": lambda run, x, rng: x.flatten(0, 1),
    "transpose": lambda run, x, rng: x.transpose(0, 1),
    "expand": lambda run, x, rng: x[:1].expand(3, *x.shape[1:]),
    "iter": lambda run, x, rng: [*x][rng.randrange(2)],
    "unbind": lambda run, x, rng: x.unbind(0)[0],
    "split": lambda run, x, rng: x.split(2)[rng.randrange(2)],
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
    "mask": lambda run, x, rng: x[labels_for(x) != -100],
    "cat": lambda run, x, rng: torch.cat([x, x]),
    "deepcopy": lambda run, x, rng: copy.deepcopy(x),
}
FUNCTIONS: dict[str, Step] = {
    "head": lambda run, x, rng: run.model.lm_head(x),
    "temperature": lambda run, x, rng: x / 0.7,
    "scale": lambda run, x, rng: 1.5 * x,
    "softcap": lambda run, x, rng: torch.tanh(x / 2) * 2,
    "log_softmax": lambda run, x, rng: x.log_softmax(-1),
    "F.log_softmax": lambda run, x, rng: functional.log_softmax(x, dim=-1),
    "log_softmax in float64": lambda run, x, rng: x.log_softmax(-1, dtype=torch.float64),
    "softmax": lambda run, x, rng: torch.softmax(x, dim=-1),
    "softmax of places": lambda run, x, rng: x.softmax(0),
    "times a tensor": lambda run, x, rng: x * factor_for(x),
    "square": lambda run, x, rng: x * x,
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


def plus(x: Tensor, y: Tensor) -> Tensor:
    x += 0.3 * y.detach().reshape(x.shape)
    return x


IN_PLACE: dict[str, Step] = {
    "+=": lambda run, x, rng: plus(x, run.held[0]),
    "mul_ by places": lambda run, x, rng: x.mul_(factor_for(x)),
    "clamp_": lambda run, x, rng: x.clamp_(-0.5, 0.5),
    "x[0] = 0": lambda run, x, rng: x.__setitem__(0, 0.0),
    "x[:, 1:] *= 2": lambda run, x, rng: x[:, 1:].mul_(2.0),
    "data.mul_": lambda run, x, rng: x.data.mul_(0.5),
    "data =": lambda run, x, rng: setattr(x, "data", x.data * 0.5),
    "out=": lambda run, x, rng: torch.mul(x.detach(), 2.0, out=x.detach()),
    "numpy": lambda run, x, rng: np.multiply(x.detach().numpy(), 0.5, out=x.detach().numpy()),
    "no_grad": lambda run, x, rng: torch.no_grad()(x.mul_)(0.5),
    "a function": lambda run, x, rng: Changed.apply(x, rng.random() < 0.5),
    "a function, a view": lambda run, x, rng: Changed.apply(x[:, 1:], rng.random() < 0.5),
}


# torch does not notice these. After a function that saved its input, the ordinary gradient would be wrong.
SILENT = {"data.mul_", "data =", "numpy"}


def note(run: Run, *values: Any) -> None:
    run.read.extend(each.detach().clone() if isinstance(each, Tensor) else each for each in values)


READERS: dict[str, Step] = {
    "item": lambda run, x, rng: note(run, x.mean().item(), x.max().item()),
    "values": lambda run, x, rng: note(run, x),
    "sum": lambda run, x, rng: note(run, x.sum(-1), x.logsumexp(-1)),
    "numpy": lambda run, x, rng: note(run, torch.from_numpy(x.detach().numpy().copy())),
    "pickle": lambda run, x, rng: note(run, pickle.loads(pickle.dumps(x.detach()))),
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
    "selected": lambda run, x, rng: of_each(selected(x)),
    "masked": lambda run, x, rng: x[labels_for(x) != -100].square().mean(),
    "squares": lambda run, x, rng: of_each(x.square()),
    "checkpoint": lambda run, x, rng: checkpoint(cross_entropy, x, use_reentrant=rng.random() < 0.5),
    "checkpoint z": lambda run, x, rng: checkpoint(
        lambda y: of_each(y.logsumexp(-1)), x, use_reentrant=rng.random() < 0.5
    ),
    "labels": lambda run, x, rng: run.model(**run.batch, labels=IDS.masked_fill(~MASK, -100)).loss,
}


def watch(run: Run, x: Tensor) -> None:
    x.retain_grad()
    run.watched.append(x)


def of_node(run: Run, x: Tensor) -> None:
    x.grad_fn.register_prehook(lambda grads: tuple(grad * 2 for grad in grads))  # type: ignore[union-attr]


def count(run: Run, x: Tensor) -> None:
    """How often a hook is called that does not look at the gradient, as those of FSDP and DeepSpeed."""

    def hook(grad: Tensor) -> Tensor:
        num_calls.add_(grad.ndim == x.ndim)
        return grad

    num_calls = torch.zeros(())
    run.read.append(num_calls)
    x.register_hook(hook)


GRADIENTS: dict[str, Step] = {
    "count": lambda run, x, rng: count(run, x),
    "hook": lambda run, x, rng: x.register_hook(lambda grad: grad * factor_for(grad)),
    "retain_grad": lambda run, x, rng: watch(run, x),
    "prehook": lambda run, x, rng: of_node(run, x),
    "tensor hook, removed": lambda run, x, rng: x.register_hook(lambda grad: grad * 3).remove(),
    "autograd.grad": lambda run, x, rng: note(run, *torch.autograd.grad(sum(run.losses), x, retain_graph=True)),
}
KINDS_OF_LINES: dict[str, tuple[dict[str, Step], int]] = {
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
            found = KINDS_OF_LINES[self.kind][0][self.name](run, x, Random(self.seed))
        if self.kind == "loss":
            run.losses.append(found)
        elif self.kind in ("view", "copy", "function"):
            run.keep(found)


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


def program(rng: Random, kind: str = "float64") -> Program:
    """A start, and up to six lines, the last of which is a loss."""
    kinds, weights = [*KINDS_OF_LINES], [weight for _, weight in KINDS_OF_LINES.values()]
    chosen = [*rng.choices(kinds, weights, k=rng.randrange(6)), "loss"]
    start = rng.choices([*START], [8, 2, 2])[0]
    lines = [line(rng, each) for each in chosen]
    head = [] if start == "logits" else [Line("function", "head", 0, "", 0)]
    return start, allowed([*lines[: len(lines) // 2], *head, *lines[len(lines) // 2 :]], kind)


def allowed(lines: list[Line], kind: str) -> list[Line]:
    """Those of which something is known.

    Of a silent change after a function, torch makes something itself. It crashes (2.13) if a hook is registered on a
    view after the tensor that it shows was changed in place. Only a gradient shows what is read of padding.
    """
    kept: list[Line] = []
    for each in lines:
        before = [one.kind for one in kept]
        is_silent = each.name in SILENT and {"function", "loss"} & {*before}
        on_changed = each.kind == "gradient" and "view" in before and "in place" in before
        of_padding = (
            each.kind in ("reader", "gradient")
            or each.context
            or each.name in ("detach", "data", "where", "+=", "clamp_")
        )
        mixed = each.name == "labels" and "autocast" in (each.context, kind)
        if not (is_silent or on_changed or mixed or (kind == "padded" and of_padding)):
            kept.append(each)
    return kept


def line(rng: Random, kind: str) -> Line:
    usual = {"reader": [4, 2, 2, 1], "loss": [12, 1, 1, 2]}.get(kind, [12, 2, 1, 1])
    context = rng.choices([*CONTEXTS], usual)[0]
    return Line(
        kind, rng.choice([*KINDS_OF_LINES[kind][0]]), rng.choice([0, 0, 0, 1, 1, 2, 3, 5]), context, rng.randrange(99)
    )


def run_program(model: Any, program: Program, batch: dict[str, Tensor], context: str = "") -> Run:
    """The program to its end or its error, and the gradient of the sum of its losses."""
    start, lines = program
    run = Run(model, batch)
    model.zero_grad(set_to_none=True)
    model.lm_head.weight.requires_grad_("frozen" not in start)
    try:
        with CONTEXTS[context]():
            run.keep(START[start](run))
            for each in lines:
                each.run(run)
            note(run, *(each.dtype for each in (*run.held, *run.losses)))
        if "attention_mask" not in batch:  # a value may be read of padding, but no gradient given to it
            note(run, *run.losses)
        total = sum(loss.double() for loss in run.losses if loss.requires_grad)
        if isinstance(total, Tensor):
            total.backward()
    except Exception as error:
        found = error.__cause__ if isinstance(error, SystemError) else error  # raised while torch looked at an argument
        run.error = found and found.with_traceback(None)  # whose frames would keep the hooks of a checkpoint in place
    note(run, *(each.grad for each in run.watched))
    note(run, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None] or [torch.zeros(1)]))
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
    for one, other in zip(ordinary.read, shared.read, strict=True):
        if not isinstance(one, Tensor | float):
            found = "" if one == other else f"{one} is {other}"
        else:
            found = difference_of(torch.as_tensor(one), torch.as_tensor(other), bar)
        if found:
            return found
    return ""


def difference_of(one: Tensor, other: Tensor, bar: float) -> str:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return f"{one.dtype} {one.shape} is {other.dtype} {other.shape}"
    if not torch.equal(one.isfinite(), other.isfinite()):
        return "what is finite"
    values = [each.masked_fill(~each.isfinite(), 0.0).double() for each in (one, other)]
    error, scale = (values[0] - values[1]).norm(), values[0].norm().clamp(min=1.0)
    return "" if error <= bar * scale else f"off by {float(error)} of {float(scale)}"


def bar_of(program: Program, context: str = "") -> float:
    """Of what casts to fewer bits, some units of them may be rounded otherwise: 16 of bfloat16."""
    if "autocast" in {context, *(each.context for each in program[1])}:
        return 2**-4
    return 1e-5 if {"float", "to", "labels"} & {each.name for each in program[1]} else 1e-12


def may_refuse(program: Program, error: BaseException | None, is_padded: bool) -> bool:
    """Whether a refusal is one of these: a gradient that is wanted late, padding."""
    if "gradient at each place" in str(error):
        lines = [*enumerate(program[1])]
        reads = [n for n, line in lines if line.kind in ("function", "copy", "loss") or line.name == "sum"]
        wants = [n for n, line in lines if line.kind == "gradient" or line.name == "version"]
        return bool(reads and wants) and min(reads) < max(wants)
    return is_padded and "attention_mask hides" in str(error)


def compare(pair: tuple[Any, Any], program: Program, batch: dict[str, Tensor], context: str = "") -> str:
    """How they differ; "refused" for what may be refused."""
    ordinary, shared = (run_program(model, program, batch, context) for model in pair)
    if isinstance(shared.error, UserError) and may_refuse(program, shared.error, "attention_mask" in batch):
        return "refused"
    return difference(ordinary, shared, bar_of(program, context))


def tiny_pair(dtype: torch.dtype = torch.float64) -> tuple[Any, Any]:
    """An OPT, whose arithmetic is that of its weights throughout: untouched, and shared."""
    sizes = {"vocab_size": V, "hidden_size": 16, "word_embed_proj_dim": 16, "ffn_dim": 32, "num_hidden_layers": 1}
    models = [tiny_model("OPTForCausalLM", **sizes, num_attention_heads=2).to(dtype).train() for _ in range(2)]
    for model in models:
        model.config.use_cache = False
    return models[0], share_prefixes(models[1], min_ratio=0.0)
