"""A checkpoint -> a model that is ready to train: loaded, checked, with adapters, prepared for unique tokens."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM

from radixtrain.errors import UserError, first_line
from radixtrain.hf.prepare import prepare_model, pretrained_model_of

__all__ = ["load_model", "load_trainable"]

logger = logging.getLogger(__name__)
HEAD_MODIFIERS = ("final_logit_softcapping", "logits_scaling", "logit_scale")


def load_trainable(settings: Any) -> Any:
    """The model that the settings of a `RadixModule` describe, in training mode. UserError where it cannot be had."""
    model = load_model(settings.model_name_or_path, settings.dtype, settings.attn_implementation)
    if settings.activation_checkpointing:
        _enable_activation_checkpointing(model)
    if settings.use_peft:
        model = _with_lora(model, settings)
    _check_head(model)
    _check_router_loss(model)
    if settings.dedup:
        allowed = settings.allow_dropout or ()
        prepare_model(model, attention=settings.attention, kernel=settings.kernel, allow_dropout=allowed)
    logger.info("%s, %s parameters, %s trained", type(model).__name__, *map("{:,}".format, _num_parameters(model)))
    return model.train()


def load_model(model_name_or_path: str, dtype: str, attn_implementation: str) -> Any:
    """A causal language model through `AutoModelForCausalLM`. UserError, in one line, where it cannot be loaded."""
    try:
        return AutoModelForCausalLM.from_pretrained(
            model_name_or_path, dtype=dtype, attn_implementation=attn_implementation, use_safetensors=True
        )
    except (OSError, ValueError, ImportError) as error:
        no_sdpa = attn_implementation == "sdpa" and "scaled_dot_product_attention" in str(error)
        reason = (
            "its soft-cap or sinks are beyond sdpa; set model.attn_implementation: eager"
            if no_sdpa
            else first_line(error)
        )
        raise UserError(f"model.model_name_or_path {model_name_or_path!r} cannot be loaded: {reason}") from None


def _enable_activation_checkpointing(model: Any) -> None:
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable  # older 5.x
    enable({"use_reentrant": False})


def _check_head(model: nn.Module) -> None:
    """The fused loss multiplies by the head itself, so the head has to be a plain matrix."""
    base = pretrained_model_of(model)
    head = base.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise UserError(
            f"{type(base).__name__} has the head {type(head).__name__}; the fused loss takes a plain nn.Linear"
        )
    for name in HEAD_MODIFIERS:
        value = getattr(base.config.get_text_config(), name, None)
        if value not in (None, 1.0):
            raise UserError(
                f"{type(base).__name__} changes its logits ({name}={value}), which the fused loss does not compute; "
                f"use the drop-in RadixCollator with the model's own loss"
            )


def _check_router_loss(model: nn.Module) -> None:
    """The fused loss knows the backbone and the head; a router loss is computed by the model's own forward."""
    base = pretrained_model_of(model)
    if getattr(base.config.get_text_config(), "output_router_logits", False):
        raise UserError(
            f"{type(base).__name__} adds a router loss (output_router_logits: true in its config.json), which the "
            f"fused loss does not compute; set it to false there, or use the drop-in RadixCollator with the model's "
            f"own loss"
        )


def _with_lora(model: nn.Module, settings: Any) -> Any:
    try:
        from peft import LoraConfig, get_peft_model  # optional, and four seconds to import
    except ImportError:
        raise UserError("model.use_peft needs the package peft: pip install 'radixtrain[peft]'") from None
    if settings.lora_r < 1:
        raise UserError(f"model.lora_r must be at least 1, got {settings.lora_r}")
    config = LoraConfig(
        task_type="CAUSAL_LM", r=settings.lora_r, lora_alpha=settings.lora_alpha, lora_dropout=settings.lora_dropout,
        target_modules=settings.lora_target_modules,
    )  # fmt: skip
    try:
        return get_peft_model(model, config)
    except ValueError as error:
        raise UserError(f"model.lora_...: {first_line(error)}") from None


def _num_parameters(model: nn.Module) -> tuple[int, int]:
    parameters = list(model.parameters())
    return sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)
