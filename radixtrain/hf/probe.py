"""Tries whether a model computes the same on unique tokens: a batch of three short rows that share, both ways.

Code that is not the model's own is judged by what it does, whatever package it is from. It may mix tokens or rows, draw
at random, or depend on how many tokens there are and on their order; its gradient may depend on the number of copies.
It may leave a state that depends on them. All of that shows here. What binds only in longer rows, such as a capacity,
shows in rows as long as those of the call, of which only the values are compared.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from threading import RLock, get_ident
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from radixtrain.collators.misuse_guard import is_instance_by_name
from radixtrain.errors import first_line
from radixtrain.hf.attention_interface import RadixCall
from radixtrain.hf.dropout import (
    generator_states,
    has_drawn,
    number_that_draws,
    set_generator_states,
    without_dropout,
)
from radixtrain.hf.progress import Progress
from radixtrain.hf.third_party import code_to_try, values_of
from radixtrain.hf.windows import chunk_of, no_mask, window_may_bind
from radixtrain.tree.layout import TreeLayout
from radixtrain.tree.plan import build_prefix_plan

# Rows that share five tokens, two of them six; of ids that every vocabulary has.
ROWS = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 1, 2], [1, 2, 3, 4, 5, 3, 2, 7, 1], [1, 2, 3, 4, 5, 3, 6, 1, 7]])
_trying = RLock()  # a trial changes modules for a while
DTENSOR = "torch.distributed.tensor", "DTensor"
FSDP = "torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"
# Of a decoder, by its state and the shape of the rows that were tried.
_verdicts: WeakKeyDictionary[nn.Module, dict[Hashable, dict[Sequence[int], str | None]]] = WeakKeyDictionary()


def why_inexact(
    decoder: Any,
    head: Any = None,
    *,
    progress: Progress,
    allowed: Collection[str] = (),
    drew: bool = False,
    shape: Sequence[int] = ROWS.shape,
) -> str | None:
    """Say what a model computes differently on unique tokens; None if nothing.

    head: computes logits from hidden states of unique tokens; None if it gets every token at its place.
    progress: of the calls of the model. allowed: as `allow_dropout` of `share_prefixes`.
    drew: whether a pass moved a generator. OPT draws numbers that change nothing while its layerdrop is 0.
    shape: rows and tokens in each, of the padded batch.

    A model is tried if it has code that is not its own, or drew; and again when a module, a mode or a number in these
    has changed, or more or longer rows come. For any other this costs one look at its modules: 1.1 ms of one core for
    28 layers with LoRA.
    """
    code, state = code_to_try(decoder, head)
    if not (code or drew):
        return None
    if drew and not _is_whole(decoder):
        return f"{type(decoder).__name__} draws at random" if number_that_draws(decoder) else None
    numbers = [value for each in decoder.modules() for value in values_of(each)] if drew else ()
    key = state, torch.is_grad_enabled(), *allowed, *numbers
    with _trying:
        tried = _verdicts.setdefault(decoder, {}).setdefault(key, {})
        if ROWS.shape not in tried:
            tried[ROWS.shape] = _tried(decoder, head, progress, allowed, ROWS, drew)
        is_known = any(reason or (shape[0] <= rows and shape[1] <= each) for (rows, each), reason in tried.items())
        if code and not is_known:
            places = torch.arange(shape[1])
            own = torch.arange(shape[0])[:, None] * (places >= shape[1] // 2)
            with torch.no_grad():  # and without a head, whose logits would take much memory
                tried[shape] = _tried(decoder, None, progress, allowed, (places + own) % 7 + 1)
        reason = next(filter(None, tried.values()), None)
    who = f"code that is not the model's own ({code})" if code else type(decoder).__name__
    return reason and f"{who} {reason}"


def _tried(
    decoder: Any, head: Any, progress: Progress, allowed: Collection[str], rows: Tensor, drew: bool = False
) -> str | None:
    """Run the decoder on rows as it is now: mode, gradients, autocast. Leaves no trace.

    Takes three forward passes, and as many backward passes if gradients are on.
    """
    if not _is_whole(decoder):
        return "cannot be tried, because the weights are not whole in this process"
    if torch.is_grad_enabled() and any(vars(each).get("scale_grad_by_freq") for each in decoder.modules()):
        return "divides a gradient by how often its token occurs (scale_grad_by_freq)"
    device = next(decoder.get_input_embeddings().parameters()).device
    rows = rows[:, : chunk_of(decoder.config)]
    plan = build_prefix_plan(rows.flatten(), torch.arange(0, rows.numel() + 1, rows.shape[1]))
    layout = TreeLayout.from_plan(plan).to(device)
    call = RadixCall(layout, None, "auto", "auto", window_may_bind(decoder.config, layout.max_seqlen))
    copies = layout.inverse_indices
    ordinary = {"input_ids": rows.to(device)}
    once = {
        "input_ids": rows.to(device).flatten()[layout.gather_indices][None],
        "position_ids": torch.tensor(plan.position_ids, device=device)[None],
        "attention_mask": no_mask(call.window_may_bind, device, call),
        "radix_call": call,
    }
    with _without_trace(decoder, allowed):
        before = generator_states(device)
        try:
            with progress.during(None):
                expected, of_copies, left = _states(decoder, head, ordinary)
                again, *_ = _states(decoder, head, ordinary)
            draws = has_drawn(device, before)
            with progress.during(call):
                states, of_rows, left_once = _states(decoder, head, once, copies)
        except Exception as error:  # by code of any kind
            return f"cannot be tried on a few tokens ({type(error).__name__}: {first_line(error)})"
    are_alike = partial(_are_alike, _bar(decoder, expected))
    if not are_alike(expected, again) or drew > draws:  # only in longer rows
        return "draws at random"
    if not are_alike(expected, states):
        return "computes a token from others, or from its place among them"
    if not are_alike(torch.zeros_like(of_rows).index_add_(0, copies, of_copies), of_rows):
        return "has a gradient that is not the sum over the copies of a token"
    if len(left) != len(left_once) or not all(map(are_alike, left, left_once)):
        return "leaves another state in a module"
    return None


def _states(
    decoder: Any, head: Any, given: dict[str, Any], copies: Tensor | slice = slice(None)
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return the hidden states or logits of all tokens, the gradient of their embeddings, and what modules have got.

    copies: the row of each token. Without any gradient there are zeros.
    """
    embedded: list[Tensor] = []
    thread = get_ident()

    def make_leaf(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        if get_ident() != thread:
            return output
        embedded.append(output.detach().requires_grad_(torch.is_grad_enabled()))
        return embedded[-1].clone()  # which a model may change in place

    with _as_it_was(decoder) as changed:  # which removes the hook too
        decoder.get_input_embeddings().register_forward_hook(make_leaf)
        states = decoder.forward(**given, use_cache=False)[0]
        states, leaf = (states if head is None else head(states)).flatten(0, 1)[copies], embedded[0]
        gradient = torch.zeros_like(leaf)
        if states.requires_grad:
            weights = torch.arange(states.shape[-1], device=states.device).sin().to(states.dtype)
            (gradient,) = torch.autograd.grad((states @ weights).sum(), leaf)
    left = [torch.as_tensor(value).detach() for value in changed if isinstance(value, Tensor | float | int)]
    return states.detach(), gradient.flatten(0, 1), left


@contextmanager
def _as_it_was(decoder: Any) -> Iterator[list[Any]]:
    """Give back what modules hold, buffers, and rows of embeddings with a `max_norm`; yield what has been changed."""
    changed: list[Any] = []
    embeddings = [each.detach()[: int(ROWS.max()) + 1] for each in decoder.get_input_embeddings().parameters()]
    tensors = [(each, each.clone()) for each in (*decoder.buffers(), *embeddings)]
    held: list[Any] = [each for module in decoder.modules() for each in (vars(module), *vars(module).values())]
    copies: list[Any] = [(each, copy(each)) for each in held if isinstance(each, dict | list)]
    try:
        yield changed
    finally:
        for now, before in copies:
            if isinstance(now, list):
                changed += now[len(before) :]
                now[:] = before
            else:
                changed += [value for name, value in now.items() if value is not before.get(name)]
                for name in now.keys() - before.keys():
                    del now[name]
                now.update(before)
        with torch.no_grad():
            for tensor, values in tensors:
                if not torch.equal(tensor, values):
                    changed.append(tensor.clone())
                    tensor.copy_(values)


def _are_alike(bar: float, expected: Tensor, other: Tensor) -> bool:
    if expected.shape != other.shape or torch.equal(expected, other):
        return expected.shape == other.shape
    expected, other = expected.double(), other.double()
    return bool((expected - other).norm() <= bar * expected.norm())


def _bar(decoder: nn.Module, states: Tensor) -> float:
    """Return the relative error up to which two passes are alike: 6e-6 in float32, 9 % in bfloat16.

    Measured on exact models of up to 64 layers: 1.2e-6 in float32, 0.5 % in float16, 2.6 % in bfloat16. Layers of
    float64 have norms and rotary embeddings in float32.
    """
    units = [torch.finfo(each.dtype).eps for each in (states, *decoder.parameters()) if each.is_floating_point()]
    if torch.is_autocast_enabled(states.device.type) or torch.get_float32_matmul_precision() != "highest":
        units.append(torch.finfo(torch.bfloat16).eps)
    unit = max(torch.finfo(torch.float32).eps, *units)
    return float(min(50 * unit, unit**0.5))


def _is_whole(decoder: nn.Module) -> bool:
    """Return whether a pass needs nothing from other processes; their calls may not be tried at the same time."""
    weights = [*decoder.parameters()]
    is_split = any(each.is_meta or not each.numel() or is_instance_by_name(each, *DTENSOR) for each in weights)
    return not is_split and not any(is_instance_by_name(each, *FSDP) for each in decoder.modules())


@contextmanager
def _without_trace(decoder: Any, allowed: Collection[str]) -> Iterator[None]:
    """Give back generators and flags; compile nothing."""
    device = next(decoder.get_input_embeddings().parameters()).device
    checkpointing = [each for each in decoder.modules() if vars(each).get("gradient_checkpointing")]
    generators = [
        value for each in decoder.modules() for value in vars(each).values() if isinstance(value, torch.Generator)
    ]
    of_modules = [each.get_state() for each in generators]
    of_numpy, of_python = np.random.get_state(), random.getstate()  # noqa: NPY002
    for module in checkpointing:  # a reentrant one allows no gradient of a single tensor
        module.gradient_checkpointing = False
    with without_dropout(decoder, allowed), torch.compiler.set_stance("force_eager"):
        states = generator_states(device)
        try:
            yield
        finally:
            set_generator_states(device, states)
            for generator, state in zip(generators, of_modules, strict=True):
                generator.set_state(state)
            np.random.set_state(of_numpy)  # noqa: NPY002
            random.setstate(of_python)
            torch.clear_autocast_cache()
            for module in checkpointing:
                module.gradient_checkpointing = True
