"""One padded batch through an ordinary model and through its copy with `share_prefixes`: loss and every gradient.

The ordinary model is the oracle: it runs on the same padded batch. Both compute in float64 throughout.

    B rows, L columns, T kept tokens, D hidden, V vocabulary

What a model generates, before and after `share_prefixes`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from padded_batches import PaddedBatch
from same_step import same
from torch import Tensor, nn

from radixtrain import share_prefixes, sharing_report
from radixtrain.hf.backbone import backbone_of
from radixtrain.hf.sharing_report import SharingReport
from radixtrain.verification.oracle import float64_throughout, gradients_of


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
    ) -> "Reads":
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


IDS = torch.tensor([[0, 0, 7, 8, 9, 1], [7, 8, 9, 1, 2, 3], [0, 7, 8, 9, 1, 2]])
PROMPTS = {"input_ids": IDS, "attention_mask": (IDS != 0).long()}


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
