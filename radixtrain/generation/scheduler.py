"""The loop of generation: prompts come in, every running sequence gets a token, finished ones leave.

A *lane* is a private run of slots for the tokens that no other sequence reads: the end of a prompt and what is
generated. Tokens that others read too belong to the cache and are locked while in use. Running sequences fill
the first lanes without gaps, so that a decoding step is one view of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from radixtrain.generation.cache import CacheFull
from radixtrain.generation.passes import LaneRange, Request, SharedRows, decoding_pass
from radixtrain.generation.prefill import Prefill, number_that_fits
from radixtrain.generation.sampling import TokenChooser
from radixtrain.generation.stopping import LENGTH, STOP, Stopper
from radixtrain.tree.arrays import IntArray

REASONS = {STOP: "stop", LENGTH: "length"}


class Limits(NamedTuple):
    """Limits on what is computed at once.

    num_lanes: most running sequences. longest_tail: tokens of a prompt that a lane takes.
    lane_length, longest_lane: slots of a lane, at first and at most.
    """

    num_lanes: int
    longest_tail: int
    lane_length: int
    longest_lane: int


def finish(requests: Sequence[Request], running: RunningBatch) -> None:
    """Finish all requests, which are sorted: prompts that share a beginning are neighbours.

    running: without a sequence, for this call only.

    Raises CacheFull if the budget of the cache is too small for one request. Nothing stays locked or reserved.
    """
    waiting = deque(requests)
    try:
        while waiting or len(running):
            if waiting and running.has_room:
                _admit(waiting, running)
            if len(running):
                running.advance()
    finally:
        running.close()


def _admit(waiting: deque[Request], running: RunningBatch) -> None:
    """Compute the next prompts, as many as there are lanes and the budget of the cache has room for."""
    number = number_that_fits(waiting, running.num_free)
    while number:
        try:
            running.join([waiting[place] for place in range(number)])
        except CacheFull:
            if number == 1 and not len(running):
                raise
            number //= 2  # at 0 they wait until a running one has left
            continue
        for _ in range(number):
            waiting.popleft()
        break
    if not running.keeps_answers:
        _forget_all_but(waiting, running)


def _forget_all_but(waiting: deque[Request], running: RunningBatch) -> None:
    """Evict what no running sequence reads and the next prompt does not begin with. Later prompts sort after it."""
    cache = running.prefill.cache
    match = cache.match_prefix(waiting[0].keys, count=False) if waiting else None
    if match is not None:
        cache.lock(match.node)
    cache.evict(cache.num_tokens)
    if match is not None:
        cache.unlock(match.node)


class RunningBatch:
    """The running sequences, one per lane, in the order of the lanes.

    prefill: of the model and the cache.
    chooser, stopper: choose the next token, and whether it is the last.
    keeps_answers: whether finished sequences go into the cache, for a later call.
    requests: of the sequences.
    lane_slots: of all lanes.
    used: (lanes,), int64. filled slots of each lane.
    lengths, prompt_lengths, max_new: (lanes,), int64. tokens of each sequence, of its prompt, and most of its answer.
    token_ids: (lanes, L), int64, on the device. prompt and answer of each.
    mask: (lanes, lane length), float32, on the device. 0 for the filled slots, else -inf.
    newest: (n,), int64, on the device. the last token of each, which is not computed yet.
    shared: the kept rows that they read; None if that has changed.
    """

    def __init__(
        self, prefill: Prefill, chooser: TokenChooser, stopper: Stopper, limits: Limits, keeps_answers: bool = False
    ):
        self.prefill, self.chooser, self.stopper, self.keeps_answers = prefill, chooser, stopper, keeps_answers
        self.limits, device, number = limits, prefill.device, limits.num_lanes
        self.lanes, self.lane_slots = _new_lanes(prefill, number, limits.lane_length)
        self.requests: list[Request] = []
        self.used, self.lengths, self.prompt_lengths, self.max_new = np.zeros((4, number), dtype=np.int64)
        self.token_ids = torch.zeros(number, 0, dtype=torch.int64, device=device)
        self.mask = torch.full((number, limits.lane_length), float("-inf"), device=device)
        self.newest = torch.zeros(0, dtype=torch.int64, device=device)
        self.shared: SharedRows | None = None

    def __len__(self) -> int:
        return len(self.requests)

    def close(self) -> None:
        """Give the lanes back, and unlock what is left after an error."""
        for request in self.requests:
            request.release(self.prefill.cache)
        self.requests.clear()
        self.prefill.cache.pool.release(self.lane_slots)

    @property
    def num_free(self) -> int:
        """Count the lanes without a sequence."""
        return self.lanes.number - len(self)

    @property
    def has_room(self) -> bool:
        """Return whether enough lanes are free: a pass for each finished sequence would cost more than idle lanes."""
        return not len(self) or self.num_free >= max(1, self.lanes.number // 4)

    def join(self, requests: Sequence[Request]) -> None:
        """Compute these prompts and their first tokens. Raises CacheFull, and does nothing, if there is no room."""
        first, end = len(self), len(self) + len(requests)
        logits, tails = self.prefill.start(requests, self.lanes, first, self.limits.longest_tail)
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
        """Run a decoding step: one token for every sequence."""
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
        """Double the length of the lanes, in place if they are at the end of the store."""
        old, places, used = self.lanes, np.arange(len(self)), self.used[: len(self)]
        length = min(2 * old.step, self.limits.longest_lane)
        self.prefill.cache.pool.release(self.lane_slots)
        self.lane_slots = self.lane_slots[:0]
        self.lane_slots = self.prefill.cache.pool.allocate(old.number * length, contiguous=True)
        self.lanes = LaneRange(int(self.lane_slots[0]), length, old.number)
        filled = self.lanes.slots_of(places, used)
        self.prefill.store.copy(old.slots_of(places, used), filled)
        self.prefill.store.zero(np.setdiff1d(self.lane_slots, filled, assume_unique=True))
        self.mask = torch.nn.functional.pad(self.mask, (0, length - old.step), value=float("-inf"))

    def _choose(self, logits: Tensor, first: int) -> Tensor:
        """Choose the next token of each sequence from a lane on: (m,), int64."""
        requests, places = self.requests[first:], slice(first, len(self))
        lengths, prompt_lengths = self.lengths[places], self.prompt_lengths[places]
        self._widen(int(lengths.max()) + 1)
        chooser, rows = self.chooser, self.token_ids[places]
        draws = np.array([request.next_draw(chooser) for request in requests]) if chooser.samples else None
        tokens, logprobs = chooser.choose(logits, rows, lengths, prompt_lengths, draws)
        rows.scatter_(1, torch.from_numpy(lengths).to(rows.device, non_blocking=True)[:, None], tokens[:, None])
        self.lengths[places] += 1
        ids, values = torch.stack([tokens.double(), logprobs.double()]).tolist()  # one wait for the device
        for request, token, logprob in zip(requests, ids, values, strict=True):
            request.token_ids.append(int(token))
            request.logprobs.append(logprob)
        return tokens

    def _leave(self, first: int) -> None:
        """Remove finished sequences from their lanes, from this one on; the last sequences move into the gaps."""
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
                if self.keeps_answers:
                    self._keep(request, lane)
                request.release(self.prefill.cache)
        self._close_gaps()
        self.shared = None

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
        """Move lanes into others, whose sequences have left. ends: slots to copy of each."""
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
        """Widen `token_ids` for sequences of that many tokens, with room for as many again."""
        if width > self.token_ids.shape[1]:
            self.token_ids = torch.nn.functional.pad(self.token_ids, (0, 2 * width - self.token_ids.shape[1]))


def _new_lanes(prefill: Prefill, number: int, length: int) -> tuple[LaneRange, IntArray]:
    """Allocate lanes that hold zeros; return their slots too."""
    slots = prefill.cache.pool.allocate(number * length, contiguous=True)
    prefill.store.zero(slots)
    return LaneRange(int(slots[0]), length, number), slots
