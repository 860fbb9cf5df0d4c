"""Errors of the machine in the types and texts of the libraries that raise them, and what a user reads."""

import errno
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from radixtrain.errors import UserError
from radixtrain.training.fault_tolerance.failures import explain, lost_rank
from tests.support.processes import limit_open_files


def of_worker(text: str) -> str:
    return f"Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n{text}"


ON_CPU = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "4294967296 bytes. Error code 12 (Cannot allocate memory)"
)
BUS_ERROR = (
    "DataLoader worker (pid 9) is killed by signal: Bus error. It is possible that dataloader's workers are out of "
    "shared memory. Please try to raise your shared memory limit."
)
NO_MEMORY = [
    (MemoryError(), "the machine ran out of memory: set data.max_tokens"),
    (
        RuntimeError(ON_CPU),
        "the machine ran out of memory when 4 GiB more were requested: set data.max_tokens to a smaller number",
    ),
    (
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.50 GiB. GPU 0 has a total capacity of 79 GiB"),
        "the device ran out of memory when 3.50 GiB more were requested: set data.max_tokens to a smaller number",
    ),
    (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be"), "the device ran out of memory: set"),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), "the device ran out of memory: set"),
    (RuntimeError("std::bad_alloc"), "the machine ran out of memory"),
    (OSError(errno.ENOMEM, "Cannot allocate memory"), "the machine ran out of memory"),
    (MemoryError(of_worker("MemoryError")), "a DataLoader worker ran out of memory"),
]
WORKERS = [
    (
        RuntimeError("DataLoader worker (pid 812) is killed by signal: Killed. "),
        "a DataLoader worker (process 812) was killed or could not hand its batch over: set "
        "data.dataloader_num_workers: 0, or give the machine or container more memory, shared memory (",
    ),
    (
        RuntimeError("DataLoader worker (pid(s) 812, 813) exited unexpectedly"),
        "a DataLoader worker (process 812, 813) ",
    ),
    (RuntimeError(BUS_ERROR), "a DataLoader worker (process 9) was killed or could not hand its batch over: "),
    *(
        (RuntimeError(text), "a DataLoader worker was killed or could not hand its batch over: ")
        for text in (
            of_worker("unable to write to file </torch_81_2_0>: No space left on device (28)"),
            "Too many open files. Communication with the workers is no longer possible",
            "received 0 items of ancdata",
        )
    ),
]


@pytest.mark.parametrize(("error", "text"), [*NO_MEMORY, *WORKERS])
def test_in_words(error: Exception, text: str) -> None:
    explained = explain(error, None)
    assert explained is not None and explained.startswith(text)
    assert "\n" not in explained and "--ckpt_path" not in explained


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),  # of a hub, say
        FileNotFoundError(errno.ENOENT, "No such file or directory", "train.jsonl"),
        UserError("the disk is full: No space left on device [Errno 28]"),
    ],
)
def test_other_errors_stay(error: Exception) -> None:
    assert explain(error, None) is None


class TestDisk:
    def test_the_one_of_the_file(self, tmp_path: Path) -> None:
        error = OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "logs" / "metrics.csv"))
        mount = next(str(each) for each in (tmp_path, *tmp_path.parents) if os.path.ismount(each))
        text = explain(error, tmp_path) or ""
        assert text.startswith(f"the disk {mount} is full, where {tmp_path / 'logs' / 'metrics.csv'} is (")
        assert "(output_dir, data.cache_dir or TMPDIR); a smaller save_total_limit needs less" in text

    @pytest.mark.parametrize(
        ("number", "words"),
        [(errno.EDQUOT, "quota"), (errno.EFBIG, "`ulimit -f`"), (errno.EROFS, "read-only")],
    )
    def test_other_reasons(self, number: int, words: str, tmp_path: Path) -> None:
        assert words in (explain(OSError(number, os.strerror(number), str(tmp_path / "x")), tmp_path) or "")

    def test_libraries_that_keep_only_the_words(self, tmp_path: Path) -> None:
        for text in ("I/O error: No space left on device (os error 28)", "[Errno 28] Error writing"):
            assert "is full, where " in (explain(Exception(text), tmp_path) or "")


def test_an_output_folder_that_is_gone(tmp_path: Path) -> None:
    error = FileNotFoundError(errno.ENOENT, "No such file or directory", str(tmp_path / "run" / "logs" / "metrics.csv"))
    assert explain(error, tmp_path) is None
    said = explain(error, tmp_path / "run") or ""
    assert said.startswith(f"output_dir {tmp_path / 'run'} is gone") and said.endswith("resume with --ckpt_path auto")


class TestCheckpoint:
    def test_none(self, tmp_path: Path) -> None:
        said = explain(MemoryError(), tmp_path) or ""
        assert said.endswith(". No checkpoint was written yet; --ckpt_path auto starts again")

    @pytest.mark.parametrize("as_link", [True, False])
    def test_the_last(self, as_link: bool, tmp_path: Path) -> None:
        folder = tmp_path / "checkpoints"
        (folder / "step=7").mkdir(parents=True)
        if as_link:
            (folder / "last").symlink_to("step=7")
        else:
            (folder / "last").write_text("step=7\n")
        said = f". The last checkpoint is {folder / 'step=7'}; resume with --ckpt_path last"
        assert (explain(MemoryError(), tmp_path) or "").endswith(said)


PAIR = "[/x/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:408: Connection reset by peer. This is typically"
BUFFER = "[/x/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 4000ms for recv operation to complete"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError(PAIR), "gone"),
        (RuntimeError("[/x/gloo/transport/tcp/pair.cc:552] Connection closed by peer [127.0.0.1]:2"), "gone"),
        (dist.DistNetworkError("Failed to recv, got 0 bytes. Connection was likely closed. Did the remote"), "gone"),
        (dist.DistBackendError("NCCL error: remote process exited or there was a network error"), "gone"),
        (dist.DistBackendError("NCCL communicator was aborted on rank 1."), "gone"),
        (RuntimeError(BUFFER), "within ddp_timeout"),
        (RuntimeError("Application timeout caused pair closure"), "within ddp_timeout"),
        (dist.DistStoreError("Timed out after 5 seconds waiting for clients. 1/2 joined."), "within ddp_timeout"),
        (RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"), None),
        (ConnectionResetError(104, "Connection reset by peer"), None),  # of a hub, or of a logger
        (TimeoutError("timed out"), None),
        (dist.DistBackendError("NCCL error: invalid usage: Duplicate GPU detected"), None),
    ],
)
def test_a_rank_that_is_gone_or_does_not_answer(error: Exception, words: str | None) -> None:
    text = lost_rank(error)
    assert text is None if words is None else words in (text or "")


@pytest.mark.parametrize(
    ("limit", "flags", "said"),
    [
        (48, {"data__dataloader_num_workers": 0}, "too many open files: the limit is 48; raise it (`ulimit -n 64`)"),
        (
            128,
            {"data__batch_size": 20, "data__max_tokens": 80, "data__max_length": 80},
            "open files (`ulimit -n 65536`)",
        ),
    ],
)
def test_too_many_open_files(start, arguments, tmp_path, limit: int, flags: dict[str, int], said: str) -> None:
    """Before rows are read if the number is known; else the worker that cannot hand its batch over ends the run."""
    given = {"data__dataloader_num_workers": 1, "output_dir": tmp_path / "run", **flags}
    run = start(arguments(**given), {"FILES": str(limit)}, before=limit_open_files)
    assert run.wait(60) == 1, run.said()
    assert run.error().startswith("error: ") and said in run.error()
    assert len(run.said()) < 2000 and "Traceback" not in run.said(), run.said()
