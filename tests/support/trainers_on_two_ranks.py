"""Two processes that train together, as `torchrun --nproc_per_node 2` starts them, forked from the one that tests.

def work(rank):                       # runs in each; the process group is made by the trainer, from the environment
    return compare(build).r

assert on_two_ranks(work) == [3.1, 2.9]
"""

from collections.abc import Callable
from typing import Any

from accelerate.state import AcceleratorState
from forked_ranks import on_ranks
from torch import distributed

__all__ = ["NUM_RANKS", "on_two_ranks"]

NUM_RANKS = 2


def on_two_ranks(work: Callable[[int], Any]) -> list[Any]:
    """What `work(rank)` returned on each, by rank. Errors as of `on_ranks`."""

    def run(rank: int) -> Any:
        AcceleratorState._reset_state(reset_partial_state=True)  # it may know the process that tests
        result = work(rank)
        if distributed.is_initialized():
            distributed.barrier()  # rank 0 keeps what the ranks meet at
        return result

    return on_ranks(NUM_RANKS, run, has_group=False)
