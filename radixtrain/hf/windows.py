"""What a layer sees, read from the mask that it would have had: its sliding window, and images in both directions.

No U x U mask is ever built. The backbone's hook (`radixtrain/hf/hooks.py`) gives mask creation

- an empty 4-D tensor, which every model returns unchanged, if no window may bind;
- a 2-D mask without columns, if one may. Our mask function answers each request of Hugging Face's with an empty mask.
  It reads from the model's mask what the last token of the longest sequence sees, so that every layer gets the window
  that it would have obeyed.

A mask that a backbone requests for its text decoder waits as a `MaskRequest` until the decoder runs
(`radixtrain/hf/padded/causes.py`): then it is known too which rows attend in both directions.

Both carry an `OnMask`, also for layers that get nothing else. An empty 4-D mask is as wide as the window, because that
is what a compiled graph can read: a size, which it does not compile anew for. There Hugging Face's own number is the
window, unless the model has changed the mask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from transformers import PreTrainedConfig

from radixtrain.errors import TRAIN_WITHOUT_SHARING, UserError
from radixtrain.hf.backbone import OF_OLDER_MASKS, name_of
from radixtrain.hf.progress import Upstream, running
from radixtrain.versions import saying_what_was_tested

ON_MASK = "_radix_on_mask"
FULL = 2**30  # the width of a mask without a window: more than any sequence
# What transformers gives a mask function by keyword.
READ = {
    *("attention_mask", "mask_function", "config", "local_size", "use_vmap", "dtype", "device"),
    *("batch_size", "q_length", "kv_length", "q_offset", "kv_offset"),
    *("allow_is_causal_skip", "allow_is_bidirectional_skip", *OF_OLDER_MASKS),
}


class OnMask(NamedTuple):
    """What an empty mask stands for.

    call: of the batch. window: tokens that a row sees, itself included; 0 for its whole past, None if no layer has
    requested a mask yet. both_ways: whether rows see the later ones of their block, too.
    """

    call: Any
    window: int | None
    both_ways: bool = False


def window_may_bind(config: PreTrainedConfig, longest: int) -> bool:
    """Return whether some layer may have a window shorter than the batch's longest sequence, in tokens."""
    window = getattr(config, "sliding_window", None)
    if not window or only_full_attention(config):
        return False
    return not isinstance(window, int) or window < longest


def only_full_attention(config: PreTrainedConfig) -> bool:
    """Return whether a configuration says of every layer that its attention is full."""
    layer_types = getattr(config, "layer_types", None) or ()
    return bool(layer_types) and all(layer_type == "full_attention" for layer_type in layer_types)


def chunk_of(config: PreTrainedConfig | None) -> int | None:
    """Return the tokens of the chunks within which some layer attends; None if no layer does."""
    chunk = getattr(config, "attention_chunk_size", None)
    return chunk if config and chunk and not only_full_attention(config) else None


def no_mask(may_bind: bool, device: torch.device, call: object = None) -> Tensor:
    """Make the empty `attention_mask` of a backbone. With two dimensions it makes every layer request its window."""
    return _empty((1, 0) if may_bind else (1, 1, 0, FULL), device, OnMask(call, None if may_bind else 0))


def is_empty(mask: object) -> TypeGuard[Tensor]:
    """Return whether this is a mask that a layer gets from `no_mask` or `mask_function`."""
    return isinstance(mask, Tensor) and mask.ndim == 4 and mask.shape[2] == 0


def on_mask(mask: object) -> OnMask | None:
    """Return what `no_mask` or `mask_function` wrote on a mask; None for any other.

    It stands on the storage, too, which views of a mask have in common: Gemma 4 cuts its masks to the last rows.
    """
    written: OnMask | None = getattr(mask, ON_MASK, None)
    if written is None and isinstance(mask, Tensor) and not mask.numel():
        written = getattr(mask.untyped_storage(), ON_MASK, None)
    return written


@torch.compiler.disable  # an attribute of a storage cannot be traced
def _empty(shape: tuple[int, ...], device: torch.device, written: OnMask) -> Tensor:
    mask = torch.empty(shape, dtype=torch.bool, device=device)
    setattr(mask, ON_MASK, written)
    setattr(mask.untyped_storage(), ON_MASK, written)
    return mask


@dataclass(frozen=True, eq=False)
class MaskRequest:
    """A mask that a backbone requests for its text decoder, before the unique tokens of the call are known.

    ordinary: the mask function. attention_mask: (B, L), or None. options: its other keywords.
    """

    ordinary: Callable[..., Any]
    attention_mask: Tensor | None
    options: Mapping[str, Any]

    def sees(self, batch: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        """Return whether queries see keys, by their places in the batch. `attention_mask` is not read."""
        seen: Tensor = self.options["mask_function"](batch, batch.new_zeros(()), queries, keys)
        return seen.expand(torch.broadcast_shapes(batch.shape, queries.shape, keys.shape))

    def window(self, longest: int) -> int:
        """Count the tokens that one of the longest sequence sees, itself included; 0 for all before it."""
        if chunk_of(self.options.get("config")) is not None:  # no shorter than the longest sequence
            return 0
        name = f"the model of {type(self.options.get('config')).__name__}"
        return _window(name, self.options["mask_function"], longest, longest, self.options)

    def made(self) -> Any:
        """Return the ordinary mask, for a call that is not shared."""
        return self.ordinary(attention_mask=self.attention_mask, **self.options)


def request_of(mask: object) -> MaskRequest | None:
    """Return the request for which a mask waits; None for any other."""
    written = on_mask(mask)
    return written.call if written is not None and isinstance(written.call, MaskRequest) else None


def answered(call: Any, window: int, both_ways: bool, device: torch.device) -> Tensor:
    """Make the empty mask of layers that see this much, as `OnMask` says it."""
    return _empty((1, 1, 0, window or FULL), device, OnMask(call, window, both_ways))


def _waits(given: Mapping[str, Any]) -> Upstream | None:
    """Return the call whose decoder gets a mask, if the mask waits for it. given: the keywords of a mask function."""
    call = None if torch.compiler.is_compiling() else running.upstream()
    is_its = call is not None and given.get("config") is call.decoder.config
    return call if is_its and "mask_function" in given and given.keys() <= READ else None


def mask_function(ordinary: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a mask function, which Hugging Face calls by keyword only: `ordinary`, except for a radix batch."""

    def mask(*, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        if attention_mask is not None and _is_stock_in_graph(attention_mask, kwargs):
            window = None if chunk_of(kwargs.get("config")) else kwargs.get("local_size")
            return attention_mask.new_empty((1, 1, 0, window or FULL))
        written = on_mask(attention_mask)
        if attention_mask is None or written is None:
            call = _waits(kwargs)
            if call is None:
                return ordinary(attention_mask=attention_mask, **kwargs)
            request = MaskRequest(ordinary, attention_mask, kwargs)
            return _empty((1, 1, 0, FULL), call.given["input_ids"].device, OnMask(request, None))
        found = _requested(written.call, kwargs)
        return _empty((1, 1, 0, found.window or FULL), attention_mask.device, found)

    return mask


def _is_stock_in_graph(mask: Tensor, given: Mapping[str, Any]) -> bool:
    """Return whether a compiled graph requests a mask of transformers for a radix batch, as its model left it."""
    return torch.compiler.is_compiling() and mask.shape == (1, 0) and not given.get("use_vmap") and given.keys() <= READ


@torch.compiler.disable  # host integers
@saying_what_was_tested()
def _requested(call: Any, given: Mapping[str, Any]) -> OnMask:
    """Return what a layer sees by the mask that its model requests. given: the keywords of a mask function.

    Raises UserError for unknown keywords, since they may change the mask.
    """
    model = f"the model of {type(given.get('config')).__name__}"
    if "mask_function" not in given or given.keys() - READ:
        unknown = ", ".join(sorted(given.keys() - READ)) or "no mask_function"
        raise UserError(
            f"{model} requests its mask with {unknown}, which this version of radixtrain cannot read: use another "
            f"version of transformers, or {TRAIN_WITHOUT_SHARING}"
        )
    sees, longest = given["mask_function"], call.layout.max_seqlen
    if given.get("use_vmap"):  # Hugging Face's sign that the model has changed the causal mask
        raise UserError(
            f"{model} adds a mask of its own to a sliding window, which tree attention does not compute; set "
            f"max_length to {given.get('local_size')} or less"
        )
    if chunk_of(given.get("config")) is not None:  # no shorter than the longest sequence, or it was refused
        return OnMask(call, 0)
    return OnMask(call, _window(model, sees, longest, min(longest, given.get("q_length", longest)), given))


def _window(model: str, sees: Callable[..., Tensor], longest: int, num_rows: int, given: Mapping[str, Any]) -> int:
    """Count the tokens that a row sees: the last of num_rows, to which some masks are limited (Gemma 4 unified).

    If that few rows cannot show it, transformers' own value is taken: then they also attend to stored rows. The mask is
    a function of indices, so it is evaluated on the CPU.
    """
    with _disable_current_modes():  # the indices are ours: no mode may count or fake these operations
        zero, rows = torch.zeros((), dtype=torch.int64, device="cpu"), torch.arange(num_rows, device="cpu")
        seen = sees(zero, zero, rows[-1:], rows).expand(num_rows)
        window = int(seen.sum())
        is_last = torch.equal(seen, rows >= num_rows - window)
        sees_later = num_rows > 1 and bool(sees(zero, zero, rows[:1], rows[-1:]))
    if sees_later or not is_last:
        raise UserError(f"{model} has a mask of other tokens than the last ones before each; {TRAIN_WITHOUT_SHARING}")
    return window if window < num_rows or num_rows == longest else given.get("local_size") or 0


def window_of(
    layer: nn.Module,
    attention_mask: object,
    written: OnMask | None,
    argument: int | None,
    longest: int,
    may_bind: bool,
    obeys_argument: bool,
) -> int | None:
    """Return the sliding window of a layer if it binds, else None.

    written: what is on its mask. argument: its `sliding_window`. longest: the batch's longest sequence, in tokens.
    obeys_argument: whether its own attention obeys only the argument, as flash attention does; any other obeys only its
    mask.
    """
    if isinstance(attention_mask, Tensor) and attention_mask.numel():
        raise UserError(
            f"{name_of(layer)} gets a mask {tuple(attention_mask.shape)} that its model made, which tree attention "
            f"would leave out; {TRAIN_WITHOUT_SHARING}"
        )
    window = argument if obeys_argument else None if written is None else written.window
    if window is None and may_bind and not obeys_argument:
        raise UserError(
            f"{name_of(layer)} gets a mask that transformers.masking_utils has not made, and its model has a sliding "
            f"window shorter than this batch's longest sequence ({longest}); set max_length to the window or less"
        )
    return window if window and window < longest else None
