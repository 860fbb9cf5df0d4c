"""Hugging Face models on unique tokens: `prepare_model` installs it, `restore_model` removes it. No model is rewritten.

transformers >= 5 gives every hook that is needed:

- the attention functions that every layer calls are registered by name (`radixtrain/hf/attention.py`), and which
  window a layer has is read from its mask (`radixtrain/hf/windows.py`);
- a pre-hook on the backbone turns the flat `radix_` entries of a batch into one object that reaches every layer, and
  hands mask creation an empty tensor: no U x U mask is ever built;
- a hook behind the backbone hands the head the rows that predict, `[1, P, D]`, and the router loss the logits of every
  original token.

What cannot be exact is refused, before and at every batch (`radixtrain/hf/refusals.py`). A radix batch on any other
attention would train silently with a wrong mask: Hugging Face reads a jump in the positions as the start of a new
packed document. So the hooks check that ours is in force, and count that every layer came by.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from radixtrain.errors import UserError
from radixtrain.hf.attention import ATTENTION_NAME, EAGER_NAME, RadixCall, register_attention
from radixtrain.hf.refusals import check_attention, check_choice, check_dropout, check_pass
from radixtrain.hf.windows import no_mask, window_may_bind
from radixtrain.kernels.rows import gather_rows
from radixtrain.layout import PREFIX, TreeLayout
from radixtrain.step_cost import CHOICES

__all__ = ["ATTENTION_NAME", "backbone_of", "prepare_model", "prepared_options", "pretrained_model_of", "restore_model"]

STATE = "_radixtrain"
logger = logging.getLogger(__name__)
ModelT = TypeVar("ModelT", bound=nn.Module)


def prepare_model(
    model: ModelT, *, attention: str = "auto", kernel: str = "auto", allow_dropout: Iterable[str] = ()
) -> ModelT:
    """Make a model accept the batches of a `RadixCollator`, beside the ordinary ones. Returns the same model.

    model: a `PreTrainedModel`, or one wrapped by PEFT. Preparing again replaces the earlier choice.
    attention: `auto`, `cascade`, `path`, `expand` or `reference`; see `radixtrain.attention`. With `auto`, batches of a
        collator that has a `step_cost` bring their own choice.
    kernel: `auto`, `torch`, `flash_attn`, `flash_attn_3` or `eager`.
    allow_dropout: names of dropout modules (or the end of their names) to accept although a shared token then draws one
        mask where an ordinary batch draws one per copy: still a dropout, no longer the same gradient.

    Soft-capping, sinks, sliding windows, latent attention and router losses (`output_router_logits`) are computed
    exactly.

    Raises UserError, naming the layer and the reason, for attention that is not understood (linear or sparse attention,
    chunks, attention dropout), for a dropout > 0 that is not allowed, and for a choice that cannot be met. Dropout that
    comes later, with adapters, is refused by the first batch that would draw.
    """
    restore_model(model)
    allowed = tuple(allow_dropout)
    base = pretrained_model_of(model)
    backbone = backbone_of(model)
    check_attention(base, backbone)
    check_dropout(base, allowed)
    check_choice(backbone, attention, kernel)
    previous = base.config._attn_implementation
    register_attention()
    name = ATTENTION_NAME if base._supports_sdpa and previous != "eager" else EAGER_NAME
    base.set_attn_implementation(name)
    if backbone.config._attn_implementation != name:
        raise UserError(
            f"{type(base).__name__} does not take its attention from AttentionInterface, so its layers cannot be "
            f"reached; train it with dedup: false"
        )
    hooks = _BackboneHooks(attention, kernel, backbone.config.num_hidden_layers, allowed)
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


class _BackboneHooks:
    """What the backbone of a prepared model does before and behind its own forward pass."""

    def __init__(self, attention: str, kernel: str, num_layers: int, allow_dropout: tuple[str, ...]):
        self.attention, self.kernel, self.num_layers = attention, kernel, num_layers
        self.allow_dropout = allow_dropout
        self.choices: set[tuple[str, int | None]] = set()

    @torch.compiler.disable  # dynamo cannot trace the dataclass, and would warn; it runs once a pass
    def before(self, backbone: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Turn the flat entries into one object for the layers. Leaves ordinary batches alone."""
        entries = {name: value for name, value in kwargs.items() if name.startswith(PREFIX)}
        if not entries:
            return None
        layout = _layout(entries)
        _check_in_force(backbone)
        check_pass(backbone, layout.max_seqlen, self.allow_dropout)
        rows = args[0] if args else kwargs.get("input_ids")
        rows = kwargs.get("inputs_embeds") if rows is None else rows
        if rows is None or tuple(rows.shape[:2]) != (1, layout.num_rows):
            came = None if rows is None else tuple(rows.shape)
            raise UserError(
                f"a radix batch of {layout.num_rows} unique tokens needs input_ids [1, {layout.num_rows}], got {came}"
            )
        may_bind = window_may_bind(backbone.config, layout)
        predictor_indices = entries.get(f"{PREFIX}predictor_indices")
        call = RadixCall(layout, predictor_indices, self.attention, self.kernel, may_bind, self._chosen(entries))
        rest = {name: value for name, value in kwargs.items() if name not in entries}
        mask = no_mask(may_bind, rows.device)
        return args, {**rest, "attention_mask": mask, "use_cache": False, "radix_call": call}

    def _chosen(self, entries: Mapping[str, Any]) -> str | None:
        """The strategy that the collator's `step_cost` chose, said the first time; None where there is none."""
        place = entries.get(f"{PREFIX}strategy")
        if place is None or self.attention != "auto":
            return None
        choice = CHOICES[place], entries.get(f"{PREFIX}min_shared_tokens")
        if choice not in self.choices:
            self.choices.add(choice)
            logger.info("a batch is fastest with attention=%s, min_shared_tokens=%s", *choice)
        return choice[0]

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


def _check_in_force(backbone: Any) -> None:
    name = backbone.config._attn_implementation
    if name not in (ATTENTION_NAME, EAGER_NAME):
        raise UserError(
            f"a radix batch needs attn_implementation={ATTENTION_NAME!r}, but it is now {name!r}: the tree would "
            f"be ignored; call prepare_model again"
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


def _layout(entries: Mapping[str, Any]) -> TreeLayout:
    try:
        return TreeLayout.from_batch(entries)
    except KeyError as missing:
        raise UserError(
            f"the batch lost its entry {missing}: keep every key of the collator (remove_unused_columns does not "
            f"touch them)"
        ) from None
