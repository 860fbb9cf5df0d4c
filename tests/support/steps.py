"""One step, ordinary and shared: the comparators of loss and gradients, and random programs on what a model returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import radixtrain.hf.attention_interface
from radixtrain import RadixCollator, restore_model, share_prefixes, sharing_report
from radixtrain.hf.backbone import backbone_of
from radixtrain.hf.recurrent import Mixer
from radixtrain.hf.sharing_report import SharingReport
from radixtrain.tree.radix_inputs import layout_of
from radixtrain.tree.runs import tree_runs
from radixtrain.verification.equivalence import Rung, compare_gradients
from radixtrain.verification.oracle import (
    Features,
    Gradients,
    float64_throughout,
    float64_truth,
    gradients_of,
    radix_batch,
)
from tests.support import cases
from tests.support.batches import PaddedBatch

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
        """A scalar that reads nothing at padding; of 100 and numbers of order one, so that it never is almost 0."""
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
        return sum(terms, 100.0)


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


def batch_of(features: Any = FEATURES) -> dict[str, Any]:
    batch = RadixCollator()(features)
    groups = tree_runs(layout_of(batch), forks=True).groups
    assert any(group.is_fork for group in groups), "these rows do not fork"
    return batch


def assert_exact(model: Any, truth: Any, arm: Callable[[], Iterator[Tensor]] | None = None) -> None:
    """A prepared model has the true gradient. arm: the terms of its loss, by default of one batch with forks."""
    with float64_throughout(model):
        found = gradients_of(model, arm or (lambda: radix_batch(model, batch_of())))
    same(truth, found)


def mixers_in(model: nn.Module) -> list[Mixer]:
    found = [getattr(module.__dict__.get("forward"), "__self__", None) for module in model.modules()]
    return [each for each in found if isinstance(each, Mixer)]
