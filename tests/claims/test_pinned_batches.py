"""Batches are pinned as they are and copied without waiting, by whoever moves them: what they carry is one copy.

Pinning needs a GPU. The walk over a batch does not, so the tensors' own `pin_memory` is replaced.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory

from radixtrain import RadixCollator
from radixtrain.collators.steps import PaddedCollator, Step, StepCollator
from radixtrain.hf.guards.batch import on_device_of_rows
from tests.support import batches

SEQUENCES = [1, 1, 2, 3], [1, 1, 2, 4, 4], [1, 1, 5], [2, 2, 1], [2, 2, 3]
FEATURES = [{"input_ids": ids, "labels": ids} for ids in SEQUENCES]
COLLATORS = {
    "drop-in": RadixCollator(),
    "merged labels": RadixCollator(merge_labels=True, pad_to_multiple_of=8),
    "a step": StepCollator(max_tokens=8),
    "a padded step": StepCollator(dedup=False, max_tokens=12),
}
META = torch.device("meta")  # it has no values, so whoever read one back would get an error


def by_accelerate(batch: Any) -> Any:
    """`Accelerator(dataloader_config=DataLoaderConfiguration(non_blocking=True))`; Trainer hands its own on."""
    from accelerate.utils import send_to_device

    return send_to_device(batch, META, non_blocking=True)


def by_lightning(batch: Any) -> Any:
    from lightning.fabric.utilities.apply_func import move_data_to_device

    return move_data_to_device(batch, META)


def by_hugging_face(batch: Any) -> Any:
    """`Trainer` moves only tensors; the hook of a prepared model moves what they leave on the host."""
    from transformers import Trainer

    class Mover(Trainer):
        args, is_deepspeed_enabled = SimpleNamespace(device=META), False

        def __init__(self) -> None:
            pass

    given = Mover()._prepare_input(batch)
    assert given["radix"] is batch["radix"]
    return {**given, "radix": on_device_of_rows(given["radix"], given)}


MOVERS: dict[str, Callable[[Any], Any]] = {
    "accelerate": by_accelerate,
    "lightning": by_lightning,
    "trainer": by_hugging_face,
    "a loop": lambda batch: {name: x.to(META) for name, x in batch.items()},
}


def tensors_of(batch: Any) -> list[Tensor]:
    """Of a batch, or of the micro-batches of a step."""
    return batches.tensors_of(batch.micro_batches if isinstance(batch, Step) else batch)


def with_elements(batch: Any) -> list[Tensor]:
    """An empty tensor has no memory, and never says that it is pinned."""
    return [x for x in tensors_of(batch) if x.numel()]


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The addresses of the tensors that were pinned; the replacement does not move them."""
    seen: set[int] = set()
    monkeypatch.setattr(Tensor, "pin_memory", lambda x, *_: seen.add(x.data_ptr()) or x)
    return seen


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """The address of every tensor that moves, and whether it moves without blocking."""
    seen: list[tuple[int, bool]] = []
    move = Tensor.to

    def spy(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append((x.data_ptr(), kwargs.get("non_blocking", False)))
        return move(x, *args, **kwargs)

    monkeypatch.setattr(Tensor, "to", spy)
    return seen


@pytest.mark.parametrize("name", COLLATORS)
def test_every_tensor_is_pinned_and_nothing_else_changes(name: str, pinned: set[int]) -> None:
    batch = COLLATORS[name](FEATURES)
    result = pin_memory(batch)
    assert {x.data_ptr() for x in tensors_of(batch)} == pinned and pinned
    assert repr(result) == repr(batch)


@pytest.mark.parametrize("non_blocking", [True, False])
def test_a_layout_moves_as_asked(copies: list[tuple[int, bool]], non_blocking: bool) -> None:
    layout = RadixCollator()(FEATURES)["radix"].layout
    assert layout.to("meta", non_blocking=non_blocking).device == META
    assert copies == [(layout.rows.data_ptr(), non_blocking)]


@pytest.mark.parametrize("name", ["drop-in", "merged labels", "padded"])
@pytest.mark.parametrize("move", MOVERS.values(), ids=MOVERS)
def test_what_a_batch_carries_is_one_copy(move: Any, name: str, copies: list[tuple[int, bool]]) -> None:
    """Nobody waits for it, and what the host reads stays where it is."""
    batch = PaddedCollator()(FEATURES) if name == "padded" else COLLATORS[name](FEATURES)
    others = {x.data_ptr() for x in batch.values() if isinstance(x, Tensor)}
    moved = move(batch)
    radix, before = moved["radix"], batch["radix"]
    assert all(x.device == META for x in tensors_of(moved)) and moved.keys() == batch.keys()
    assert [each for each in copies if each[0] not in others] == [(before.rows.data_ptr(), True)]
    assert radix.host is before.host and radix.sections is before.sections
    if radix.host is not None:
        layout = radix.layout
        assert layout.device == META and layout.host.device.type == "cpu"
        assert layout.pieces[0].ragged.max_seqlen_q == layout.max_seqlen == 5, "its launches are known"


@pytest.mark.parametrize("name", COLLATORS)
def test_lightning_moves_without_blocking(name: str, copies: list[tuple[int, bool]]) -> None:
    batch = COLLATORS[name](FEATURES)
    moved = by_lightning(batch)
    assert all(x.device == META for x in tensors_of(moved))
    assert dict.fromkeys(map(Tensor.data_ptr, tensors_of(batch)), True) == dict(copies) and copies


def test_a_step_on_the_host_is_waited_for(copies: list[tuple[int, bool]]) -> None:
    """Nothing holds the host back from reading a copy to it that has not arrived."""
    step = COLLATORS["a step"](FEATURES).to("cpu")
    assert copies == [(x.data_ptr(), False) for x in tensors_of(step)] and copies


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="a machine with a CUDA device runs this: make test-gpu")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_pins(num_workers: int) -> None:
    collate: Callable[..., Any] = COLLATORS["merged labels"]
    loader: DataLoader[Any] = DataLoader(
        FEATURES, batch_size=5, collate_fn=collate, pin_memory=True, num_workers=num_workers
    )
    (batch,) = loader
    assert all(x.is_pinned() for x in with_elements(batch)) and with_elements(batch)
    (step,) = DataLoader(FEATURES, 5, collate_fn=COLLATORS["a step"], pin_memory=True, num_workers=num_workers)
    assert all(x.is_pinned() for x in with_elements(step)) and with_elements(step)
    assert all(x.is_cuda for x in tensors_of(step.to("cuda")))
    layout = batch["radix"].layout.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(layout.gather_indices.cpu(), batch["radix"].layout.gather_indices)
