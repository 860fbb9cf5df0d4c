"""Whether a model separates the sequences of a packed row, found by running it.

transformers separates them at the jumps of `position_ids`, but only in models that pass these to their mask. In all
others every sequence attends to those before it in the row, so equal prefixes have different hidden states.
"""

from __future__ import annotations

from typing import Any

import torch

from radixtrain.hf.dropout import evaluating

__all__ = ["separates_packed_sequences"]

FIRST = ([1, 2], [3, 4])
SECOND = [5, 6]
MAX_ERROR = 16  # units of rounding: a mixture of experts groups its tokens in another order


@torch.no_grad()
def separates_packed_sequences(backbone: Any) -> bool:
    """Whether a sequence has the same hidden states after another sequence in its row.

    Runs the untouched model on two rows of 4 tokens, in evaluation mode and without gradients. Waits for the device. In
    16 bits the states have to be equal bit for bit, because a unit of rounding may hide the other sequence.
    """
    device = backbone.get_input_embeddings().weight.device
    positions = torch.tensor([[0, 1, 0, 1]], device=device)
    with evaluating(backbone):
        rows = (torch.tensor([[*first, *SECOND]], device=device) for first in FIRST)
        one, other = (
            backbone.forward(input_ids=ids, position_ids=positions, use_cache=False)[0][0, 2:] for ids in rows
        )
    if one.dtype not in (torch.float32, torch.float64):
        return torch.equal(one, other)
    return bool((one - other).norm() <= MAX_ERROR * torch.finfo(one.dtype).eps * one.norm())
