"""A source of rows -> its token store: found in the cache, or encoded into it, in several processes.

An entry is a folder of `<cache>/tokens`, named after everything that its samples depend on. It is written under
another name and renamed, so an entry is whole or absent. Entries can be deleted at any time.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from datetime import date
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pyarrow as pa
import xxhash
from tqdm import tqdm

from radixtrain.checkpoints.tensors import FileDigest, digest_of_file
from radixtrain.cores import num_cores
from radixtrain.data.chat import ChatEncoder
from radixtrain.data.files.sources import AnyRow, Source, UnreadRow, files_of, open_rows
from radixtrain.data.sample import EncodeReport
from radixtrain.data.template import writes_date
from radixtrain.data.tokens.store import SAMPLES, TokenStore, TokenWriter, packed, write_about
from radixtrain.data.workers import end_with_parent, worker_context
from radixtrain.errors import DataError, UserError, first_line
from radixtrain.text_files import check_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

HERE = Path(__file__).resolve().parent
ROWS_PER_BLOCK = 256
BYTES_PER_BLOCK = 1 << 20
BLOCKS_AHEAD = 3  # for each process: what waits in memory
LARGE = 8 << 20  # bytes of a file from which on starting processes pays
MAX_PROCESSES = 16
UNFINISHED = f".{'[0-9a-f]' * 32}.{'[0-9a-f]' * 32}"  # an entry while it is written
SECONDS_OF_A_DAY = 86_400


def cache_folder() -> Path:
    """Return `$RADIXTRAIN_CACHE`, or `radixtrain` in `$XDG_CACHE_HOME` or `~/.cache`."""
    if os.environ.get("RADIXTRAIN_CACHE"):
        return Path(os.environ["RADIXTRAIN_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "radixtrain"


@dataclass(frozen=True)
class Tokenized:
    """The samples of a source, and a report on its rows. digest: of the samples."""

    store: TokenStore
    report: EncodeReport
    digest: str


def tokenized(source: Source, encoder: ChatEncoder, settings: Any) -> Tokenized:
    """Return the samples of a source, in the order of its rows. settings: of an `SFTData`.

    Raises what `open_rows` and `ChatEncoder` raise; UserError if no row can be used, or if the cache cannot be
    written.
    """
    files = {path: digest_of_file(Path(path)) for path in files_of(source)}
    about = {name: getattr(source, name) for name in ("path", "subset", "split", "columns")}
    about["on_bad_row"] = settings.on_bad_row
    cache = Path(settings.cache_dir).expanduser().absolute() if settings.cache_dir else cache_folder() / "tokens"
    entry = cache / fingerprint(encoder, about, files)
    if os.path.exists(entry):
        return _opened(source, entry, " (tokenised by an earlier run)")
    made = cache / f".{entry.name}.{uuid4().hex}"
    with _written_to(cache):
        made.mkdir(parents=True)
    try:
        _delete_unfinished(cache, made.stat().st_mtime)
        _write_entry(source, encoder, settings, made, files)
        _check_unchanged(files)
        with suppress(OSError):  # another process has written it meanwhile
            made.rename(entry)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return _opened(source, entry, "")


def _delete_unfinished(cache: Path, now: float) -> None:
    """Delete what killed processes have left: unfinished entries into which nothing was written for a day.

    now: by the clock of the disk.
    """
    for folder in cache.glob(UNFINISHED):
        with suppress(OSError):  # another process finishes or deletes it
            if max(path.stat().st_mtime for path in (folder, *folder.iterdir())) < now - SECONDS_OF_A_DAY:
                shutil.rmtree(folder)


def _check_unchanged(files: Mapping[str, FileDigest]) -> None:
    """Raise UserError if a file has changed since before its rows were read."""
    for path, digest in files.items():
        if digest_of_file(Path(path)) != digest:
            raise UserError(f"{path}: changed while it was read; start again when it is complete")


def _write_entry(
    source: Source, encoder: ChatEncoder, settings: Any, folder: Path, files: Mapping[str, FileDigest]
) -> None:
    """Write an entry into a folder."""
    report = EncodeReport()
    num_proc = num_processes(settings.dataset_num_proc, sum(file.size for file in files.values()))
    writer = TokenWriter(folder)
    with tqdm(desc=f"tokenising {source.label}", unit=" rows", leave=False, disable=None) as bar:
        for batch, of_block in encode_blocks(encoder, open_rows(source), num_proc, settings.on_bad_row == "skip"):
            with _written_to(folder.parent):
                writer.add(batch)
            report.add(of_block)
            bar.update(of_block.num_rows)
    with _written_to(folder.parent):
        digest = writer.close()
    if not report.num_samples:
        shown = f"; the first: {report.bad_rows[0]}" if report.bad_rows else ""
        raise UserError(f"{source.label}: none of its {report.num_rows} rows can be used; {report}{shown}")
    with _written_to(folder.parent):
        write_about(folder, {"digest": digest, "report": vars(report)})


def _opened(source: Source, folder: Path, hint: str) -> Tokenized:
    try:
        check_file(folder / SAMPLES)
        store = TokenStore(folder).opened()
        report = EncodeReport(**store.about["report"])
    except (OSError, ValueError) as error:
        raise UserError(f"the tokens in {folder} cannot be read: {first_line(error)}; delete that folder") from error
    logger.info("%s: %s, %s tokens%s", source.label, report, f"{report.num_tokens:,}", hint)
    for line in report.lines():
        logger.warning("%s", line)
    return Tokenized(store, report, store.about["digest"])


@contextmanager
def _written_to(folder: Path) -> Iterator[None]:
    """Name the cache folder in an error of the file system."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"data.cache_dir {folder}: cannot be written: {reason}; name a writable folder") from None


# In several processes


Block = tuple[pa.RecordBatch, EncodeReport]


def num_processes(asked: int | None, num_bytes: int) -> int:
    """Choose how many processes tokenise. asked: `dataset_num_proc`; None is one per core if the file is large."""
    if asked is not None:
        return asked
    return min(num_cores(), MAX_PROCESSES) if num_bytes >= LARGE else 1


def encode_blocks(encoder: ChatEncoder, rows: Iterable[AnyRow], num_proc: int, skip_bad_rows: bool) -> Iterator[Block]:
    """Yield the blocks of a file, in order.

    rows: from `open_rows`.
    num_proc: processes; 1 works in this one.
    skip_bad_rows: True counts rows that cannot be used; otherwise the first one raises its DataError.

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
    report, errors = EncodeReport(), list[DataError]()
    return packed(encoder.encode_all(rows, errors.append if skip_bad_rows else None, report)), report


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


# The name of an entry


def fingerprint(encoder: ChatEncoder, source: dict[str, Any], files: Mapping[str, FileDigest]) -> str:
    """Name the samples that `encoder` makes of these files.

    source: what else they depend on: its path, columns, split, policies.
    files: by their paths, which are part of `where`.

    The order of keys counts: templates print the values of `chat_template_kwargs` in theirs.
    """
    options = {field.name: getattr(encoder, field.name) for field in fields(encoder) if field.name != "tokenizer"}
    key = {
        "encoder": type(encoder).__name__,
        "options": options,
        "tokenizer": _digest_of_tokenizer(encoder.tokenizer),
        "versions": _versions(),
        "source": source,
        "files": {path: file.xxh3_128 for path, file in files.items()},
    }
    if encoder.template_date is None and writes_date(encoder.tokenizer):
        key["date"] = date.today().isoformat()
    return xxhash.xxh3_128_hexdigest(json.dumps(key, default=repr).encode())


def _digest_of_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """Digest all files that the tokenizer saves, including its chat template."""
    digest = xxhash.xxh3_128(type(tokenizer).__name__.encode())
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file():
                digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


@cache
def _versions() -> dict[str, str]:
    """Name the versions of the libraries that render and tokenise, and of this folder's own sources."""
    import tokenizers
    import transformers

    digest = xxhash.xxh3_128()
    for path in sorted(HERE.rglob("*.py")):
        digest.update(path.read_bytes())
    return {
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
        "sources": digest.hexdigest(),
    }
