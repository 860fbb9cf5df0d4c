"""A fingerprint of a model's weights: two are equal only if the same model computes the same.

Rows of a cache are useless once the weights have changed. Nothing announces a change (an optimizer's step,
`load_state_dict`, `p.data.add_(...)`, another adapter), so all weights are read. One read costs little beside a
generation, which reads them once for every token.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterator
from functools import cache
from itertools import chain
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from radixtrain.errors import UserError
from radixtrain.hf.third_party import third_party_hooks

OF_EVERY_MODULE = frozenset(vars(nn.Module()))  # `training`, hooks and the like, which change no weight
OURS = "_radixtrain"  # what preparing a model leaves on its modules
PLAIN = (bool, int, float, str, type(None), torch.dtype)
WORDS = 1 << 20  # words of a tensor that are multiplied at once, off the CPU: 8 MiB of products


def fingerprint(model: nn.Module) -> tuple[Hashable, ...]:
    """Return what equals another fingerprint unless something changed on which the model's keys and values depend.

    It contains: the digest, shape, dtype and device of each parameter and buffer; each module, and its attributes that
    are plain values (LoRA's scaling, which adapters are active or merged); which forward hooks it has, since a hook may
    change what a module returns; the configuration; and autocast. It does not depend on the mode (`train`, `eval`), our
    own hooks, gradients, `requires_grad`, or weights of PEFT's adapters while these are disabled. Module attributes
    that are tensors or functions, and what a hook reads, are not covered.

    Raises UserError if a tensor is on the meta device. Reads the device once, at the end.

    As slow as summing the weights: 0.12 s for 0.6 billion parameters in float32, on one CPU thread that reads 20 GB/s.
    """
    left_out = tuple(unread(model))
    named = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    of_id = {id(tensor): (name, tensor) for name, tensor in named if not name.startswith(left_out)}
    tensors = dict(of_id.values())
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise UserError(
                f"{name} is on the meta device and has no values: load the weights before generating (from_pretrained, "
                "without a device_map that offloads)"
            )
    kinds = tuple((name, tuple(each.shape), each.dtype, each.device) for name, each in tensors.items())
    modules = tuple(
        (name, weakref.ref(each), third_party_hooks(each), *_settings(each)) for name, each in model.named_modules()
    )
    autocast = tuple(_autocast(kind) for kind in sorted({each.device.type for each in tensors.values()}))
    return kinds, _digests(list(tensors.values())), modules, _configuration(model), autocast


def unread(model: nn.Module) -> Iterator[str]:
    """Name the beginnings of weights that no forward pass reads, because their adapters are disabled.

    Merged adapters are read: a disabled layer takes them out of its own weights first.
    """
    for path, module in model.named_modules():
        if getattr(module, "disable_adapters", False) is True and not getattr(module, "merged_adapters", ()):
            for name in (*module.adapter_layer_names, *module.other_param_names):
                yield f"{path}.{name}."


def _digests(tensors: list[Tensor]) -> tuple[int, ...]:
    """Digest the bytes in logical order: 128 bits on the CPU, 64 bits for every WORDS words elsewhere."""
    digests: list[int] = []
    elsewhere: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.device.type == "cpu":
            digests.append(xxhash.xxh3_128_intdigest(_words(tensor, torch.uint8).numpy().data))
        else:
            elsewhere.setdefault(tensor.device, []).append(tensor)
    for device, on_it in elsewhere.items():
        factors = word_factors(device)
        digests += torch.stack([each for tensor in on_it for each in word_sums(tensor, factors)]).tolist()
    return tuple(digests)


@cache  # 11 ms of one core, beside every reference pass of a trainer
def word_factors(device: torch.device) -> Tensor:
    """Draw an odd random factor for each place, (WORDS,), int64, the same in every call."""
    factors = torch.randint(-(2**63), 2**63 - 1, (WORDS,), generator=torch.Generator().manual_seed(0)) | 1
    return factors.to(device, non_blocking=True)


def word_sums(tensor: Tensor, factors: Tensor) -> Iterator[Tensor]:
    """Yield for every WORDS words of 4 bytes the sum of word times factor modulo 2^64, (), int64, on its device.

    One changed word always changes the sum, because odd factors are invertible. Several, such as two swapped words, or
    all signs, leave it unchanged with a probability of at most 2^-32 (multilinear hashing).
    """
    for words in _words(tensor, torch.int32).split(len(factors)):
        yield (words * factors[: len(words)]).sum()


def _words(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """View the bytes of a tensor in logical order, (n,), as integers of `dtype`; as uint8 if that does not fit."""
    flat = tensor.detach().reshape(-1).contiguous()
    fits = flat.nbytes % dtype.itemsize == 0 and flat.storage_offset() * flat.itemsize % dtype.itemsize == 0
    return flat.view(dtype if fits else torch.uint8)


def _settings(module: nn.Module) -> Iterator[Hashable]:
    """Yield names and values of a module's own attributes that are plain values, or lists and dictionaries of them.

    None is left out: Qwen2-VL has None in place of a tensor, which is not covered, until it has generated.
    """
    for name, value in vars(module).items():
        is_ours = name in OF_EVERY_MODULE or name.startswith(OURS)
        if value is not None and not is_ours and (plain := _plain(value)) is not None:
            yield name, plain


def _configuration(model: nn.Module) -> Hashable:
    """Return Hugging Face's configuration, without the attention function, which radixtrain replaces for a while."""
    to_dict: Any = getattr(getattr(model, "config", None), "to_dict", dict)
    return _plain(to_dict())


def _autocast(device_type: str) -> Hashable:
    enabled = torch.is_autocast_enabled(device_type)
    return device_type, enabled, torch.get_autocast_dtype(device_type) if enabled else None


def _plain(value: object) -> Hashable:
    """Make a hashable copy of plain values and collections of them; None for anything else."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, PLAIN):
        return type(value).__name__, value
    if isinstance(value, dict):
        return tuple((str(key), _plain(each)) for key, each in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(_plain(each) for each in value)
    if isinstance(value, (set, frozenset)):
        return frozenset(_plain(each) for each in value)
    return None
