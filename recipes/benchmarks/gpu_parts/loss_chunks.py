"""Head and fused loss by the size of a chunk: `MIN_CHUNK_ELEMENTS` of `radixtrain/loss.py`."""

import torch
from gpu_parts.run import Run, median_seconds
from step import ModelShape

import radixtrain.loss as loss_module
from radixtrain.timing import peak_bytes

__all__ = ["loss_chunks"]


def loss_chunks(run: Run, shape: ModelShape, num_rows: int, powers: range) -> None:
    """Forward and backward of so many labelled rows, with each power of 2 as the elements of a chunk at least."""
    options = {"device": run.device, "dtype": torch.bfloat16, "requires_grad": True}
    states, weight = (torch.randn(n, shape.hidden_size, **options) for n in (num_rows, shape.vocab_size))
    rows, ones = torch.arange(num_rows, device=run.device), torch.ones(num_rows, device=run.device)
    labels = torch.randint(shape.vocab_size, (num_rows,), device=run.device)

    def step() -> None:
        states.grad = weight.grad = None
        loss_module.linear_cross_entropy(states, weight, labels, rows, ones).backward()

    key, before = "cpu" if run.device.type == "cpu" else "other", dict(loss_module.MIN_CHUNK_ELEMENTS)
    try:
        for power in powers:
            case = f"{shape}, {num_rows} rows, 2**{power}"
            if not run.has_time(f"chunks {case}"):
                return
            loss_module.MIN_CHUNK_ELEMENTS[key] = 2**power
            peak = peak_bytes(step, run.device) / 1e9
            milliseconds = 1e3 * median_seconds(step, run.device, rounds=3)
            run.found("chunks", case, milliseconds=milliseconds, peak_gigabytes=peak)
    finally:
        loss_module.MIN_CHUNK_ELEMENTS.update(before)
