"""Hugging Face models on unique tokens: `prepare_model` installs it, `restore_model` removes it. No model is rewritten.

transformers >= 5 gives every hook that is needed:

- the attention function "radix" is registered beside "sdpa". Without a plan it is `sdpa`, mask included: generation and
  an ordinary padded batch behave as if nothing had been prepared;
- a pre-hook on the backbone turns the flat `radix_` entries of a batch into one object that reaches every layer, and
  hands mask creation an empty 4-D tensor, which every model returns as it is: no U x U mask is ever built;
- a hook behind the backbone hands the head the rows that predict, `[1, P, D]`.

A radix batch on any other attention would train silently with a wrong mask: Hugging Face reads a jump in the
positions as
the start of a new packed document. So the hooks check that "radix" is in force, and count that every layer came by.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from radixtrain.attention import STRATEGIES, choose_attention, tree_attention
from radixtrain.errors import UserError
from radixtrain.kernels.rows import gather_rows
from radixtrain.layout import PREFIX, TreeLayout

__all__ = ["ATTENTION_NAME", "backbone_of", "prepare_model", "prepared_options", "pretrained_model_of", "restore_model"]

ATTENTION_NAME = "radix"
STATE = "_radixtrain"
EXACT_LAYERS = ("full_attention", "sliding_attention")
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

    Raises UserError, naming the layer and the reason, for attention that is not understood (linear attention, latent
    attention, soft-capping, sinks, attention dropout), for a dropout > 0 that is not allowed, and for a choice that
    cannot be met.
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
    base.set_attn_implementation(ATTENTION_NAME)
    if backbone.config._attn_implementation != ATTENTION_NAME:
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
        if base.config._attn_implementation == ATTENTION_NAME:
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
    base = pretrained_model_of(model)
    return base.base_model if base.base_model is not base else base


@dataclass
class _RadixCall:
    """One forward pass on a radix batch: what every layer needs, and how many came by."""

    layout: TreeLayout
    predictor_indices: Tensor | None
    attention: str
    kernel: str
    layers_seen: int = field(default=0)


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
        call = _RadixCall(layout, entries.get(f"{PREFIX}predictor_indices"), self.attention, self.kernel)
        rest = {name: value for name, value in kwargs.items() if name not in entries}
        no_mask = torch.empty(1, 1, 0, 0, dtype=torch.bool, device=rows.device)
        return args, {**rest, "attention_mask": no_mask, "use_cache": False, "radix_call": call}

    def behind(self, backbone: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Check that every layer attended by the tree, and keep the rows that predict."""
        call = kwargs.get("radix_call")
        if call is None:
            return None
        if call.layers_seen != self.num_layers:
            raise RuntimeError(
                f"radix attention ran in {call.layers_seen} of {self.num_layers} layers of "
                f"{type(backbone).__name__}: the others attended without the tree, and their gradient would be wrong"
            )
        if call.predictor_indices is None:
            return None
        hidden = output[0]
        predicting = gather_rows(hidden[0], call.predictor_indices)[None]
        if isinstance(output, tuple):
            return predicting, *output[1:]
        output.last_hidden_state = predicting
        return output

    def _check_in_force(self, backbone: Any, layout: TreeLayout) -> None:
        name = backbone.config._attn_implementation
        if name != ATTENTION_NAME:
            raise UserError(
                f"a radix batch needs attn_implementation={ATTENTION_NAME!r}, but it is now {name!r}: the tree would "
                f"be ignored; call prepare_model again"
            )
        window = _mask_window(backbone.config)
        if window is not None and window < layout.max_seqlen:
            raise UserError(
                f"{type(backbone).__name__} attends to the last {window} tokens only, and this batch has a sequence of "
                f"{layout.max_seqlen}; set max_length to {window} or less, where the window changes nothing"
            )
        noise = getattr(backbone.get_input_embeddings(), "neftune_noise_alpha", None)
        if noise and backbone.training and not self.allow_neftune:
            raise UserError(
                f"NEFTune (neftune_noise_alpha={noise}) draws one noise for a shared token where an ordinary batch "
                f"draws one per copy; remove it, or prepare_model(..., allow_dropout=['neftune'])"
            )


def radix_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    radix_call: _RadixCall | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function "radix", called by every layer: tree attention with a plan, `sdpa` without one.

    query: (batch, N, length, H). key, value: (batch, K, length, H). With a plan, batch is 1 and length is U.
    Returns (batch, length, N, H) and None, as every Hugging Face attention function.
    """
    if radix_call is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
    _check_call(module, dropout, radix_call.layout, kwargs)
    q_UNH, k_UKH, v_UKH = (_as_autocast(x[0]).transpose(0, 1) for x in (query, key, value))
    out_UNH = tree_attention(
        q_UNH, k_UKH, v_UKH, radix_call.layout, attention=radix_call.attention, kernel=radix_call.kernel, scale=scaling
    )
    radix_call.layers_seen += 1
    return out_UNH[None], None


def _as_autocast(x: Tensor) -> Tensor:
    """As autocast does for `scaled_dot_product_attention`: norms leave q and k in float32, projections v in 16 bits."""
    device_type = x.device.type
    return x.to(torch.get_autocast_dtype(device_type)) if torch.is_autocast_enabled(device_type) else x


def _check_call(module: nn.Module, dropout: float, layout: TreeLayout, kwargs: Mapping[str, Any]) -> None:
    """Refuse what a layer asks for and the tree does not compute."""
    layer = f"{type(module).__name__} of layer {getattr(module, 'layer_idx', '?')}"
    if dropout:
        raise UserError(f"{layer} asks for attention dropout {dropout}; set attention_dropout to 0")
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise UserError(f"{layer} asks for {name}, which tree attention does not compute")
    window = kwargs.get("sliding_window")
    if window is not None and window < layout.max_seqlen:
        raise UserError(
            f"{layer} attends to the last {window} tokens only, and this batch has a sequence of {layout.max_seqlen}; "
            f"set max_length to {window} or less, where the window changes nothing"
        )
    if not kwargs.get("is_causal", getattr(module, "is_causal", True)):
        raise UserError(f"{layer} is not causal; a shared prefix has the same states only under causal attention")


def _mask_window(config: Any) -> int | None:
    """Shortest span that the model's own masks would leave, in tokens; some layers see it in their mask alone."""
    layer_types = getattr(config, "layer_types", None)
    if layer_types and all(layer_type == "full_attention" for layer_type in layer_types):
        return None
    windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    return min((int(window) for window in windows if window), default=None)


def _register() -> None:
    """Without a mask function of its own name an attention function gets no mask at all, so "radix" takes `sdpa`'s."""
    AttentionInterface.register(ATTENTION_NAME, radix_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)


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
    if getattr(config, "output_router_logits", False):
        raise UserError(
            f"{name} adds a router loss (output_router_logits), which would count shared tokens once; set it to false"
        )
    for index, layer_type in enumerate(getattr(config, "layer_types", None) or ()):
        if layer_type not in EXACT_LAYERS:
            raise UserError(
                f"{name} layer {index} is {layer_type!r}: only {' and '.join(EXACT_LAYERS)} compute a shared prefix "
                f"once; train it with dedup: false"
            )
    for key, what in (("attn_logit_softcapping", "soft-capped attention"), ("kv_lora_rank", "latent attention (MLA)")):
        if getattr(config, key, None):
            raise UserError(f"{name} has {what} ({key}={getattr(config, key)}), which tree attention does not compute")
    for path, module in backbone.named_modules():
        if isinstance(getattr(module, "sinks", None), Tensor):
            raise UserError(f"{name} layer {path!r} has attention sinks, which tree attention does not compute")
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
        try:
            choose_attention(attention, kernel, parameter.device, parameter.dtype, head_dim)
        except ValueError as error:
            raise UserError(str(error)) from None


def _num_layers(backbone: Any) -> int:
    return int(backbone.config.num_hidden_layers)
