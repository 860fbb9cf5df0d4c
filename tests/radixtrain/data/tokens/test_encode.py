"""Processes: how many, and what happens if one is killed."""

import multiprocessing
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from radixtrain.data import cache
from radixtrain.data.cache import encode_blocks
from radixtrain.data.chat import ChatEncoder
from radixtrain.data.files.sources import UnreadRow
from radixtrain.errors import UserError
from tests.support.processes import wait_for_end

LINE = b'{"prompt": "one", "completion": "two"}'


def lines(count: int, line: bytes = LINE) -> list[UnreadRow]:
    return [UnreadRow(line, f"a.jsonl:{number}") for number in range(1, count + 1)]


def test_blocks_are_bounded_by_rows_and_by_bytes(encoder: Callable[..., ChatEncoder]) -> None:
    by_rows = list(encode_blocks(encoder(), lines(600), 1, skip_bad_rows=False))
    assert [report.num_rows for _, report in by_rows] == [256, 256, 88]
    long = b'{"text": "' + b"x" * 400_000 + b'"}'
    by_bytes = list(encode_blocks(encoder(), lines(5, long), 1, skip_bad_rows=False))
    assert [report.num_rows for _, report in by_bytes] == [3, 2]


def test_few_blocks_wait_in_memory(encoder: Callable[..., ChatEncoder]) -> None:
    """The file is read no further than the processes need."""
    taken = 0

    def counted() -> Any:
        nonlocal taken
        for row in lines(cache.ROWS_PER_BLOCK * 40):
            taken += 1
            yield row

    blocks = encode_blocks(encoder(), counted(), 2, skip_bad_rows=False)
    next(blocks)
    assert taken <= cache.ROWS_PER_BLOCK * (2 * cache.BLOCKS_AHEAD + 2)
    blocks.close()


def test_a_killed_process_is_named(encoder: Callable[..., ChatEncoder], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_encode", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(UserError, match=r"one of 2 tokenising processes was killed.*data\.dataset_num_proc"):
        list(encode_blocks(encoder(), lines(10), 2, skip_bad_rows=False))


def test_processes_of_a_killed_run_end(encoder: Callable[..., ChatEncoder]) -> None:
    made = encoder()
    read, write = os.pipe()
    parent = os.fork()
    if parent == 0:
        blocks = encode_blocks(made, lines(10), 2, skip_bad_rows=False)
        next(blocks)
        os.write(write, b" ".join(str(child.pid).encode() for child in multiprocessing.active_children()))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(parent, 0)
    for pid in map(int, os.read(read, 100).split()):
        assert wait_for_end(pid)
