"""A training step waits for the device once: to look whether loss and gradient norm are finite.

CUDA itself says so here. Without a GPU `fake_cuda/` does: whole steps on a device that has no values, and which
function of ours waits for it.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from radixtrain import RadixCollator, share_prefixes
from tests.support.batches import FEATURES


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="a machine with a CUDA device runs this: make test-gpu")
@pytest.mark.parametrize("attention", ["cascade", "path", "expand"])
def test_cuda_itself_does_not_wait(tiny_qwen3: Callable[..., Any], attention: str) -> None:
    """CUDA raises if the host would wait. The first step compiles and fills caches, and may."""
    model = share_prefixes(tiny_qwen3().to("cuda", torch.bfloat16).train(), attention=attention)
    lightning_module = pytest.importorskip("radixtrain.training.module", reason="pip install lightning")
    module = lightning_module.RadixModule("unused")
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
