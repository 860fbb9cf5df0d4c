"""A source of rows -> its token store: found in the cache, or encoded into it.

An entry is a folder of `<cache>/tokens`, named after everything that its samples depend on. It is written under
another name and renamed, so an entry is whole or absent. Entries can be deleted at any time.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from radixtrain.checkpoints.tensors import FileDigest, digest_of_file
from radixtrain.data.chat import ChatEncoder
from radixtrain.data.files.sources import Source, files_of
from radixtrain.data.formats import open_rows
from radixtrain.data.sample import EncodeReport, TooLongError
from radixtrain.data.tokenized.encode import encode_blocks, num_processes
from radixtrain.data.tokenized.fingerprint import fingerprint
from radixtrain.data.tokenized.store import ABOUT, SAMPLES, TokenStore, TokenWriter, write_about
from radixtrain.errors import DataError, UserError, first_line
from radixtrain.text_files import check_file

logger = logging.getLogger(__name__)


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
    files = {path: digest_of_file(Path(path)) for path in files_of(source)}
    if not files:  # of a data set whose files are not known, such as one that is made by a script
        return _without_cache(source, encoder, options)
    about = {name: getattr(source, name) for name in ("path", "subset", "split", "columns")}
    about["skip_bad_rows"] = options.skip_bad_rows
    entry = options.folder / fingerprint(encoder, about, files)
    if not options.overwrite_cache and os.access(entry / ABOUT, os.R_OK):
        return _opened(source, entry, " (tokenised by an earlier run)")
    with _written_to(options.folder):
        options.folder.mkdir(parents=True, exist_ok=True)
        staging = tempfile.TemporaryDirectory(prefix=f".{entry.name}.", dir=options.folder, ignore_cleanup_errors=True)
        made = Path(staging.name) / entry.name
        made.mkdir()  # with the permissions that the umask gives, while the temporary folder is for its owner only
    try:
        _encode(source, encoder, options, made, files)
        _check_unchanged(files)
    except BaseException:
        staging.cleanup()
        raise
    if options.overwrite_cache:
        shutil.rmtree(entry, ignore_errors=True)
    try:
        made.rename(entry)
    except OSError:  # another process has written it meanwhile, or another user whose files this one may not read
        return _opened(source, made, "", staging)
    staging.cleanup()
    return _opened(source, entry, "")


def _check_unchanged(files: Mapping[str, FileDigest]) -> None:
    """Raise UserError if a file has changed since before its rows were read."""
    for path, digest in files.items():
        if digest_of_file(Path(path)) != digest:
            raise UserError(f"{path}: changed while it was read; start again when it is complete")


def _without_cache(source: Source, encoder: ChatEncoder, options: TokenizingOptions) -> Tokenized:
    """Encode without the cache, for this process only."""
    folder = tempfile.TemporaryDirectory(prefix="radixtrain-tokens-")
    _encode(source, encoder, options, Path(folder.name), {})
    return _opened(source, Path(folder.name), "", folder)


def _encode(
    source: Source, encoder: ChatEncoder, options: TokenizingOptions, folder: Path, files: Mapping[str, FileDigest]
) -> None:
    """Write an entry into a folder."""
    report, long = EncodeReport(), None
    num_proc = num_processes(options.dataset_num_proc, sum(file.size for file in files.values()))
    writer = TokenWriter(folder)
    with tqdm(desc=f"tokenising {source.label}", unit=" rows", leave=False, disable=None) as bar:
        for block in encode_blocks(encoder, open_rows(source), num_proc, options.skip_bad_rows):
            with _written_to(options.folder):
                writer.add(block.batch)
            report.add(block.report)
            long = long or block.first_long
            bar.update(block.report.num_rows)
    with _written_to(options.folder):
        digest = writer.close()
    if long is not None:
        raise _all_long(long, report)
    if not report.num_samples:
        shown = f"; the first: {report.bad_rows[0]}" if report.bad_rows else ""
        raise UserError(f"{source.label}: none of its {report.num_rows} rows can be used; {report}{shown}")
    with _written_to(options.folder):
        write_about(folder, {"digest": digest, "report": vars(report)})


def _opened(
    source: Source, folder: Path, hint: str, owned: tempfile.TemporaryDirectory[str] | None = None
) -> Tokenized:
    try:
        check_file(folder / SAMPLES)
        store = TokenStore(folder, owned).opened()
        report = EncodeReport(**store.about["report"])
    except (OSError, ValueError) as error:
        reason = f"cannot be read: {first_line(error)}; tokenise again with --data.overwrite_cache true"
        raise UserError(f"the tokens in {folder} {reason}") from error
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


@contextmanager
def _written_to(folder: Path) -> Iterator[None]:
    """Name the cache folder in an error of the file system."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"data.cache_dir {folder}: cannot be written: {reason}; name a writable folder") from None
