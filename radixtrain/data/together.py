"""Rows that several ranks read: tokenised once on each machine, and the same rows everywhere."""

from __future__ import annotations

import socket
from collections.abc import Callable

from radixtrain.data.report import EncodeReport
from radixtrain.data.tokenized.corpus import Corpus
from radixtrain.distributed import ranks
from radixtrain.errors import UserError

__all__ = ["read_together"]


def read_together(read: Callable[[bool], tuple[Corpus, EncodeReport]], key: str) -> tuple[Corpus, EncodeReport]:
    """What `read` returns here. Every rank calls this; a single process just reads.

    Rank 0 reads first, and writes the tokens. Then the first rank of every other machine does, since its cache may be
    another folder. The rest find what was written, or tokenise by themselves.

    read: `load_split` of the same rows on every rank; receives whether this rank is the first one of its machine.
    key: the key that names the files, for errors.

    Raises what `read` raises. Raises UserError if some rank has read other rows than rank 0: they would cut the steps
    differently.
    """
    here = ranks()
    machines = here.gather(socket.gethostname())
    is_first = machines.index(machines[here.rank]) == here.rank
    found = here.rank0_first(lambda: read(True) if is_first else None)
    here.barrier()
    corpus, report = found or read(False)
    digests = here.gather(corpus.digest, long_timeout=True)
    here.broadcast_from_rank0(lambda: _check_same(digests, machines, key))
    return corpus, report


def _check_same(digests: list[str], machines: list[str], key: str) -> None:
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise UserError(
                f"{key}: rank {rank} on {machines[rank]} reads other rows than rank 0 on {machines[0]}: the files "
                f"differ; give every rank the same ones"
            )
