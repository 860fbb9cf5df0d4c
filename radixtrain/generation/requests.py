"""One answer that is being generated, from its prompt to its last token."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from radixtrain.generation.cache import RadixCache
from radixtrain.generation.nodes import Node, path_to_root
from radixtrain.generation.sampling import TokenChooser
from radixtrain.tree.arrays import IntArray

__all__ = ["Request"]

FIRST_DRAWS = 64


@dataclass(eq=False)
class Request:
    """An answer to be.

    index: its place in the result. rank: its place in sorted order.
    prompt: (n,), int64.
    max_new: most tokens of the answer.
    draws: (n,), float64 in [0, 1). what its first tokens are sampled with; more are drawn when they are needed.
    lcp: tokens that the prompt shares with the request before it, in sorted order.
    kept: leading tokens of the prompt that the cache should hold, because other requests read them too.

    While it is active:

    node: where its kept tokens end in the cache, locked.
    path: (m,), int64. slots of the kept tokens, the first of the sequence. The others are in its lane.
    token_ids, logprobs: what was generated.
    finish_reason: as in `Generated`; empty until it is finished.
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

    def next_draw(self, chooser: TokenChooser) -> float:
        """What the next token is sampled with."""
        place = len(self.token_ids)
        if place >= len(self.draws):
            self.draws = chooser.draws(self.index, max(FIRST_DRAWS, 2 * place))  # begins with those before
        return float(self.draws[place])

    def hold(self, cache: RadixCache, node: Node) -> None:
        """Lock the node where the kept tokens end, and remember their slots as the cache has them."""
        cache.lock(node)
        self.node = node
        self.path = np.concatenate([above.slots for above in path_to_root(node)][::-1])

    def release(self, cache: RadixCache) -> None:
        """Unlock the node; nothing to do if none is held."""
        if self.node is not None:
            cache.unlock(self.node)
            self.node = None
