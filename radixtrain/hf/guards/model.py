"""Tries whether a model computes the same on unique tokens: a batch of three short rows that share, both ways.

A model is judged by what it does, not by its code or its name. It may mix tokens or rows, draw at random, or depend on
how many tokens there are and on their order; its gradient may depend on the number of copies. It may leave a state that
depends on them. All of that shows here: in the first call that would be shared, and again after the model has changed.
What short rows do not show is in `rules.py`. Code that is not the model's own may have limits that nobody has read,
such as a capacity, so it is tried on rows as long as those of the call too, of which only the values are compared.

A model with recurrent layers is tried with states that fork. If it differs, it is tried with whole sequences, which its
mixers then compute in every call. So they do where nothing can be tried. A mixer that starts from a state has to read
it and return its gradient, and the gradient of its final state. Not all do: Mamba's first version does not read it, and
a kernel for generation may have no gradient. In 16 bits the outputs of a model do not show that: the state of fresh
weights, or one that fades fast, is small beside the rounding of all layers. So each mixer runs by itself too. What its
rows after the forks give to those before them comes through the states alone: where one is lost, that gradient is zero.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import isfinite
from threading import RLock, get_ident
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes

from radixtrain.collators.misuse_guard import is_instance_by_name
from radixtrain.errors import UserError, first_line
from radixtrain.hf.attention_interface import RadixCall, take_over
from radixtrain.hf.backbone import Parts, mixers_of, num_attention_layers, text_decoder_of, text_layers
from radixtrain.hf.guards.code import ADAPTERS, code_in, why_recorded
from radixtrain.hf.guards.draws import (
    generator_states,
    has_drawn,
    number_that_draws,
    set_generator_states,
    without_dropout,
)
from radixtrain.hf.guards.rules import EntryPoint, why_unsupported
from radixtrain.hf.progress import running
from radixtrain.hf.recurrent import arguments_by_name, each_tensor, run_on_tree
from radixtrain.hf.windows import chunk_of, no_mask, window_may_bind
from radixtrain.tree.layout import TreeLayout
from radixtrain.tree.plan import build_prefix_plan
from radixtrain.tree.runs import SHORTEST_FORK, RunLayout, runs_of_segments

logger = logging.getLogger(__name__)
# Rows that share five tokens, two of them six; of ids that every vocabulary has. Five are more than most convolutions
# are wide, so a gradient of the first token comes through the state.
NUM_SHARED = 5
ROWS = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 1, 2], [1, 2, 3, 4, 5, 3, 2, 7, 1], [1, 2, 3, 4, 5, 3, 6, 1, 7]])
DRAWS = "draws at random"
OTHER_STATES = "computes a token from others, or from its place among them"
OTHER_GRADIENT, OTHER_WEIGHTS = (
    "has a gradient that is not the sum over the copies of a token",
    "has another gradient of",
)
# Rounding gets as far as so many times the largest distance of so many ordinary passes, which are rounded otherwise. In
# float32 also after each layer: in pretrained weights one such pass may be several times as far as another. In 16 bits
# that would hide faults, so there it is one pass from embeddings that are rounded otherwise.
ROUNDING, NUM_ROUNDED = 4, 4
ROUNDING_OF_16_BITS = 2
LOST = 0.1  # relative error of the gradient through the states of a mixer, of which rounding in bfloat16 makes 0.01
MAX_STATES = 100  # of a decoder whose verdicts are kept: a setting may change in every step
LARGE = 2**22  # numbers: larger buffers are weights of a quantized layer, larger parameters not those of an adapter
_trying = RLock()  # a trial changes modules for a while
NO_VALUES = (("torch.distributed.tensor", "DTensor"), ("torch._subclasses.fake_tensor", "FakeTensor"))
WRAPPER = "checkpoint_fn"  # of torch's CheckpointWrapper
FSDP = "torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"


@dataclass(eq=False)
class Verdict:
    """What is known of a model in one state: of its modules, their code and settings, and how a pass computes.

    reason: why it is not shared; None if nothing is known.
    name: of what is tried, for a reason: code that is not the model's own, or the model. is_own: whether it is that.
    num_layers: decoder layers that attend, each of which must run tree attention; None if their list has another length
        than the configuration says.
    mixers: modules with a recurrent state, each of which must run on the tree: their ids and classes. forks: whether
        their states may fork.
    shapes: rows and tokens in each that have been tried. drew: whether a pass has moved a generator. OPT draws numbers
        that change nothing while its layerdrop is 0.
    left_padding, separates: of padded batches, found when the first one needs it (`padded/sharing.py`).
    """

    reason: str | None
    name: str = ""
    is_own: bool = True
    num_layers: int | None = None
    mixers: dict[int, str] = field(default_factory=dict)
    forks: bool = False
    shapes: list[Sequence[int]] = field(default_factory=list)
    drew: bool = False
    left_padding: tuple[str | None, str | None] | None = None
    separates: bool | None = None

    def why_not(
        self,
        backbone: Any,
        head: Any = None,
        allowed: Collection[str] = (),
        shape: Sequence[int] = ROWS.shape,
    ) -> str | None:
        """Say why the model, in the state in which it is now, is not shared; None if it is. Tries it if it has to.

        backbone: runs, as far as it gets unique tokens. head: computes logits from their hidden states; None if it gets
            every token at its place. allowed: as `allow_dropout` of `share_prefixes`. shape: rows and tokens in each.
        """
        if self.drew and number_that_draws(text_decoder_of(backbone), allowed)[0]:  # a layer that is left out seldom
            return f"{type(text_decoder_of(backbone)).__name__} {DRAWS}"  # does not show in a trial
        gradients = torch.is_grad_enabled()
        with _trying, torch.inference_mode(False), torch.set_grad_enabled(gradients):
            if self.reason is None and not self.shapes:
                reason, self.forks = _first_tried(backbone, head, allowed, self.drew, self.is_own)
                self._note(reason, ROWS.shape)
            is_long = not any(shape[0] <= rows and shape[1] <= length for rows, length in self.shapes)
            if self.reason is None and is_long and not self.is_own:
                places = torch.arange(shape[1], device="cpu")
                own = torch.arange(shape[0], device="cpu")[:, None] * (places >= shape[1] // 2)
                ids = (places + own) % 7 + 1
                with torch.no_grad():  # and without a head, whose logits would take much memory
                    self._note(_tried(backbone, None, allowed, ids), shape)
        return self.reason

    @cached_property
    def if_drawn(self) -> Verdict:
        """Return what is known of the model if a pass has moved a generator."""
        return Verdict(None, self.name, self.is_own, drew=True)

    def _note(self, reason: str | None, shape: Sequence[int]) -> None:
        """Add what a trial of rows of this shape has found."""
        self.reason = reason and f"{self.name} {reason}"
        self.shapes.append(shape)


_judged: WeakKeyDictionary[nn.Module, dict[Hashable, Verdict]] = WeakKeyDictionary()  # of a decoder, by its state


def look(
    parts: Parts,
    head: Any = None,
    *,
    rules: EntryPoint | None = None,
    allowed: Collection[str] = (),
    **reached: Any,
) -> Verdict:
    """Look at a model before a call is planned, and return what is known of it in its present state.

    head: as `Verdict.why_not` takes it. rules: those that apply if the model has changed; None without any.
    allowed: as `allow_dropout` of `share_prefixes`. reached: what else gets unique tokens, as `code_in` takes it.

    A model has one verdict in each mode and dtype, with and without gradients, and another one when its modules, hooks,
    functions or settings have changed, to which the rules apply again. It is tried once for each. One with code that is
    not its own is tried again when more or longer rows come. Every other call costs one look at its modules
    (`code_in`). If the weights are spread over processes, nothing is tried: then the rules decide, code that is not the
    model's own is refused, and recurrent layers compute whole sequences.
    """
    decoder = parts.decoder
    code = code_in(parts.base, decoder, head, **reached)
    if (other := why_recorded() or take_over(decoder.config, code.kinds)) is not None:
        return Verdict(other)
    key: Any = code.state, type(parts.base), rules, _arithmetic(decoder), *allowed
    with _trying:
        known = _judged.setdefault(decoder, {})
        if len(known) > MAX_STATES:
            known.clear()
        if key not in known:
            mixers = mixers_of(decoder).values()
            reason = why_unsupported(parts, rules) if rules else None
            if (
                rules and reason is None and any("forward" not in vars(mixer) for mixer in mixers)
            ):  # `install_mixers` replaces each
                reason = f"{parts.name} has got further recurrent layers; call share_prefixes again"
            num_layers = num_attention_layers(decoder) if text_layers(decoder) else None
            of_mixers = {id(mixer): type(mixer).__name__ for mixer in mixers}
            name = code.tried or type(decoder).__name__
            known[key] = Verdict(reason or code.refused, name, not code.tried, num_layers, of_mixers)
        return known[key]


def _first_tried(
    backbone: Any, head: Any, allowed: Collection[str], drew: bool, is_own: bool
) -> tuple[str | None, bool]:
    """Try a model on a few rows: with states that fork, if it has any, and then without.

    Returns what it computes differently, and whether states fork.
    """
    decoder = text_decoder_of(backbone)
    has_states = bool(mixers_of(decoder))
    if not _is_whole(decoder):
        not_whole = "the weights are not whole in this process"
        reason = None if is_own else f"cannot be tried: {not_whole}"
        why_whole: str | None = f"{not_whole}, so forks cannot be tried"
    else:
        given = backbone, head, allowed, ROWS, drew
        why_whole = _tried(*given, forks=True) if has_states else None
        if has_states and why_whole is None:
            return None, True
        reason = _tried(*given)
        weight = decoder.get_input_embeddings().weight
        is_mixed = torch.is_autocast_enabled(weight.device.type) and weight.dtype == torch.float32
        if is_own and is_mixed and (reason or "").startswith((OTHER_STATES, OTHER_GRADIENT, OTHER_WEIGHTS)):
            with torch.autocast(weight.device.type, enabled=False):  # the rounding of 16 bits may get as far
                reason = _tried(*given)
        if reason == DRAWS and is_own and not drew:
            reason = None  # the call itself will show it, and is refused with the number
    if has_states and reason is None:
        name = type(decoder).__name__
        logger.warning("%s computes every sequence from its first token on in recurrent layers: %s", name, why_whole)
    return reason, False


def _arithmetic(decoder: Any) -> Hashable:
    """Return what a pass computes with: the dtype and device of the embeddings, autocast, gradients."""
    weight = decoder.get_input_embeddings().weight  # which FSDP1 keeps, and no parameter
    return weight.dtype, weight.device, torch.is_autocast_enabled(weight.device.type), torch.is_grad_enabled()


def what_is_wrong(backbone: Any, trial: Callable[[Callable[[Tensor, Tensor], bool]], str | None]) -> str | None:
    """Return what a trial of something before the text decoder finds, once in each state of the code.

    trial: computes, and says what is wrong; None if nothing. It gets a function that compares half of the digits, since
        in pretrained weights rounding gets far.

    Runs without gradients and leaves no trace. If the weights are spread over processes, nothing is tried.
    """
    decoder = text_decoder_of(backbone)
    state = code_in(backbone, backbone, besides=decoder).state
    with _trying, torch.inference_mode(False), torch.no_grad():
        known, key = _judged.setdefault(decoder, {}), (state, _arithmetic(decoder))
        if key not in known:
            known[key] = Verdict(_wrong_by(trial, backbone))
        return known[key].reason


def _wrong_by(trial: Callable[[Callable[[Tensor, Tensor], bool]], str | None], backbone: Any) -> str | None:
    if not _is_whole(backbone):
        return "the weights are not whole in this process"
    with _without_trace(backbone, ()), _as_it_was(backbone), running.during(None):
        try:
            return trial(lambda one, other: _are_alike(_rounding_unit(backbone, one) ** 0.5, one, other))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # by code of any kind
            return f"it cannot be tried ({type(error).__name__}: {first_line(error)})"


class _Pass(NamedTuple):
    """What a pass has computed for each token.

    states: hidden states, or logits. gradient: of the embeddings, of every place of the batch; zeros without any.
    left: what modules have got. layers: the hidden states that each decoder layer returned. weights: the gradient of
    small trained parameters by name, times a vector. Adapters are mostly made with zeros, by which they change no
    states yet: only their own gradient shows what they compute. mixers: the arguments that each mixer got.
    """

    states: Tensor
    gradient: Tensor
    left: list[Tensor]
    layers: list[Tensor]
    weights: dict[str, Tensor]
    mixers: dict[nn.Module, dict[str, Any]]

    def suspects(self, other: _Pass, bar: float) -> Iterator[str]:
        """Yield the parameters whose gradients differ, by more than the rounding of the largest."""
        largest = max((float(each.norm()) for each in self.weights.values()), default=0.0)
        for name, of_weight in self.weights.items():
            if not (of_weight - other.weights[name]).norm() <= bar * max(float(of_weight.norm()), largest / 10):
                yield name

    def differs_from(
        self, other: _Pass, rounded: Sequence[_Pass], times: int, summed: Tensor, suspects: Sequence[str]
    ) -> str | None:
        """Say what of another pass is farther than rounding gets; None if nothing is.

        other: of unique tokens. rounded, times: ordinary passes, and so many times their largest distance is rounding.
        summed: the gradient of the embeddings, added over the copies of each token. suspects: names of weights.
        """
        of_states = _largest(_distance(self.states, each.states) for each in rounded)
        if not _are_alike(times * of_states, self.states, other.states):
            return OTHER_STATES
        of_gradient = _largest(_distance(self.gradient, each.gradient) for each in rounded)
        if not _are_alike(times * of_gradient, summed, other.gradient):
            return OTHER_GRADIENT
        usual = max(self._usual_distance(each, 9 if times == ROUNDING else 5) for each in rounded)
        for name in suspects:
            of_weight = self.weights[name]
            distance = _largest(float((of_weight - each.weights[name]).norm()) for each in rounded)
            distance = max(distance, usual * float(of_weight.norm()))
            if not (of_weight - other.weights[name]).norm() <= times * distance:
                return f"{OTHER_WEIGHTS} {name}, such as by an average over the tokens of a batch"
        return None

    def _usual_distance(self, other: _Pass, of_ten: int) -> float:
        """Return how far so many weights of ten are. One may be near by luck: each is a product with a vector."""
        distances = sorted(_distance(each, other.weights[name]) for name, each in self.weights.items())
        finite = [each for each in distances if isfinite(each)] or [0.0]
        return finite[len(finite) * of_ten // 10]


def _tried(
    backbone: Any,
    head: Any,
    allowed: Collection[str],
    rows: Tensor,
    drew: bool = False,
    forks: bool = False,
) -> str | None:
    """Run the backbone on rows as it is now: mode, gradients, autocast. Leaves no trace.

    forks: whether states of recurrent layers fork.

    Takes three forward passes, up to four more if rounding is in question, and as many backward passes if gradients
    are on.
    """
    decoder = text_decoder_of(backbone)
    if torch.is_grad_enabled() and any(vars(each).get("scale_grad_by_freq") for each in decoder.modules()):
        return "divides a gradient by how often its token occurs (scale_grad_by_freq)"
    device = next(decoder.get_input_embeddings().parameters()).device
    rows = rows[:, : chunk_of(decoder.config)].to(device)
    attended = torch.ones_like(rows)
    attended[0, -1:] = rows.shape[1] < 2  # as in a batch of rows of different lengths: one has padding
    tokens, lengths = attended.flatten().nonzero()[:, 0], attended.sum(dim=1)
    depths = torch.arange(rows.shape[1], device=device).expand_as(rows).flatten()[tokens]
    starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    plan = build_prefix_plan(rows.flatten()[tokens].cpu(), starts.cpu())
    layout = TreeLayout.from_plan(plan).to(device)
    call = RadixCall(layout, None, "auto", "auto", window_may_bind(decoder.config, layout.max_seqlen))
    whole = call.runs
    if forks:
        call.runs = runs_of_segments(*layout.segments, SHORTEST_FORK, device)
    copies = layout.inverse_indices
    ordinary = {"input_ids": rows, "attention_mask": attended}
    once = {
        "input_ids": rows.flatten()[tokens][layout.gather_indices][None],
        "position_ids": torch.tensor(plan.position_ids, device=device)[None],
        "attention_mask": no_mask(call.window_may_bind, device, call),
        "radix_call": call,
    }
    has_adapters = any(hasattr(type(each), ADAPTERS) and getattr(each, ADAPTERS) for each in backbone.modules())
    with _without_trace(backbone, allowed), torch.set_grad_enabled(torch.is_grad_enabled() or has_adapters):
        before = generator_states(device)
        try:
            with running.during(None):
                expected, again = (_passed(backbone, head, ordinary, tokens, depths) for _ in range(2))
            draws = has_drawn(device, before)
            with running.during(call):
                found = _passed(backbone, head, once, copies, depths)
            if forks:
                with running.during(None):
                    tries = (
                        _why_no_fork(mixer, given, call.runs, whole, layout.row_depths < NUM_SHARED)
                        for mixer, given in found.mixers.items()
                    )
                    if reason := next(filter(None, tries), None):
                        return reason
            bar = _bar(decoder, expected.states)
            are_alike = partial(_are_alike, bar)
            is_same = are_alike(expected.states, again.states) and not any(expected.suspects(again, bar))
            if not is_same or (drew > draws and not allowed):  # only in longer rows
                return DRAWS
            summed = torch.zeros_like(found.gradient).index_add_(0, copies, expected.gradient[tokens])
            with running.during(None):
                again_rounded = partial(_passed, backbone, head, ordinary, tokens, depths)
                if reason := _why_not_rounding(decoder, expected, found, summed, again_rounded):
                    return reason
            num_layers = num_attention_layers(decoder) if text_layers(decoder) else None
            call.check_layers(backbone, num_layers, "attended without the tree")
        except torch.OutOfMemoryError:  # of this moment, not of the model
            raise
        except UserError as error:
            return f"is refused: {error}"
        except Exception as error:  # by code of any kind
            return f"cannot be tried on a few tokens ({type(error).__name__}: {first_line(error)})"
    if len(expected.left) != len(found.left) or not all(map(are_alike, expected.left, found.left)):
        return "leaves another state in a module"
    return None


def _why_not_rounding(
    decoder: Any, expected: _Pass, found: _Pass, summed: Tensor, again_rounded: Callable[[int, bool], _Pass]
) -> str | None:
    """Say how a pass of unique tokens differs from the ordinary one by more than rounding; None if it does not.

    summed: the gradient of the embeddings, added over the copies of each token. again_rounded: runs the ordinary pass
    once more, as `_passed` does with this `rounding` and `in_layers`.
    """
    bar = _bar(decoder, expected.states)
    suspects = [*expected.suspects(found, bar)]
    pairs = (expected.states, found.states), (summed, found.gradient)
    if not suspects and all(_are_alike(bar, *pair) for pair in pairs):
        return None
    is_float32 = _rounding_unit(decoder, expected.states) <= torch.finfo(torch.float32).eps
    times, count = (ROUNDING, NUM_ROUNDED) if is_float32 else (ROUNDING_OF_16_BITS, 1)
    reason, rounded = None, list[_Pass]()
    for number in range(1, count + 1):
        rounded.append(again_rounded(number, is_float32))
        reason = expected.differs_from(found, rounded, times, summed, suspects)
        if reason is None:
            return None
    return OTHER_STATES + _first_layer(decoder, expected, found, rounded, times) if reason == OTHER_STATES else reason


def _why_no_fork(
    mixer: nn.Module, given: Mapping[str, Any], forked: RunLayout, whole: RunLayout, is_above: Tensor
) -> str | None:
    """Say why runs of a mixer cannot start from a state; None if they can.

    given: its arguments on unique rows, the hidden rows first. forked, whole: the runs of a batch with forks and
    without. is_above: the rows before its forks, (U,).
    """
    name = type(mixer).__name__
    try:
        found, expected = (_gradient_above_forks(mixer, given, runs, is_above) for runs in (forked, whole))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a kernel may raise anything
        return f"{name} raises {type(error).__name__}: {first_line(error)}"
    if not expected.any():
        return f"the state of {name} does not show"
    is_lost = expected.any(dim=-1) & ~found.any(dim=-1)
    if is_lost.any() or not (found - expected).norm() <= LOST * expected.norm():
        return f"the gradient of rows before a fork does not come through the state of {name}"
    return None


@torch.enable_grad()
def _gradient_above_forks(mixer: nn.Module, given: Mapping[str, Any], runs: RunLayout, is_above: Tensor) -> Tensor:
    """Return the gradient of the rows before the forks, (rows, channels), of a sum of the outputs after them."""
    inputs = {name: each_tensor(Tensor.detach, len(is_above), value) for name, value in given.items()}
    rows = next(iter(inputs.values())).requires_grad_()
    output = run_on_tree(mixer, mixer.forward, inputs, runs)
    outputs = output if isinstance(output, tuple) else (output,)
    below = torch.cat([each[0, ~is_above].flatten() for each in outputs if each is not None])
    weights = torch.arange(len(below), device=below.device).sin()
    (gradient,) = torch.autograd.grad((below * weights).sum(), rows)
    return gradient[0, is_above].float()


def _first_layer(decoder: Any, expected: _Pass, found: _Pass, rounded: Sequence[_Pass], times: int) -> str:
    """Name the first layer whose hidden states differ, if one does."""
    by_layer = zip(*(each.layers for each in rounded), strict=False)
    passes = zip(text_layers(decoder), expected.layers, found.layers, by_layer, strict=False)
    for index, (layer, states, others, states_rounded) in enumerate(passes):
        of_rounding = _largest(_distance(states, each) for each in states_rounded)
        if not _are_alike(max(times * of_rounding, _bar(decoder, states)), states, others):
            return f", first in layer {index} ({type(layer).__name__})"
    return ""


def _passed(
    backbone: Any,
    head: Any,
    given: dict[str, Any],
    tokens: Tensor,
    depths: Tensor,
    rounding: int = 0,
    in_layers: bool = False,
) -> _Pass:
    """Run the backbone and the head.

    tokens: where each is in the batch. depths: in its sequence. rounding: if it is not 0, each number of the embeddings
    is moved by a unit of rounding, up or down, in a pattern of this number. in_layers: the states after
    each layer too.
    """
    decoder = text_decoder_of(backbone)
    embedded: list[Tensor] = []
    layers: list[Tensor] = []
    mixers: dict[nn.Module, dict[str, Any]] = {}
    thread = get_ident()
    # Not those with a hook, which would see a gradient of no step.
    small = ((name, each) for name, each in backbone.named_parameters() if each.numel() <= LARGE)
    trained = {name: each for name, each in small if each.requires_grad and not each._backward_hooks}

    def make_leaf(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        if get_ident() != thread:
            return output
        rows = _moved(output.detach(), rounding) if rounding else output.detach().clone()
        embedded.append(rows.requires_grad_(torch.is_grad_enabled()))
        return embedded[-1].clone()  # which a model may change in place

    def note(number: int, layer: nn.Module, args: Any, output: Any) -> Any:
        if get_ident() != thread:
            return output
        states = output if isinstance(output, Tensor) else output[0]
        if in_layers:
            states = _moved(states, rounding + NUM_ROUNDED * number)
            output = states if isinstance(output, Tensor) else (states, *output[1:])
        if states.shape[:2] == embedded[0].shape[:2]:
            layers.append(states.detach().flatten(0, 1)[tokens])
        return output

    def note_mixer(mixer: nn.Module, args: Any, kwargs: Any) -> None:
        if get_ident() == thread:
            mixers[mixer] = arguments_by_name(mixer, args, kwargs)

    with _as_it_was(backbone) as changed:  # which removes the hooks too
        decoder.get_input_embeddings().register_forward_hook(make_leaf)
        for number, layer in enumerate(text_layers(decoder), 1):
            layer.register_forward_hook(partial(note, number))
        for mixer in mixers_of(decoder).values():
            mixer.register_forward_pre_hook(note_mixer, with_kwargs=True)
        states = backbone.forward(**given, use_cache=False)[0]
        states, leaf = (states if head is None else head(states)).flatten(0, 1)[tokens], embedded[0]
        gradient, gradients = torch.zeros_like(leaf), dict[str, Tensor]()
        if states.requires_grad:
            size = (int(depths.max()) + 1) * states.shape[-1]
            weights = torch.arange(size, device=states.device).sin().to(states.dtype).view(-1, states.shape[-1])[depths]
            gradient, *of_weights = torch.autograd.grad(
                (states * weights).sum(), [leaf, *trained.values()], allow_unused=True
            )
            gradients = dict(zip(trained, map(_times_a_vector, of_weights), strict=True))
    numbers = (torch.tensor(each, device="cpu") if isinstance(each, float | int) else each for each in changed)
    left = [each.detach() for each in numbers if isinstance(each, Tensor)]
    return _Pass(states.detach(), gradient.flatten(0, 1), left, layers, gradients, mixers)


def _moved(states: Tensor, number: int) -> Tensor:
    """Move each number by a unit of rounding, up or down, in the pattern of this number, which is 1 or more."""
    places = torch.arange(states[0].numel(), device=states.device, dtype=torch.float64)  # of one row, which is enough
    steps = (places * number + 1).sin().sign() * torch.finfo(states.dtype).eps
    return states * (1 + steps).to(states.dtype).view_as(states[0])


def _times_a_vector(gradient: Tensor | None) -> Tensor:
    """Return the product with a vector, which takes less memory than a matrix. None is zeros."""
    if gradient is None:
        return torch.zeros((), device="cpu")  # whatever the default device
    matrix = gradient.reshape(len(gradient), -1) if gradient.ndim else gradient.reshape(1, 1)
    vector = torch.arange(1, matrix.shape[1] + 1, device=matrix.device).sin()
    return matrix.to(vector.dtype) @ vector if matrix.dtype != torch.float64 else matrix @ vector.double()


@contextmanager
def _as_it_was(backbone: Any) -> Iterator[list[Any]]:
    """Recompute nothing, and give back what modules hold, buffers, and rows of embeddings with a `max_norm`.

    Yields what has been changed in the decoder. Around it a backbone notes what `generate` needs, such as rope_deltas.
    """
    changed: list[Any] = []
    decoder = set(text_decoder_of(backbone).modules())
    embeddings = [each.detach()[: int(ROWS.max()) + 1] for each in backbone.get_input_embeddings().parameters()]
    buffers = [each for each in backbone.buffers() if each.numel() <= LARGE]
    tensors = [(each, each.clone()) for each in (*buffers, *embeddings)]
    held = [(each, m) for m in backbone.modules() for each in (vars(m), *vars(m).values())]
    copies: list[Any] = [
        (each, copy(each), changed if module in decoder else [])
        for each, module in held
        if isinstance(each, dict | list)
    ]
    for module in backbone.modules():  # a reentrant one allows no gradient of a single tensor
        if vars(module).get("gradient_checkpointing"):
            module.gradient_checkpointing = False
        if WRAPPER in vars(module):
            module.checkpoint_fn = _called
    try:
        yield changed
    finally:
        for now, before, noted in copies:
            if isinstance(now, list):
                noted += now[len(before) :]
                now[:] = before
            else:
                noted += [value for name, value in now.items() if value is not before.get(name)]
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
    return _distance(expected, other) <= bar


def _distance(expected: Tensor, other: Tensor) -> float:
    """Return the relative L2 distance; infinite if anything is NaN, or for any number in place of zeros."""
    expected, other = expected.double(), other.double()
    distance = float((expected - other).norm() / expected.norm())
    return distance if distance == distance else float("inf")


def _largest(distances: Iterable[float]) -> float:
    """Return the largest that is a number: passes that overflow say nothing of rounding."""
    return max(filter(isfinite, distances), default=0.0)


def _bar(decoder: nn.Module, states: Tensor) -> float:
    """Return the relative error up to which two passes are alike: 6e-6 in float32, 9 % in bfloat16.

    Measured on exact models of up to 64 layers of random weights: 1.2e-6 in float32, 0.5 % in float16, 2.6 % in
    bfloat16. In pretrained weights a few numbers are thousands of times as large as others, so that rounding gets
    farther: see `_Pass.differs_from`.
    """
    unit = _rounding_unit(decoder, states)
    return min(50 * unit, unit**0.5)


def _rounding_unit(decoder: nn.Module, states: Tensor) -> float:
    """Return the largest relative step of the dtypes in which a pass computes.

    Layers of float64 have norms and rotary embeddings in float32.
    """
    units = [torch.finfo(each.dtype).eps for each in (states, *decoder.parameters()) if each.is_floating_point()]
    if torch.is_autocast_enabled(states.device.type) or torch.get_float32_matmul_precision() != "highest":
        units.append(torch.finfo(torch.bfloat16).eps)
    return max(torch.finfo(torch.float32).eps, *units)


def _is_whole(decoder: Any) -> bool:
    """Return whether a pass needs nothing from other processes; their calls may not be tried at the same time.

    Weights on `meta` and fake ones have no values. FSDP1 around a model leaves its modules without parameters.
    """
    weights = [*decoder.parameters()]
    is_split = any(
        each.is_meta or not each.numel() or any(is_instance_by_name(each, *kind) for kind in NO_VALUES)
        for each in weights
    )
    is_flat = not any(True for _ in decoder.get_input_embeddings().parameters())
    return not is_flat and not is_split and not any(is_instance_by_name(each, *FSDP) for each in decoder.modules())


@contextmanager
def _without_trace(backbone: Any, allowed: Collection[str]) -> Iterator[None]:
    """Give back generators; compile nothing, and show nothing to checkpointing and counts of operations."""
    device = next(backbone.get_input_embeddings().parameters()).device
    generators = [
        value for each in backbone.modules() for value in vars(each).values() if isinstance(value, torch.Generator)
    ]
    of_modules = [each.get_state() for each in generators]
    of_numpy, of_python = np.random.get_state(), random.getstate()  # noqa: NPY002
    unnoticed = saved_tensors_hooks(_same, _same)
    no_modes = _disable_current_modes()
    with without_dropout(backbone, allowed), torch.compiler.set_stance("force_eager"), unnoticed, no_modes:
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


def _called(function: Any, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _same(tensor: Tensor) -> Tensor:
    return tensor
