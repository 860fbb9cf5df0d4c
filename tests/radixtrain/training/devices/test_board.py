"""What ranks tell one another beside torch.distributed: which of them says why the run ends.

That ranks notice one that is gone or hangs, and end: `tests/claims/devices/test_kills.py`.
"""

import os
import socket

import pytest
from forked_ranks import on_ranks
from tiers import FULL

from radixtrain.distributed import ranks
from radixtrain.errors import EndedElsewhere, UserError
from radixtrain.training.devices.board import Board
from radixtrain.training.devices.telling import one_of_each_machine


@FULL
def test_one_rank_tells_what_rank_0_has_not_found():
    def work(rank):
        board = Board()
        ranks().barrier()
        if rank == 0:
            board.is_told.wait(60.0)
            said = board.claim(0.0)  # of what it finds then, such as a closed connection
        else:
            said = board.claim(0.2)
        ranks().barrier()
        return said

    said = on_ranks(3, work)
    assert said[0] is False and sorted(said[1:]) == [False, True]


@FULL
@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2", "::1"])
def test_rank_0_always_tells_and_the_others_hear_it(address):
    """On this machine, and as from others, which connect by either protocol."""
    if ":" in address and not socket.has_dualstack_ipv6():
        pytest.skip("needs a machine with IPv6")

    def work(rank):
        os.environ["MASTER_ADDR"] = address
        board = Board()
        ranks().barrier()
        said = board.claim(10.0)
        ranks().barrier()
        return said

    assert on_ranks(3, work) == [True, False, False]


@pytest.mark.parametrize(("local_rank", "error"), [("0", UserError), ("1", EndedElsewhere)])
def test_before_there_is_a_group_one_process_of_a_machine_tells(monkeypatch, local_rank, error):
    names = {"TORCHELASTIC_RUN_ID": "x", "RANK": "4", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
    for name, value in {**names, "LOCAL_RANK": local_rank}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(error), one_of_each_machine():
        raise UserError("a key")
