"""FlexAttention on the tree mask: what PyTorch users would write without this library.

Query q sees key k iff `k <= q < subtree_ends[k]`. The block mask is made once for a batch, on the device, and used in
every layer; both are compiled on CUDA. One buffer holds the ends of all plans, so that a plan of as many rows is not
compiled anew. On a CPU neither is compiled, and there is no backward pass.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

__all__ = ["FlexTree"]


class FlexTree:
    """Attention of one plan after another, all of `num_rows` unique rows."""

    def __init__(self, num_rows: int, device: torch.device):
        self.ends = torch.zeros(num_rows, dtype=torch.int32, device=device)
        compiled = device.type == "cuda"
        self.attend_blocks: Any = torch.compile(flex_attention, dynamic=False) if compiled else flex_attention
        self.make_blocks: Any = torch.compile(create_block_mask, dynamic=False) if compiled else create_block_mask
        self.blocks: Any = None
        ends = self.ends

        def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= query) & (query < ends[key])

        self.sees = sees  # a function: FlexAttention takes no method

    def take(self, row_subtree_ends: Tensor) -> None:
        """Make the block mask of a plan. row_subtree_ends: (U,), integer, on the device."""
        self.ends.copy_(row_subtree_ends)
        num_rows = len(self.ends)
        self.blocks = self.make_blocks(self.sees, None, None, num_rows, num_rows, device=self.ends.device)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query: (U, N, H). key, value: (U, K, H). Returns (U, N, H)."""
        heads = (x.transpose(0, 1)[None] for x in (query, key, value))
        return self.attend_blocks(*heads, block_mask=self.blocks, enable_gqa=True)[0].transpose(0, 1)
