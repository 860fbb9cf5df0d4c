"""The attention functions that every layer of a Hugging Face model calls: wrappers that replace transformers' own.

With a plan they are tree attention, in a call that generates attention over stored rows. Otherwise they are the
wrapped function, mask included: `model.generate` and an ordinary padded batch behave as if nothing had
been shared, in this model and in every other of the process. Only functions of transformers are taken over
(`take_over`), since what another one computes is unknown.

The plan reaches a layer as the keyword argument `radix_call` of the model call; layers that do not pass those on
(Nemotron, StableLM) find it on their mask, which every layer gets, in a recomputed forward pass too.

A layer's window comes from its mask (`radixtrain/hf/windows.py`), everything else from the keyword arguments that
Hugging Face's layers pass: scale, soft-cap, sinks. An argument that tree attention does not compute is refused. If
queries and values have different head dims, as in latent attention (MLA), the narrower get zeros (`_of_one_head_dim`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from functools import cache, cached_property
from threading import Lock
from types import BuiltinFunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    eager_mask,
    flash_attention_mask,
    flex_attention_mask,
    sdpa_mask,
)

from radixtrain.attention import launched_in_graphs, tree_attention
from radixtrain.errors import TRAIN_WITHOUT_SHARING, UserError
from radixtrain.hf.backbone import attends, eager_slots, interfaces_of, name_of
from radixtrain.hf.padded.places import Places
from radixtrain.hf.windows import is_empty, mask_function, on_mask, window_of
from radixtrain.tree.arrays import IntArray
from radixtrain.tree.layout import TreeLayout
from radixtrain.tree.radix_inputs import RADIX
from radixtrain.tree.runs import RunLayout, tree_runs
from radixtrain.versions import saying_what_was_tested, untested

Heads = tuple[Tensor, Tensor, Tensor]  # query, key and value of a layer


class Extent(NamedTuple):
    """What a layer asks of a call without a plan. max_seqlen: the longest sequence at its end, in tokens."""

    max_seqlen: int
    has_blocks: bool = False


class Call:
    """One forward pass, the argument `radix_call` of every layer: what the layers need, and which of them ran.

    Not a dataclass: FSDP copies dataclasses for every layer when it casts arguments.

    layout: which rows see which. kernel: of the attention. window_may_bind: whether a layer may hide a part of a row's
        past.
    ran: the id of every attention module that ran. both_ways: of those in which rows see later ones of their block.
    """

    def __init__(self, layout: TreeLayout | Extent, kernel: str, window_may_bind: bool) -> None:
        self.layout, self.kernel, self.window_may_bind = layout, kernel, window_may_bind
        self.ran: list[int] = []
        self.both_ways: list[int] = []

    in_graph = False  # whether layers may attend in a compiled graph
    depths: Any  # the place of each new row in its sequence

    def attend(self, heads: Heads, window: int | None, **scoring: Any) -> Tensor:
        """Compute the attention of a layer. heads, scoring: as `tree_attention` takes them."""
        raise NotImplementedError

    def check_layers(self, backbone: PreTrainedModel, num_layers: int | None, others: str) -> None:
        """Raise RuntimeError unless every layer took part in a pass that ran, and images attended in both directions.

        num_layers: that attend; None if it is not known. others: what the layers did that took no part.
        """
        # DiffLlama calls its attention twice a layer; a model that runs one layer twice has fewer modules than layers.
        in_graphs = launched_in_graphs(self.layout) if isinstance(self.layout, TreeLayout) else 0
        number = len(self.ran) + in_graphs
        all_ran = num_layers in (None, number, len(set(self.ran))) or (in_graphs and number % num_layers == 0)
        if not all_ran:
            raise RuntimeError(
                f"radix attention ran in {len(set(self.ran)) + in_graphs} of {num_layers} layers of "
                f"{type(backbone).__name__}: the others {others}{untested()}"
            )
        if self.layout.has_blocks and not self.both_ways:
            raise RuntimeError(
                f"no layer of {type(backbone).__name__} let the images of this batch attend in both directions, for "
                f"which it reads token types: leave these out if it has no such layer, else train it without "
                f"sharing{untested()}"
            )


class RadixCall(Call):
    """A forward pass on a radix batch.

    predictor_indices: the rows that the head gets; None for all of them.
    places: where the rows stand in the padded batch that they came from; None for a batch of a `RadixCollator`.
    misses_cache: whether the ordinary call would have returned a cache.
    token_loss: whether any loss of this batch is known to be a sum over tokens.
    place_rows: of the `RadixInputs`.
    verdict: what is known of the model. mixed: the id of every mixer that ran.
    module: that began it. ordinary: its arguments without sharing. generators: their states when it began.
    """

    layout: TreeLayout

    def __init__(
        self,
        layout: TreeLayout,
        predictor_indices: Tensor | None,
        attention: str,
        kernel: str,
        window_may_bind: bool,
        places: Places | None = None,
        verdict: Any = None,
    ) -> None:
        super().__init__(layout, kernel, window_may_bind)
        self.predictor_indices, self.attention = predictor_indices, attention
        self.places, self.misses_cache = places, False
        self.token_loss = False
        self.place_rows: IntArray | None = None
        self.verdict = verdict
        self.mixed: list[int] = []
        self.in_graph = not layout.has_blocks
        launched_in_graphs(layout)  # of an earlier pass, which recomputed its layers
        self.module: Any = None
        self.ordinary: tuple[tuple[Any, ...], dict[str, Any]] = (), {}
        self.generators: list[Tensor] = []

    @property
    def depths(self) -> Tensor:
        """Return the place of each row of this process in its sequence."""
        return self.own_rows(self.layout.row_depths)

    @property
    def num_rows(self) -> int:
        """Return the number of rows that this process holds."""
        return self.layout.num_rows

    def all_rows(self, rows: Tensor) -> Tensor:
        """Gather (rows of this process, ...) -> (U, ...)."""
        return rows

    def own_rows(self, rows: Tensor) -> Tensor:
        """Select (U, ...) -> (rows of this process, ...)."""
        return rows

    @cached_property
    def runs(self) -> RunLayout:
        """Return the runs that recurrent mixers compute."""
        return tree_runs(self.layout, self.verdict is not None and self.verdict.forks)

    def attend(self, heads: Heads, window: int | None, **scoring: Any) -> Tensor:
        """Attend to the unique tokens."""
        options = {"attention": self.attention, "kernel": self.kernel, "window": window, **scoring}
        return tree_attention(*heads, self.layout, **options)


Attention = Callable[..., tuple[Tensor, Tensor | None]]
# Arguments of a model call that layers hand on to their attention, which would read them.
OPTIONS = {"dropout", "is_causal", "position_bias", "s_aux", "scaling", "sliding_window", "softcap"}
FLASH = ("flash_attention_2", "flash_attention_3", "flash_attention_4")
# Under each name transformers' own attention, None for that of the model's file, and its own mask function.
STOCK: dict[str, tuple[Attention | None, Callable[..., Any]]] = {
    "sdpa": (sdpa_attention_forward, sdpa_mask),
    "eager": (None, eager_mask),
    "flex_attention": (flex_attention_forward, flex_attention_mask),
    **dict.fromkeys(FLASH, (flash_attention_forward, flash_attention_mask)),
}


class Slot(NamedTuple):
    """Where layers find a function.

    mapping, key: it is there. register: puts another one there. stock: transformers' own, None for one of its files.
    around: makes ours of it.
    """

    mapping: MutableMapping[str, Any]
    key: str
    register: Callable[[str, Any], None]
    stock: object
    around: Callable[[Any], Any]


_TAKING = Lock()  # models may be loaded, and called, in several threads
_ours: dict[Callable[..., Any], Callable[..., Any]] = {}  # a function of transformers -> ours around it


def take_over(config: PreTrainedConfig, classes: frozenset[type]) -> str | None:
    """Wrap the attention functions that modules call; return why if these are not transformers' own.

    They stay there, for all models of the process, and do nothing without a plan.

    config: names the attention. classes: of the modules.
    """
    name = config._attn_implementation
    if name not in STOCK:
        return f"attn_implementation {name!r} is not one of transformers' own ({', '.join(STOCK)})"
    sdpa = torch.nn.functional.scaled_dot_product_attention  # context parallelism replaces it during a step
    if name == "sdpa" and not isinstance(sdpa, BuiltinFunctionType):
        return f"{_made(sdpa)} replaces torch's own scaled_dot_product_attention"
    with _TAKING:
        return next(filter(None, map(_take, _slots_of(name, classes))), None)


def _made(function: object) -> str:
    return f"{getattr(function, '__module__', None)}.{getattr(function, '__qualname__', function)}"


@cache
def _slots_of(name: str, classes: frozenset[type]) -> list[Slot]:
    attention, mask = STOCK[name]
    slots = [Slot(ALL_MASK_ATTENTION_FUNCTIONS, name, AttentionMaskInterface.register, mask, mask_function)]
    for module_class in filter(attends, classes):
        places = eager_slots(module_class) if name == "eager" else [(x, name) for x in interfaces_of(module_class)]
        for mapping, key in places:
            register = mapping.__setitem__ if name == "eager" else AttentionInterface.register
            slots.append(Slot(mapping, key, register, attention, radix_attention))
    return slots


def _take(slot: Slot) -> str | None:
    """Wrap the function in this slot, or return why not."""
    mapping, key, register, stock, around = slot
    found: Any = mapping.get(key)
    if found in _ours.values():
        return None
    written_in = getattr(found, "__globals__", {}).get("__name__", "")  # `functools.wraps` does not change it
    if found is not stock if stock else not written_in.startswith("transformers."):
        return f"{_made(found)} replaces transformers' own {key!r}"
    ours = _ours.setdefault(found, around(found))
    register(key, ours)
    if mapping.get(key) is not ours:  # another program has put it into this mapping
        mapping[key] = ours
    return None


def radix_attention(ordinary: Attention) -> Attention:
    """Wrap an attention function: it computes what the call of the layer says, and `ordinary` without a call."""

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: object = None,
        *further: object,
        radix_call: Call | None = None,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend as the call of the layer says.

        query: (batch, N, length, H). key: (batch, K, length, H). value: (batch, K, length, V), mostly V = H.
        With a call, batch is 1 and length is U. Returns (batch, length, N, V) and None, as every attention function.
        """
        call = radix_call or _call_of(module, attention_mask, kwargs)
        if call is None:
            return ordinary(module, query, key, value, attention_mask, *further, **kwargs)
        if further:
            raise UserError(
                f"{name_of(module)} gives its attention more than a mask by position; {TRAIN_WITHOUT_SHARING}"
            )
        heads = query, key, value
        if torch.compiler.is_compiling():
            is_in_graph = call.in_graph and is_empty(attention_mask) and not _scales(module)
            attend = _attend_in_graph if is_in_graph else _attend_beside_graph
            return attend(call, module, heads, attention_mask, kwargs, ordinary)
        try:
            return _attend(call, module, heads, attention_mask, kwargs, ordinary)
        except Exception:
            with saying_what_was_tested():  # as a decorator it would be nine calls of Python in every layer
                raise

    return attention


def _attend_in_graph(
    call: Call, layer: nn.Module, heads: Heads, mask: Any, options: Mapping[str, Any], ordinary: Attention
) -> tuple[Tensor, None]:
    """Compute the attention of one layer in a compiled graph, which holds no number of the tree."""
    _check_options(layer, options, ordinary)
    window = options.get("sliding_window") if ordinary is flash_attention_forward else mask.shape[3]
    return _attended(call, heads, window, options, False)


def _attended(
    call: Call,
    heads: Heads,
    window: int | None,
    options: Mapping[str, Any],
    both_ways: bool,
) -> tuple[Tensor, None]:
    scored, valued, scaling = heads[0].shape[-1], heads[2].shape[-1], options.get("scaling")
    if torch.is_autocast_enabled(heads[0].device.type):
        heads = _as_autocast(*heads)
    if scored != valued:
        heads = _of_one_head_dim(*heads)
    query, key, value = heads
    out_UNH = call.attend(
        (query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)),
        window,
        scale=scored**-0.5 if scaling is None else scaling,
        softcap=options.get("softcap"),
        sinks=options.get("s_aux"),
        both_ways=both_ways,
    )
    return out_UNH[None, ..., :valued].contiguous(), None  # as `sdpa` of Hugging Face: JetMoE makes a view


def _call_of(module: nn.Module, attention_mask: object, kwargs: Mapping[str, Any]) -> Call | None:
    """Find the call of a layer that received no keyword arguments; None in an ordinary batch.

    Raises UserError for a radix batch whose plan did not reach the layer. It is known by its mask, which only our hook
    makes, or by its `radix`, which only a batch that did not pass the hook still has.
    """
    if kwargs.get(RADIX) is not None:
        raise UserError(
            f"{name_of(module)} receives a radix batch that did not pass the backbone of a shared model: "
            f"call the shared model or its backbone, not a part of it, its forward method or another model"
        )
    written = on_mask(attention_mask)
    if written is None and not is_empty(attention_mask):
        return None
    call: Call | None = None if written is None else written.call
    if call is None:
        raise UserError(
            f"{name_of(module)} receives neither the keyword arguments of the model call nor the mask of its model, "
            f"so the tree cannot reach it; {TRAIN_WITHOUT_SHARING}"
        )
    return call


def _attend(
    call: Call,
    layer: nn.Module,
    heads: Heads,
    attention_mask: object,
    options: Mapping[str, Any],
    ordinary: Attention,
) -> tuple[Tensor, None]:
    """Compute the attention of one layer, by its call. options: what Hugging Face's layers pass by keyword."""
    _check_options(layer, options, ordinary)
    argument, longest = options.get("sliding_window"), call.layout.max_seqlen
    obeys_argument, written = ordinary is flash_attention_forward, on_mask(attention_mask)
    window = window_of(layer, attention_mask, written, argument, longest, call.window_may_bind, obeys_argument)
    both_ways = written is not None and written.both_ways
    if _scales(layer):
        heads = _at_own_places(layer, heads[0], call), *heads[1:]
    try:
        attended = _attended(call, heads, window, options, both_ways)
    except UserError as error:  # this layer cannot do what was requested
        why = f" attends to the last {window} tokens, and this batch has a sequence of {longest}" if window else ""
        raise UserError(f"{name_of(layer)}{why}: {error}") from None
    call.ran.append(id(layer))
    if both_ways:
        call.both_ways.append(id(layer))
    return attended


# It counts the layers, and reads what a graph cannot.
_attend_beside_graph = torch.compiler.disable(saying_what_was_tested()(_attend))


def _scales(layer: nn.Module) -> bool:
    """Return whether a layer scales its queries by their place."""
    own: Any = layer
    return bool(layer.__dict__.get("attn_temperature_tuning")) and not own.use_rope


def _at_own_places(layer: nn.Module, query: Tensor, call: Call) -> Tensor:
    """Scale queries, (1, N, rows, H), of a layer that does, by the place of each row in its sequence.

    Llama 4's layers without rotary embeddings take no positions: they have scaled queries by the place in their hidden
    states, which are the unique tokens here.
    """
    own: Any = layer
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    computed, of_sequence = (
        (torch.log1p(torch.floor((places.float() + 1.0) / own.floor_scale)) * own.attn_scale + 1.0).to(wide)
        for places in (torch.arange(length, device=query.device) for length in (query.shape[2], call.layout.max_seqlen))
    )
    return (query * (of_sequence[call.depths] / computed)[:, None]).to(query.dtype)


def _as_autocast(*heads: Tensor) -> Heads:
    """Cast as autocast does for `scaled_dot_product_attention`: norms leave q and k in float32, v comes in 16 bits.

    Autocast leaves float64 as it is (`cached_cast` in torch's autocast_mode.cpp).
    """
    dtype = torch.get_autocast_dtype(heads[0].device.type)
    query, key, value = (x if x.dtype == torch.float64 else x.to(dtype) for x in heads)
    return query, key, value


def _of_one_head_dim(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pad the narrower of queries and values with zeros, which add nothing to a score and zero columns to the output.

    Queries and keys get the same number of zeros, so that two head dims that do not fit are still refused.
    """
    scored, valued = query.shape[-1], value.shape[-1]
    if scored < valued:
        query, key = (nn.functional.pad(x, (0, valued - scored)) for x in (query, key))
    elif valued < scored:
        value = nn.functional.pad(value, (0, scored - valued))
    return query, key, value


def _check_options(module: nn.Module, options: Mapping[str, Any], ordinary: Attention) -> None:
    """Refuse what a layer requests and tree attention does not compute, or `ordinary` would not have computed."""
    if options.get("dropout"):
        raise UserError(
            f"{name_of(module)} requests attention dropout {options['dropout']}; set attention_dropout to 0"
        )
    if options.get("position_bias") is not None:
        raise UserError(
            f"{name_of(module)} adds a position_bias to its scores, which tree attention does not compute; "
            f"{TRAIN_WITHOUT_SHARING}"
        )
    # Not by `getattr`: for what a module does not have, that is a call of Python in every layer.
    for key, attribute, held in (
        ("softcap", "attn_logit_softcapping", module.__dict__),
        ("s_aux", "sinks", module._parameters),
    ):
        if options.get(key) is None and held.get(attribute) is not None:
            raise UserError(
                f"{name_of(module)} has {attribute} and does not pass it to its attention function as {key}, so tree "
                f"attention would leave it out; {TRAIN_WITHOUT_SHARING}"
            )
    if ordinary is sdpa_attention_forward and options.get("s_aux") is not None:
        raise UserError(
            f"{name_of(module)} has sinks, which attn_implementation 'sdpa' leaves out; load it with 'eager'"
        )
    if not options.get("is_causal", getattr(module, "is_causal", True)):
        raise UserError(
            f"{name_of(module)} is not causal; a shared prefix has the same states only under causal attention"
        )
