"""`trainer.strategy: fsdp2`: weights, gradients and optimizer moments are sharded over the ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from radixtrain.checkpoints.tensors import is_sharded, whole
from radixtrain.distributed import ranks
from radixtrain.errors import UserError
from radixtrain.hf.backbone import parts_of, text_layers
from radixtrain.hf.quantized import four_bit_layers

logger = logging.getLogger(__name__)

METHODS = ("loss_sum", "predict_step")  # methods of a `RadixModule` that use its weights


def shard(module: nn.Module, model: object, device: torch.device, num_ranks: int, methods: Iterable[str]) -> None:
    """Shard the weights of a module over all ranks, by rows. Each rank holds its part on `device`, and all buffers.

    module: around the model; all its weights are those of the model. It is changed in place, and keeps their names.
    model: a `PreTrainedModel`, or one wrapped by PEFT, with the same weights on every rank.
    methods: of the module, the only ones that use its weights. Every rank calls them equally often.

    Gradients are means over the ranks, in the dtype of the weights, or summed in float32 if that has 16 bits.

    Raises UserError for a model that cannot be sharded this way.
    """
    check_shardable(model)
    mesh = init_device_mesh(device.type, (num_ranks,))
    layers = _layers(model)
    if not layers:
        logger.warning("the layers of %s are not one list: all its weights are gathered at once", type(model).__name__)
    for unit in (*layers, module):
        fully_shard(unit, mesh=mesh, mp_policy=_policy(unit))
    for name in methods:
        setattr(module, name, _without_cached_casts()(getattr(module, name)))
        register_fsdp_forward_method(module, name)
    module.to(device)


def check_shardable(model: Any) -> None:
    """Raise UserError for what cannot be sharded exactly; it names the weight, the reason and the fix."""
    if four_bit_layers(model):
        raise UserError("trainer.strategy fsdp2 cannot shard weights of 4 bits (model.load_in_4bit); use ddp")
    owner: dict[nn.Parameter, int] = {}
    for name, parameter in model.named_parameters():
        if parameter.ndim == 0:
            raise UserError(f"trainer.strategy fsdp2 divides weights by rows, and {name} is a single number; use ddp")
    for number, layer in enumerate(_layers(model)):
        for parameter in layer.parameters():
            if owner.setdefault(parameter, number) != number:
                raise UserError(
                    f"trainer.strategy fsdp2: layers {owner[parameter]} and {number} of {type(model).__name__} share a "
                    f"weight, and each layer is sharded separately; use ddp"
                )
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and path.endswith("experts"):
            raise UserError(
                f"trainer.strategy fsdp2: {path} is a list of modules, and ranks that route no token to one of them "
                f"would wait for each other; use ddp"
            )


def _layers(model: Any) -> list[nn.Module]:
    """List the decoder layers, each once."""
    return list(dict.fromkeys(text_layers(parts_of(model).decoder)))


def _policy(unit: nn.Module) -> MixedPrecisionPolicy:
    """Return a policy that casts neither weights nor inputs: autocast does it, as in a single process."""
    trained = {parameter.dtype for parameter in _weights_of(unit) if parameter.requires_grad}
    if len(trained) > 1:
        names = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in trained))
        raise UserError(
            f"trainer.strategy fsdp2: {type(unit).__name__} trains weights of {names}, which are reduced together; set "
            f"model.dtype: float32, or use ddp"
        )
    has_16_bits = any(dtype.itemsize == 2 for dtype in trained)
    return MixedPrecisionPolicy(reduce_dtype=torch.float32 if has_16_bits else None)


def _weights_of(unit: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the weights of a unit that are in none of the units inside."""
    yield from unit.parameters(recurse=False)
    for child in unit.children():
        if not isinstance(child, FSDPModule):
            yield from _weights_of(child)


@contextmanager
def _without_cached_casts() -> Iterator[None]:
    """Let autocast keep no copies of weights in 16 bits, which would add up to all weights in a pass."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


@torch.no_grad()
def gather_on_first(model: nn.Module) -> None:
    """Gather the weights of a sharded model in the memory of rank 0's host, one at a time. Every rank calls this.

    Afterwards the other ranks have weights without memory, and no rank can compute with the model. A model that is not
    sharded is not changed.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    gathered: dict[nn.Parameter, nn.Parameter] = {}
    for module, name, parameter in list(_places(model)):
        if not is_sharded(parameter):
            continue
        if parameter not in gathered:  # a weight may have several places
            found = whole(parameter)
            held = found.cpu() if ranks().is_first else found.to("meta")
            gathered[parameter] = nn.Parameter(held, requires_grad=parameter.requires_grad)
        setattr(module, name, gathered[parameter])


def _places(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Yield module, name and parameter for each place where a model keeps a parameter."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            yield module, name, parameter
