"""Which calls of a backbone are shared: padded `[B, L]` ids, no cache, and nothing whose result would change.

Any other call runs as if nothing had been installed, and the report counts it under the reason found here.

transformers separates the sequences of a packed row at the jumps of `position_ids`, but only in models that pass these
to their mask. In all others every sequence attends to those before it in the row. Running the model shows which.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from itertools import islice
from numbers import Number
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedConfig, PreTrainedModel

from radixtrain.collators.misuse_guard import is_called_by
from radixtrain.hf.attention_interface import OPTIONS, take_over
from radixtrain.hf.backbone import CACHE, text_decoder_of
from radixtrain.hf.guards.code import why_recorded
from radixtrain.hf.guards.draws import evaluating
from radixtrain.hf.guards.rules import limit_of, scaled_from
from radixtrain.hf.padded.places import Places
from radixtrain.hf.pictures import OF_PICTURES, image_token_of
from radixtrain.hf.sharing_report import GENERATION, is_frozen
from radixtrain.tree.arrays import IntArray

BoolArray = npt.NDArray[np.bool_]
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


class PaddedRows(NamedTuple):
    """The rows of a padded batch on the host.

        input_ids  7 8 9 0    attention_mask  1 1 1 0    unique rows  7 8 5 9    places  0 1 3 4
                   0 7 8 5                    0 1 1 1                                    4 0 1 2

    A place is one entry of the `[B, L]` batch. The row of a place that the mask hides is U, one past the last.

        input_ids: (B, L), int64.
        kept: (B, L), bool. False for padding.
        position_ids: (B, L), int64, or None if they count the columns.
        is_packed: one row that has several sequences, each of which counts its positions from 0.
    """

    input_ids: IntArray
    kept: BoolArray
    position_ids: IntArray | None
    is_packed: bool

    @classmethod
    def of(cls, input_ids: IntArray, attention_mask: IntArray | None, position_ids: IntArray | None) -> PaddedRows:
        """Return the rows of a batch. All (B, L). attention_mask: None if nothing is hidden."""
        kept = np.ones(input_ids.shape, dtype=bool) if attention_mask is None else attention_mask.astype(bool)
        jumps = position_ids is not None and bool((np.diff(position_ids) != 1).any())
        return cls(input_ids, kept, position_ids, is_packed=attention_mask is None and jumps)

    @property
    def has_holes(self) -> bool:
        """Return whether some row has padding between its tokens."""
        return bool((np.diff(self.kept, axis=1, prepend=False, append=False).sum(axis=1) > 2).any())

    @property
    def is_left_padded(self) -> bool:
        return bool((~self.kept[:, :1] & self.kept.any(axis=1, keepdims=True)).any())

    @property
    def has_negative_positions(self) -> bool:
        positions = self.kept_positions
        return positions is not None and bool((positions < 0).any())

    @property
    def packing_is_plain(self) -> bool:
        """Return whether the sequences of a packed batch stand in one row, and each counts its positions from 0."""
        assert self.position_ids is not None
        return len(self.kept) == 1 and not self.position_ids[0][self.cu_seqlens[:-1]].any()

    @property
    def max_position(self) -> int:
        """Return the largest position that Hugging Face computes, of padding too."""
        return self.kept.shape[1] - 1 if self.position_ids is None else int(self.position_ids.max(initial=0))

    @property
    def kept_positions(self) -> IntArray | None:
        """Return the positions of the kept tokens, (T,), int64; None if they count from 0 in every sequence."""
        return None if self.position_ids is None or self.is_packed else self.position_ids[self.kept]

    @property
    def cu_seqlens(self) -> IntArray:
        """Return where each sequence starts among the kept tokens, and their number."""
        if self.is_packed:
            assert self.position_ids is not None
            starts = np.flatnonzero(np.diff(self.position_ids[0], prepend=-2) != 1)
            return np.append(starts, self.kept.size)
        return np.concatenate([[0], np.cumsum(self.kept.sum(axis=1))])

    def places(self, row_of_token: IntArray, num_rows: int) -> Places:
        """Return where rows stand. row_of_token: (T,), int64. num_rows: U."""
        rows = np.full(self.kept.shape, num_rows)
        rows[self.kept] = row_of_token
        return Places(rows, len(row_of_token))


def why_unshared(model: nn.Module, backbone: PreTrainedModel, given: Mapping[str, Any], generates: bool) -> str | None:
    """Say why a call cannot be shared, as far as this is known without reading the ids; None if it can.

    model: around the backbone.
    given: as `arguments_of` returns them.
    generates: whether the caller may want a cache that only the configuration requests.
    """
    decoder = text_decoder_of(backbone)
    if given.get("input_ids") is None:
        return "inputs_embeds are given, and tokens are compared by their ids"
    return (
        _why_cache(backbone, decoder, given, generates)
        or _why_shape(given["input_ids"])
        or _why_outputs(decoder.config, given)
        or _why_other_inputs(backbone, decoder, given)
        or _why_state(model, backbone, decoder)
    )


def why_rows_are_not_shared(backbone: PreTrainedModel, given: Mapping[str, Any], rows: PaddedRows) -> str | None:
    """Say why these rows cannot be shared; None if they can."""
    decoder = text_decoder_of(backbone)
    if not rows.kept.any():
        return "attention_mask hides every token"
    if torch.is_grad_enabled() and not backbone.training and not rows.kept.all() and is_frozen(backbone):
        return (
            "a frozen model in eval() with gradients on, where a loss may read padding; call it under torch.no_grad()"
        )
    if rows.has_holes:
        return "attention_mask has a hole"
    if rows.is_packed and not rows.packing_is_plain:
        return "position_ids jump within a row"
    if rows.is_packed and option("use_cache", decoder.config, given):
        return "a row has several sequences, which transformers separates only with use_cache=False"
    if rows.has_negative_positions:
        return "position_ids are negative"
    scaled = scaled_from(decoder.config)
    if scaled and scaled <= rows.kept.shape[1] and (rows.is_packed or rows.is_left_padded):
        return f"queries are scaled by their place in a row from {scaled} tokens on, padding counted"
    limit = limit_of(decoder, rows.kept.shape[1], rows.max_position)
    return limit and limit.reason


def _why_cache(
    backbone: PreTrainedModel, decoder: PreTrainedModel, given: Mapping[str, Any], generates: bool
) -> str | None:
    """Say why a call needs a cache, as generation does. Training and score heads do not, whatever the configuration."""
    if not torch.is_grad_enabled() and is_generating():
        return GENERATION
    if any(name in CACHE or isinstance(value, Cache) for name, value in given.items()):
        return "a cache is given"
    if given.get("use_cache"):
        return "a cache is wanted (use_cache=True)"
    is_training = backbone.training and torch.is_grad_enabled()
    is_tuple = not option("return_dict", decoder.config, given, default=True)  # with the cache as one of its entries
    is_wanted = is_tuple or (generates and not is_training)
    if is_wanted and option("use_cache", decoder.config, given):
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


def _why_other_inputs(backbone: PreTrainedModel, decoder: PreTrainedModel, given: Mapping[str, Any]) -> str | None:
    """Name a further argument that a layer may read. A tensor may have one entry for each token or each row."""
    for name in OPTIONS & given.keys():
        return f"{name} is given, which layers hand on to their attention"
    drops_rows = given.get(DROPS_ROWS) and DROPS_ROWS in inspect.signature(decoder.forward).parameters
    if drops_rows and not is_called_by("forward", "transformers"):  # which cuts once more
        return f"{DROPS_ROWS} is given, by which a {type(backbone).__name__} drops rows itself"
    upstream: set[str] = set()  # what only the backbone reads
    if backbone is not decoder:
        upstream = {*TYPES, *(OF_PICTURES if image_token_of(backbone) is not None else ())}
    for name, value in given.items():
        is_read = name not in UNREAD or name in inspect.signature(backbone.forward).parameters
        if not is_option(value) and is_read and name not in READ | FOR_THE_LOSS | upstream:
            return f"{name} is given"
    return None


def is_option(value: object) -> bool:
    """Return whether a value is an option. Any other, such as a cache, may hold something for each token or row."""
    if isinstance(value, list | tuple):
        return all(map(is_option, value))
    return value is None or isinstance(value, Number | str | np.generic | torch.dtype | torch.device)


def _why_state(model: nn.Module, backbone: PreTrainedModel, decoder: PreTrainedModel) -> str | None:
    if getattr(backbone, "_is_replica", False):  # torch sets it on the copies of DataParallel
        return "torch.nn.DataParallel runs copies of the model"
    if not backbone.training and _names_adapters(model):
        return "adapter_names choose an adapter for each row"
    return take_over(decoder) or why_recorded()


def _names_adapters(model: nn.Module) -> bool:
    """Return whether PEFT hands every layer the names of adapters for this call, by a hook on each of them."""
    layers = (module for module in model.modules() if type(module).__module__.startswith("peft."))
    hooks = (hook for layer in islice(layers, 1) for hook in layer._forward_pre_hooks.values())
    return any("adapter_names" in getattr(hook, "keywords", ()) for hook in hooks)


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
def separates_packed_sequences(backbone: PreTrainedModel) -> bool:
    """Return whether a sequence has the same hidden states after another sequence in its row.

    Runs the untouched model on two rows of 4 tokens, in evaluation mode and without gradients. Waits for the device. In
    16 bits the states have to be equal bit for bit, because a unit of rounding may hide the other sequence.
    """
    device = _device_of_ids(backbone)
    positions = torch.tensor([[0, 1, 0, 1]], device=device)
    with evaluating(backbone):
        rows = (torch.tensor([[*first, *SECOND]], device=device) for first in FIRST)
        one, other = (
            backbone.forward(input_ids=ids, position_ids=positions, use_cache=False)[0][0, 2:] for ids in rows
        )
    return _are_equal(one, other)


def _device_of_ids(backbone: Any) -> torch.device:
    """Return the device of the embeddings. The first parameter may be a vision tower's, elsewhere by a device_map."""
    device: torch.device = backbone.get_input_embeddings().weight.device
    return device


def _are_equal(one: Tensor, other: Tensor) -> bool:
    if one.dtype not in (torch.float32, torch.float64):
        return torch.equal(one, other)
    return bool((one - other).norm() <= MAX_ERROR * torch.finfo(one.dtype).eps * one.norm())
