"""Does a step wait for the device? From the collator to the optimizer, while torch raises on every wait that it sees.

Two steps: the drop-in model with its own loss, and merged predictions with the fused loss, as in `fit`. Batches are
pinned and copied without waiting. One step runs before the watch, since the first step of a process compiles and
initializes. The part begins with a read, to show that the watch sees; on a CPU there is nothing to wait for.
"""

import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from gpu_parts.run import Run
from step import ModelShape, build_model, random_rows
from torch import Tensor

from radixtrain import RadixCollator, share_prefixes
from radixtrain.attention import STRATEGIES
from radixtrain.collators.steps import StepCollator
from radixtrain.hf.predicting_rows import forward_rows

__all__ = ["sync"]

Features = list[dict[str, Any]]


def sync(run: Run, shape: ModelShape, prompt_length: int) -> None:
    """Every strategy with the first kernel that `auto` takes, and both losses."""
    features = random_rows(shape.vocab_size, prompt_length, prompt_length // 8, 10, "nested")
    is_watched = _waits(run.device, lambda: torch.ones(1, device=run.device).item()) is not None
    if not is_watched:
        run.leave_out("sync, the watch", f"torch reports no wait on {run.device.type}, not even a read")
    for strategy in (name for name in STRATEGIES if name != "reference"):
        for loss, step in {"own loss": own_loss_step, "loss of fit": fit_step}.items():
            if not run.has_time(f"sync {strategy}, {loss}"):
                return
            model = share_prefixes(build_model(shape, run.device, torch.bfloat16), attention=strategy)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
            one_step = partial(step, model, optimizer, features)
            try:
                one_step()
                line = _waits(run.device, one_step)
            except Exception as error:  # the other strategies are still to be measured
                run.leave_out(f"sync {strategy}, {loss}", error)
                continue
            seen = {"waits": int(line is not None), "where": line or "nowhere"} if is_watched else {}
            finite = all(bool(p.isfinite().all()) for p in model.parameters())
            run.found("sync", f"{strategy}, {loss}", **seen, finite=finite)


def _waits(device: torch.device, call: Callable[[], object]) -> str | None:
    """file:line of the first wait for the device in our code, or None."""
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        ours = [frame for frame in traceback.extract_tb(error.__traceback__) if "/torch/" not in frame.filename]
        return f"{'/'.join(ours[-1].filename.split('/')[-2:])}:{ours[-1].lineno}"
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    return None


def own_loss_step(model: Any, optimizer: Any, features: Features) -> None:
    """The drop-in step: the batch, the model's own head and loss, clipping, AdamW."""
    model(**to_device(RadixCollator()(features), model.device)).loss.backward()
    _update(model, optimizer)


def fit_step(model: Any, optimizer: Any, features: Features) -> None:
    """The step of `fit`: micro-batches, merged predictions, the fused loss, clipping, AdamW."""
    step = StepCollator()(features)
    for batch in step.micro_batches:
        (forward_rows(model, to_device(batch, model.device), True).loss_sum() / step.num_labels).backward()
    _update(model, optimizer)


def to_device(batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Pinned and copied without waiting, as a DataLoader and a trainer do."""
    if device.type == "cpu":
        return batch
    pinned = {name: x.pin_memory() if isinstance(x, Tensor) else x for name, x in batch.items()}
    return {name: x.to(device, non_blocking=True) if isinstance(x, Tensor) else x for name, x in pinned.items()}


def _update(model: Any, optimizer: Any) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
