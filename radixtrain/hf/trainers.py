"""What other trainers do to a batch on its way to the model, and what of it destroys a radix batch.

Every tensor of an ordinary batch has one row per example, so trainers cut and join batches along the first axis. A
radix batch has no such axis: its `radix_` tensors have the lengths of the tree.

| trainer | what reaches the model |
|---|---|
| `Trainer` with an `IterableDataset`, `dispatch_batches=True` | every tensor cut to its first element |
| the same in several processes | nothing: Accelerate cannot join or send the batches |
| `split_batches=True`, a data set with a length | the whole batch: the rows are split before the collator |
| several GPUs in one process (`nn.DataParallel`) | one share of every tensor, on the first GPU |

All but the third are refused, dispatching already by the collator (`radixtrain/collators/misuse_guard.py`).
"""

from __future__ import annotations

from torch import nn

from radixtrain.collators.misuse_guard import NO_DISPATCHING
from radixtrain.errors import UserError
from radixtrain.tree.layout import TreeLayout

__all__ = ["check_not_cut"]


def check_not_cut(backbone: nn.Module, layout: TreeLayout) -> None:
    """Refuse a radix batch that a trainer cut or spread over devices. Reads only shapes.

    backbone: the module that received the batch. layout: as `TreeLayout.from_batch` read it.

    Raises UserError naming the setting that did it.
    """
    if getattr(backbone, "_is_replica", False):  # torch sets it on the copies of DataParallel
        raise UserError(
            "torch.nn.DataParallel cannot spread a radix batch over several GPUs; Trainer uses it if one process sees "
            "several: start one process per GPU (torchrun), or show the process one: CUDA_VISIBLE_DEVICES=0"
        )
    num_segments = layout.subtree_ends.shape[0]
    if num_segments == 0 or layout.segment_starts.shape[0] != num_segments + 1:
        raise UserError(f"this radix batch was cut. {NO_DISPATCHING}")
