"""Which calls of a backbone are shared: padded `[B, L]` ids, no cache, and nothing whose result would change.

Any other call runs as if nothing had been installed, and the report counts it under the reason found here.

transformers separates the sequences of a packed row at the jumps of `position_ids`, but only in models that pass these
to their mask. In all others every sequence attends to those before it in the row. Running the model shows which.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Cache, PreTrainedConfig, PreTrainedModel

from radixtrain.collators.misuse_guard import is_called_by
from radixtrain.hf.attention_interface import OPTIONS
from radixtrain.hf.backbone import CACHE
from radixtrain.hf.guards.draws import evaluating
from radixtrain.hf.guards.rules import limit_of, scaled_from
from radixtrain.hf.padded.places import PaddedIds
from radixtrain.hf.pictures import OF_PICTURES, image_token_of
from radixtrain.hf.progress import Upstream
from radixtrain.hf.sharing_report import GENERATION, is_frozen

READ = {"input_ids", "attention_mask", "position_ids"}
# Other tensors that a call may have. They are for the loss: no layer reads them.
FOR_THE_LOSS = {"labels", "shift_labels", "num_items_in_batch"}
TYPES = ("mm_token_type_ids", "token_type_ids")  # 1 at placeholders of images
DROPS_ROWS = "logits_to_keep"  # of most classes only before the head
# No layer reads these either, unless the backbone's forward method names them.
UNREAD = {
    *("token_type_ids", "mm_token_type_ids", "cache_position"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"),
}

# The gradient would show a loss that reads padding; to ask for one where the untouched model has none would change it.
LEARNS_NOTHING = (
    "nothing that hidden states depend on is trained, so that a loss might read padding; call it under torch.no_grad()"
)


def why_unshared(call: Upstream, generates: bool) -> str | None:
    """Say why a call cannot be shared, as far as this is known without reading the ids; None if it can.

    generates: whether the caller may want a cache that only the configuration requests.
    """
    if call.given.get("input_ids") is None:
        return "inputs_embeds are given, and tokens are compared by their ids"
    return (
        _why_cache(call, generates)
        or _why_shape(call.given["input_ids"])
        or _why_outputs(call.decoder.config, call.given)
        or _why_other_inputs(call)
        or _why_replica(call)
    )


def why_batch_is_not_shared(call: Upstream, batch: PaddedIds) -> str | None:
    """Say why the ids of a call cannot be shared, as they stand in its batch; None if they can."""
    decoder = call.decoder
    if not batch.attended.any():
        return "attention_mask hides every token"
    if torch.is_grad_enabled() and not batch.attended.all() and is_frozen(call.backbone):
        return LEARNS_NOTHING
    if batch.has_holes:
        return "attention_mask has a hole"
    if batch.is_packed and not batch.packing_is_plain:
        return "position_ids jump within a row"
    if batch.is_packed and option("use_cache", decoder.config, call.given):
        return "a row has several sequences, which transformers separates only with use_cache=False"
    if batch.has_negative_positions:
        return "position_ids are negative"
    scaled = scaled_from(decoder.config)
    if scaled and scaled <= batch.attended.shape[1] and (batch.is_packed or batch.is_left_padded):
        return f"queries are scaled by their place in a row from {scaled} tokens on, padding counted"
    limit = limit_of(decoder, batch.attended.shape[1], batch.max_position)
    return limit and limit.reason


def _why_cache(call: Upstream, generates: bool) -> str | None:
    """Say why a call needs a cache, as generation does. Training and score heads do not, whatever the configuration."""
    given, config = call.given, call.decoder.config
    if not torch.is_grad_enabled() and is_generating():
        return GENERATION
    if any(name in CACHE or isinstance(value, Cache) for name, value in given.items()):
        return "a cache is given"
    if given.get("use_cache"):
        return "a cache is wanted (use_cache=True)"
    is_training = call.backbone.training and torch.is_grad_enabled()
    is_tuple = not option("return_dict", config, given, default=True)  # with the cache as one of its entries
    is_wanted = is_tuple or (generates and not is_training)
    if is_wanted and option("use_cache", config, given):
        return "a cache is wanted; call model.train(), pass use_cache=False, or set model.config.use_cache = False"
    return None


def option(name: str, config: PreTrainedConfig, given: Mapping[str, Any], default: bool = False) -> bool:
    """Return an option of a call, or else of the configuration."""
    return bool(given.get(name, getattr(config, name, default)))


def _why_shape(ids: Tensor) -> str | None:
    if ids.is_floating_point():
        return "input_ids are not whole numbers"
    if ids.ndim != 2:
        return f"input_ids have {ids.ndim} dimensions, not 2"
    return None if ids.numel() else "the batch is empty"


def _why_outputs(config: PreTrainedConfig, given: Mapping[str, Any]) -> str | None:
    """Name outputs that cannot be shared: attention weights, and those in a tuple, where their order is not known."""
    if option("output_attentions", config, given):
        return "output_attentions"
    wanted = any(option(name, config, given) for name in ("output_hidden_states", "output_router_logits"))
    if wanted and not option("return_dict", config, given, default=True):
        return "hidden states or router logits in a tuple; pass return_dict=True"
    return None


def _why_other_inputs(call: Upstream) -> str | None:
    """Say why a further argument changes what a layer computes; None if none does."""
    backbone, decoder, given = call.backbone, call.decoder, call.given
    for name in OPTIONS & given.keys():
        return f"{name} is given, which layers hand on to their attention"
    drops_rows = given.get(DROPS_ROWS) and DROPS_ROWS in inspect.signature(decoder.forward).parameters
    if drops_rows and not is_called_by("forward", "transformers"):  # which cuts once more
        return f"{DROPS_ROWS} is given, by which a {type(backbone).__name__} drops rows itself"
    upstream: set[str] = set()  # what only the backbone reads
    if backbone is not decoder:
        upstream = {*TYPES, *(OF_PICTURES if image_token_of(backbone) is not None else ())}
    return why_unknown(backbone, given, READ | FOR_THE_LOSS | upstream)


def why_unknown(module: PreTrainedModel, given: Mapping[str, Any], known: Collection[str]) -> str | None:
    """Name an argument that a layer may read and that may hold something for each token or row; None without any."""
    for name, value in given.items():
        is_read = name not in UNREAD or name in inspect.signature(module.forward).parameters
        if is_read and name not in known and not _is_option(value):
            return f"{name} is given"
    return None


def _is_option(value: object) -> bool:
    """Return whether a value is an option. Any other, such as a cache, may hold something for each token or row."""
    if isinstance(value, list | tuple):
        return all(map(_is_option, value))
    return value is None or isinstance(value, Number | str | np.generic | torch.dtype | torch.device)


def _why_replica(call: Upstream) -> str | None:
    is_replica = getattr(call.backbone, "_is_replica", False)  # torch sets it on the copies of DataParallel
    return "torch.nn.DataParallel runs copies of the model" if is_replica else None


def is_generating() -> bool:
    """Return whether `generate` of transformers is on the stack. Without a cache its calls look like any other."""
    return is_called_by("generate", "transformers")


def is_compiled() -> bool:
    """Return whether `torch.compile` runs the call: it traces only ordinary tensors. Its hooks on us stay eager."""
    return is_called_by("compile_wrapper")


FIRST = ([1, 2], [3, 4])
SECOND = [5, 6]
MAX_ERROR = 16  # units of rounding: a mixture of experts groups its tokens in another order


@torch.no_grad()
def separates_packed_sequences(backbone: PreTrainedModel, device: torch.device) -> bool:
    """Return whether a sequence has the same hidden states after another sequence in its row.

    Runs the untouched model on two rows of 4 tokens, in evaluation mode and without gradients. Waits for the device. In
    16 bits the states have to be equal bit for bit, because a unit of rounding may hide the other sequence.

    device: of ids.
    """
    positions = torch.tensor([[0, 1, 0, 1]], device=device)
    with evaluating(backbone):
        rows = (torch.tensor([[*first, *SECOND]], device=device) for first in FIRST)
        one, other = (
            backbone.forward(input_ids=ids, position_ids=positions, use_cache=False)[0][0, 2:] for ids in rows
        )
    if one.dtype not in (torch.float32, torch.float64):
        return torch.equal(one, other)
    return bool((one - other).norm() <= MAX_ERROR * torch.finfo(one.dtype).eps * one.norm())
