"""Where the host waits for a device that has no values, and tensors that live there.

Under `FakeTensorMode` every operator checks the devices and shapes of its arguments; `Waits` checks the dtypes that
CUDA's products and flash attention take, writes down what asks for a value, and answers with ones.
"""

from __future__ import annotations

import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from radixtrain import position_wise
from radixtrain.tree.layout import Movable

__all__ = ["DEVICE", "FakeCUDA", "Waits", "move_module", "moved"]

DEVICE = "cuda:0"
ROOT = Path(__file__).resolve().parents[3]
OURS = tuple(str(ROOT / folder) for folder in ("radixtrain", "kernels", "collators"))
READS = {"_local_scalar_dense", "equal", "nonzero", "masked_select", "bincount", "_unique2", "unique_dim"}
NO_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "promote_types"}
PRODUCTS = {"mm", "bmm", "addmm", "addmm_", "baddbmm"}


@position_wise
class FakeCUDA(FakeTensorMode):
    """As torch has it for a process without a device: nothing is made on one for real."""

    avoid_device_init = True  # a property, of whether `torch.cuda.is_available()`


def check_dtypes(name: str, args: Any) -> None:
    """TypeError for what CUDA's kernels refuse and the shapes of their results do not show."""
    heads = {"_flash_attention_forward": 3, "_flash_attention_backward": 5}.get(name)  # dout, q, k, v, out
    tensors = args[:heads] if heads else args if name in PRODUCTS else ()
    dtypes = {x.dtype for x in tensors if isinstance(x, Tensor) and x.is_floating_point()}
    if len(dtypes) > 1 or (heads and not dtypes <= {torch.float16, torch.bfloat16}):
        raise TypeError(f"{name} of {', '.join(sorted(map(str, dtypes)))}")
    offset = 6 if name.endswith("backward") else 3  # cu_seqlens
    if heads and any(x.dtype != torch.int32 for x in args[offset : offset + 2]):
        raise TypeError(f"{name} takes cu_seqlens in int32")


def moved(value: Any, mode: FakeTensorMode) -> Any:
    """The same with its tensors on the device, as a loader moves pinned ones."""
    return tree_map_only((Tensor, Movable), lambda x: _moved(x, mode), value)


def _moved(x: Any, mode: FakeTensorMode) -> Any:
    """It remembers its values, for a function that is known to read them."""
    if isinstance(x, Movable):
        return x.map(partial(_moved, mode=mode))
    fake: Any = mode.from_tensor(x).to(DEVICE, non_blocking=True)
    fake.values_on_host = None if x.is_floating_point() else x.numpy()
    return fake


def move_module(module: nn.Module, mode: FakeTensorMode) -> Any:
    """The same module with its weights on the device; tied ones stay tied. `Module.to` makes no fakes of real ones."""
    found: dict[int, Tensor] = {}

    def on_device(tensor: Tensor) -> Tensor:
        if id(tensor) not in found:
            fake = moved(tensor.detach(), mode)
            is_weight = isinstance(tensor, nn.Parameter)
            found[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if is_weight else fake
        return found[id(tensor)]

    for each in module.modules():
        for tensors in (each._parameters, each._buffers):
            tensors.update({name: tensor if tensor is None else on_device(tensor) for name, tensor in tensors.items()})
    return module


@position_wise
class Waits(TorchDispatchMode):
    """`counts`: how often which of our functions, as `file:function`, made the host wait for the device.

    It waits for a value, for a shape that depends on values, and for a copy that was not asked to be `non_blocking`.

    `launches`: operators that start a kernel or a copy, which neither a view nor fresh memory does.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.launches = 0

    def __enter__(self) -> Waits:
        self._own = FakeTensor.tolist, Tensor.numpy
        FakeTensor.tolist = lambda x: self._values(x).tolist()
        Tensor.numpy = lambda x, **_: self._values(x) if isinstance(x, FakeTensor) else self._own[1](x)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        FakeTensor.tolist, Tensor.numpy = self._own
        super().__exit__(*error)

    def _values(self, x: Any) -> Any:
        """One read, however many they are: those that it had before it was moved, else ones."""
        if x.is_cuda:
            self.counts[_our_function()] += 1
        known = getattr(x, "values_on_host", None)
        return np.ones(x.shape, dtype=str(x.dtype).removeprefix("torch.")) if known is None else known

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        check_dtypes(func.overloadpacket.__name__, args)
        if func.overloadpacket.__name__ in READS and any(x.is_cuda for x in given):
            self.counts[_our_function()] += 1
            if func is torch.ops.aten._local_scalar_dense.default:
                return {torch.bool: True, torch.int64: 0}.get(given[0].dtype, 1.0)
            if func is torch.ops.aten.equal.default:
                return True
        if func is torch.ops.aten._efficient_attention_backward.default:  # torch's own shapes of it lack an argument
            result = (*(torch.empty_like(x) for x in args[1:4]), args[1].new_empty(0))
        else:
            result = func(*args, **(kwargs or {}))
        self.launches += func.namespace == "aten" and not func.is_view and func.overloadpacket.__name__ not in NO_KERNEL
        devices = {x.device.type for x in [*given, *tree_leaves(result)] if isinstance(x, Tensor) and x.ndim}
        if len(devices) > 1 and not _is_non_blocking(func, args, kwargs or {}):
            self.counts[_our_function()] += 1
        return result


def _is_non_blocking(func: Any, args: Any, kwargs: Any) -> bool:
    names = [argument.name for argument in func._schema.arguments]
    place = names.index("non_blocking") if "non_blocking" in names else len(args)
    return bool(kwargs.get("non_blocking", args[place] if place < len(args) else False))


def _our_function() -> str:
    """The innermost of ours that runs; in a backward pass of torch's operators there is none."""
    frame = sys._getframe()
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(OURS):
            return f"{Path(path).relative_to(ROOT)}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "torch"
