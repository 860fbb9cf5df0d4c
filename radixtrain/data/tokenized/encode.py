"""Rows -> packed samples, in several processes, block by block and in the order of the file."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import NamedTuple

import pyarrow as pa

from radixtrain.cores import num_cores
from radixtrain.data.chat import ChatEncoder
from radixtrain.data.formats import Row, UnreadRow
from radixtrain.data.sample import EncodeReport, TooLongError
from radixtrain.data.tokenized.store import packed
from radixtrain.data.workers import end_with_parent, worker_context
from radixtrain.errors import DataError, UserError

ROWS_PER_BLOCK = 256
BYTES_PER_BLOCK = 1 << 20
BLOCKS_AHEAD = 3  # for each process: what waits in memory
LARGE = 8 << 20  # bytes of a file from which on starting processes pays
MAX_PROCESSES = 16

AnyRow = Row | UnreadRow


class Block(NamedTuple):
    """Some encoded rows of a file. first_long: the error of the first row that is too long, if that is an error."""

    batch: pa.RecordBatch
    report: EncodeReport
    first_long: TooLongError | None = None


def num_processes(asked: int | None, num_bytes: int) -> int:
    """Choose how many processes tokenise. asked: `dataset_num_proc`; None is one per core if the file is large."""
    if asked is not None:
        return asked
    return min(num_cores(), MAX_PROCESSES) if num_bytes >= LARGE else 1


def encode_blocks(encoder: ChatEncoder, rows: Iterable[AnyRow], num_proc: int, skip_bad_rows: bool) -> Iterator[Block]:
    """Yield the blocks of a file, in order.

    rows: from `open_rows`.
    num_proc: processes; 1 works in this one.
    skip_bad_rows: True counts rows that cannot be used; otherwise the first one raises its DataError. Rows that are too
        long do not raise here, so that the error can count them.

    Raises UserError if a process is killed, as happens when memory runs out.
    """
    if num_proc == 1:
        yield from (_encode(encoder, block, skip_bad_rows) for block in _blocks(rows))
        return
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads do not survive a fork
    pool = ProcessPoolExecutor(num_proc, worker_context(), initializer=_start, initargs=(encoder, skip_bad_rows))
    try:
        waiting: deque[Future[Block]] = deque()
        for block in _blocks(rows):
            waiting.append(pool.submit(_encode_here, block))
            if len(waiting) > BLOCKS_AHEAD * num_proc:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise UserError(
            f"one of {num_proc} tokenising processes was killed, probably because the machine ran out of memory; set "
            f"data.dataset_num_proc to fewer"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _blocks(rows: Iterable[AnyRow]) -> Iterator[list[AnyRow]]:
    block: list[AnyRow] = []
    num_bytes = 0
    for row in rows:
        block.append(row)
        num_bytes += len(row.content) if isinstance(row, UnreadRow) and isinstance(row.content, bytes) else 0
        if len(block) == ROWS_PER_BLOCK or num_bytes >= BYTES_PER_BLOCK:
            yield block
            block, num_bytes = [], 0
    if block:
        yield block


def _encode(encoder: ChatEncoder, rows: list[AnyRow], skip_bad_rows: bool) -> Block:
    report = EncodeReport()
    long: list[TooLongError] = []

    def on_error(error: DataError) -> None:
        if not skip_bad_rows and not isinstance(error, TooLongError):
            raise error
        if isinstance(error, TooLongError):
            long.append(error)

    batch = packed(encoder.encode_all(rows, on_error, report))
    return Block(batch, report, long[0] if long and not skip_bad_rows else None)


_worker: tuple[ChatEncoder, bool] | None = None


def _start(encoder: ChatEncoder, skip_bad_rows: bool) -> None:
    global _worker
    _worker = encoder, skip_bad_rows
    end_with_parent()  # if the parent was killed, nothing would send rows or say that there are no more


def _encode_here(rows: list[AnyRow]) -> Block:
    """Encode rows in a worker process."""
    assert _worker is not None
    encoder, skip_bad_rows = _worker
    return _encode(encoder, rows, skip_bad_rows)
