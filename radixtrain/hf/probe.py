"""Tries whether a model computes the same on unique tokens: three short rows that share, each alone and all at once.

Code that is not the model's own is judged by what it does, whatever package it is from. It may mix tokens, draw at
random, or depend on how many tokens there are and on their order; its gradient may depend on the number of copies. All
of that shows here. What binds only in longer rows, such as a window or a capacity, does not.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from radixtrain.collators.misuse_guard import is_instance_by_name
from radixtrain.errors import first_line
from radixtrain.hf.attention_interface import RadixCall
from radixtrain.hf.dropout import without_dropout
from radixtrain.hf.modules import mixers_of
from radixtrain.hf.progress import Progress
from radixtrain.hf.third_party import code_to_try
from radixtrain.hf.windows import chunk_of, no_mask, window_may_bind
from radixtrain.tree.layout import TreeLayout
from radixtrain.tree.plan import build_prefix_plan
from radixtrain.tree.runs import RunCost

# Rows that share five tokens, two of them six; of ids that every vocabulary has.
ROWS = ([1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 3, 2, 7, 1], [1, 2, 3, 4, 5, 3, 6, 1, 7, 2, 4])
SHARDED = (
    *(("torch.distributed.tensor", "DTensor"),),
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"),
)
NUMBERS = {bool, int, float}
MOST = 512  # tokens of a pass that is repeated
_verdicts: WeakKeyDictionary[nn.Module, dict[Hashable, str | None]] = WeakKeyDictionary()  # of a decoder, by its state


def why_inexact(decoder: Any, head: Any = None, *, progress: Progress, allowed: Collection[str] = ()) -> str | None:
    """Say what code in a model computes differently on unique tokens; None if nothing.

    head: computes logits from hidden states of unique tokens; None if it gets every token at its place.
    progress: of the calls of the model. allowed: as `allow_dropout` of `prepare_model`.

    A model without code to try costs one look at its modules (0.6 ms of one core for 28 layers with LoRA). Any other is
    tried once, and again when a module, a mode or a number in that code has changed.
    """
    code, state = code_to_try(decoder, head)
    if not code:
        return None
    tried = _verdicts.setdefault(decoder, {})
    key = state, torch.is_grad_enabled(), *allowed
    if key not in tried:
        tried[key] = _tried(decoder, head, progress, allowed)
    verdict = tried[key]
    return verdict and f"code that is not the model's own ({code}) {verdict}"


def why_it_drew(decoder: Any, given: Mapping[str, Any], progress: Progress) -> str | None:
    """Say that a pass which moved a generator draws what changes its result; None if it changes nothing (OPT).

    given: the arguments of the pass. Its first tokens run again in two ordinary passes, once for each state of the
    numbers that the modules hold.
    """
    numbers = tuple(value for each in decoder.modules() for value in vars(each).values() if type(value) in NUMBERS)
    tried = _verdicts.setdefault(decoder, {})
    if ("draws", numbers) not in tried:
        names = ("input_ids", "position_ids") if "input_ids" in given else ("inputs_embeds", "position_ids")
        cut = {name: given[name][:, :MOST] if name == "inputs_embeds" else given[name][..., :MOST] for name in names}
        with _without_trace(decoder, ()), progress.during(None), torch.no_grad():
            one, other = (decoder.forward(**cut, use_cache=False)[0] for _ in range(2))
        tried["draws", numbers] = None if _error(one, other) <= _bar(decoder, one) else "draws at random"
    return tried["draws", numbers]


def _tried(decoder: Any, head: Any, progress: Progress, allowed: Collection[str]) -> str | None:
    """Run the decoder on `ROWS` as it is now: mode, gradients, autocast. Leaves no trace.

    Takes five forward passes of at most 27 tokens, and as many backward passes if gradients are on.
    """
    if any(map(_is_absent, [*decoder.parameters(), *decoder.modules()])):
        return "cannot be tried, because the weights are not whole in this process"
    if torch.is_grad_enabled() and any(vars(each).get("scale_grad_by_freq") for each in decoder.modules()):
        return "divides a gradient by how often its token occurs (scale_grad_by_freq)"
    device = decoder.get_input_embeddings().weight.device
    sequences = [row[: chunk_of(decoder.config)] for row in ROWS]
    ids = np.concatenate(sequences)
    plan = build_prefix_plan(ids, np.cumsum([0, *map(len, sequences)]))
    layout = TreeLayout.from_plan(plan, RunCost() if mixers_of(decoder) else None).to(device)
    call = RadixCall(layout, None, "auto", "auto", window_may_bind(decoder.config, layout.max_seqlen))
    copies = layout.inverse_indices.long()
    once = {
        "input_ids": torch.tensor(ids[plan.gather_indices], device=device)[None],
        "position_ids": torch.tensor(plan.position_ids, device=device)[None],
        "attention_mask": no_mask(call.window_may_bind, device, call),
        "radix_call": call,
    }
    rows = [{"input_ids": torch.tensor([row], device=device)} for row in sequences]
    with _without_trace(decoder, allowed):
        try:
            with progress.during(None):
                alone = [_states(decoder, head, row) for row in (*rows, rows[-1])]
            with progress.during(call):
                states, gradient = _states(decoder, head, once, copies)
        except Exception as error:  # by code of any kind
            return f"cannot be tried on a few tokens ({type(error).__name__}: {first_line(error)})"
    expected, expected_gradients = (torch.cat(parts) for parts in zip(*alone[:-1], strict=True))
    bar = _bar(decoder, states)
    if not _error(alone[-2][0], alone[-1][0]) <= bar:
        return "draws at random"
    if not _error(expected, states) <= bar:
        return "computes a token from others, or from its place among them"
    if not _error(torch.zeros_like(gradient).index_add_(0, copies, expected_gradients), gradient) <= bar:
        return "has a gradient that is not the sum over the copies of a token"
    return None


def _states(
    decoder: Any, head: Any, given: dict[str, Any], copies: Tensor | slice = slice(None)
) -> tuple[Tensor, Tensor]:
    """Return the hidden states or logits of some tokens, and the gradient of their embeddings, or zeros without any.

    copies: of the rows, for each token.
    """
    embedded: list[Tensor] = []

    def make_leaf(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_(torch.is_grad_enabled()))
        return embedded[-1]

    handle = decoder.get_input_embeddings().register_forward_hook(make_leaf)
    try:
        states = decoder.forward(**given, use_cache=False)[0]
    finally:
        handle.remove()
    states = (states if head is None else head(states))[0][copies]
    leaf = embedded[0]
    if not states.requires_grad:
        return states, leaf.new_zeros(leaf.shape[1:])
    weights = torch.arange(states.shape[-1], device=states.device).sin().to(states.dtype)
    (gradient,) = torch.autograd.grad((states @ weights).sum(), leaf)
    return states.detach(), gradient[0]


def _error(expected: Tensor, other: Tensor) -> float:
    expected, other = expected.double(), other.double()
    return float((expected - other).norm() / expected.norm().clamp(min=torch.finfo(torch.float64).tiny))


def _bar(decoder: nn.Module, states: Tensor) -> float:
    """Return the root of the largest unit of rounding in a pass: what mixes or draws changes far more.

    Layers of float64 have norms and rotary embeddings in float32.
    """
    kind = states.device.type
    dtypes = [torch.float32, states.dtype, *(each.dtype for each in decoder.parameters() if each.is_floating_point())]
    if torch.is_autocast_enabled(kind):
        dtypes.append(torch.get_autocast_dtype(kind))
    units = [torch.finfo(dtype).eps for dtype in set(dtypes)]
    if torch.get_float32_matmul_precision() != "highest":  # TF32 has the 10 bits of float16, "medium" those of bfloat16
        units.append(torch.finfo(torch.bfloat16).eps)
    return max(units) ** 0.5


def _is_absent(each: Tensor | nn.Module) -> bool:
    """Return whether a weight is not here as a whole, or a module gathers its weights for a pass."""
    is_empty = isinstance(each, Tensor) and (each.is_meta or not each.numel())
    return is_empty or any(is_instance_by_name(each, *kind) for kind in SHARDED)


@contextmanager
def _without_trace(decoder: Any, allowed: Collection[str]) -> Iterator[None]:
    """Give back generators, buffers, flags, and rows of embeddings with a `max_norm`; compile nothing."""
    embedding = decoder.get_input_embeddings().weight
    tensors = [*decoder.buffers(), embedding.detach()[: max(map(max, ROWS)) + 1]]
    before = [(each, each._version, each.clone()) for each in tensors]
    checkpointing = [each for each in decoder.modules() if each.__dict__.get("gradient_checkpointing")]
    numbers, own = np.random.get_state(), random.getstate()
    devices = [] if embedding.device.type == "cpu" else [embedding.device]
    for module in checkpointing:  # a reentrant one allows no gradient of a single tensor
        module.gradient_checkpointing = False
    try:
        with torch.random.fork_rng(devices, device_type=embedding.device.type if devices else "cuda"):
            with without_dropout(decoder, allowed), torch.compiler.set_stance("force_eager"):
                yield
    finally:
        for module in checkpointing:
            module.gradient_checkpointing = True
        np.random.set_state(numbers)
        random.setstate(own)
        torch.clear_autocast_cache()
        with torch.no_grad():
            for tensor, version, values in before:
                if tensor._version != version:
                    tensor.copy_(values)
