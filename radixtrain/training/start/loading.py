"""A folder or hub name -> a model ready to train: loaded, checked, with adapters, shared."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
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

from radixtrain.errors import UserError, first_line
from radixtrain.hf.activation_checkpointing import recompute
from radixtrain.hf.config import (
    MODEL_JSON,
    MODEL_NAMES,
    check_attention_name,
    check_json_files,
    check_names,
    read_config,
    reason_of,
)
from radixtrain.hf.guards.batch import check_only_cross_entropy, check_soft_cap
from radixtrain.hf.quantized import four_bit_layers, keep_trainable
from radixtrain.hf.share import check_takes_collated, share_prefixes
from radixtrain.screen import logged_from
from radixtrain.training.fault_tolerance.failures import explain
from radixtrain.training.fault_tolerance.nonfinite_guard import check_weights_finite
from radixtrain.training.start.adapters import check_quantized, quantization, with_adapters

if TYPE_CHECKING:
    from radixtrain.settings.model import ModelSettings


logger = logging.getLogger(__name__)
LOADERS: dict[Any, Any] = {
    AutoModelForCausalLM: MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForImageTextToText: MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForMultimodalLM: MODEL_FOR_MULTIMODAL_LM_MAPPING,
}


def load_trainable(settings: ModelSettings) -> Any:
    """Load the model that the settings of a `RadixModule` describe, in training mode. Raises UserError if it cannot."""
    model = load_model(
        settings.model_name_or_path, settings.dtype, settings.attn_implementation, quantization(settings)
    )
    check_weights_finite(model, f"model.model_name_or_path {settings.model_name_or_path!r}")
    check_quantized(model, settings)
    model = with_training_options(model, settings)
    if settings.dedup:
        allowed = settings.allow_dropout or ()
        check_takes_collated(model)
        share_prefixes(model, attention=settings.attention, kernel=settings.kernel, allow_dropout=allowed)
    logger.info("%s, %s parameters", type(model).__name__, f"{num_parameters(model)[0]:,}")
    return model.train()


def with_training_options(model: Any, settings: ModelSettings) -> Any:
    """Add checkpointing and adapters as the settings say. Raises UserError for a loss besides the cross-entropy."""
    if model.dtype == torch.float64 and model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # torch's grouped product of experts takes no float64
    if settings.activation_checkpointing:
        recompute(model, settings.activation_checkpointing)
    if settings.use_peft:
        model = with_adapters(model, settings)
    check_only_cross_entropy(model)
    return model


def load_model(
    model_name_or_path: str, dtype: str, attn_implementation: str, quantization_config: object = None
) -> Any:
    """Load a causal language model, or a multimodal one to train on text. Raises UserError, in one line, if it cannot.

    quantization_config: transformers', for the weights; None for no quantization.
    """
    check_json_files(model_name_or_path, MODEL_JSON)
    check_attention_name(attn_implementation)
    check_names(model_name_or_path, MODEL_NAMES)
    try:
        # No table of missing and unread weights: `_check_loaded` says it in a line.
        with logged_from(logging.ERROR, "transformers.modeling_utils"):
            config = AutoConfig.from_pretrained(model_name_or_path, trust_remote_code=False)
            model, loaded = auto_class(model_name_or_path).from_pretrained(
                model_name_or_path,
                config=config,  # else an `_attn_implementation` in config.json overrides the one below
                dtype=dtype,
                attn_implementation=attn_implementation,
                use_safetensors=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,  # otherwise transformers refuses them without naming one
                output_loading_info=True,
                **({} if quantization_config is None else {"quantization_config": quantization_config}),
            )
    except Exception as error:  # a value of a wrong type in config.json may raise anything
        if explain(error, None):
            raise
        reason = reason_of(error)
        if attn_implementation == "sdpa" and "scaled_dot_product_attention" in str(error):
            reason = "its class has no sdpa attention; set model.attn_implementation: eager"
        raise UserError(f"model.model_name_or_path {model_name_or_path!r} cannot be loaded: {reason}") from None
    _check_loaded(model, loaded, model_name_or_path)
    check_soft_cap(type(model).__name__, model.config.get_text_config(decoder=True))
    if any(parameter.dtype == torch.float16 for parameter in model.parameters()):
        raise UserError(
            f"model.dtype {dtype!r}: the checkpoint is float16, which needs a loss scale; set it to bfloat16 or float32"
        )
    keep_trainable(model)
    return model


def _check_loaded(model: object, loaded: Mapping[str, Any], model_name_or_path: str) -> None:
    """Refuse weights that transformers filled with random numbers: the checkpoint has none, or of another shape.

    loaded: transformers' loading info. A tied head, or what a class computes itself, does not count as missing.
    """
    source, name = f"model.model_name_or_path {model_name_or_path!r}", type(model).__name__
    mismatched = sorted(loaded["mismatched_keys"])
    if mismatched:
        weight, stored, expected = mismatched[0]
        raise UserError(
            f"{source}: {weight} is {list(stored)} in the checkpoint and {list(expected)} in {name} as config.json "
            f"describes it{_and_more(mismatched)}; the two belong to different models"
        )
    missing, unread = sorted(loaded["missing_keys"]), sorted(loaded["unexpected_keys"])
    if missing:
        hint = f"; it has {unread[0]}, which {name} does not" if unread else ""
        raise UserError(
            f"{source}: the checkpoint has no {missing[0]}{_and_more(missing)}, and {name} would be trained from "
            f"random numbers there{hint}"
        )
    if unread:
        logger.warning("%s has no place for %s%s of the checkpoint", name, unread[0], _and_more(unread))


def _and_more(names: Sequence[Any]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def auto_class(model_name_or_path: str) -> Any:
    """Return transformers' loader of this checkpoint: of the class that wrote it, else the first that can load it.

    A class for text and images keeps its tower for images: for Qwen3.5, `AutoModelForCausalLM` would leave it out.
    """
    config = AutoConfig.from_pretrained(model_name_or_path, trust_remote_code=False)
    made = {loader: _names(mapping[type(config)]) for loader, mapping in LOADERS.items() if type(config) in mapping}
    wrote = set(config.architectures or ())
    return next((loader for loader, names in made.items() if wrote & names), next(iter(made), AutoModelForCausalLM))


def _names(classes: object) -> set[str]:
    return {model.__name__ for model in (classes if isinstance(classes, tuple) else (classes,))}


def num_parameters(model: nn.Module) -> tuple[int, int]:
    """Count all parameters, and those that train. Torch counts two 4-bit parameters as one; here they are two."""
    parameters = list(model.parameters())
    packed = sum(layer.weight.numel() for layer in four_bit_layers(model).values())
    return packed + sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)


MAX_PERIOD = 8


def random_trainable(settings: ModelSettings, num_layers: int, device: torch.device) -> Any:
    """Make the model that the settings of a `RadixModule` describe, with the first layers only and random weights.

    It is in training mode, with adapters and activation checkpointing as configured, and not shared. On the meta
    device nothing is allocated. The global random state does not change. Raises UserError if the model cannot be made.
    """
    check_attention_name(settings.attn_implementation)
    config = _cut(read_config(settings.model_name_or_path), num_layers)
    dtype = getattr(torch, settings.dtype) if settings.dtype != "auto" else config.dtype or torch.float32
    options = {"dtype": dtype, "attn_implementation": settings.attn_implementation}
    drawn_on = [device] if device.type == "cuda" else []  # the default is all GPUs of the machine, with a warning
    try:
        with torch.random.fork_rng(drawn_on), device:
            model = auto_class(settings.model_name_or_path).from_config(config, trust_remote_code=False, **options)
            return with_training_options(model, settings).train()
    except (ValueError, ImportError, RuntimeError, IndexError, AttributeError) as error:
        reason = f"{type(config).__name__} cannot be made with {num_layers} layers: {first_line(error)}"
        raise UserError(f"model.model_name_or_path {settings.model_name_or_path!r}: {reason}") from error


def layer_period(config: Any) -> int:
    """Return the number of layers after which their kinds repeat, by `layer_types`; 1 if the configuration has none.

    Returns the number of all layers if the period is above `MAX_PERIOD`: then no part represents the whole.
    """
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None) or [""] * text.num_hidden_layers
    periods = range(1, min(MAX_PERIOD, len(kinds)) + 1)
    return next((n for n in periods if all(kind == kinds[i % n] for i, kind in enumerate(kinds))), len(kinds))


def _cut(config: Any, num_layers: int) -> Any:
    """Reduce the configuration to fewer layers; what it lists for each layer is cut too."""
    config = deepcopy(config)
    text = config.get_text_config()
    whole = text.num_hidden_layers
    if num_layers == whole:
        return config
    lists = {name: value for name, value in vars(text).items() if isinstance(value, list) and len(value) == whole}
    for name, value in lists.items():
        setattr(text, name, value[:num_layers])
    text.num_hidden_layers = num_layers
    return config
