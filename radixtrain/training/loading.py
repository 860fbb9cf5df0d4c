"""A folder or hub name -> a model ready to train: loaded, checked, with adapters, prepared for unique tokens."""

from __future__ import annotations

import logging
import re
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
)

from radixtrain.errors import UserError, did_you_mean, first_line
from radixtrain.hf.adapters import check_not_shared
from radixtrain.hf.backbone import pretrained_model_of
from radixtrain.hf.prepare import prepare_model

__all__ = ["auto_class", "load_model", "load_trainable", "with_training_options"]

logger = logging.getLogger(__name__)
LOADERS: dict[Any, Any] = {
    AutoModelForCausalLM: MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForImageTextToText: MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForMultimodalLM: MODEL_FOR_MULTIMODAL_LM_MAPPING,
}


def load_trainable(settings: Any) -> Any:
    """The model that the settings of a `RadixModule` describe, in training mode. UserError if it cannot be made."""
    model = load_model(settings.model_name_or_path, settings.dtype, settings.attn_implementation)
    model = with_training_options(model, settings)
    if settings.dedup:
        allowed = settings.allow_dropout or ()
        prepare_model(model, attention=settings.attention, kernel=settings.kernel, allow_dropout=allowed)
    logger.info("%s, %s parameters, %s trained", type(model).__name__, *map("{:,}".format, _num_parameters(model)))
    return model.train()


def with_training_options(model: Any, settings: Any) -> Any:
    """The model with checkpointing and adapters as the settings say. UserError for a router loss."""
    if settings.activation_checkpointing:
        _enable_activation_checkpointing(model)
    if settings.use_peft:
        model = _with_lora(model, settings)
    _check_router_loss(model)
    return model


def load_model(model_name_or_path: str, dtype: str, attn_implementation: str) -> Any:
    """A causal language model, or a multimodal one to train on text. UserError, in one line, if it cannot be loaded."""
    try:
        model = auto_class(model_name_or_path).from_pretrained(
            model_name_or_path, dtype=dtype, attn_implementation=attn_implementation, use_safetensors=True
        )
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        reason = first_line(error)
        if attn_implementation == "sdpa" and "scaled_dot_product_attention" in str(error):
            reason = "its class has no sdpa attention; set model.attn_implementation: eager"
        raise UserError(f"model.model_name_or_path {model_name_or_path!r} cannot be loaded: {reason}") from None
    if any(parameter.dtype == torch.float16 for parameter in model.parameters()):
        raise UserError(
            f"model.dtype {dtype!r}: the checkpoint is float16, which needs a loss scale; set it to bfloat16 or float32"
        )
    return model


def auto_class(model_name_or_path: str) -> Any:
    """transformers' loader of this checkpoint: the one that makes the class which wrote it, else the first that can.

    A class for text and images keeps its tower for images: for Qwen3.5, `AutoModelForCausalLM` would leave it out.
    """
    config = AutoConfig.from_pretrained(model_name_or_path)
    made = {loader: _names(mapping[type(config)]) for loader, mapping in LOADERS.items() if type(config) in mapping}
    wrote = set(config.architectures or ())
    return next((loader for loader, names in made.items() if wrote & names), next(iter(made), AutoModelForCausalLM))


def _names(classes: Any) -> set[str]:
    return {each.__name__ for each in (classes if isinstance(classes, tuple) else (classes,))}


def _enable_activation_checkpointing(model: Any) -> None:
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable  # older 5.x
    enable({"use_reentrant": False})


def _check_router_loss(model: nn.Module) -> None:
    """Refuse a router loss: the loss of `fit` is only the cross-entropy of the predictions."""
    base = pretrained_model_of(model)
    if getattr(base.config.get_text_config(), "output_router_logits", False):
        raise UserError(
            f"{type(base).__name__} adds a router loss (output_router_logits: true in its config.json), which is not "
            f"part of the loss here; set it to false there, or use the drop-in RadixCollator with the model's own loss"
        )


def _with_lora(model: nn.Module, settings: Any) -> Any:
    try:
        from peft import LoraConfig, get_peft_model  # optional, and four seconds to import
    except ImportError:
        raise UserError("model.use_peft needs the package peft: pip install 'radixtrain[peft]'") from None
    if settings.lora_r < 1:
        raise UserError(f"model.lora_r must be at least 1, got {settings.lora_r}")
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.lora_r,
        lora_alpha=settings.lora_alpha,
        lora_dropout=settings.lora_dropout,
        target_modules=settings.lora_target_modules,
    )
    linear = _names_of_linear(model)  # PEFT changes the model before it refuses it
    try:
        adapted: Any = get_peft_model(model, config)
    except ValueError as error:
        raise UserError(_why_not_adapted(error, settings.lora_target_modules, linear)) from None
    _check_all_found(settings.lora_target_modules, adapted.base_model.targeted_module_names, linear)
    check_not_shared(adapted)
    return adapted


def _check_all_found(targets: Any, found: list[str], linear: list[str]) -> None:
    """Refuse a name without a layer: PEFT passes over it in silence if another one has some."""
    names = targets if isinstance(targets, list) else []
    missing = [name for name in names if not any(f".{path}".endswith(f".{name}") for path in found)]
    if missing:
        raise UserError(
            f"model.lora_target_modules: no layer has the name {missing[0]!r}{did_you_mean(missing[0], linear)}"
        )


def _names_of_linear(model: Any) -> list[str]:
    """What `all-linear` stands for: the last names of the linear layers, without the head."""
    head = model.get_output_embeddings()
    modules = model.named_modules()
    return sorted({path.rpartition(".")[2] for path, x in modules if isinstance(x, nn.Linear) and x is not head})


def _why_not_adapted(error: ValueError, targets: Any, linear: list[str]) -> str:
    """PEFT's reason. If it finds no layer, or refuses one that `all-linear` has chosen, those that can be named are."""
    if "not found in the base model" in str(error):
        return f"model.lora_target_modules: no layer has a name of {targets}; linear layers are {', '.join(linear)}"
    refused = re.search(r"Module '(\w+)' is incompatible with Mamba", str(error))
    if not refused or targets != "all-linear":
        return f"model.lora_...: {first_line(error)}"
    others = ", ".join(name for name in linear if name != refused[1])
    return (
        f"model.lora_target_modules: all-linear has {refused[1]}, which PEFT refuses for the Mamba layers of this "
        f"model; name the others: [{others}]"
    )


def _num_parameters(model: nn.Module) -> tuple[int, int]:
    parameters = list(model.parameters())
    return sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)
