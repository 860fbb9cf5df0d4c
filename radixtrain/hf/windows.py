"""What a layer sees, read from the mask that it would have had: its sliding window, and images in both directions.

No U x U mask is ever built. The backbone's hook (`radixtrain/hf/hooks.py`) gives mask creation

- an empty 4-D tensor, which every model returns as it is, if no window may bind;
- a 2-D mask without columns, if one may. Our mask function answers each request of Hugging Face's with an empty mask as
  wide as the window (`window_on_mask`), so that every layer gets the window that it would have obeyed. If the batch has
  blocks of rows that may attend in both directions, it asks the mask of the model whether they do (`sees_both_ways`).

Both carry the call of the batch as an attribute (`call_on_mask`), for layers that get nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from radixtrain.errors import TRAIN_WITHOUT_SHARING, UserError
from radixtrain.tree.blocks import BlockLayout

CALL = "_radix_call"


def window_may_bind(config: Any, longest: int) -> bool:
    """Whether some layer may have a window shorter than the batch's longest sequence, in tokens."""
    window = getattr(config, "sliding_window", None)
    if not window or only_full_attention(config):
        return False
    return not isinstance(window, int) or window < longest


def only_full_attention(config: Any) -> bool:
    """Whether a configuration says of every layer that its attention is full."""
    layer_types = getattr(config, "layer_types", None) or ()
    return bool(layer_types) and all(layer_type == "full_attention" for layer_type in layer_types)


def chunk_of(config: Any) -> int | None:
    """Tokens of the chunks within which some layer attends; None if no layer does."""
    chunk = getattr(config, "attention_chunk_size", None)
    return chunk if chunk and not only_full_attention(config) else None


def no_mask(may_bind: bool, device: torch.device, call: Any = None) -> Tensor:
    """What a backbone gets as `attention_mask`: empty; its shape asks for every layer's window or for none."""
    return _with_call(torch.empty((1, 0) if may_bind else (1, 1, 0, 0), dtype=torch.bool, device=device), call)


def call_on_mask(mask: Tensor | None) -> Any:
    """The call that `no_mask` put on its mask, from this mask or one that `mask_function` made from it; else None."""
    return getattr(mask, CALL, None)


def _with_call(mask: Tensor, call: Any) -> Tensor:
    setattr(mask, CALL, call)
    return mask


def mask_function(ordinary: Callable[..., Any]) -> Callable[..., Any]:
    """A mask function as Hugging Face calls it, by keyword only: `ordinary`, except for a radix batch."""

    def mask(*, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        if attention_mask is None or attention_mask.shape[-1] != 0:
            return ordinary(attention_mask=attention_mask, **kwargs)
        call = call_on_mask(attention_mask)
        blocks = None if call is None else call.layout.blocks
        if blocks is not None:
            both_ways, width = _seen(kwargs["mask_function"], blocks, call.layout.max_seqlen)
            empty = torch.empty(1, 2 if both_ways else 1, 0, width, dtype=torch.bool, device=attention_mask.device)
            return _with_call(empty, call)
        if kwargs.get("use_vmap"):  # Hugging Face's sign that the model has changed the causal mask
            raise UserError(
                f"the model of {type(kwargs.get('config')).__name__} adds a mask of its own to a sliding window, which "
                f"tree attention does not compute; set max_length to {kwargs.get('local_size')} or less"
            )
        width = kwargs.get("local_size") or 0
        empty = torch.empty(1, 1, 0, width, dtype=torch.bool, device=attention_mask.device)
        return _with_call(empty, call)

    return mask


def _seen(sees: Callable[..., Tensor], blocks: BlockLayout, longest: int) -> tuple[bool, int]:
    """Whether rows see the next one of their block, and how many tokens one outside sees. Waits for the device.

    sees: the mask of the model, `sees(batch, head, query, key)`. longest: sequence, in tokens. As in `types` of blocks.

    Raises UserError if rows see the next one and are not of an image, or if a window does not hold within images.
    """
    of_row = blocks.block_of_row
    num_rows, zero = len(of_row), of_row.new_zeros(())
    tokens = torch.arange(max(num_rows + 1, longest), device=of_row.device)
    next_seen = sees(zero, zero, tokens[: num_rows - 1], tokens[1:num_rows]).expand(num_rows - 1)
    width = int(sees(zero, zero, tokens[-1:], tokens).expand(len(tokens)).sum())
    if not next_seen.any():
        return False, width
    is_block = (of_row[1:] >= 0) & (of_row[:-1] >= 0)  # two images of two sequences may be neighbours
    is_same = is_block & (of_row[1:] == of_row[:-1])
    if (next_seen & ~is_block).any() or not next_seen[is_same].all():
        raise UserError(f"the model attends in both directions elsewhere than within images; {TRAIN_WITHOUT_SHARING}")
    first, last = blocks.bounds
    if not torch.equal(sees(zero, zero, last, first), last - first < width):
        raise UserError(
            f"an image is longer than a window, beyond which its tokens see each other; {TRAIN_WITHOUT_SHARING}"
        )
    return True, width


def window_on_mask(attention_mask: Tensor | None) -> int | None:
    """The window that `mask_function` wrote down as the width of a mask without rows; 0 is the whole past."""
    if attention_mask is None or attention_mask.ndim != 4 or attention_mask.shape[-2] != 0:
        return None
    return attention_mask.shape[-1]


def sees_both_ways(attention_mask: Tensor | None) -> bool:
    """Whether `mask_function` wrote down that rows see the later ones of their block: a mask of two heads, no rows."""
    return attention_mask is not None and attention_mask.shape[1:3] == (2, 0)


def window_of(
    layer: str, attention_mask: Tensor | None, argument: int | None, longest: int, may_bind: bool
) -> int | None:
    """The sliding window of a layer if it binds, else None.

    layer: its name in errors. argument: its `sliding_window`. longest: the batch's longest sequence, in tokens.

    `sdpa` and eager attention obey only the mask, flash attention only the argument `sliding_window`. Layers that leave
    the argument out obey their mask; a mask and an argument that contradict each other are refused.
    """
    if attention_mask is not None and attention_mask.numel():
        raise UserError(
            f"{layer} gets a mask {tuple(attention_mask.shape)} that its model made, which tree attention would leave "
            f"out; {TRAIN_WITHOUT_SHARING}"
        )
    masked = window_on_mask(attention_mask)
    if masked is None and may_bind:
        raise UserError(
            f"{layer} gets a mask that transformers.masking_utils has not made, and its model has a sliding window "
            f"shorter than this batch's longest sequence ({longest}); set max_length to the window or less"
        )
    masked, argument = (window if window and window < longest else None for window in (masked, argument))
    if argument is not None and argument != masked:
        raise UserError(
            f"{layer} attends to the last {argument} tokens by its sliding_window and to "
            f"{f'the last {masked}' if masked else 'all'} by its mask, and this batch has a sequence of {longest}; "
            f"set max_length to {argument} or less, and the window changes nothing"
        )
    return masked
