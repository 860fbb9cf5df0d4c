"""Which tokens of a call are one at its text decoder: by the causes of what it gets for them, proved by its bits.

    input_ids  7 <img> <img> 8    pictures  A    causes  7 A0 A1 8
               7 <img> <img> 9              A            7 A0 A1 9

The causes of a token are its id, for a placeholder the bytes of the picture and which of its features stands there, the
position on every axis, and the whole of a block that attends in both directions. Equal values are not enough: two ids
may have equal embeddings, two pictures equal features after a projector that starts at zero, and their gradients are
two. Equal causes are not enough either if something stands between the ids and the decoder, such as a tower, an
adapter, a hook or noise: then all that the decoder gets for equal tokens has to be equal bit for bit.

The gradient of equal tokens arrives at the first of them, as one sum. So no one may read it at `inputs_embeds`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import Cache

from radixtrain.errors import UserError
from radixtrain.hf.guards.code import is_hooked
from radixtrain.hf.padded.calls import DROPS_ROWS, FOR_THE_LOSS, READ, TYPES, why_unknown
from radixtrain.hf.padded.places import BoolArray, PaddedIds
from radixtrain.hf.pictures import OF_PICTURES, bits_of, gradient_is_read, image_token_of
from radixtrain.hf.progress import Upstream
from radixtrain.hf.windows import MaskRequest, answered, request_of
from radixtrain.tree.arrays import IntArray, lengths_of
from radixtrain.tree.layout import on_device
from radixtrain.tree.plan import PrefixPlan

AT_PLACEHOLDERS, PLACEHOLDERS = "deepstack_visual_embeds", "visual_pos_masks"  # tensors (P, D), and where they stand
PER_TOKEN = {*TYPES, PLACEHOLDERS, "per_layer_inputs"}
OF_A_DECODER = {*READ, *FOR_THE_LOSS, PLACEHOLDERS, "per_layer_inputs", "inputs_embeds", AT_PLACEHOLDERS}
BESIDES = {"cache_position", DROPS_ROWS}  # what a call on unique tokens goes without
OTHER_MASK = "a mask of other tokens than the last ones before each, and those of its image"
TOLD_APART = "what stands before the decoder, such as noise, a hook or an adapter, tells equal tokens apart"
UNSEEN_TOWER = "images whose features did not come from the get_image_features that share_prefixes has put there"
READS_GRADIENT = (
    "a gradient is read at inputs_embeds or before, where that of equal tokens is one sum at the first of them"
)


class NotShared(Exception):
    """A call that cannot be shared. The message says why, for `sharing_report`."""


@dataclass(eq=False)
class Causes:
    """The causes of the T tokens of a call, without padding, and all that its decoder gets for them.

    call: of the backbone. given: the arguments of the decoder, by name.
    per_token: those with an entry for each token, (B, L, ...). requests: masks that wait, by the layers they are for.
    planes: numbers for each place of the batch, (B, L), int64, by what they are. batch: of the ids.
    axes: positions, (A, T), int64; None if they have one axis.
    """

    call: Upstream
    given: dict[str, Any]
    per_token: dict[str, Tensor]
    requests: dict[str, MaskRequest]
    planes: dict[str, IntArray]
    batch: PaddedIds
    axes: IntArray | None

    @classmethod
    def read(cls, call: Upstream, given: Mapping[str, Any]) -> Causes:
        """Read the causes of a call in one copy from the device. Raises NotShared if not all are known."""
        given = {name: value for name, value in given.items() if name not in BESIDES and not _is_empty_cache(value)}
        if (reason := why_unknown(call.decoder, given, OF_A_DECODER)) is not None:
            raise NotShared(reason)
        if call.pictures is None and any(name in call.given for name in OF_PICTURES):
            raise NotShared(UNSEEN_TOWER)
        if torch.is_grad_enabled() and call.backbone is not call.decoder and gradient_is_read(call.backbone):
            raise NotShared(READS_GRADIENT)
        ids = call.given["input_ids"]
        requests = _requests(given.get("attention_mask"))
        mask = given.get("attention_mask") if not requests else _one_mask(requests)
        if mask is not None and not (isinstance(mask, Tensor) and mask.shape == ids.shape):
            raise NotShared("attention_mask is not [B, L]")
        names = "input_ids", "inputs_embeds", *PER_TOKEN
        per_token = {name: given[name] for name in names if isinstance(given.get(name), Tensor)}
        for name, value in per_token.items():
            if value.shape[:2] != ids.shape:
                raise NotShared(f"the decoder gets {name} of shape {tuple(value.shape)}")
        planes = {"ids": ids, **_mask_plane(mask), **_positions(call, given), **_whole_numbers(call, per_token)}
        for layers, request in requests.items():
            planes[f"next {layers}"] = _sees_next(request, ids)
        arrays = _on_host(planes)
        axes = [arrays[name] for name in arrays if name.startswith("axis")]
        positions = arrays.get("positions")
        if positions is not None and "position_ids" not in call.given and (positions == np.arange(ids.shape[1])).all():
            positions = None  # of the columns, by the backbone: as the decoder counts them without any
        if mask is None and len(axes) == 4 and (np.diff(axes[0]) != 1).any():
            raise NotShared("position_ids jump within a row")
        batch = PaddedIds.of(arrays["ids"], arrays.get("mask"), positions)
        return cls(call, given, per_token, requests, arrays, batch, np.stack(axes)[:, batch.attended] if axes else None)

    @property
    def device(self) -> torch.device:
        """Return the device on which the decoder computes."""
        of_decoder: Tensor = self.per_token.get("inputs_embeds", self.call.given["input_ids"])
        return of_decoder.device

    @property
    def is_looked_up(self) -> bool:
        """Return whether the decoder gets what its embedding holds for the ids, and nothing else that has bits."""
        if "inputs_embeds" not in self.given:
            return True
        return self.call.pictures is None and is_plain(self.call.backbone.get_input_embeddings())

    @cached_property
    def codes(self) -> IntArray:
        """Return codes, (T,), int64, equal for tokens with equal causes. Raises NotShared if a cause is not known."""
        ids, attended = self.batch.input_ids, self.batch.attended
        codes = ids.copy()
        if self.call.pictures is not None:
            is_picture = ids == image_token_of(self.call.backbone)
            codes[is_picture] = ids.max() + 1 + self._features(int(is_picture.sum()))
        codes = codes[attended]
        positions = self.axes if self.axes is not None or self.blocks is None else self.batch.attended_positions
        for axis in () if positions is None else np.atleast_2d(positions):
            codes = _of_pairs(codes, axis)
        for name in self.planes.keys() & {*PER_TOKEN}:
            codes = _of_pairs(codes, self.planes[name][attended])
        return codes if self.blocks is None else _of_pairs(codes, _whole_blocks(codes, self.blocks))

    def _features(self, num_placeholders: int) -> IntArray:
        """Return the distinct feature at each placeholder, (P,), int64."""
        rows: IntArray | None = self.call.pictures.rows
        if rows is None:
            raise NotShared("images of which it is not known which features are whose")
        if len(rows) != num_placeholders:
            raise NotShared(f"{num_placeholders} placeholders of images for {len(rows)} features")
        return rows

    @cached_property
    def blocks(self) -> IntArray | None:
        """Number the blocks whose tokens see each other, (T,), -1 outside; None without any. From the masks."""
        found = [links for layers in self.requests if (links := self._links(layers)).any()]
        if not found:
            return None
        if self.batch.is_packed:
            raise NotShared("a row has several sequences, and its images attend in both directions")
        if any((links != found[0]).any() for links in found):
            raise NotShared("layers in which other tokens attend in both directions")
        return _numbered(found[0])[self.batch.attended]

    def _links(self, layers: str) -> BoolArray:
        """Return which tokens see the next one, (B, L), by the mask of these layers."""
        attended = self.batch.attended
        links: BoolArray = self.planes[f"next {layers}"].astype(bool) & attended
        links[:, :-1] &= attended[:, 1:]
        return links

    def _seen(self, layers: str, request: MaskRequest) -> tuple[int, bool]:
        """Return how many tokens a mask lets its layers see, 0 for all, and whether images attend in both directions.

        Raises NotShared for what tree attention has not.
        """
        both_ways, is_changed = bool(self._links(layers).any()), request.options.get("use_vmap")
        if both_ways or is_changed:
            return self._proved_window(request), both_ways
        if self.batch.is_packed:  # of its own sequence only
            return request.options.get("local_size") or 0, both_ways
        return request.window(int(lengths_of(self.batch.cu_seqlens).max())), both_ways

    def _proved_window(self, request: MaskRequest) -> int:
        """Return the window of layers whose mask is the causal one with blocks, 0 without any. Waits for the device."""
        for window in (0, getattr(self.call.decoder.config, "sliding_window", None)):
            if window is not None and self._is_within(request, window):
                return window
        raise NotShared(OTHER_MASK)

    def _is_within(self, request: MaskRequest, window: int) -> bool:
        """Return whether tokens see those before them, in a window, and their block, and no others."""
        device, (_, length) = self.call.given["input_ids"].device, self.batch.attended.shape
        numbers = np.full(self.batch.attended.shape, -1)
        numbers[self.batch.attended] = -1 if self.blocks is None else self.blocks
        blocks, attended = on_device(numbers, device), on_device(self.batch.attended.astype(np.int64), device).bool()
        places = torch.arange(length, device=device)
        queries, keys = places[:, None], places
        before = (keys <= queries) & (queries - keys < (window or length))
        wrong = torch.zeros((), dtype=torch.bool, device=device)
        for batch in range(len(blocks)):  # L x L at a time
            of, is_token = blocks[batch], attended[batch]
            own = (of[:, None] == of) & (of >= 0) & (keys > queries)
            seen = request.sees(places.new_tensor(batch), queries, keys)
            wrong |= ((seen != before | own) & is_token & is_token[:, None]).any()
        return not wrong

    def block_of_row(self, plan: PrefixPlan) -> IntArray | None:
        """Return the number of the block of each unique token, (U,), as `TreeLayout.from_plan` takes it."""
        if self.blocks is None:
            return None
        blocks = self.blocks[plan.gather_indices]
        blocks[plan.num_unique_tokens :] = -1
        return blocks

    def check_bits(self, plan: PrefixPlan) -> None:
        """Compare what the decoder gets for equal tokens, bit for bit. Waits for the device.

        Raises NotShared if something before the decoder gave one of them another value, such as noise or a hook.
        """
        first = plan.gather_indices[plan.inverse_indices]
        copies = np.flatnonzero(first != np.arange(len(first)))
        if self.is_looked_up or not len(copies):
            return
        flat = np.flatnonzero(self.batch.attended)
        pairs = [(x.flatten(0, 1), flat[copies], flat[first[copies]]) for x in self.per_token.values()]
        for level in self.given.get(AT_PLACEHOLDERS, ()):
            at = self.row_at_placeholder
            is_one = at[flat[copies]] >= 0
            pairs.append((level, at[flat[copies][is_one]], at[flat[first[copies]][is_one]]))
        are_equal = [
            (bits_of(x[on_device(some, x.device)]) == bits_of(x[on_device(others, x.device)])).all()
            for x, some, others in pairs
        ]
        if not torch.stack([each.to(are_equal[0].device) for each in are_equal]).all():
            raise NotShared(TOLD_APART)

    @cached_property
    def row_at_placeholder(self) -> IntArray:
        """Return the row of `AT_PLACEHOLDERS` at each place, (B * L,), -1 where there is none."""
        is_one = self.planes[PLACEHOLDERS].astype(bool).flatten()
        return np.where(is_one, is_one.cumsum() - 1, -1)

    def of_unique_tokens(self, plan: PrefixPlan) -> dict[str, Any]:
        """Return the arguments of the decoder for the unique tokens, without a mask."""
        device, flat = self.device, np.flatnonzero(self.batch.attended)[plan.gather_indices]
        index = on_device(flat, device)
        found: dict[str, Any] = {
            name: x.flatten(0, 1).index_select(0, index.to(x.device))[None] for name, x in self.per_token.items()
        }
        if "inputs_embeds" in found:
            embedded = [*self.call.embedded, self.per_token["inputs_embeds"]]
            self.call.embedded.clear()
            refuse_reading_at(embedded, found["inputs_embeds"])
        if levels := self.given.get(AT_PLACEHOLDERS):
            at = self.row_at_placeholder[flat]
            places = on_device(at[at >= 0], device)
            found[AT_PLACEHOLDERS] = [level.index_select(0, places.to(level.device)) for level in levels]
        positions = plan.position_ids[None] if self.axes is None else self.axes[:, None, plan.gather_indices]
        found["position_ids"] = on_device(positions, device)
        return {**self.given, **found}

    def masks_for(self, call: Any) -> Any:
        """Return the masks for which layers waited, in the form in which the backbone asked for them."""
        made = {
            layers: answered(call, *self._seen(layers, each), self.device) for layers, each in self.requests.items()
        }
        return made if isinstance(self.given["attention_mask"], dict) else next(iter(made.values()))


def is_plain(embedding: nn.Module) -> bool:
    """Return whether an embedding gives each id a row of its weight: no adapter, hook or other `forward` is on it."""
    is_own = type(embedding).__module__.startswith(("torch.nn.", "transformers.models."))
    return is_own and not is_hooked(embedding)


def with_made_masks(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a decoder with ordinary masks in place of those that wait, for a call unshared."""

    def made(value: Any) -> Any:
        request = request_of(value)
        return value if request is None else request.made()

    found: dict[str, Any] = tree_map(made, {**given})
    return found


def _is_empty_cache(value: object) -> bool:
    """Return whether this is a cache that the backbone made for the call, as its configuration asks."""
    return isinstance(value, Cache) and not value.get_seq_length()


def _requests(mask: Any) -> dict[str, MaskRequest]:
    """Return the masks that wait, by the layers that they are for."""
    named = mask if isinstance(mask, dict) else {"": mask}
    found = {name: request for name, each in named.items() if (request := request_of(each)) is not None}
    if found and len(found) < len(named):
        raise NotShared("the backbone made a mask of its own for some layers")
    return found


def _one_mask(requests: Mapping[str, MaskRequest]) -> Tensor | None:
    """Return the padding of the masks that wait."""
    masks = [request.attention_mask for request in requests.values()]
    if any(each is not masks[0] and (each is None or masks[0] is None) for each in masks):
        raise NotShared("layers whose masks hide other tokens")
    return masks[0]


def _mask_plane(mask: Tensor | None) -> dict[str, Tensor]:
    return {} if mask is None else {"mask": mask != 0}


def _positions(call: Upstream, given: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the positions of a decoder as planes, one for each axis if there are several."""
    positions, (num_rows, length) = given.get("position_ids"), call.given["input_ids"].shape
    if positions is None:
        return {}
    if positions.is_floating_point():
        raise NotShared("position_ids are not whole numbers")
    has_axes = call.backbone is not call.decoder and positions.ndim == 3
    if positions.shape[has_axes:] not in ((1, length), (num_rows, length)):
        raise NotShared("position_ids are not [B, L]")
    return {"positions": positions} if positions.ndim == 2 else {f"axis {n}": each for n, each in enumerate(positions)}


def _whole_numbers(call: Upstream, per_token: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return further causes of tokens: entries for each that are whole numbers, of the decoder or the backbone."""
    types = {name: call.given[name] for name in TYPES if name in call.given}
    if call.backbone is call.decoder:  # no layer reads them
        types = {}
    return {
        name: x
        for name, x in {**types, **per_token}.items()
        if name in PER_TOKEN and not x.is_floating_point() and x.shape == call.given["input_ids"].shape
    }


def _sees_next(request: MaskRequest, ids: Tensor) -> Tensor:
    """Return which tokens see the next one, (B, L), bool."""
    batch = torch.arange(len(ids), device=ids.device)[:, None]
    places = torch.arange(ids.shape[1], device=ids.device)
    seen = request.sees(batch, places[:-1], places[1:])
    return torch.cat([seen, seen.new_zeros(len(ids), 1)], 1)


def _on_host(planes: Mapping[str, Tensor]) -> dict[str, IntArray]:
    """Copy planes to the host, in one copy if they are on a device."""
    ids = planes["ids"]
    stacked = torch.stack([each.to(ids.device, torch.int64).expand_as(ids) for each in planes.values()])
    return dict(zip(planes, stacked.cpu().numpy(), strict=True))


def refuse_reading_at(embeddings: Sequence[Tensor], rows: Tensor) -> None:
    """Refuse to read the gradient at any of these, from which the unique rows were taken.

    Raises NotShared if someone waits for it already. Else the backward pass raises UserError.
    """
    if not rows.requires_grad:
        return
    if any(map(_is_read, embeddings)):
        raise NotShared(READS_GRADIENT)
    held = [ref(each) for each in embeddings]

    def check(grad: Tensor) -> None:
        if any(_is_read(x) or _is_wanted(x) for each in held if (x := each()) is not None):
            raise UserError(f"{READS_GRADIENT}: call restore_model(model) to read it")

    rows.register_hook(check)


def _is_read(x: Tensor) -> bool:
    """Return whether someone waits for the gradient of a tensor."""
    return bool(x._backward_hooks) or x.retains_grad


def _is_wanted(x: Tensor) -> bool:
    """Return whether this backward pass ends at a tensor, as `torch.autograd.grad` does."""
    runs = torch._C._will_engine_execute_node
    if x.grad_fn is None or not runs(x.grad_fn):
        return False
    try:
        return not any(runs(node) for node, _ in x.grad_fn.next_functions if node is not None)
    except RuntimeError:  # a weight is wanted too
        return False


def _numbered(links: BoolArray) -> IntArray:
    """Number the runs of tokens that see the next one, (B, L), the last of each run included; -1 outside."""
    before = np.pad(links, ((0, 0), (1, 0)))[:, :-1]
    numbers = np.cumsum((links & ~before).flatten()).reshape(links.shape) - 1
    return np.where(links | before, numbers, -1)


def _whole_blocks(codes: IntArray, blocks: IntArray) -> IntArray:
    """Number the blocks of all tokens, (T,), so that two are the same if all their codes are; -1 outside."""
    numbers: dict[bytes, int] = {}
    found = np.full_like(blocks, -1)
    starts = np.flatnonzero(np.diff(blocks, prepend=-1)).tolist()
    for start, end in pairwise([*starts, len(blocks)]):
        if blocks[start] >= 0:
            found[start:end] = numbers.setdefault(codes[start:end].tobytes(), len(numbers))
    return found


def _of_pairs(codes: IntArray, others: IntArray) -> IntArray:
    """Number the distinct pairs, (T,). codes: not negative."""
    places = others - others.min(initial=0)
    pairs: IntArray = np.unique(codes * (places.max(initial=0) + 1) + places, return_inverse=True)[1]
    return pairs
