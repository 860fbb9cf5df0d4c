"""The active sequences: each has a lane, gets a token at every step, and leaves when it is finished.

A *lane* is a private run of slots for the tokens that no other sequence reads: the end of a prompt and what is
generated. All that others read as well belongs to the cache and is locked while it is in use. Active sequences fill the
first lanes without gaps, so that a decoding step is one view of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from radixtrain.generation.cache import CacheFull
from radixtrain.generation.passes import LaneRange, SharedRows, decoding_pass
from radixtrain.generation.prefill import Prefill
from radixtrain.generation.requests import Request
from radixtrain.generation.sampling import TokenChooser
from radixtrain.generation.stopping import LENGTH, STOP, Stopper
from radixtrain.tree.arrays import IntArray

__all__ = ["Active"]

REASONS = {STOP: "stop", LENGTH: "length"}


@dataclass(eq=False)
class Active:
    """The active sequences, one a lane, in the order of the lanes.

    prefill, chooser, stopper, keeps_answers: as in `Engine`.
    lane_slots: of all lanes.
    used: (lanes,), int64. filled slots of each lane.
    lengths, prompt_lengths, max_new: (lanes,), int64. tokens of each sequence, of its prompt, and most of its answer.
    token_ids: (lanes, L), int64, on the device. prompt and answer of each.
    mask: (lanes, lane length), float32, on the device. 0 for the filled slots, else -inf.
    newest: (n,), int64, on the device. the last token of each, which is not computed yet.
    shared: the kept rows that they read; None if that has changed.
    """

    prefill: Prefill
    chooser: TokenChooser
    stopper: Stopper
    keeps_answers: bool
    lanes: LaneRange
    lane_slots: IntArray
    used: IntArray
    lengths: IntArray
    prompt_lengths: IntArray
    max_new: IntArray
    token_ids: Tensor
    mask: Tensor
    newest: Tensor
    requests: list[Request] = field(default_factory=list)
    shared: SharedRows | None = None

    @classmethod
    def empty(
        cls,
        prefill: Prefill,
        chooser: TokenChooser,
        stopper: Stopper,
        keeps_answers: bool,
        number: int,
        length: int,
    ) -> Active:
        """Without a sequence. number: of lanes. length: of each, in slots, until an answer needs more."""
        lanes, slots = _new_lanes(prefill, number, length)
        device = prefill.device
        return cls(
            prefill,
            chooser,
            stopper,
            keeps_answers,
            lanes=lanes,
            lane_slots=slots,
            used=np.zeros(number, dtype=np.int64),
            lengths=np.zeros(number, dtype=np.int64),
            prompt_lengths=np.zeros(number, dtype=np.int64),
            max_new=np.zeros(number, dtype=np.int64),
            token_ids=torch.zeros(number, 0, dtype=torch.int64, device=device),
            mask=torch.full((number, length), float("-inf"), device=device),
            newest=torch.zeros(0, dtype=torch.int64, device=device),
        )

    def __len__(self) -> int:
        return len(self.requests)

    def close(self) -> None:
        """Unlock what is left after an error, and give the lanes back."""
        for request in self.requests:
            request.release(self.prefill.cache)
        self.requests.clear()
        self.prefill.cache.pool.release(self.lane_slots)

    def join(self, requests: Sequence[Request], logits: Tensor, tails: IntArray) -> None:
        """Take in sequences whose prompts are computed and whose tails are in the lanes after the others.

        logits: (m, V), of their last tokens. tails: (m,), int64, as `Prefill.start` returns both.
        """
        first, end = len(self), len(self) + len(requests)
        self.requests += requests
        self.used[first:end] = tails
        self.lengths[first:end] = self.prompt_lengths[first:end] = [len(request.prompt) for request in requests]
        self.max_new[first:end] = [request.max_new for request in requests]
        places = torch.arange(self.lanes.step, device=self.mask.device)
        is_filled = places < torch.from_numpy(tails).to(self.mask.device, non_blocking=True)[:, None]
        self.mask[first:end] = torch.where(is_filled, 0.0, float("-inf"))
        self._write_prompts(requests, first)
        self.newest = torch.cat([self.newest, self._choose(logits, first)])
        self.shared = None
        self._leave(first)

    def advance(self) -> None:
        """A decoding step: one token for every sequence."""
        n, device = len(self), self.newest.device
        if self.shared is None:
            self.shared = SharedRows.of(self.requests, device)
        if int(self.used[:n].max()) == self.lanes.step:
            self._lengthen()
        self.mask[:n].scatter_(1, torch.from_numpy(self.used[:n]).to(device, non_blocking=True)[:, None], 0.0)
        self.used[:n] += 1
        mask = self.mask[:n, : int(self.used[:n].max())]
        step = decoding_pass(self.requests, self.newest, self.lengths[:n], self.used[:n], self.lanes, mask, self.shared)
        self.newest = self._choose(self.prefill.logits(step), 0)
        self._leave(0)

    def _lengthen(self) -> None:
        """Lanes of twice the length: how long answers get is not known before."""
        lanes, slots = _new_lanes(self.prefill, self.lanes.number, 2 * self.lanes.step)
        places, used = np.arange(len(self)), self.used[: len(self)]
        try:
            self.prefill.store.copy(self.lanes.slots_of(places, used), lanes.slots_of(places, used))
        except BaseException:
            self.prefill.cache.pool.release(slots)
            raise
        self.prefill.cache.pool.release(self.lane_slots)
        self.mask = torch.nn.functional.pad(self.mask, (0, lanes.step - self.lanes.step), value=float("-inf"))
        self.lanes, self.lane_slots = lanes, slots

    def _choose(self, logits: Tensor, first: int) -> Tensor:
        """The next token of each sequence from a lane on: (m,), int64."""
        requests, places = self.requests[first:], slice(first, len(self))
        lengths, prompt_lengths = self.lengths[places], self.prompt_lengths[places]
        self._widen(int(lengths.max()) + 1)
        chooser, rows = self.chooser, self.token_ids[places]
        draws = np.array([request.next_draw(chooser) for request in requests]) if chooser.samples else None
        tokens, logprobs = chooser.choose(logits, rows, lengths, prompt_lengths, draws)
        rows.scatter_(1, torch.from_numpy(lengths).to(rows.device, non_blocking=True)[:, None], tokens[:, None])
        self.lengths[places] += 1
        chosen, found = torch.stack([tokens.double(), logprobs.double()]).tolist()  # one wait for the device
        for request, token, logprob in zip(requests, chosen, found, strict=True):
            request.token_ids.append(int(token))
            request.logprobs.append(logprob)
        return tokens

    def _leave(self, first: int) -> None:
        """Finished sequences leave their lanes, from this one on; the last ones move into the gaps."""
        requests, places = self.requests[first:], slice(first, len(self))
        verdicts = self.stopper.finished(
            np.array([request.token_ids[-1] for request in requests]),
            self.token_ids[places],
            self.lengths[places],
            self.lengths[places] - self.prompt_lengths[places],
            self.max_new[places],
        )
        if not verdicts.any():
            return
        for lane, (request, verdict) in enumerate(zip(requests, verdicts.tolist(), strict=True), start=first):
            if verdict:
                request.finish_reason = REASONS[verdict]
                self._end(request, lane)
        self._close_gaps()
        self.shared = None

    def _end(self, request: Request, lane: int) -> None:
        """Keep the sequence for later calls if asked to, and unlock what it read."""
        if self.keeps_answers:
            self._keep(request, lane)
        request.release(self.prefill.cache)

    def _keep(self, request: Request, lane: int) -> None:
        """Copy a finished sequence into the cache, if its budget has room. Its last token was never computed."""
        cache, used = self.prefill.cache, int(self.used[lane])
        try:
            slots = cache.reserve(used)
        except CacheFull:
            return
        try:
            self.prefill.store.copy(self.lanes.slots(lane, used), slots)
        except BaseException:
            cache.cancel(slots)
            raise
        tokens = np.concatenate([request.prompt, np.array(request.token_ids[:-1], dtype=np.int64)])
        cache.insert(tokens, np.concatenate([request.path, slots]))

    def _close_gaps(self) -> None:
        """Move the last sequences into the lanes of finished ones, and make the lanes that are left zero."""
        before = len(self)
        staying = np.array([not request.finish_reason for request in self.requests])
        after = int(staying.sum())
        gaps, movers = (~staying[:after]).nonzero()[0], after + staying[after:].nonzero()[0]
        lane_of = np.arange(after)
        lane_of[gaps] = movers
        ends = np.maximum(self.used[movers], self.used[gaps])  # beyond the filled slots is zero, and so it becomes
        self._move(movers, gaps, ends)
        self.requests = [self.requests[lane] for lane in lane_of.tolist()]
        self.newest = self.newest[torch.from_numpy(lane_of).to(self.newest.device, non_blocking=True)]
        self.prefill.store.zero(self.lanes.slots_of(np.arange(after, before), self.used[after:before]))

    def _move(self, movers: IntArray, gaps: IntArray, ends: IntArray) -> None:
        """Move lanes into others, whose sequences have left. ends: slots of each to copy."""
        if not len(movers):
            return
        self.prefill.store.copy(self.lanes.slots_of(movers, ends), self.lanes.slots_of(gaps, ends))
        for values in (self.used, self.lengths, self.prompt_lengths, self.max_new):
            values[gaps] = values[movers]
        source, target = (torch.from_numpy(lanes).to(self.mask.device, non_blocking=True) for lanes in (movers, gaps))
        for rows in (self.token_ids, self.mask):
            rows.index_copy_(0, target, rows.index_select(0, source))

    def _write_prompts(self, requests: Sequence[Request], first: int) -> None:
        """Put the prompts into rows of `token_ids`."""
        self._widen(max(len(request.prompt) for request in requests))
        rows = np.zeros((len(requests), self.token_ids.shape[1]), dtype=np.int64)
        for row, request in zip(rows, requests, strict=True):
            row[: len(request.prompt)] = request.prompt
        self.token_ids[first : first + len(requests)] = torch.from_numpy(rows).to(
            self.token_ids.device, non_blocking=True
        )

    def _widen(self, width: int) -> None:
        """Rows of `token_ids` for sequences of so many tokens, and room for as many again."""
        if width > self.token_ids.shape[1]:
            self.token_ids = torch.nn.functional.pad(self.token_ids, (0, 2 * width - self.token_ids.shape[1]))


def _new_lanes(prefill: Prefill, number: int, length: int) -> tuple[LaneRange, IntArray]:
    """Lanes that hold zeros, and their slots."""
    slots = prefill.cache.pool.allocate(number * length, contiguous=True)
    prefill.store.zero(slots)
    return LaneRange(int(slots[0]), length, number), slots
