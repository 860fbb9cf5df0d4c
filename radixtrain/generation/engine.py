"""The loop of generation: prompts come in, every active sequence gets a token, finished ones leave."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from radixtrain.generation.active import Active
from radixtrain.generation.cache import CacheFull, Match, RadixCache
from radixtrain.generation.prefill import Prefill, number_that_fits
from radixtrain.generation.requests import Request
from radixtrain.generation.sampling import TokenChooser
from radixtrain.generation.stopping import Stopper

__all__ = ["Engine", "Limits"]


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
    chooser, stopper: which token comes next, and whether it was the last.
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
        waiting, (num_lanes, _, length) = deque(requests), self.limits
        active = Active.empty(self.prefill, self.chooser, self.stopper, self.keeps_answers, num_lanes, length)
        try:
            while waiting or len(active):
                if waiting and self._has_room(active):
                    self._admit(waiting, active)
                if len(active):
                    active.advance()
        finally:
            active.close()

    def _has_room(self, active: Active) -> bool:
        """Prompts come in together: a pass for each finished sequence would cost more than an idle lane."""
        free = self.limits.num_lanes - len(active)
        return not len(active) or free >= max(1, self.limits.num_lanes // 4)

    def _admit(self, waiting: deque[Request], active: Active) -> None:
        """Compute the next prompts, as many as there are lanes and the budget of the cache has room for."""
        number = number_that_fits(waiting, self.limits.num_lanes - len(active))
        while number and not self._start(number, waiting, active):
            number //= 2  # at 0 they wait until an active one has left
        if not self.keeps_answers:
            self._forget_all_but(waiting)

    def _start(self, number: int, waiting: deque[Request], active: Active) -> bool:
        """Compute so many prompts. False, and nothing is done, if the budget of the cache has no room for them.

        Raises CacheFull for a single one, if no active sequence can make room.
        """
        requests = [waiting[place] for place in range(number)]
        try:
            logits, tails = self.prefill.start(requests, active.lanes, len(active), self.limits.longest_tail)
        except CacheFull:
            if number == 1 and not len(active):
                raise
            return False
        for _ in requests:
            waiting.popleft()
        active.join(requests, logits, tails)
        return True

    def _forget_all_but(self, waiting: deque[Request]) -> None:
        """Evict what no active sequence reads and the next prompt does not begin with. Later ones are sorted after."""
        match: Match | None = self.cache.match_prefix(waiting[0].prompt, count=False) if waiting else None
        if match is not None:
            self.cache.lock(match.node)
        self.cache.evict(self.cache.num_tokens)
        if match is not None:
            self.cache.unlock(match.node)
