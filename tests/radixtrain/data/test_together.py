"""Rows that several ranks read: who reads when, and that all have read the same."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forked_ranks import on_ranks

from radixtrain.data import together
from radixtrain.data.report import EncodeReport
from radixtrain.data.together import read_together
from radixtrain.data.tokenized.corpus import Corpus, Part
from radixtrain.errors import EndedElsewhere, UserError


def corpus_of(digest: str) -> tuple[Corpus, EncodeReport]:
    return Corpus([Part(name="rows", conversations=[], digest=digest)]), EncodeReport()


def on_machines(names: str, work: Callable[[int], Any]) -> list[Any]:
    """What `work` returns on ranks, each on the machine that its letter names."""

    def run(rank: int) -> Any:
        together.socket.gethostname = lambda: names[rank]
        return work(rank)

    return on_ranks(len(names), run)


def test_a_single_process_reads_once() -> None:
    calls = []
    found = read_together(lambda is_first: calls.append(is_first) or corpus_of("a"), "data.train_file")
    assert calls == [True]
    assert found[0].digest == corpus_of("a")[0].digest


@pytest.mark.parametrize(
    ("machines", "first"), [("aa", [True, False]), ("aabb", [True, False, True, False])], ids=["one", "two"]
)
def test_the_first_rank_of_each_machine_reads_before_the_others(
    machines: str, first: list[bool], tmp_path: Path
) -> None:
    def work(rank: int) -> bool:
        asked = []

        def read(is_first: bool) -> tuple[Corpus, EncodeReport]:
            asked.append(is_first)
            with (tmp_path / "order").open("a") as file:
                file.write(f"{rank} ")
            return corpus_of("a")

        read_together(read, "data.train_file")
        (is_first,) = asked
        return is_first

    assert on_machines(machines, work) == first
    readers = [int(rank) for rank in (tmp_path / "order").read_text().split()]
    leading = [rank for rank, is_first in enumerate(first) if is_first]
    assert readers[: len(leading)] == leading
    assert sorted(readers) == list(range(len(machines)))


def raised_by(work: Callable[[], Any]) -> tuple[type, str]:
    try:
        work()
    except Exception as error:
        return type(error), str(error)
    raise AssertionError("nothing was raised")


def test_other_rows_on_a_rank_end_the_run() -> None:
    def work(rank: int) -> tuple[type, str]:
        return raised_by(lambda: read_together(lambda _: corpus_of("ab"[rank]), "data.train_file"))

    first, second = on_machines("xy", work)
    said = "rank 1 on y reads other rows than rank 0 on x: the files differ; give every rank the same ones"
    assert first == (UserError, f"data.train_file: {said}")
    assert second[0] is EndedElsewhere


def test_an_error_of_rank_0_is_told_once() -> None:
    def read(_: bool) -> tuple[Corpus, EncodeReport]:
        raise UserError("rows.jsonl:1: no answer")

    first, second = on_machines("xx", lambda _: raised_by(lambda: read_together(read, "data.train_file")))
    assert first == (UserError, "rows.jsonl:1: no answer")
    assert second[0] is EndedElsewhere
