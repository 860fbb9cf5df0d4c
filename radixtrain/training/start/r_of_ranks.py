"""r of a run on several ranks: each computes its share of a step, and shares no token with another rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from radixtrain.collators.batching import share_by_unique_tokens
from radixtrain.data.grouping import Conversations, expected_r

__all__ = ["r_of_ranks"]


def r_of_ranks(
    conversations: Conversations, batches: Iterable[Sequence[int]], max_tokens: int | None, num_ranks: int
) -> float:
    """r of these steps, if each is shared out among the ranks: tokens per computed token, of all ranks together.

    conversations, batches, max_tokens: as `expected_r` takes them, and it leaves out the same. So is the measured cost
    of a token, by which a run may share out otherwise.
    """
    if num_ranks == 1:
        return expected_r(conversations, batches, max_tokens)
    num_tokens = num_computed = 0
    for batch in batches:
        sequences = [sample.input_ids for index in batch for sample in conversations[index] if len(sample.input_ids)]
        num_tokens += sum(map(len, sequences))
        num_computed += sum(share_by_unique_tokens(sequences, num_ranks, max_tokens).costs)  # each unique token costs 1
    return num_tokens / num_computed if num_computed else 1.0
