"""The loop of generation: prompts come in, every active sequence gets a token, finished ones leave.

An active sequence has a *lane*, a private run of slots for the tokens that no other sequence reads: the end of its
prompt and what it generates. All that others read as well belongs to the cache and is locked while it is in use. Active
sequences fill the first lanes without gaps, so that a decoding step is one view of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from radixtrain.generation.cache import CacheFull, Match, RadixCache
from radixtrain.generation.passes import LaneBlock, SharedRows, decoding_pass
from radixtrain.generation.prefill import Prefill, number_that_fits
from radixtrain.generation.requests import Request
from radixtrain.generation.sampling import TokenChooser
from radixtrain.generation.stopping import LENGTH, STOP, Stopper
from radixtrain.tree.arrays import IntArray

__all__ = ["Engine", "Limits"]

REASONS = {STOP: "stop", LENGTH: "length"}


class Limits(NamedTuple):
    """How much is computed at once.

    num_lanes: most active sequences. longest_tail: tokens of a prompt that a lane takes. lane_length: slots of a lane.
    """

    num_lanes: int
    longest_tail: int
    lane_length: int


@dataclass(eq=False)
class Engine:
    """Finishes requests.

    prefill: of the model and the cache.
    keeps_answers: whether finished sequences go into the cache, for a later call.
    """

    prefill: Prefill
    chooser: TokenChooser
    stopper: Stopper
    limits: Limits
    keeps_answers: bool = False

    @property
    def cache(self) -> RadixCache:
        return self.prefill.cache

    def run(self, requests: Sequence[Request]) -> None:
        """Finish all requests. They are sorted: prompts that share a beginning are neighbours.

        Raises CacheFull if the budget of the cache is too small for one request. Nothing stays locked or reserved.
        """
        waiting, active = deque(requests), _Active.empty(self)
        try:
            while waiting or len(active):
                if waiting and self._has_room(active):
                    self._admit(waiting, active)
                if len(active):
                    active.advance()
        finally:
            active.close()

    def _has_room(self, active: _Active) -> bool:
        """Prompts come in together: a pass for each finished sequence would cost more than an idle lane."""
        free = self.limits.num_lanes - len(active)
        return not len(active) or free >= max(1, self.limits.num_lanes // 4)

    def _admit(self, waiting: deque[Request], active: _Active) -> None:
        """Compute the next prompts, as many as there are lanes and the budget of the cache has room for."""
        number = number_that_fits(waiting, self.limits.num_lanes - len(active))
        while number:
            requests = [waiting[place] for place in range(number)]
            try:
                started = self.prefill.start(requests, active.lanes, len(active), self.limits.longest_tail)
            except CacheFull:
                if number == 1 and not len(active):
                    raise
                number //= 2  # at 0 it waits until an active one has left
                continue
            for _ in requests:
                waiting.popleft()
            active.join(requests, *started)
            break
        if not self.keeps_answers:
            self._forget_all_but(waiting)

    def _forget_all_but(self, waiting: deque[Request]) -> None:
        """Evict what no active sequence reads and the next prompt does not begin with. Later ones are sorted after."""
        match: Match | None = self.cache.match_prefix(waiting[0].prompt, count=False) if waiting else None
        if match is not None:
            self.cache.lock(match.node)
        self.cache.evict(self.cache.num_tokens)
        if match is not None:
            self.cache.unlock(match.node)


@dataclass(eq=False)
class _Active:
    """The active sequences, one a lane, in the order of the lanes.

    used: (lanes,), int64. filled slots of each lane.
    lengths, prompt_lengths, max_new: (lanes,), int64. tokens of each sequence, of its prompt, and most of its answer.
    token_ids: (lanes, L), int64, on the device. prompt and answer of each.
    mask: (lanes, lane length), float32, on the device. 0 for the filled slots, else -inf.
    newest: (n,), int64, on the device. the last token of each, which is not computed yet.
    shared: the kept rows that they read; None if that has changed.
    """

    engine: Engine
    lanes: LaneBlock
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
    def empty(cls, engine: Engine) -> _Active:
        number, _, length = engine.limits
        slots = engine.cache.pool.allocate(number * length, contiguous=True)
        engine.prefill.store.zero(slots)
        device = engine.prefill.device
        return cls(
            engine,
            lanes=LaneBlock(int(slots[0]), length, number),
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
            request.release(self.engine.cache)
        self.requests.clear()
        self.engine.cache.pool.release(self.lane_slots)

    def join(self, requests: Sequence[Request], logits: Tensor, tails: IntArray) -> None:
        """Sequences whose prompts are computed, in the lanes after the others. logits: (m, V), of their last tokens."""
        first, end = len(self), len(self) + len(requests)
        self.requests += requests
        self.used[first:end] = tails
        self.lengths[first:end] = self.prompt_lengths[first:end] = [len(request.prompt) for request in requests]
        self.max_new[first:end] = [request.max_new for request in requests]
        places = torch.arange(self.lanes.step, device=self.mask.device)
        is_filled = places < torch.from_numpy(tails).to(self.mask.device)[:, None]
        self.mask[first:end] = torch.where(is_filled, 0.0, float("-inf"))
        self._write_prompts(requests, first)
        self.newest = torch.cat([self.newest, self._choose(logits, first)])
        self.shared = None
        self._leave(first)

    def advance(self) -> None:
        """One token for every sequence."""
        n, device = len(self), self.newest.device
        if self.shared is None:
            self.shared = SharedRows.of(self.requests, device)
        self.mask[:n].scatter_(1, torch.from_numpy(self.used[:n]).to(device)[:, None], 0.0)
        self.used[:n] += 1
        mask = self.mask[:n, : int(self.used[:n].max())]
        step = decoding_pass(self.requests, self.newest, self.lengths[:n], self.used[:n], self.lanes, mask, self.shared)
        self.newest = self._choose(self.engine.prefill.logits(step), 0)
        self._leave(0)

    def _choose(self, logits: Tensor, first: int) -> Tensor:
        """The next token of each sequence from a lane on: (m,), int64."""
        requests, places = self.requests[first:], slice(first, len(self))
        lengths, prompt_lengths = self.lengths[places], self.prompt_lengths[places]
        chooser, rows = self.engine.chooser, self.token_ids[places]
        draws = np.array([request.next_draw for request in requests]) if chooser.samples else None
        tokens, logprobs = chooser.choose(logits, rows, lengths, prompt_lengths, draws)
        rows.scatter_(1, torch.from_numpy(lengths).to(rows.device)[:, None], tokens[:, None])
        self.lengths[places] += 1
        chosen, found = torch.stack([tokens.double(), logprobs.double()]).tolist()  # one wait for the device
        for request, token, logprob in zip(requests, chosen, found, strict=True):
            request.token_ids.append(int(token))
            request.logprobs.append(logprob)
        return tokens

    def _leave(self, first: int) -> None:
        """Finished sequences leave their lanes, from this one on; the last ones move into the gaps."""
        requests, places = self.requests[first:], slice(first, len(self))
        verdicts = self.engine.stopper.finished(
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
        if self.engine.keeps_answers:
            self._keep(request, lane)
        request.release(self.engine.cache)

    def _keep(self, request: Request, lane: int) -> None:
        """Copy a finished sequence into the cache, if its budget has room. Its last token was never computed."""
        cache, used = self.engine.cache, int(self.used[lane])
        try:
            slots = cache.reserve(used)
        except CacheFull:
            return
        try:
            self.engine.prefill.store.copy(self.lanes.slots(lane, used), slots)
        except BaseException:
            cache.cancel(slots)
            raise
        tokens = np.concatenate([request.prompt, np.array(request.token_ids[:-1], dtype=np.int64)])
        cache.insert(tokens, np.concatenate([request.path, slots]))

    def _close_gaps(self) -> None:
        before = len(self)
        staying = np.array([not request.finish_reason for request in self.requests])
        after = int(staying.sum())
        gaps, movers = (~staying[:after]).nonzero()[0], after + staying[after:].nonzero()[0]
        lane_of = np.arange(after)
        lane_of[gaps] = movers
        ends = np.maximum(self.used[movers], self.used[gaps])  # beyond the filled slots is zero, and so it becomes
        self._move(movers, gaps, ends)
        self.requests = [self.requests[lane] for lane in lane_of.tolist()]
        self.newest = self.newest[torch.from_numpy(lane_of).to(self.newest.device)]
        vacated = [self.lanes.slots(lane, int(self.used[lane])) for lane in range(after, before)]
        self.engine.prefill.store.zero(np.concatenate(vacated))

    def _move(self, movers: IntArray, gaps: IntArray, ends: IntArray) -> None:
        """Move lanes into others, whose sequences have left. ends: slots of each to copy."""
        if not len(movers):
            return
        from_slots, to_slots = (
            np.concatenate(
                [self.lanes.slots(lane, end) for lane, end in zip(lanes.tolist(), ends.tolist(), strict=True)]
            )
            for lanes in (movers, gaps)
        )
        self.engine.prefill.store.copy(from_slots, to_slots)
        for values in (self.used, self.lengths, self.prompt_lengths, self.max_new):
            values[gaps] = values[movers]
        source, target = (torch.from_numpy(lanes).to(self.mask.device) for lanes in (movers, gaps))
        for rows in (self.token_ids, self.mask):
            rows.index_copy_(0, target, rows.index_select(0, source))

    def _write_prompts(self, requests: Sequence[Request], first: int) -> None:
        width = max(len(request.prompt) + request.max_new for request in requests)
        missing = width - self.token_ids.shape[1]
        if missing > 0:
            self.token_ids = torch.nn.functional.pad(self.token_ids, (0, missing))
        rows = np.zeros((len(requests), self.token_ids.shape[1]), dtype=np.int64)
        for row, request in zip(rows, requests, strict=True):
            row[: len(request.prompt)] = request.prompt
        self.token_ids[first : first + len(requests)] = torch.from_numpy(rows).to(self.token_ids.device)
