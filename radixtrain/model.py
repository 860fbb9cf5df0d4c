"""Hugging Face models on unique tokens: `prepare_model` installs it, `restore_model` removes it. No model is rewritten.

transformers >= 5 gives every hook that is needed:

- the attention function "radix" is registered beside "sdpa", and "radix_eager" for models whose soft-cap or sinks
  `sdpa` cannot compute. Without a plan they are `sdpa` and the model's own eager attention, mask included: generation
  and an ordinary padded batch behave as if nothing had been prepared;
- a pre-hook on the backbone turns the flat `radix_` entries of a batch into one object that reaches every layer, and
  hands mask creation an empty 4-D tensor, which every model returns as it is: no U x U mask is ever built;
- where a sliding window may bind, it hands over a 2-D mask of no columns instead, and our mask function answers each
  question of Hugging Face's with an empty mask as wide as the window: every layer gets the one that it would have
  obeyed, whatever the model calls its layers (`_told_by_mask`);
- a hook behind the backbone hands the head the rows that predict, `[1, P, D]`, and the router loss the logits of every
  original token.

A radix batch on any other attention would train silently with a wrong mask: Hugging Face reads a jump in the positions
as the start of a new packed document. So the hooks check that ours is in force, and count that every layer came by.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from radixtrain.attention import STRATEGIES, choose_attention, tree_attention
from radixtrain.errors import UserError
from radixtrain.kernels.rows import gather_rows
from radixtrain.layout import PREFIX, TreeLayout

__all__ = ["ATTENTION_NAME", "backbone_of", "prepare_model", "prepared_options", "pretrained_model_of", "restore_model"]

ATTENTION_NAME = "radix"
EAGER_NAME = "radix_eager"
STATE = "_radixtrain"
EXACT_LAYERS = ("full_attention", "sliding_attention")
NOT_COMPUTED = {"kv_lora_rank": "latent attention (MLA)", "keep_window_size": "a dynamic mask"}
ModelT = TypeVar("ModelT", bound=nn.Module)


def prepare_model(
    model: ModelT, *, attention: str = "auto", kernel: str = "auto", allow_dropout: Iterable[str] = ()
) -> ModelT:
    """Make a model accept the batches of a `RadixCollator`, beside the ordinary ones. Returns the same model.

    model: a `PreTrainedModel`, or one wrapped by PEFT. Preparing again replaces the earlier choice.
    attention: `auto`, `cascade`, `path`, `expand` or `reference`; see `radixtrain.attention`.
    kernel: `auto`, `torch`, `flash_attn` or `eager`.
    allow_dropout: names of dropout modules (or the end of their names) to accept although a shared token then draws one
        mask where an ordinary batch draws one per copy: still a dropout, no longer the same gradient.

    Soft-capping, sinks, sliding windows and router losses (`output_router_logits`) are computed exactly.

    Raises UserError, naming the layer and the reason, for attention that is not understood (linear attention, latent
    attention, chunks, attention dropout), for a dropout > 0 that is not allowed, and for a choice that cannot be met.
    """
    restore_model(model)
    allowed = tuple(allow_dropout)
    base = pretrained_model_of(model)
    backbone = backbone_of(model)
    _check_attention(base, backbone)
    _check_dropout(base, allowed)
    _check_choice(backbone, attention, kernel)
    previous = base.config._attn_implementation
    _register()
    name = ATTENTION_NAME if base._supports_sdpa and previous != "eager" else EAGER_NAME
    base.set_attn_implementation(name)
    if backbone.config._attn_implementation != name:
        raise UserError(
            f"{type(base).__name__} does not take its attention from AttentionInterface, so its layers cannot be "
            f"reached; train it with dedup: false"
        )
    hooks = _BackboneHooks(attention, kernel, _num_layers(backbone), allow_neftune="neftune" in allowed)
    handles = [
        backbone.register_forward_pre_hook(hooks.before, with_kwargs=True),
        backbone.register_forward_hook(hooks.behind, with_kwargs=True),
    ]
    options = {"attention": attention, "kernel": kernel, "allow_dropout": allowed}
    setattr(base, STATE, (previous, handles, options))
    return model


def prepared_options(model: nn.Module) -> dict[str, Any] | None:
    """The keyword arguments that `prepare_model` was given, or None for a model that is not prepared."""
    state = getattr(pretrained_model_of(model), STATE, None)
    return None if state is None else state[2]


def restore_model(model: ModelT) -> ModelT:
    """Undo `prepare_model`: the hooks go, the attention is what it was. A model never prepared is left alone."""
    base = pretrained_model_of(model)
    if hasattr(base, STATE):
        previous, handles, _ = getattr(base, STATE)
        for handle in handles:
            handle.remove()
        delattr(base, STATE)
        if base.config._attn_implementation in (ATTENTION_NAME, EAGER_NAME):
            base.set_attn_implementation(previous)
    return model


def pretrained_model_of(model: nn.Module) -> PreTrainedModel:
    """The Hugging Face model itself, out of its PEFT wrapper. TypeError for anything else."""
    base = model.get_base_model() if callable(getattr(model, "get_base_model", None)) else model  # type: ignore[operator]
    if not isinstance(base, PreTrainedModel):
        raise TypeError(
            f"expected a transformers PreTrainedModel or a PEFT model around one, got {type(model).__name__}; "
            f"prepare the model before the trainer wraps it"
        )
    return base


def backbone_of(model: nn.Module) -> Any:
    """The module that returns `last_hidden_state`: the model without its head."""
    backbone: Any = pretrained_model_of(model).base_model
    decoder = getattr(backbone, "decoder", None)  # OPT's head calls the decoder inside its backbone, not the backbone
    return decoder if isinstance(decoder, PreTrainedModel) and not backbone.config.is_encoder_decoder else backbone


@dataclass
class _RadixCall:
    """One forward pass on a radix batch: what every layer needs, and how many came by."""

    layout: TreeLayout
    predictor_indices: Tensor | None
    attention: str
    kernel: str
    window_may_bind: bool
    calls: list[int] = field(default_factory=list)  # the id of every attention module that came by


class _BackboneHooks:
    def __init__(self, attention: str, kernel: str, num_layers: int, allow_neftune: bool):
        self.attention, self.kernel, self.num_layers = attention, kernel, num_layers
        self.allow_neftune = allow_neftune

    def before(self, backbone: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Turn the flat entries into one object for the layers. Leaves ordinary batches alone."""
        entries = {name: value for name, value in kwargs.items() if name.startswith(PREFIX)}
        if not entries:
            return None
        layout = _layout(entries)
        self._check_in_force(backbone, layout)
        rows = args[0] if args else kwargs.get("input_ids")
        rows = kwargs.get("inputs_embeds") if rows is None else rows
        if rows is None or tuple(rows.shape[:2]) != (1, layout.num_rows):
            came = None if rows is None else tuple(rows.shape)
            raise UserError(
                f"a radix batch of {layout.num_rows} unique tokens needs input_ids [1, {layout.num_rows}], got {came}"
            )
        predictors, may_bind = entries.get(f"{PREFIX}predictor_indices"), _window_may_bind(backbone.config, layout)
        call = _RadixCall(layout, predictors, self.attention, self.kernel, may_bind)
        rest = {name: value for name, value in kwargs.items() if name not in entries}
        no_mask = torch.empty((1, 0) if may_bind else (1, 1, 0, 0), dtype=torch.bool, device=rows.device)
        return args, {**rest, "attention_mask": no_mask, "use_cache": False, "radix_call": call}

    def behind(self, backbone: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Check that every layer attended by the tree, keep the rows that predict, and count every original token."""
        call = kwargs.get("radix_call")
        if call is None:
            return None
        # DiffLlama calls its attention twice a layer; a model that runs one layer twice has fewer modules than layers
        if self.num_layers not in (len(call.calls), len(set(call.calls))):
            raise RuntimeError(
                f"radix attention ran in {len(set(call.calls))} of {self.num_layers} layers of "
                f"{type(backbone).__name__}: the others attended without the tree, and their gradient would be wrong"
            )
        _expand_router_logits(type(backbone).__name__, output, kwargs, call.layout)
        if call.predictor_indices is None:
            return output
        hidden = output[0]
        predicting = gather_rows(hidden[0], call.predictor_indices)[None]
        if isinstance(output, tuple):
            return predicting, *output[1:]
        output.last_hidden_state = predicting
        return output

    def _check_in_force(self, backbone: Any, layout: TreeLayout) -> None:
        config = backbone.config
        name = config._attn_implementation
        if name not in (ATTENTION_NAME, EAGER_NAME):
            raise UserError(
                f"a radix batch needs attn_implementation={ATTENTION_NAME!r}, but it is now {name!r}: the tree would "
                f"be ignored; call prepare_model again"
            )
        chunk = getattr(config, "attention_chunk_size", None)
        if chunk and chunk < layout.max_seqlen and not _only_full_attention(config):
            raise UserError(
                f"{type(backbone).__name__} attends within chunks of {chunk} tokens (attention_chunk_size), and this "
                f"batch has a sequence of {layout.max_seqlen}; set max_length to {chunk} or less, where the chunks "
                f"change nothing"
            )
        noise = getattr(backbone.get_input_embeddings(), "neftune_noise_alpha", None)
        if noise and backbone.training and not self.allow_neftune:
            raise UserError(
                f"NEFTune (neftune_noise_alpha={noise}) draws one noise for a shared token where an ordinary batch "
                f"draws one per copy; remove it, or prepare_model(..., allow_dropout=['neftune'])"
            )


def _expand_router_logits(name: str, output: Any, kwargs: Mapping[str, Any], layout: TreeLayout) -> None:
    """Router logits of the U unique rows -> of the T original tokens, in place: the loss behind counts each once."""
    if isinstance(output, tuple):
        if kwargs.get("output_router_logits"):
            raise UserError(f"{name} returns its router logits in a tuple; call it with return_dict=True")
        return
    router_logits = getattr(output, "router_logits", None)
    if router_logits is None:
        return
    expanded = []
    for index, logits in enumerate(router_logits):
        rows = logits.flatten(0, -2)
        if len(rows) != layout.num_rows:
            raise UserError(
                f"{name} layer {index} returns router logits of shape {tuple(logits.shape)} for {layout.num_rows} "
                f"unique tokens, so the router loss cannot be counted by token; set output_router_logits to false"
            )
        expanded.append(gather_rows(rows, layout.inverse_indices))
    output.router_logits = tuple(expanded)


def radix_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    radix_call: _RadixCall | None = None, **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The attention function "radix", called by every layer: tree attention with a plan, `sdpa` without one.

    query: (batch, N, length, H). key, value: (batch, K, length, H). With a plan, batch is 1 and length is U.
    Returns (batch, length, N, H) and None, as every Hugging Face attention function.
    """
    if radix_call is None:
        _check_no_plan(module, attention_mask)
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    return _attend(module, query, key, value, attention_mask, radix_call, **kwargs)


def radix_eager_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    radix_call: _RadixCall | None = None, **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The attention function "radix_eager": as `radix_attention`, but without a plan the model's own eager function."""
    if radix_call is None:
        _check_no_plan(module, attention_mask)
        return _eager_of(module)(module, query, key, value, attention_mask, **kwargs)
    return _attend(module, query, key, value, attention_mask, radix_call, **kwargs)


def _check_no_plan(module: nn.Module, attention_mask: Tensor | None) -> None:
    """A radix batch whose plan did not come through, by the mask that only our hook hands over."""
    if _told_by_mask(attention_mask) is not None:
        raise UserError(
            f"{_name_of(module)} is not given the keyword arguments of the model call, so the tree cannot reach it; "
            f"train it with dedup: false"
        )


def _eager_of(module: nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """What a layer falls back to for "eager": each modeling file of Hugging Face has one function of this name."""
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is None:
        raise UserError(
            f"{_name_of(module)} has no eager attention beside it to run an ordinary batch with; call restore_model"
        )
    return eager


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, call: _RadixCall,
    scaling: float | None = None, dropout: float = 0.0, softcap: float | None = None, s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Tree attention of one layer, by the keyword arguments that Hugging Face's layers give their attention."""
    _check_call(module, query, value, dropout, {**kwargs, "softcap": softcap, "s_aux": s_aux})
    window = _window(module, attention_mask, kwargs.get("sliding_window"), call)
    q_UNH, k_UKH, v_UKH = (_as_autocast(x[0]).transpose(0, 1) for x in (query, key, value))
    try:
        out_UNH = tree_attention(
            q_UNH, k_UKH, v_UKH, call.layout, attention=call.attention, kernel=call.kernel,
            scale=scaling, softcap=softcap, window=window, sinks=s_aux,
        )  # fmt: skip
    except ValueError as error:
        told = f" attends to the last {window} tokens, and this batch has a sequence of {call.layout.max_seqlen}"
        raise UserError(f"{_name_of(module)}{told if window else ''}: {error}") from None
    call.calls.append(id(module))
    return out_UNH[None], None


def _as_autocast(x: Tensor) -> Tensor:
    """As autocast does for `scaled_dot_product_attention`: norms leave q and k in float32, projections v in 16 bits."""
    device_type = x.device.type
    return x.to(torch.get_autocast_dtype(device_type)) if torch.is_autocast_enabled(device_type) else x


def _check_call(module: nn.Module, query: Tensor, value: Tensor, dropout: float, kwargs: Mapping[str, Any]) -> None:
    """Refuse what a layer asks for and the tree does not compute."""
    layer = _name_of(module)
    if dropout:
        raise UserError(f"{layer} asks for attention dropout {dropout}; set attention_dropout to 0")
    if kwargs.get("position_bias") is not None:
        raise UserError(f"{layer} adds a position_bias to its scores, which tree attention does not compute")
    for key, attribute in (("softcap", "attn_logit_softcapping"), ("s_aux", "sinks")):
        if kwargs[key] is None and getattr(module, attribute, None) is not None:
            raise UserError(
                f"{layer} has {attribute} and does not hand it to its attention function as {key}, so tree attention "
                f"would leave it out; train it with dedup: false"
            )
    if query.shape[-1] != value.shape[-1]:
        raise UserError(
            f"{layer} has values of head dim {value.shape[-1]} and queries of {query.shape[-1]}; tree attention takes "
            f"one head dim; train it with dedup: false"
        )
    if not kwargs.get("is_causal", getattr(module, "is_causal", True)):
        raise UserError(f"{layer} is not causal; a shared prefix has the same states only under causal attention")


def _name_of(module: nn.Module) -> str:
    return f"{type(module).__name__} of layer {getattr(module, 'layer_idx', '?')}"


def _window(module: nn.Module, attention_mask: Tensor | None, told: int | None, call: _RadixCall) -> int | None:
    """The sliding window of a layer where it binds, else None.

    `sdpa` and eager attention obey the mask alone, and flash attention the argument `sliding_window` alone. Layers that
    leave the argument out obey their mask; two that contradict each other are refused.
    """
    if attention_mask is not None and attention_mask.numel():
        raise UserError(
            f"{_name_of(module)} gets a mask {tuple(attention_mask.shape)} that its model made, which tree attention "
            f"would leave out; train it with dedup: false"
        )
    masked, longest = _told_by_mask(attention_mask), call.layout.max_seqlen
    if masked is None and call.window_may_bind:
        raise UserError(
            f"{_name_of(module)} gets a mask that transformers.masking_utils has not made, and its model has a sliding "
            f"window shorter than this batch's longest sequence ({longest}); set max_length to the window or less"
        )
    masked, told = (window if window and window < longest else None for window in (masked, told))
    if told is not None and told != masked:
        raise UserError(
            f"{_name_of(module)} attends to the last {told} tokens by its sliding_window and to "
            f"{f'the last {masked}' if masked else 'all'} by its mask, and this batch has a sequence of {longest}; "
            f"set max_length to {told} or less, where the window changes nothing"
        )
    return masked


def _told_by_mask(attention_mask: Tensor | None) -> int | None:
    """The window that `_mask_function` wrote down as the width of a mask without rows; 0 is the whole past."""
    if attention_mask is None or attention_mask.ndim != 4 or attention_mask.shape[-2] != 0:
        return None
    return attention_mask.shape[-1]


def _mask_function(ordinary: Callable[..., Any]) -> Callable[..., Any]:
    """A mask function as Hugging Face calls it, keywords alone: `ordinary`, but for the question of a radix batch."""

    def mask(*, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        if attention_mask is None or attention_mask.shape[-1] != 0:
            return ordinary(attention_mask=attention_mask, **kwargs)
        if kwargs.get("use_vmap"):  # Hugging Face's sign that the model has changed the causal mask
            raise UserError(
                f"the model of {type(kwargs.get('config')).__name__} adds a mask of its own to a sliding window, which "
                f"tree attention does not compute; set max_length to {kwargs.get('local_size')} or less"
            )
        return torch.empty(1, 1, 0, kwargs.get("local_size") or 0, dtype=torch.bool, device=attention_mask.device)

    return mask


def _window_may_bind(config: Any, layout: TreeLayout) -> bool:
    """Whether some layer may have a window shorter than the batch's longest sequence."""
    window = getattr(config, "sliding_window", None)
    if not window or _only_full_attention(config):
        return False
    return not isinstance(window, int) or window < layout.max_seqlen


def _only_full_attention(config: Any) -> bool:
    layer_types = getattr(config, "layer_types", None) or ()
    return bool(layer_types) and all(layer_type == "full_attention" for layer_type in layer_types)


def _register() -> None:
    """Without a mask function of its own name an attention function gets no mask at all."""
    AttentionInterface.register(ATTENTION_NAME, radix_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, _mask_function(sdpa_mask))
    AttentionInterface.register(EAGER_NAME, radix_eager_attention)
    AttentionMaskInterface.register(EAGER_NAME, _mask_function(eager_mask))


def _layout(entries: Mapping[str, Any]) -> TreeLayout:
    try:
        return TreeLayout.from_batch(entries)
    except KeyError as missing:
        raise UserError(
            f"the batch lost its entry {missing}: keep every key of the collator (remove_unused_columns does not "
            f"touch them)"
        ) from None


def _check_attention(base: PreTrainedModel, backbone: Any) -> None:
    """Refuse attention layers that are not understood, by what the configuration and the modules say."""
    config = backbone.config
    name = type(base).__name__
    if getattr(config, "is_encoder_decoder", False) or not hasattr(config, "num_hidden_layers"):
        raise UserError(f"{name} is not a plain decoder (one stack of num_hidden_layers); train it with dedup: false")
    if "position_ids" not in inspect.signature(backbone.forward).parameters:
        raise UserError(
            f"{type(backbone).__name__} does not take position_ids, so a token behind a shared prefix would get the "
            f"position of its row; train it with dedup: false"
        )
    for index, layer_type in enumerate(getattr(config, "layer_types", None) or ()):
        if layer_type not in EXACT_LAYERS:
            raise UserError(
                f"{name} layer {index} is {layer_type!r}: only {' and '.join(EXACT_LAYERS)} compute a shared prefix "
                f"once; train it with dedup: false"
            )
    for key, what in NOT_COMPUTED.items():
        if getattr(config, key, None):
            raise UserError(
                f"{name} has {what} ({key}={getattr(config, key)}), which tree attention does not compute; train it "
                f"with dedup: false"
            )
    if getattr(config, "attention_dropout", 0.0):
        raise UserError(
            f"{name} has attention_dropout={config.attention_dropout}: a shared token would draw one mask where an "
            f"ordinary batch draws one per copy; set attention_dropout to 0"
        )


def _check_dropout(base: PreTrainedModel, allowed: tuple[str, ...]) -> None:
    """Refuse what draws at random: settings of the model that name it, and dropout modules wherever they are."""
    for name, value in base.config.get_text_config().to_dict().items():
        random = re.search(r"drop(out|$)|pdrop|layerdrop|jitter", name) and not re.search("classifier|summary", name)
        if random and isinstance(value, float) and value > 0 and name not in allowed:
            raise UserError(
                f"{type(base).__name__} has {name}={value}: a shared token would draw once where an ordinary batch "
                f"draws once per copy; set it to 0, or allow it by name: allow_dropout=[{name!r}]"
            )
    for path, module in base.named_modules():
        drops = isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
        if drops and not any(name and name in path.split(".") for name in allowed):
            raise UserError(
                f"dropout p={module.p} at {path!r}: a shared token would draw one mask where an ordinary batch draws "
                f"one per copy; "
                f"set it to 0 (LoRA: lora_dropout), or allow it by name: allow_dropout=[{_short_name(path)!r}]"
            )


def _short_name(path: str) -> str:
    """`...q_proj.lora_dropout.default` -> `lora_dropout`."""
    parts = path.split(".")
    return next((part for part in reversed(parts) if "drop" in part), parts[-1])


def _check_choice(backbone: Any, attention: str, kernel: str) -> None:
    """Unknown names at once. Whether a kernel runs is known where the model is when the first batch comes."""
    if attention not in ("auto", *STRATEGIES) or kernel != "auto":
        parameter = next(backbone.parameters())
        config = backbone.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        softcap = getattr(config, "attn_logit_softcapping", None) is not None
        try:
            choose_attention(attention, kernel, parameter.device, parameter.dtype, head_dim, softcap=softcap)
        except ValueError as error:
            raise UserError(str(error)) from None


def _num_layers(backbone: Any) -> int:
    return int(backbone.config.num_hidden_layers)
