"""LoRA, DoRA and QLoRA: adapters on a loaded model, and merged into its weights at the end."""

from __future__ import annotations

import re
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from radixtrain.errors import UserError, did_you_mean, first_line
from radixtrain.hf.guards.batch import check_not_shared
from radixtrain.hf.quantized import four_bit_layers, with_plain_weights
from radixtrain.versions import to_install

if TYPE_CHECKING:
    from radixtrain.settings.model import ModelSettings


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
    """Return PEFT's reason; if it finds no layer, or refuses one of `all-linear`, with the layers that can be named."""
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
