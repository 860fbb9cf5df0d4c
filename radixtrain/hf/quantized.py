"""Weights of 4 bits (bitsandbytes): which layers have them, and the same layers with ordinary weights.

bitsandbytes computes in 16 bits and in float32. Its CPU kernels take float64 and return uninitialised memory. On
CPUs with AVX512-BF16, a layer in evaluation mode repacks its weight for a kernel without a gradient, and keeps it so:
every training step after the first validation then had a wrong gradient (bitsandbytes 0.50, relative error 1). So the
comparison with float64 runs on ordinary weights, and layers are kept from repacking.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


def four_bit_layers(model: nn.Module) -> dict[str, Any]:
    """Return the linear layers whose weight has 4 bits, by name."""
    return {name: module for name, module in model.named_modules() if _is_four_bit(module)}


def _is_four_bit(module: nn.Module) -> bool:
    """Judge by a weight of its own: PEFT's wrapper shows that of the layer inside."""
    own = dict(module.named_parameters(recurse=False))
    return getattr(own.get("weight"), "quant_state", None) is not None


def keep_trainable(model: nn.Module) -> None:
    """Keep the 4-bit layers of a model from repacking their weights on a CPU. Call it right after loading."""
    for layer in four_bit_layers(model).values():
        layer.support_avx512bf16_for_cpu = False


@contextmanager
def plain_weights(model: nn.Module) -> Iterator[None]:
    """Let 4-bit layers compute with ordinary frozen weights of the same values, which can have any dtype."""
    layers = four_bit_layers(model)
    try:
        for name, layer in layers.items():
            model.set_submodule(name, _plain(layer))
        yield
    finally:
        for name, layer in layers.items():
            model.set_submodule(name, layer)


def with_plain_weights(model: Any) -> Any:
    """Replace the 4-bit layers of a Hugging Face model by ordinary ones in its own dtype, in place."""
    for name, layer in four_bit_layers(model).items():
        model.set_submodule(name, _plain(layer).to(model.dtype))
    model.hf_quantizer.remove_quantization_config(model)
    return model


def _plain(layer: Any) -> nn.Linear:
    """Return an ordinary layer with the weight that a 4-bit one computes with."""
    from bitsandbytes.functional import dequantize_4bit

    plain = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
    weight = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    plain.weight, plain.bias = nn.Parameter(weight, requires_grad=False), layer.bias
    return plain
