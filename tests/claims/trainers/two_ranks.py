"""Two processes that train together, as `torchrun --nproc_per_node 2` starts them, forked from the one that tests.

    def work(rank):                       # runs in each; the process group is made by the trainer, from the environment
        return compare(build).r

    assert on_two_ranks(work) == [3.1, 2.9]

Forking saves the seconds that two new processes spend on imports. An error of a rank is raised here, with its
traceback, and ends the other one.
"""

import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from torch import distributed as dist
from torch import multiprocessing

__all__ = ["NUM_RANKS", "on_two_ranks"]

NUM_RANKS = 2
SECONDS = 120


def on_two_ranks(work: Callable[[int], Any]) -> list[Any]:
    """What `work(rank)` returned on each, by rank; it must be what pickle can hold.

    Raises ProcessRaisedException with the traceback of the rank that failed first, TimeoutError after `SECONDS`.
    """
    assert not dist.is_initialized(), "a group that is there already would be that of the forked processes, too"
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # torchrun keeps it, too
    try:
        with tempfile.TemporaryDirectory() as folder:
            _wait(work, store.port, Path(folder))
            return [pickle.loads((Path(folder) / f"{rank}").read_bytes()) for rank in range(NUM_RANKS)]
    finally:
        del store  # a process that is forked later must not collect it: it would wait for a thread that it has not


def _wait(work: Callable[[int], Any], port: int, folder: Path) -> None:
    ranks = multiprocessing.start_processes(_run, (work, port, folder), NUM_RANKS, join=False, start_method="fork")
    end = time.monotonic() + SECONDS
    while not ranks.join(timeout=1.0):
        if time.monotonic() > end:
            for process in ranks.processes:
                process.kill()
            raise TimeoutError(f"two ranks still run after {SECONDS} s")


def _run(rank: int, work: Callable[[int], Any], port: int, folder: Path) -> None:
    torch.set_num_threads(1)  # the threads of OpenMP are not forked
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ.update(_environment(rank, port))
    result = work(rank)
    (folder / f"{rank}").write_bytes(pickle.dumps(result))
    if dist.is_initialized():
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # the destructors of gloo and DDP hung in 2 runs of 24, after all was done


def _environment(rank: int, port: int) -> dict[str, str]:
    """As torchrun sets it on one machine."""
    return {
        **{name: str(rank) for name in ("RANK", "LOCAL_RANK", "ROLE_RANK")},
        **{name: str(NUM_RANKS) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE")},
        **{"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
        **{"TORCHELASTIC_RUN_ID": "test", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"},
        "OMP_NUM_THREADS": "1",
    }
