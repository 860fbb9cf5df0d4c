"""Which packed tokens stand for each unique row: what the Triton sum over repeated rows reads.

T packed tokens, U unique rows.

    indices  2 0 2 1 2 0        token t is row indices[t]
    order    1 5 3 0 2 4        the tokens of row 0, of row 1, ...; of one row in the order of the batch
    starts   0 2 3 6            the place in `order` of each row's first token
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["RowOrder", "row_order"]


@dataclass(frozen=True, eq=False)
class RowOrder:
    """indices: (T,), int64 or int32, in [0, U), as the plan has them; order: (T,), int32; starts: (U+1,), int32."""

    indices: Tensor
    order: Tensor
    starts: Tensor

    @property
    def num_rows(self) -> int:
        return self.starts.shape[0] - 1

    def to(self, device: torch.device | str, non_blocking: bool = False) -> RowOrder:
        moved = (x.to(device, non_blocking=non_blocking) for x in (self.indices, self.order, self.starts))
        return RowOrder(*moved)


def row_order(indices: Tensor, num_rows: int) -> RowOrder:
    """The order of `indices`, on their device.

    indices: (T,), int64 or int32, in [0, num_rows). ValueError for others, if they are on the host.
    """
    if indices.device.type == "cpu" and len(indices):
        low, high = (int(bound) for bound in indices.aminmax())
        if low < 0 or high >= num_rows:
            raise ValueError(f"row_order: indices must lie in [0, {num_rows}), got {low} to {high}")
    ordered, order = indices.sort(stable=True)
    rows = torch.arange(num_rows + 1, dtype=indices.dtype, device=indices.device)
    return RowOrder(indices, order.to(torch.int32), torch.searchsorted(ordered, rows, out_int32=True))
