"""A training step waits for the device once: to look whether loss and gradient norm are finite.

Without a GPU the step runs on torch's `meta` device, which has no values and takes the code path of CUDA (packed
pieces, torch's varlen kernels), under a watch that refuses every operator whose result or shape the host would have to
read back. More steps, and where each waits, are in `fake_cuda/`.
"""

import importlib.util
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hybrids import ONE_KIND
from tiers import cases
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from radixtrain import RadixCollator, prepare_model
from radixtrain.attention import AttentionChoice
from radixtrain.collators.steps import StepCollator
from radixtrain.kernels.flash import TorchCUDAKernel
from radixtrain.testing import FREE_FORKS
from radixtrain.training.fault_tolerance.nonfinite_guard import NonFiniteGuard
from radixtrain.training.module import RadixModule
from radixtrain.tree.runs import RunLayout

ROOT = Path(__file__).resolve().parents[2]
aten = torch.ops.aten
NESTED = [[1, 1, 2, 2, 3], [1, 1, 2, 2, 4, 4], [1, 1, 2, 5], [2, 2, 1], [2, 2, 3, 3], [2, 2, 3, 4], [5, 1]]
FEATURES = [{"input_ids": ids, "labels": [-100, *ids[1:]]} for ids in NESTED]

# What a device has to be asked for: a value, or a size that depends on values.
READS = {
    *("_local_scalar_dense", "equal", "nonzero", "nonzero_static", "masked_select", "bincount", "histc", "linalg_eig"),
    *("_unique", "_unique2", "unique_dim", "unique_consecutive"),
}


class Waits(AssertionError):
    """The host waits for the device here."""


class NoWaiting(TorchDispatchMode):
    """Refuses operators that make the host wait, forward and backward."""

    def __init__(self, device: str):
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if any(x.device.type == self.device for x in given):
            self.check(func.overloadpacket.__name__, args, kwargs, given)
        result = func(*args, **kwargs)
        devices = {x.device.type for x in [*given, *tree_leaves(result)] if isinstance(x, Tensor) and x.ndim}
        if len(devices) > 1 and not _is_non_blocking(func, args, kwargs):
            raise Waits(f"{func} copies between {' and '.join(sorted(devices))} and waits")
        return result

    def check(self, name: str, args: Any, kwargs: Any, given: list[Tensor]) -> None:
        if name in READS:
            raise Waits(f"{name} reads from the device")
        if name == "repeat_interleave" and kwargs.get("output_size") is None:
            raise Waits("repeat_interleave without output_size asks the device how long its result is")
        if name.lstrip("_").startswith("index") and any(x.dtype in (torch.bool, torch.uint8) for x in _indices(args)):
            raise Waits(f"{name} with a mask asks the device how many are set")


def _indices(args: Any) -> list[Tensor]:
    """The index tensors of `index` and `index_put`: a list after the tensor."""
    listed = args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else ()
    return [x for x in listed if isinstance(x, Tensor)]


def _is_non_blocking(func: Any, args: Any, kwargs: Any) -> bool:
    names = [argument.name for argument in func._schema.arguments]
    place = names.index("non_blocking") if "non_blocking" in names else len(args)
    return bool(kwargs.get("non_blocking", args[place] if place < len(args) else False))


@pytest.fixture
def no_autocast_on_meta(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch knows no autocast there, and raises if it is asked for its state."""
    is_enabled, autocast = torch.is_autocast_enabled, torch.autocast

    def autocast_elsewhere(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return nullcontext() if device_type == "meta" else autocast(device_type, *args, **kwargs)

    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *device: device != ("meta",) and is_enabled(*device))
    monkeypatch.setattr(torch, "autocast", autocast_elsewhere)


@pytest.fixture
def on_meta(monkeypatch: pytest.MonkeyPatch, no_autocast_on_meta: None) -> Callable[..., Any]:
    """`on_meta(model, attention)`: it prepared, in bfloat16 without values, with the kernel of torch on CUDA.

    Those of the packages run in `tests/kernels/test_flash.py`.
    """

    def prepared(model: Any, attention: str = "cascade") -> Any:
        choice = AttentionChoice(attention, "torch", "test")
        monkeypatch.setattr("radixtrain.attention.choose_attention", lambda *args, **kwargs: choice)
        monkeypatch.setattr("radixtrain.attention._kernel", lambda *args: TorchCUDAKernel())
        return prepare_model(model.to(torch.bfloat16).to("meta").train())

    return prepared


def module_around(model: Any, monkeypatch: pytest.MonkeyPatch) -> RadixModule:
    """Lightning's part of the step, without a trainer."""
    module = RadixModule("unused")
    module.model = model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    stand_ins = {
        "optimizers": lambda: optimizer,
        "lr_schedulers": lambda: scheduler,
        "manual_backward": lambda loss: loss.backward(),
        "log_dict": lambda *args, **kwargs: None,
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(module, name, stand_in)
    monkeypatch.setattr(RadixModule, "device", torch.device("meta"))
    monkeypatch.setattr(RadixModule, "global_step", 0)
    return module


def to_meta(batch: Any) -> Any:
    """As Lightning moves a batch: pinned tensors, without waiting."""
    if isinstance(batch, Tensor):
        return batch.to("meta", non_blocking=True)
    if isinstance(batch, dict):
        return {name: to_meta(value) for name, value in batch.items()}
    return [to_meta(value) for value in batch] if isinstance(batch, list) else batch


TREE = ["tree"] if importlib.util.find_spec("triton") else []


@pytest.mark.parametrize("attention", ["cascade", "path", "expand", *TREE])
def test_loss_and_backward(on_meta: Callable[..., Any], tiny_qwen3: Callable[..., Any], attention: str) -> None:
    """The drop-in: the model's own head and loss."""
    model = on_meta(tiny_qwen3(), attention)
    for padding in (None, 8):
        batch = to_meta(RadixCollator(pad_to_multiple_of=padding, tree_tiles=attention == "tree")(FEATURES))
        with NoWaiting("meta"):
            model(**batch).loss.backward()
        assert all(parameter.grad.device.type == "meta" for parameter in model.parameters())


@pytest.mark.parametrize(("merge_labels", "checkpointing"), [(True, True), (False, False)])
def test_the_step_of_fit_waits_once(
    on_meta: Callable[..., Any],
    tiny_qwen3: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    merge_labels: bool,
    checkpointing: bool,
) -> None:
    """Micro-batches, the fused loss, clipping, AdamW and the schedule; what Lightning's loggers read is not here."""
    model = on_meta(tiny_qwen3())
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    module = module_around(model, monkeypatch)
    step = StepCollator(max_tokens=12, merge_labels=merge_labels)(FEATURES).to("meta")
    assert len(step.micro_batches) > 1
    finite: list[tuple[Tensor, Tensor]] = []
    monkeypatch.setattr(NonFiniteGuard, "allows", lambda *given: not finite.append(given[2:4]))
    with NoWaiting("meta"):
        module.training_step(step, 0)
    assert len(finite) == 1
    monkeypatch.undo()
    with NoWaiting("meta"), pytest.raises(Waits, match="_local_scalar_dense"):
        module.guard.allows(model, *finite[0], [], 0)


def test_a_window(on_meta: Callable[..., Any], tiny_qwen3: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its mask tells the layers, by its shape and not by its values."""
    windows = []
    forward = TorchCUDAKernel.forward
    monkeypatch.setattr(TorchCUDAKernel, "forward", lambda *a: windows.append(a[-1].window) or forward(*a))
    kinds = ["full_attention", "sliding_attention"]
    model = on_meta(tiny_qwen3(sliding_window=3, use_sliding_window=True, layer_types=kinds), "path")
    with NoWaiting("meta"):
        model(**to_meta(RadixCollator()(FEATURES))).loss.backward()
    assert windows == [None, 3]


@ONE_KIND
@pytest.mark.parametrize("checkpointing", cases([True, False], [True]))
def test_layers_with_a_state(
    on_meta: Callable[..., Any],
    tiny_hybrid: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    checkpointing: bool,
) -> None:
    """Their runs come with the batch. Whether a mixer can fork is tried once, which waits, and needs values."""
    tried: list[Any] = []
    monkeypatch.setattr("radixtrain.hf.recurrent.layers.why_it_cannot_fork", lambda *args: tried.append(args) or "")
    model = on_meta(tiny_hybrid(kind))
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    batch = to_meta(RadixCollator(run_cost=FREE_FORKS)(FEATURES))
    assert RunLayout.from_batch(batch).num_forks
    for _ in range(2):
        with NoWaiting("meta"):
            model(**batch).loss.backward()
    assert len(tried) == 1


WAITING: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "bool": lambda x: bool((x > 0).all()),
    "mask": lambda x: x[x > 0],
    "mask put": lambda x: x.index_put_((x > 0,), x.new_zeros(())),
    "nonzero": lambda x: x.nonzero(),
    "unique": lambda x: torch.unique(x),
    "repeats": lambda x: x.repeat_interleave(torch.zeros(4, dtype=torch.int64, device="meta")),
    "from the host": lambda x: x + torch.tensor([1.0, 2.0, 3.0, 4.0]).to("meta"),
}


def test_the_watch_sees() -> None:
    for wait in WAITING.values():
        with NoWaiting("meta"), pytest.raises((Waits, NotImplementedError, RuntimeError)):
            wait(torch.empty(4, device="meta"))


def test_the_watch_sees_a_backward() -> None:
    class ReadsInBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad.repeat_interleave(torch.ones_like(grad, dtype=torch.int64))

    with NoWaiting("meta"), pytest.raises(Waits, match="repeat_interleave"):
        ReadsInBackward.apply(torch.empty(4, device="meta", requires_grad=True)).sum().backward()


def test_the_watch_lets_pass() -> None:
    with NoWaiting("meta"):
        x = torch.ones(4).to("meta", non_blocking=True) + 1.0
        x.index_select(0, torch.empty(2, dtype=torch.int64, device="meta"))
        x[torch.empty(2, dtype=torch.int64, device="meta")].repeat_interleave(
            torch.empty(2, dtype=torch.int64, device="meta"), output_size=5
        )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="a machine with a CUDA device runs this: make test-gpu")
@pytest.mark.parametrize("attention", ["cascade", "path", "expand"])
def test_cuda_itself_does_not_wait(tiny_qwen3: Callable[..., Any], attention: str) -> None:
    """CUDA raises if the host would wait. The first step compiles and fills caches, and may."""
    model = prepare_model(tiny_qwen3().to("cuda", torch.bfloat16).train(), attention=attention)
    module = RadixModule("unused")
    module.model = model
    batch = RadixCollator(merge_labels=True, pad_to_multiple_of=8)(FEATURES)
    pinned = {name: x.pin_memory() if isinstance(x, Tensor) else x for name, x in batch.items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        moved = {name: x.to("cuda", non_blocking=True) if isinstance(x, Tensor) else x for name, x in pinned.items()}
        module.loss_sum(moved).backward()
        module._clip()
        optimizer.step()

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
