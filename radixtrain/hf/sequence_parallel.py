"""Sequence parallelism: the unique rows of one batch, split over the ranks of a process group.

Everything but attention and recurrent layers computes rows independently, so each of n ranks holds U / n rows in every
layer, and computes the head and the loss of those that predict. Around attention two all-to-alls trade rows for heads
(Ulysses; Jacobs et al., 2023, arXiv 2309.14509):

    q [u, N, H], k and v [u, K, H]  ->  [U, N/n, H], [U, K/n, H]  ->  tree attention  ->  [U, N/n, H]  ->  [u, N, H]

The rows are filled up to a multiple of n by copies, which reach nothing. A recurrent layer computes all rows on every
rank.

Every rank returns the loss of the whole batch; its gradient is n times that of its own part. So an average over all
ranks, as DDP and FSDP take it, is the gradient of the batch, and of the mean over data-parallel groups.

u = ceil(U / n) rows of a rank; N, K heads of queries and of keys, each of H; P predictions.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn

from radixtrain.collators.features import IGNORE_INDEX
from radixtrain.collators.row_split import RowShare, filled, split_batch
from radixtrain.errors import UserError
from radixtrain.hf.attention_interface import Heads, RadixCall
from radixtrain.hf.backbone import Parts, in_one_row
from radixtrain.hf.guards.batch import on_device_of_rows
from radixtrain.hf.progress import Progress
from radixtrain.tree.radix_inputs import RADIX, RadixInputs, layout_of, radix_of

logger = logging.getLogger(__name__)


class RowSplit:
    """Which rows of a batch this rank holds, and how ranks exchange them. group: of torch.distributed, with n ranks."""

    def __init__(self, group: Any) -> None:
        self.group, self.share = group, RowShare(dist.get_rank(group), dist.get_world_size(group))
        self.rank, self.size = self.share
        if self.rank < 0:
            raise UserError("sp_group: this rank is not in it; give each rank the group that it is a member of")

    def __deepcopy__(self, memo: dict[int, Any]) -> RowSplit:
        """Return the same object: a process group cannot be copied, and a copy of the model trains in the same one."""
        return self

    def all_rows(self, rows: Tensor, num_rows: int) -> Tensor:
        """Gather the rows of every rank: (u, ...) -> (U, ...). The gradient of a row is the sum over the ranks."""
        return _AllToAll.apply(rows.expand(self.size, *rows.shape), self.group).flatten(0, 1)[:num_rows]

    def rows_to_heads(self, heads: Sequence[Tensor]) -> Tensor:
        """Exchange rows for heads: several (u, N, H), N a multiple of n -> (n u, the sum of N / n, H)."""
        by_rank = torch.cat([x.unflatten(1, (self.size, -1)).transpose(0, 1) for x in heads], dim=2)
        return _AllToAll.apply(by_rank, self.group).flatten(0, 1)

    def heads_to_rows(self, x: Tensor) -> Tensor:
        """Exchange heads for rows: (n u, N / n, H) -> (u, N, H)."""
        by_rank = _AllToAll.apply(x.unflatten(0, (self.size, -1)), self.group)
        return by_rank.transpose(0, 1).flatten(1, 2)

    def sum(self, loss: Tensor) -> Tensor:
        """Sum over the ranks; the gradient is n times that of this rank's part."""
        total = loss.detach().clone()
        dist.all_reduce(total, group=self.group)
        return self.size * loss + (total - self.size * loss).detach()

    def check_same(self, batch: Mapping[str, Any]) -> None:
        """Refuse a batch that differs between the ranks of the group, by a hash of 64 bits. Waits for a device."""
        entries = [(name, value) for name, given in sorted(batch.items()) for value in _flat(given)]
        tensors = [value for _, value in entries if isinstance(value, Tensor)]
        plain = [(name, value if isinstance(value, PLAIN) else None) for name, value in entries]  # num_items_in_batch
        digest = xxhash.xxh64(repr(plain).encode())
        for tensor in tensors:
            numbers = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
            digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode() + numbers.numpy().tobytes())
        found = digest.intdigest() >> 1
        extremes = torch.tensor([found, -found], device=tensors[0].device)
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=self.group)
        if extremes[0] != -extremes[1]:
            raise UserError(
                f"the {self.size} ranks of sp_group got different batches, and they compute one together: give each of "
                f"them the same, for instance by a sampler that counts groups and not ranks"
            )


PLAIN = (int, float, str, np.generic)  # types whose `repr` is complete and the same on every rank


def _flat(value: object) -> Iterator[Any]:
    """Yield what is in a tuple or a record, however deep; or the value itself."""
    if isinstance(value, RadixInputs):
        value = tuple({**vars(value), "host": None}.values())  # `rows` differ too
    if not isinstance(value, tuple):
        yield value
        return
    for each in value:
        yield from _flat(each)


class _AllToAll(torch.autograd.Function):
    """All-to-all: part i of (n, ...) goes to rank i, part j of the result came from rank j. Its own adjoint."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: Any) -> Tensor:
        ctx.group, sent = group, parts.contiguous()
        received = torch.empty(
            sent.shape, dtype=sent.dtype, device=sent.device
        )  # empty_like keeps a gradient's strides
        dist.all_to_all_single(received, sent, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.apply(gradients[0], ctx.group), None


class SplitCall(RadixCall):
    """The forward pass of one rank of a `RowSplit`. layout: of all rows."""

    def __init__(self, split: RowSplit, *args: Any) -> None:
        super().__init__(*args)
        self.split, self.in_graph = split, False

    @property
    def num_rows(self) -> int:
        return self.split.share.count(self.layout.num_rows)

    def all_rows(self, rows: Tensor) -> Tensor:
        return self.split.all_rows(rows, self.layout.num_rows)

    def own_rows(self, rows: Tensor) -> Tensor:
        return self.split.share.of(rows)

    def attend(self, heads: Heads, window: int | None, **scoring: Any) -> Tensor:
        """Compute tree attention on this rank's heads of all rows, with one all-to-all before it and one after it."""
        n, num_rows, (query, key, _) = self.split.size, self.layout.num_rows, heads
        check_heads(query.shape[1], n)
        copies = n // math.gcd(n, key.shape[1])  # of a key head, with its queries: n divides the result
        widths = [query.shape[1] // n, *[key.shape[1] * copies // n] * 2]
        copied = (x[:, :, None].expand(-1, -1, copies, -1).flatten(1, 2) for x in heads[1:])
        own = self.split.rows_to_heads([query, *copied])[:num_rows].split(widths, dim=1)
        if scoring.get("sinks") is not None:
            scoring["sinks"] = scoring["sinks"].unflatten(0, (n, -1))[self.split.rank]
        out = super().attend((own[0], own[1], own[2]), window, **scoring)
        return self.split.heads_to_rows(filled(out, out[:1], 0, n * self.num_rows))


def check_heads(num_heads: int, size: int) -> None:
    if num_heads % size:
        fit = ", ".join(str(n) for n in range(1, num_heads + 1) if num_heads % n == 0)
        raise UserError(
            f"{size} ranks of sp_group (sp_size in fit) do not divide the {num_heads} query heads of this model; "
            f"these numbers do: {fit}"
        )


class SplitLoss:
    """The loss of a call that is split. Not a dataclass, which FSDP copies when it casts arguments.

    labels: (1, p), int64. of this rank's predictions. num_items: labels of the whole batch, or what the trainer gave.
    is_computed: whether the model has called its loss function.
    """

    def __init__(self, labels: Tensor, num_items: object) -> None:
        self.labels, self.num_items, self.is_computed = labels, num_items, False


class SplitModel:
    """What a model of `share_prefixes(model, sp_group=...)` does around its own call.

    parts: of the model. outer: what the user calls: the model, or PEFT's wrapper around it.
    """

    def __init__(self, outer: nn.Module, parts: Parts, group: object) -> None:
        self.outer, self.base, self.rows = outer, parts.base, RowSplit(group)
        self.progress = Progress()
        _check_loss(parts)
        check_heads(parts.decoder.config.num_attention_heads, self.rows.size)
        self.hooks: list[Any] = []

    def install(self, num_recurrent: int) -> None:
        """Install it before the first call. num_recurrent: layers that compute all rows on every rank, for one line."""
        if num_recurrent:
            logger.warning(
                "sp_group: %d recurrent layers of %s compute all rows on each of %d ranks; the others split them",
                *(num_recurrent, type(self.base).__name__, self.rows.size),
            )
        self.loss_function = self.base.loss_function
        self.base.loss_function = self.loss
        self.hooks = [
            self.outer.register_forward_pre_hook(self.cut, with_kwargs=True, prepend=True),
            self.outer.register_forward_hook(self.end, always_call=True),
        ]

    def remove(self) -> None:
        for hook in self.hooks:
            hook.remove()
        self.base.loss_function = self.loss_function

    @torch.compiler.disable
    def cut(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Cut a batch to the rows, positions and predictions of this rank; every rank computes an ordinary batch whole.

        A batch that a `StepCollator` has split is left as it is.
        """
        self.progress.begin(None)
        if RADIX not in kwargs or radix_of(kwargs).split is not None:
            return None
        if kwargs.get("shift_labels") is None or kwargs.get("labels") is None:
            raise UserError(
                "sp_group: each rank computes the loss of its own rows, so the model has to get labels; use "
                "RadixCollator() without merge_labels, and the loss that the model returns"
            )
        kwargs = {**kwargs, RADIX: on_device_of_rows(radix_of(kwargs), kwargs)}
        self.rows.check_same(kwargs)
        part = split_batch({**kwargs, **in_one_row(kwargs, layout_of(kwargs))}, self.rows.share)
        given = kwargs.get("num_items_in_batch")
        num_items = (kwargs["shift_labels"] != IGNORE_INDEX).sum() if given is None else given
        radix_of(part).split = split = SplitLoss(part["shift_labels"], num_items)  # lives as long as the batch
        self.progress.become(split)
        return args, part

    def loss(self, logits: Tensor, labels: Tensor, *args: object, **kwargs: object) -> Any:
        """Return the loss of the whole batch, in place of the model's `loss_function`."""
        split = self.progress.call
        if split is None:
            return self.loss_function(logits, labels, *args, **kwargs)
        if split.is_computed:
            raise self._refusal("calls its loss_function more than once, and only the first is of the whole batch")
        split.is_computed = True
        given = {**kwargs, "shift_labels": split.labels, "num_items_in_batch": split.num_items}
        return self.rows.sum(self.loss_function(logits, labels, *args, **given))

    def end(self, model: nn.Module, args: tuple[Any, ...], output: object) -> None:
        split = self.progress.end()
        if split is not None and not split.is_computed and output is not None:
            raise self._refusal("computes its loss without its loss_function, so it would be that of a part")

    def _refusal(self, what: str) -> UserError:
        return UserError(f"sp_group: {type(self.base).__name__} {what}; train it by data parallel")


def _check_loss(parts: Parts) -> None:
    if parts.head is None:
        raise UserError(
            f"sp_group: {parts.name} has no head, and each rank computes the loss of its own rows; share the model "
            f"with its head"
        )
    if "num_items_in_batch" not in inspect.signature(parts.base.loss_function).parameters:
        raise UserError(
            f"sp_group: the loss_function of {parts.name} takes no num_items_in_batch, so the parts of a batch would "
            f"not add up; use one that divides a sum by it, as ForCausalLMLoss of transformers"
        )
