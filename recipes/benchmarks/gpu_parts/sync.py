"""Does a step wait for the device? From the collator to the optimizer, while torch raises on every wait that it sees.

Two steps: the drop-in model with its own loss, and merged predictions with the fused loss, as in `fit`. Batches are
pinned and copied without waiting. One step runs before the watch, since the first step of a process compiles and
initializes. `torch.cuda.set_sync_debug_mode` sees copies, values that are read and shapes that depend on values; the
part begins with a read, to show that the watch sees. On a CPU the same steps run, and there is nothing to wait for.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from gpu_parts.equivalence import takes_tree
from gpu_parts.run import Run, wait_for
from torch import Tensor

from radixtrain import RadixCollator, prepare_model
from radixtrain.attention import EVERYWHERE
from radixtrain.bench.cells import Cell, ModelShape, build_model, features_of_cell
from radixtrain.collators.steps import StepCollator
from radixtrain.hf.predictions import predict

__all__ = ["PART", "sync", "watching"]

PART = "sync"
Features = list[dict[str, Any]]


def sync(run: Run, shape: ModelShape, prompt_length: int) -> None:
    """Every strategy with the first kernel that `auto` takes."""
    features = features_of_cell(Cell(shape, prompt_length, prompt_length // 8, 10, tree="nested"))
    watched = sees_a_read(run.device)
    if not watched:
        run.leave_out(f"{PART}, the watch", f"torch reports no wait on {run.device.type}, not even a read")
    strategies = [strategy for strategy in EVERYWHERE if strategy != "reference"]
    if takes_tree(run, PART, torch.bfloat16, shape.head_dim):
        strategies.append("tree")
    for strategy in strategies:
        losses = {"own loss": own_loss_step} if strategy == "tree" else LOSSES  # `fit` has no key for lists of tiles
        for loss, step in losses.items():
            if not run.has_time(f"{PART} {strategy}, {loss}"):
                return
            try:
                _measure(run, shape, features, strategy, loss, step, watched)
            except Exception as error:  # of the step before the watch; the other strategies are still to be measured
                run.leave_out(f"{PART} {strategy}, {loss}", error)


def _measure(
    run: Run,
    shape: ModelShape,
    features: Features,
    strategy: str,
    loss: str,
    step: Callable[..., None],
    watched: bool,
) -> None:
    model = prepare_model(build_model(shape, run.device, torch.bfloat16, "sdpa"), attention=strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tiles, where = strategy == "tree", ""
    step(model, optimizer, features, tiles)
    wait_for(run.device)
    try:
        with watching(run.device):
            step(model, optimizer, features, tiles)
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        where = _place(error)
    seen = {"waits": int(bool(where)), "where": where or "nowhere"} if watched else {}
    run.found(PART, f"{strategy}, {loss}", **seen, finite=all(bool(p.isfinite().all()) for p in model.parameters()))


@contextmanager
def watching(device: torch.device) -> Iterator[None]:
    """Inside, torch raises a RuntimeError wherever the host waits for the device."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def sees_a_read(device: torch.device) -> bool:
    """Whether the watch sees anything on this device."""
    number = torch.ones(1, device=device)
    try:
        with watching(device):
            number.item()
    except RuntimeError:
        return True
    return False


def own_loss_step(model: Any, optimizer: Any, features: Features, tiles: bool) -> None:
    """The drop-in step: the batch, the model's own head and loss, clipping, AdamW."""
    batch = to_device(RadixCollator(tree_tiles=tiles)(features), model.device)
    model(**batch).loss.backward()
    _update(model, optimizer)


def fit_step(model: Any, optimizer: Any, features: Features, tiles: bool) -> None:
    """The step of `fit`: micro-batches, merged predictions, the fused loss, clipping, AdamW."""
    assert not tiles, "`fit` has no key for lists of tiles"
    step = StepCollator()(features)
    for batch in step.micro_batches:
        (predict(model, to_device(batch, model.device), True).loss_sum() / step.num_labels).backward()
    _update(model, optimizer)


LOSSES: dict[str, Callable[..., None]] = {"own loss": own_loss_step, "loss of fit": fit_step}


def to_device(batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Pinned and copied without waiting, as a DataLoader and a trainer do."""
    if device.type == "cpu":
        return batch
    return {
        name: value.pin_memory().to(device, non_blocking=True) if isinstance(value, Tensor) else value
        for name, value in batch.items()
    }


def _update(model: Any, optimizer: Any) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _place(error: BaseException) -> str:
    """The innermost line of the trace that is not in torch, as file:line."""
    place, trace = "", error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename.replace("\\", "/")
        if "/torch/" not in name:
            place = f"{'/'.join(name.split('/')[-2:])}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place or "unknown"
