"""Ranks that ask one another: the same answer everywhere, and an error of rank 0 ends all."""

import time
from datetime import timedelta

import pytest
import torch

from radixtrain.distributed import ranks
from radixtrain.errors import EndedElsewhere, UserError
from tests.support import FULL
from tests.support.processes import on_ranks


def test_all_ranks_get_the_same_answers():
    def ask(rank: int) -> tuple:
        here = ranks()
        own = torch.full((2, 3), float(rank + 1), dtype=torch.float64)
        total = here.sum(own)
        assert torch.equal(own, torch.full((2, 3), float(rank + 1), dtype=torch.float64))
        here.barrier()
        return (
            *(here.rank, here.size, here.is_first),
            *(here.largest(rank, -rank), here.any(rank == 2), here.any(False)),
            *(total.tolist(), here.gather(f"of {rank}"), here.broadcast_from_rank0(lambda: [rank, "made"])),
        )

    answers = on_ranks(3, ask)
    assert [answer[:3] for answer in answers] == [(0, 3, True), (1, 3, False), (2, 3, False)]
    expected = ((2, 0), True, False, [[6.0] * 3] * 2, ["of 0", "of 1", "of 2"], [0, "made"])
    assert [answer[3:] for answer in answers] == [expected] * 3


def test_rank_0_comes_first(tmp_path):
    def read(rank: int) -> str:
        def make() -> str:
            path = tmp_path / "made"
            if not path.exists():
                assert rank == 0
                time.sleep(0.2)  # in which the other one would come, if it did not wait
                path.write_text("by rank 0")
            return f"{rank}: {path.read_text()}"

        return ranks().rank0_first(make)

    assert on_ranks(2, read) == ["0: by rank 0", "1: by rank 0"]


@pytest.mark.parametrize("way", ["broadcast_from_rank0", "rank0_first"])
def test_an_error_of_rank_0_ends_the_others(way):
    def fail(rank: int) -> str:
        def make() -> None:
            raise UserError("there is no such file")

        try:
            getattr(ranks(), way)(make)
        except UserError as error:
            return f"error: {error}"
        except EndedElsewhere:
            return "ended"
        return "went on"

    assert on_ranks(2, fail) == ["error: there is no such file", "ended"]


IMPATIENT = {
    "any": lambda: ranks().any(True),
    "gather": lambda: ranks().gather(1),
    "broadcast_from_rank0": lambda: ranks().broadcast_from_rank0(lambda: 1),
}


@FULL
@pytest.mark.parametrize("ask", IMPATIENT.values(), ids=IMPATIENT)
def test_a_rank_that_hangs_is_not_waited_for_longer_than_a_step(ask, tmp_path):
    def wait(rank: int) -> str:
        if rank == 0:
            while not (tmp_path / "gave up").exists():
                time.sleep(0.01)
            return "slept"
        with pytest.raises(RuntimeError, match=r"(?i)timed? ?out"):  # and not that rank 0 has ended
            ask()
        (tmp_path / "gave up").touch()
        return "gave up"

    assert on_ranks(2, wait, timeout=timedelta(seconds=1)) == ["slept", "gave up"]


@FULL
def test_rank_0_may_work_for_hours():
    """Longer than a step may take, that is."""

    def wait(rank: int) -> int:
        here = ranks()
        return here.broadcast_from_rank0(lambda: time.sleep(1.5) or 5, long_timeout=True) + here.rank0_first(
            lambda: time.sleep(1.5 * here.is_first) or 1
        )

    assert on_ranks(2, wait, timeout=timedelta(seconds=1)) == [6, 6]
