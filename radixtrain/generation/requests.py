"""One answer that is being generated, from its prompt to its last token."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from radixtrain.generation.cache import Node, RadixCache
from radixtrain.tree.arrays import IntArray

__all__ = ["Request"]


@dataclass(eq=False)
class Request:
    """An answer to be.

    index: its place in the result. rank: its place in sorted order.
    prompt: (n,), int64.
    max_new: most tokens of the answer.
    draws: (max_new,), float64 in [0, 1). what its tokens are sampled with; empty if they are not sampled.
    lcp: tokens that the prompt shares with the request before it, in sorted order.
    kept: leading tokens of the prompt that the cache should hold, because other requests read them too.

    While it is active:

    node: where its kept tokens end in the cache, locked.
    path: slots of the kept tokens, the first of the sequence. The others are in its lane.
    token_ids, logprobs: what was generated.
    """

    index: int
    prompt: IntArray
    max_new: int
    draws: np.ndarray
    rank: int = 0
    lcp: int = 0
    kept: int = 0
    node: Node | None = None
    path: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = ""

    @property
    def next_draw(self) -> float:
        """What the next token is sampled with."""
        return float(self.draws[len(self.token_ids)])

    def hold(self, cache: RadixCache, node: Node) -> None:
        """Lock the node where the kept tokens end, and remember their slots as the cache has them."""
        cache.lock(node)
        self.node = node
        parts: list[IntArray] = []
        above: Node | None = node
        while above is not None:
            parts.append(above.slots)
            above = above.parent
        self.path = np.concatenate(parts[::-1])

    def release(self, cache: RadixCache) -> None:
        """Unlock it."""
        if self.node is not None:
            cache.unlock(self.node)
            self.node = None
