"""Rows are tokenised once, by some processes: which changes tokenise again, what an interrupted run leaves."""

import logging
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from radixtrain.data import cache
from radixtrain.data.cache import Tokenized, encode_blocks
from radixtrain.data.chat import ChatEncoder
from radixtrain.data.files.sources import UnreadRow
from radixtrain.data.tokens.store import ABOUT, SAMPLES
from radixtrain.errors import DataError, UserError
from tests.support import cases
from tests.support.batches import CHATML, MARKED
from tests.support.processes import wait_for_end
from tests.support.runs import write_rows

Tokenize = Callable[..., Tokenized]


def chat(question: str, answer: str, **columns: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages, **columns}


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "chats.jsonl", [chat(f"question {n}", f"answer {n}") for n in range(20)])


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def ids_of(found: Tokenized) -> list[list[list[int]]]:
    return [[sample.input_ids.tolist() for sample in samples] for samples in found.store]


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A name for each time that rows are encoded."""
    calls: list[str] = []
    encode = cache._write_entry
    monkeypatch.setattr(cache, "_write_entry", lambda source, *rest: calls.append(source.path) or encode(source, *rest))
    return calls


def test_the_second_time_nothing_is_encoded(
    chats: Path, tokenize: Tokenize, encoded: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        first, second = tokenize(chats), tokenize(chats)
    assert encoded == [str(chats)]
    assert ids_of(first) == ids_of(second) and len(first.store) == 20
    assert first.report == second.report and first.digest == second.digest
    first_line, second_line = caplog.messages
    assert second_line == f"{first_line} (tokenised by an earlier run)"


def another_version(path: Path, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    patch.setattr(sys.modules["transformers"], "__version__", "99")  # not an import: other tests load it again
    return {}


def tomorrow(path: Path, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    class Tomorrow(date):
        @classmethod
        def today(cls) -> date:
            return date(2099, 1, 2)

    patch.setattr(cache, "date", Tomorrow)
    return DATED


def another_row(path: Path, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    write_rows(path, [chat("another", "one")])
    return {}


DATED = {"template": "{{- strftime_now('%Y') }}" + CHATML}
LOUD = "{%- if loud %}{{- loud | tojson }}{% endif %}" + CHATML
CHANGES = {
    # options of the first run, and of the second one
    "a row": ({}, another_row),
    "the library that renders": ({}, another_version),
    "the date, which the template writes": (DATED, tomorrow),
    "the template": ({}, {"template": CHATML.replace("\\n", " ")}),
    "variables of the template": ({"template": LOUD}, {"template": LOUD, "chat_template_kwargs": {"loud": False}}),
    "their order": (
        {"template": LOUD, "chat_template_kwargs": {"loud": {"b": 1, "a": 2}}},
        {"template": LOUD, "chat_template_kwargs": {"loud": {"a": 2, "b": 1}}},
    ),
    "columns": ({}, {"columns": {"messages": "messages"}}),
    "max_length": ({}, {"max_length": 500}),
    "split_turns": ({"template": MARKED}, {"template": MARKED, "split_turns": False}),
    "assistant_only_loss": ({}, {"assistant_only_loss": False}),
    "the vocabulary": ({}, {"vocab_size": 300}),
    "on_bad_row": ({}, {"on_bad_row": "skip"}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_tokenises_again(
    change: str, chats: Path, tokenize: Tokenize, encoded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = CHANGES[change]
    tokenize(chats, **first)
    tokenize(chats, **first)
    assert len(encoded) == 1
    changed = second(chats, monkeypatch) if callable(second) else second
    cache._versions.cache_clear()
    try:
        tokenize(chats, **changed)
    finally:
        cache._versions.cache_clear()
    assert len(encoded) == 2


def test_what_does_not_tokenise_again(chats: Path, tokenize: Tokenize, encoded: list[str]) -> None:
    tokenize(chats)
    os.utime(chats, (1, 1))
    tokenize(chats, dataset_num_proc=2)
    assert len(encoded) == 1


def test_another_name_is_another_entry(chats: Path, tokenize: Tokenize, tmp_path: Path) -> None:
    """The name is part of what errors say; also that of a file of a glob."""
    copy = Path(shutil.copy(chats, tmp_path / "a.json"))
    glob = tmp_path / "a.js*"
    assert tokenize(chats).store[0][0].where == f"{chats}:1"
    assert tokenize(copy).store[0][0].where == tokenize(glob).store[0][0].where == f"{copy}:1"
    copy.rename(tmp_path / "a.jsonl")
    assert tokenize(glob).store[0][0].where == f"{tmp_path}/a.jsonl:1"


@pytest.fixture(params=cases([1, 3], [3]))
def num_proc(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def test_processes_give_what_one_gives(num_proc: int, tmp_path: Path, tokenize: Tokenize) -> None:
    rows = [chat(f"question {n}" * (n % 7 + 1), f"answer {n}") for n in range(900)]
    path = write_rows(tmp_path / "many.jsonl", rows)
    found = tokenize(path, dataset_num_proc=num_proc)
    assert [samples[0].where for samples in found.store] == [f"{path}:{n}" for n in range(1, 901)]
    assert len(found.store[899]) == 1 and bytes(found.store[899][0].input_ids[-11:-1].tolist()) == b"answer 899"


def test_the_first_bad_row_of_the_file_is_the_error(num_proc: int, tmp_path: Path, tokenize: Tokenize) -> None:
    rows: list[Any] = [chat(f"question {n}", "yes") for n in range(700)]
    rows[650] = "not JSON"
    rows[401] = {"nothing": 1}
    path = write_rows(tmp_path / "bad.jsonl", rows)
    with pytest.raises(DataError, match=rf"^{path}:402: no format has the columns nothing"):
        tokenize(path, dataset_num_proc=num_proc)
    assert entries(tmp_path / "cache") == []


def test_skipped_rows_are_counted_and_the_first_few_named(
    num_proc: int, tmp_path: Path, tokenize: Tokenize, caplog: pytest.LogCaptureFixture
) -> None:
    rows: list[Any] = [chat("a", "b"), "not JSON", {"nothing": 1}] * 300
    path = write_rows(tmp_path / "bad.jsonl", rows)
    for _ in range(2):  # from the cache too
        caplog.clear()
        with caplog.at_level(logging.INFO):
            found = tokenize(path, on_bad_row="skip", dataset_num_proc=num_proc)
        assert (found.report.num_rows, found.report.num_bad_rows, len(found.store)) == (900, 600, 300)
        lines = caplog.messages[1:]
        assert lines[0] == "skipped 600 bad rows:" and lines[-1] == "  and 595 more"
        assert [line.split(": ")[0] for line in lines[1:-1]] == [f"  skipped {path}:{n}" for n in (2, 3, 5, 6, 8)]


def test_a_file_without_a_usable_row(tmp_path: Path, tokenize: Tokenize) -> None:
    path = write_rows(tmp_path / "bad.jsonl", [{"nothing": 1}] * 3)
    said = "none of its 3 rows can be used; 3 rows, 0 samples, 3 bad rows skipped; the first: "
    with pytest.raises(UserError, match=f"^{path}: {said}{path}:1: "):
        tokenize(path, on_bad_row="skip")


def test_long_rows_are_counted(tmp_path: Path, tokenize: Tokenize) -> None:
    path = write_rows(tmp_path / "long.jsonl", [chat("a" * size, "b") for size in (1, 200, 3, 900, 300)])
    with pytest.raises(DataError, match=rf"^{path}:2: \d+ tokens exceed max_length 100; raise max_length or"):
        tokenize(path, max_length=100)
    report = tokenize(path, max_length=100, excess_length_strategy="drop").report
    assert (report.num_dropped_samples, report.num_long_samples, report.longest_where) == (3, 3, f"{path}:4")
    cut = tokenize(path, max_length=100, excess_length_strategy="truncate").report
    assert (cut.num_truncated_samples, cut.num_without_loss, cut.num_samples) == (0, 3, 2)
    assert "3 samples dropped because truncation left them no loss" in str(cut)


def test_an_interrupted_run_leaves_no_entry(
    chats: Path, tokenize: Tokenize, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(cache.TokenWriter, "close", stop)
        with pytest.raises(KeyboardInterrupt):
            tokenize(chats)
    assert entries(tmp_path / "cache") == []
    assert len(tokenize(chats).store) == 20


@pytest.mark.parametrize("name", [SAMPLES, ABOUT])
def test_an_entry_that_cannot_be_read_is_named(
    name: str, chats: Path, tokenize: Tokenize, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of another user, and a damaged one."""

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    first = ids_of(tokenize(chats))
    (entry,) = (tmp_path / "cache").iterdir()
    with monkeypatch.context() as patch, pytest.raises(UserError, match=f"{entry} cannot be read: .*Permission denied"):
        patch.setattr(cache, "check_file", refuse)
        tokenize(chats)
    (entry / name).write_bytes((entry / name).read_bytes()[:20])
    with pytest.raises(UserError, match=rf"^the tokens in {entry} cannot be read: .*; delete that folder$"):
        tokenize(chats)
    shutil.rmtree(entry)
    assert ids_of(tokenize(chats)) == ids_of(tokenize(chats)) == first
    assert entries(tmp_path / "cache") == [entry.name]


def test_an_entry_that_is_deleted_while_it_is_read(chats: Path, tokenize: Tokenize, tmp_path: Path) -> None:
    """A worker that started after it ended the run, with a line about memory."""
    found, expected = tokenize(chats), ids_of(tokenize(chats))
    shutil.rmtree(tmp_path / "cache")
    assert ids_of(found) == expected and len(found.store) == 20


def test_a_file_that_changes_while_it_is_read(
    chats: Path, tokenize: Tokenize, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = cache.open_rows
    monkeypatch.setattr(cache, "open_rows", lambda source: write_rows(chats, [chat("other", "rows")]) and read(source))
    with pytest.raises(UserError, match=r"chats\.jsonl: changed while it was read"):
        tokenize(chats)
    assert entries(tmp_path / "cache") == []


def test_two_runs_at_once(chats: Path, tokenize: Tokenize, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run writes the same entry while this one encodes. What a killed one left is deleted after a day."""
    check, other, begun = cache._check_unchanged, tmp_path / "other", [f".{digit * 32}.{'0' * 32}" for digit in "01"]
    tokenize(chats, cache_dir=str(other))
    for name, age in zip((*begun, ".my.files"), (0, 90_000, 90_000), strict=True):
        (tmp_path / "cache" / name).mkdir(parents=True)
        os.utime(tmp_path / "cache" / name, (time.time() - age,) * 2)

    def other_first(files: Any) -> None:
        shutil.copytree(other, tmp_path / "cache", dirs_exist_ok=True)
        check(files)

    monkeypatch.setattr(cache, "_check_unchanged", other_first)
    assert len(tokenize(chats).store) == 20
    assert entries(tmp_path / "cache") == sorted([*entries(other), begun[0], ".my.files"])


def test_a_folder_that_cannot_be_written(chats: Path, tokenize: Tokenize, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"^data\.cache_dir .*file/inside: cannot be written: Not a directory"):
        tokenize(chats, cache_dir=str(tmp_path / "file" / "inside"))


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
