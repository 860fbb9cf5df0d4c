"""A folder or hub name -> a model ready to train: loaded, checked, shared, with adapters; and merged at the end."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from importlib.util import find_spec
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

from radixtrain.errors import UserError, did_you_mean, first_line
from radixtrain.hf.backbone import parts_of, recompute
from radixtrain.hf.config import (
    MODEL_JSON,
    MODEL_NAMES,
    check_attention_name,
    check_json_files,
    check_names,
    read_config,
    reason_of,
)
from radixtrain.hf.guards.batch import check_not_shared, check_only_cross_entropy, check_soft_cap
from radixtrain.hf.guards.draws import number_that_draws
from radixtrain.hf.guards.rules import Limit, limit_of, positions_in_table
from radixtrain.hf.quantized import four_bit_layers, keep_trainable, with_plain_weights
from radixtrain.hf.share import check_takes_collated, share_prefixes
from radixtrain.screen import logged_from
from radixtrain.training.fault_tolerance.failures import explain
from radixtrain.training.fault_tolerance.nonfinite_guard import check_weights_finite
from radixtrain.versions import to_install

if TYPE_CHECKING:
    from radixtrain.settings.sections import ModelSettings


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
    model = _shared(with_training_options(model, settings), settings)
    logger.info("%s, %s parameters", type(model).__name__, f"{num_parameters(model)[0]:,}")
    return model.train()


def _shared(model: Any, settings: ModelSettings) -> Any:
    """Share the model, unless `dedup` is off. Raises UserError if it cannot be."""
    if settings.dedup:
        allowed = settings.allow_dropout or ()
        check_takes_collated(model)
        share_prefixes(model, attention=settings.attention, kernel=settings.kernel, allow_dropout=allowed)
    return model


def check_trainable(settings: ModelSettings, num_layers: int, longest: int) -> None:
    """Raise UserError as `fit` does before its first step, for what the configuration of the model shows.

    num_layers: of the model. Nothing is allocated for its weights, so no kernel can be asked whether it runs there.
    longest: as for `check_length`.
    """
    quantization(settings)
    model = random_trainable(settings, num_layers, torch.device("meta"))
    _check_not_float16(model, settings.dtype)
    model = _shared(model, replace(settings, attention="auto", kernel="auto"))
    check_length(model, settings, longest)
    check_draws(model, settings)


def check_length(model: nn.Module, settings: ModelSettings, longest: int) -> None:
    """Refuse rows that reach further than a table of positions, or than what a shared model computes exactly.

    longest: tokens of the longest sequence.
    """
    parts = parts_of(model)
    limit, table = limit_of(parts.decoder, longest, longest - 1), positions_in_table(parts.decoder)
    if limit is None or not settings.dedup:
        limit = Limit(f"a table of {table} positions", table) if table and longest > table else None
    if limit is not None:
        raise UserError(
            f"{parts.name} has {limit.reason}, and the longest sequence has {longest:,} tokens; set data.max_length "
            f"to {limit.tokens} or less, and data.excess_length_strategy"
        )


def check_draws(model: nn.Module, settings: ModelSettings) -> None:
    """Refuse a dropout that the first shared step would refuse, by the key that sets it.

    model: of `load_trainable`, in training mode.
    """
    if not settings.dedup:
        return
    parts, allowed, numbers = parts_of(model), [*(settings.allow_dropout or ())], []
    for root in (parts.decoder, parts.head):
        while any(found := number_that_draws(root, allowed)):
            allowed.append(found[1])
            numbers += [found[0]] if not settings.use_peft or found[1] != "lora_dropout" else []
    if allowed == [*(settings.allow_dropout or ())]:
        return
    where, fix = f"model.lora_dropout is {settings.lora_dropout}", "set it to 0, or allow it"
    if numbers:
        where = f"{parts.name} has {', '.join(numbers)}"
        fix = "set it to 0 in the config.json of the checkpoint, or allow it, unless it drops weights of the attention"
    raise UserError(
        f"{where}: a shared token would draw once, but an ordinary batch draws once per copy; {fix}: "
        f"model.allow_dropout: [{', '.join(allowed)}]; or set dedup: false"
    )


def with_training_options(model: Any, settings: ModelSettings) -> Any:
    """Add checkpointing and adapters as the settings say.

    Raises UserError for a loss besides the cross-entropy, and for a soft-cap that its attention leaves out.
    """
    check_soft_cap(type(model).__name__, model.config.get_text_config(decoder=True))
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
                attn_implementation=_given(attn_implementation),
                use_safetensors=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,  # otherwise transformers refuses them without naming one
                output_loading_info=True,
                **({} if quantization_config is None else {"quantization_config": quantization_config}),
            )
    except Exception as error:  # a value of a wrong type in config.json may raise anything
        if explain(error, None):
            raise
        raise UserError(
            f"model.model_name_or_path {model_name_or_path!r} cannot be loaded: {reason_of(error)}"
        ) from None
    _check_loaded(model, loaded, model_name_or_path)
    _check_not_float16(model, dtype)
    keep_trainable(model)
    return model


def _check_not_float16(model: nn.Module, dtype: str) -> None:
    if any(parameter.dtype == torch.float16 for parameter in model.parameters()):
        raise UserError(
            f"model.dtype {dtype!r}: the checkpoint is float16, which needs a loss scale; set it to bfloat16 or float32"
        )


def _given(attn_implementation: str) -> str | None:
    """Return the attention for transformers; None is sdpa, or eager for a class that has no sdpa, such as gpt-oss."""
    return None if attn_implementation == "auto" else attn_implementation


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


# LoRA, DoRA and QLoRA


def quantization(settings: ModelSettings) -> Any:
    """Return transformers' `BitsAndBytesConfig` if the settings of a `RadixModule` want 4-bit weights, else None.

    Raises UserError if bitsandbytes is missing, or if another setting does not fit.
    """
    if not settings.load_in_4bit:
        return None
    if not settings.use_peft:
        raise UserError("model.load_in_4bit needs model.use_peft: true: weights of 4 bits do not train, adapters do")
    if settings.dtype == "float64":
        raise UserError("model.load_in_4bit: bitsandbytes has no float64; set model.dtype to float32 or bfloat16")
    if find_spec("bitsandbytes") is None:
        raise UserError(f"model.load_in_4bit needs the package bitsandbytes: {to_install('bitsandbytes')}")
    from transformers import BitsAndBytesConfig

    dtype = settings.bnb_4bit_compute_dtype or settings.dtype
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=settings.bnb_4bit_quant_type,
        bnb_4bit_compute_dtype=None if dtype == "auto" else getattr(torch, dtype),
        bnb_4bit_use_double_quant=settings.bnb_4bit_use_double_quant,
    )


def check_quantized(model: nn.Module, settings: ModelSettings) -> None:
    """Refuse a checkpoint that was stored quantised, unless it has 4 bits of bitsandbytes and only adapters train."""
    method = getattr(getattr(model, "hf_quantizer", None), "quantization_config", None)
    if method is None:
        return
    named = f"model.model_name_or_path {settings.model_name_or_path!r} is quantised"
    if not four_bit_layers(model):
        kind = getattr(method.quant_method, "value", method.quant_method)
        raise UserError(
            f"{named} ({kind}), and adapters cannot be merged into such weights; name the checkpoint before its "
            f"quantisation, and set model.load_in_4bit: true to hold it in 4 bits"
        )
    if not settings.use_peft:
        raise UserError(f"{named}, and weights of 4 bits do not train; set model.use_peft: true")


def with_adapters(model: nn.Module, settings: ModelSettings) -> Any:
    """Wrap the model by PEFT. Raises UserError that names the key if that is not possible."""
    try:
        from peft import LoraConfig, get_peft_model  # optional, and four seconds to import
    except ImportError:
        raise UserError(f"model.use_peft needs the package peft: {to_install('peft')}") from None
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.lora_r,
        lora_alpha=settings.lora_alpha,
        lora_dropout=settings.lora_dropout,
        target_modules=settings.lora_target_modules,
        use_dora=settings.use_dora,
        use_rslora=settings.use_rslora,
    )
    linear = _names_of_linear(model)  # PEFT changes the model before it refuses it
    try:
        adapted: Any = get_peft_model(model, config)
    except ValueError as error:
        raise UserError(_why_not_adapted(error, settings.lora_target_modules, linear)) from None
    _check_all_targeted(settings.lora_target_modules, adapted.base_model.targeted_module_names, linear)
    check_not_shared(adapted)
    return adapted


def merged(model: Any) -> Any:
    """Merge the adapters of a PEFT model into the weights of its Hugging Face model. The PEFT model is used up.

    Weights of 4 bits become ordinary ones first, in the dtype of the model: merged into 4 bits, the adapters would be
    rounded away with them. The result computes what was trained, up to the rounding of that dtype.
    """
    if not four_bit_layers(model):
        return model.merge_and_unload()
    from peft import get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

    config, adapters = model.active_peft_config, get_peft_model_state_dict(model)
    plain = get_peft_model(with_plain_weights(model.unload()), config)
    set_peft_model_state_dict(plain, adapters)
    return plain.merge_and_unload()


def _check_all_targeted(targets: object, targeted: list[str], linear: list[str]) -> None:
    """Refuse a name without a layer: PEFT skips it silently if another name has layers."""
    names = targets if isinstance(targets, list) else []
    missing = [name for name in names if not any(f".{path}".endswith(f".{name}") for path in targeted)]
    if missing:
        raise UserError(
            f"model.lora_target_modules: no layer has the name {missing[0]!r}{did_you_mean(missing[0], linear)}"
        )


def _names_of_linear(model: Any) -> list[str]:
    """List the layers that `all-linear` means: the last part of the names of the linear layers, without the head."""
    head = model.get_output_embeddings()
    modules = model.named_modules()
    return sorted({path.rpartition(".")[2] for path, x in modules if isinstance(x, nn.Linear) and x is not head})


def _why_not_adapted(error: ValueError, targets: object, linear: list[str]) -> str:
    """Return PEFT's reason, with the layers that can be named."""
    if "not found in the base model" in str(error):
        return f"model.lora_target_modules: no layer has a name of {targets}; linear layers are {', '.join(linear)}"
    return f"model.lora_target_modules: {first_line(error)}; its linear layers are {', '.join(linear)}"


# The first layers, with random weights

MAX_PERIOD = 8


def random_trainable(settings: ModelSettings, num_layers: int, device: torch.device) -> Any:
    """Make the model that the settings of a `RadixModule` describe, with the first layers only and random weights.

    It is in training mode, with adapters and activation checkpointing as configured, and not shared. On the meta
    device nothing is allocated. The global random state does not change. Raises UserError if the model cannot be made.
    """
    check_attention_name(settings.attn_implementation)
    config = _cut(read_config(settings.model_name_or_path), num_layers)
    dtype = getattr(torch, settings.dtype) if settings.dtype != "auto" else config.dtype or torch.float32
    options = {"dtype": dtype, "attn_implementation": _given(settings.attn_implementation)}
    drawn_on = [device] if device.type == "cuda" else []  # the default is all GPUs of the machine, with a warning
    try:
        with torch.random.fork_rng(drawn_on), device:
            model = auto_class(settings.model_name_or_path).from_config(config, trust_remote_code=False, **options)
            return with_training_options(model, settings).train()
    except UserError:  # of the settings
        raise
    except Exception as error:  # a value of a wrong type in config.json may raise anything
        if explain(error, None):
            raise
        reason = f"{type(config).__name__} cannot be made with {num_layers} layers: {reason_of(error)}"
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
