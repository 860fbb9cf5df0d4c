"""A source of rows -> its token store: found in the cache, or encoded into it.

An entry is a folder of `<cache>/tokens`, named after everything that its samples depend on. It is written under
another name and renamed, so an entry is whole or absent. Entries can be deleted at any time; those that no run has used
for `DAYS_KEPT` days are deleted when another one is written.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from radixtrain.checkpoints.tensors import digest_of_file
from radixtrain.data.chat import ChatEncoder
from radixtrain.data.files.sources import Source, files_of
from radixtrain.data.formats import open_rows
from radixtrain.data.sample import EncodeReport, TooLongError
from radixtrain.data.tokenized.encode import encode_blocks, num_processes
from radixtrain.data.tokenized.fingerprint import FileContents, contents_of, fingerprint
from radixtrain.data.tokenized.store import ABOUT, SAMPLES, TokenStore, TokenWriter, read_about, write_about
from radixtrain.errors import DataError, UserError
from radixtrain.screen import screen

logger = logging.getLogger(__name__)

NAME, LEFT = re.compile(r"[0-9a-f]{32}"), re.compile(r"\.[0-9a-f]{32}\..+")  # of an entry; of what a killed run left
DAYS_KEPT = 30
SECONDS_BETWEEN_LINES = 10.0  # in a log that is not a terminal
FREE_SPACE = 256 << 20  # bytes to leave on the disk of the cache


def cache_folder() -> Path:
    """Return `$RADIXTRAIN_CACHE`, or `radixtrain` in `$XDG_CACHE_HOME` or `~/.cache`."""
    if os.environ.get("RADIXTRAIN_CACHE"):
        return Path(os.environ["RADIXTRAIN_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "radixtrain"


@dataclass(frozen=True, kw_only=True)
class TokenizingOptions:
    """How rows are tokenised, apart from the settings of their encoder.

    skip_bad_rows: count rows that cannot be used; otherwise the first one is an error.
    dataset_num_proc: processes; None chooses by the size of the files.
    cache_dir: where entries are kept; None for the folder of radixtrain's cache.
    overwrite_cache: tokenise again.
    """

    skip_bad_rows: bool = False
    dataset_num_proc: int | None = None
    cache_dir: str | None = None
    overwrite_cache: bool = False

    @property
    def folder(self) -> Path:
        """Return the folder of the entries, whether it exists or not."""
        return Path(self.cache_dir).expanduser().absolute() if self.cache_dir else cache_folder() / "tokens"


@dataclass(frozen=True)
class Tokenized:
    """The samples of a source, and a report on its rows. digest: of the samples."""

    store: TokenStore
    report: EncodeReport
    digest: str


def tokenized(source: Source, encoder: ChatEncoder, options: TokenizingOptions) -> Tokenized:
    """Return the samples of a source, in the order of its rows.

    Raises what `open_rows` and `ChatEncoder` raise; UserError if no row can be used, if samples are longer than
    `max_length` and that is an error, or if the cache cannot be written.
    """
    files = {path: contents_of(path) for path in files_of(source)}
    if not files:  # of a data set whose files are not known, such as one that is made by a script
        return _without_cache(source, encoder, options)
    about = {name: getattr(source, name) for name in ("path", "subset", "split", "columns")}
    about["skip_bad_rows"] = options.skip_bad_rows
    entry = options.folder / fingerprint(encoder, about, files)
    if not options.overwrite_cache and _is_whole(entry):
        with suppress(OSError):  # a shared folder may be read-only
            os.utime(entry / ABOUT)  # when it was last used
        return _opened(source, entry, " (tokenised by an earlier run)")
    with _written_to(options.folder):
        _delete_unused(options.folder)
        _check_space(options.folder, files.values())
        staging = tempfile.TemporaryDirectory(prefix=f".{entry.name}.", dir=options.folder, ignore_cleanup_errors=True)
        made = Path(staging.name) / entry.name
        made.mkdir()  # with the permissions that the umask gives, while the temporary folder is for its owner only
    try:
        _encode(source, encoder, options, made, files)
        _check_unchanged(files)
        if not _place(made, entry):
            return _opened(source, made, "", staging)
    except BaseException:
        staging.cleanup()
        raise
    staging.cleanup()
    return _opened(source, entry, "")


def _is_whole(entry: Path) -> bool:
    """Return whether there is an entry, and its files are as they were written."""
    if not entry.is_dir():
        return False
    damage = damage_in(entry)
    if damage is not None:
        logger.warning("the tokens in %s cannot be used; they are made again (%s)", entry, damage)
    return damage is None


def damage_in(entry: Path) -> str | None:
    """Say what is wrong with an entry, or None if its files are as they were written. Reads them all."""
    try:
        written = read_about(entry)["checksum"]
        found = digest_of_file(entry / SAMPLES).xxh3_128
    except (OSError, ValueError) as error:
        return str(error)
    return None if found == written else f"{SAMPLES} is not as it was written"


def _check_unchanged(files: Mapping[str, FileContents]) -> None:
    """Raise UserError if a file has changed since before its rows were read."""
    for path, contents in files.items():
        if contents_of(path) != contents:
            raise UserError(f"{path}: changed while it was read; start again when it is complete")


def _without_cache(source: Source, encoder: ChatEncoder, options: TokenizingOptions) -> Tokenized:
    """Encode without the cache, for this process only."""
    folder = tempfile.TemporaryDirectory(prefix="radixtrain-tokens-")
    _encode(source, encoder, options, Path(folder.name), {})
    return _opened(source, Path(folder.name), "", folder)


def _encode(
    source: Source, encoder: ChatEncoder, options: TokenizingOptions, folder: Path, files: Mapping[str, FileContents]
) -> None:
    """Write an entry into a folder."""
    report, long = EncodeReport(), None
    num_proc = num_processes(options.dataset_num_proc, sum(file.num_bytes for file in files.values()))
    writer = TokenWriter(folder)
    with _progress(source.label, _num_rows(files)) as update:
        for block in encode_blocks(encoder, open_rows(source), num_proc, options.skip_bad_rows):
            with _written_to(options.folder):
                writer.add(block.batch)
            report.add(block.report)
            long = long or block.first_long
            update(report.num_rows, report.num_tokens)
    with _written_to(options.folder):
        digest = writer.close()
    if long is not None:
        raise _all_long(long, report)
    if not report.num_samples:
        shown = f"; the first: {report.bad_rows[0]}" if report.bad_rows else ""
        raise UserError(f"{source.label}: none of its {report.num_rows} rows can be used; {report}{shown}")
    with _written_to(options.folder):
        checksum = digest_of_file(folder / SAMPLES).xxh3_128
        about = {"digest": digest, "report": vars(report), "checksum": checksum}
        write_about(folder, about)


def _num_rows(files: Mapping[str, FileContents]) -> int | None:
    """Estimate the number of rows, if a line is a row."""
    is_known = files and all(path.endswith((".jsonl", ".ndjson")) for path in files)
    return sum(contents.num_lines for contents in files.values()) if is_known else None


def _opened(
    source: Source, folder: Path, hint: str, owned: tempfile.TemporaryDirectory[str] | None = None
) -> Tokenized:
    store = TokenStore(folder, owned).opened()
    report = EncodeReport(**store.about["report"])
    logger.info("%s: %s, %s tokens%s", source.label, report, f"{report.num_tokens:,}", hint)
    for line in report.lines():
        logger.warning("%s", line)
    return Tokenized(store, report, store.about["digest"])


def _all_long(first: TooLongError, report: EncodeReport) -> DataError:
    """Make the error of the first sample that is too long; it names how many there are, and the longest."""
    others = report.num_long_samples - 1
    if not others:
        return first
    excess, _, hint = first.reason.partition("; ")
    more = f"so do {others:,} more, the longest of {report.longest:,} tokens at {report.longest_where}"
    return DataError(first.where, f"{excess}, and {more}; {hint}")


def _place(made: Path, entry: Path) -> bool:
    """Rename a finished entry. Another process may have written the same one meanwhile.

    Returns False if an entry of another user has its name, which this one may not replace.
    """
    try:
        made.rename(entry)
    except OSError:
        if not entry.is_dir():
            raise
        old = Path(tempfile.mkdtemp(prefix=f".{entry.name}.old.", dir=entry.parent))
        try:
            entry.rename(old / entry.name)
        except PermissionError:
            return False
        finally:
            shutil.rmtree(old, ignore_errors=True)
        made.rename(entry)
    return True


def _delete_unused(folder: Path) -> None:
    """Delete entries that were not used for long, and what killed runs left a day ago or earlier.

    The folder may have other files: names that no entry has are not touched.
    """
    for entry in folder.iterdir() if folder.is_dir() else ():
        is_left = LEFT.fullmatch(entry.name) is not None
        with suppress(OSError):  # another run deletes it too, or it belongs to another user
            is_entry = NAME.fullmatch(entry.name) is not None and (entry / SAMPLES).is_file()
            if (is_left or is_entry) and _days_unused(entry) > (1 if is_left else DAYS_KEPT):
                shutil.rmtree(entry, ignore_errors=True)


def _days_unused(folder: Path) -> float:
    """Return the age of the newest file in days: an entry that is still written is young, whenever it began."""
    return (time.time() - max(path.stat().st_mtime for path in (folder, *folder.rglob("*")))) / 86400


def _check_space(folder: Path, files: Collection[FileContents]) -> None:
    """Raise UserError without space: token ids take about as much as their text, rarely more than twice as much."""
    folder.mkdir(parents=True, exist_ok=True)
    needed, free = sum(file.num_bytes for file in files) + FREE_SPACE, shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"data.cache_dir {folder}: {free >> 20:,} MiB are free and about {needed >> 20:,} MiB are needed for the "
            f"tokens; make space or name another folder"
        )


@contextmanager
def _written_to(folder: Path) -> Iterator[None]:
    """Name the cache folder in an error of the file system."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"data.cache_dir {folder}: cannot be written: {reason}; name a writable folder") from None


@contextmanager
def _progress(name: str, num_rows: int | None) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that takes the rows and the tokens done so far: a bar on a terminal, else lines in the log.

    name: what is tokenised. num_rows: of all, None if that is not known.
    """
    columns = (
        TextColumn("tokenising {task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,} rows, {task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    start = last = time.perf_counter()
    has_bar = sys.stderr.isatty()
    with Progress(*columns, console=screen(stderr=True), transient=True, disable=not has_bar) as bar:
        task = bar.add_task(name, total=num_rows, rate="")

        def update(rows: int, tokens: int) -> None:
            nonlocal last
            now = time.perf_counter()
            rate = f"{tokens / (now - start):,.0f} tokens/s"
            bar.update(task, completed=rows, rate=rate)
            if not has_bar and now - last >= SECONDS_BETWEEN_LINES:
                last = now
                of_all = f" of {num_rows:,}" if num_rows else ""
                logger.info("tokenising %s: %s%s rows, %s", name, f"{rows:,}", of_all, rate)

        yield update
