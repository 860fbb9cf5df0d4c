"""The random generators of a process: what they would draw next, kept and set. Those of the ranks draw apart."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch

from radixtrain.distributed import ranks

__all__ = ["draw_apart", "generator_states", "set_generator_states", "set_states_of_ranks"]

logger = logging.getLogger(__name__)


def generator_states() -> dict[str, Any]:
    """Of Python's, NumPy's and torch's random generators, those of all CUDA devices included.

    A process that has not used CUDA has drawn nothing there, and asking would start it, which a forked one cannot.
    """
    version, numbers, gauss = random.getstate()
    name, keys, place, has_gauss, cached = cast(Any, np.random.get_state())  # noqa: NPY002
    return {
        "python": {"version": version, "numbers": list(numbers), "gauss": gauss},
        "numpy": {"name": name, "keys": torch.from_numpy(keys.astype(np.int64)), "rest": [place, has_gauss, cached]},
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def set_generator_states(states: Mapping[str, Any]) -> None:
    """What `generator_states` gave. With another number of CUDA devices theirs are left alone; a warning says so."""
    python, numpy = states["python"], states["numpy"]
    random.setstate((python["version"], tuple(python["numbers"]), python["gauss"]))
    keys = numpy["keys"].numpy().astype(np.uint32)
    np.random.set_state((numpy["name"], keys, *numpy["rest"]))  # noqa: NPY002
    torch.set_rng_state(states["torch"])
    was, here = len(states["cuda"]), torch.cuda.device_count() if torch.cuda.is_initialized() else 0
    if was == here:
        torch.cuda.set_rng_state_all(states["cuda"])
    else:
        logger.warning("the run was on %d CUDA devices and is on %d: dropout will draw other numbers there", was, here)


def set_states_of_ranks(states: list[Mapping[str, Any]] | Mapping[str, Any]) -> None:
    """Set the random generators of this rank.

    states: of all ranks, by rank; of one process in a checkpoint of an earlier version. If there is another number of
        ranks now, dropout draws other numbers than the run would have drawn, and the log says so.
    """
    by_rank = states if isinstance(states, list) else [states]
    here = ranks()
    if len(by_rank) != here.size:
        logger.info("the run was on %d ranks and is on %d: dropout will draw other numbers", len(by_rank), here.size)
    if here.rank < len(by_rank):
        set_generator_states(by_rank[here.rank])
    else:
        draw_apart()


def draw_apart() -> None:
    """Seed this rank for dropout masks of its own; rank 0 goes on as one process would.

    Called once all that must be equal on the ranks, such as a new adapter, has been drawn from the seed of the run.
    """
    if not ranks().is_first:
        torch.manual_seed(torch.initial_seed() + ranks().rank)
