"""A job of SLURM, with a `scontrol` that is a script."""

import logging
from pathlib import Path

import pytest

from radixtrain.training.fault_tolerance import signals
from tests.support.runs import names

VARIABLES = ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_JOB_NAME", "SLURM_RESTART_COUNT")


@pytest.fixture(autouse=True)
def outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The script. It writes its arguments into `asked` beside it, and fails if there is a file `refuses`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "scontrol"
    lines = ["#!/bin/sh", f'echo "$@" > {folder}/asked', f"test -f {folder}/refuses || exit 0"]
    script.write_text("\n".join([*lines, "echo Requeue is disabled for the job >&2", "exit 1", ""]))
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    return script


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "41"}, "41"),
        ({"SLURM_JOB_ID": "41", "SLURM_ARRAY_JOB_ID": "40", "SLURM_ARRAY_TASK_ID": "3"}, "40_3"),
        ({"SLURM_JOB_ID": "41; rm -r x"}, None),
    ],
)
def test_job_id(variables: dict[str, str], found: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert signals.job_id() == found
    assert signals.is_batch_job() == (found is not None)
    monkeypatch.setenv("SLURM_JOB_NAME", "interactive")  # in a terminal
    assert not signals.is_batch_job()


def test_requeue(scontrol: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Done, refused, and without `scontrol`."""
    with caplog.at_level(logging.INFO):
        signals.requeue()
        assert scontrol.with_name("asked").read_text() == "requeue 41\n"
        scontrol.with_name("refuses").touch()
        signals.requeue()
        scontrol.unlink()
        signals.requeue()
    reason = "Requeue is disabled for the job"
    assert caplog.messages[:2] == [
        "SLURM job 41 requeued",
        f"SLURM job 41 was not requeued ({reason}); submit it again with --ckpt_path last",
    ]
    assert "(no scontrol in PATH)" in caplog.messages[2]


def test_restarted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same job again, in the folder that it remembers; another job is none."""
    signals.remember_job(tmp_path)
    assert not list(tmp_path.iterdir())  # outside of SLURM
    monkeypatch.setenv("SLURM_JOB_ID", "40")
    signals.remember_job(tmp_path)
    assert names(tmp_path) == [signals.JOB_RECORD] and not signals.is_restarted(tmp_path)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert signals.is_restarted(tmp_path) and not signals.is_restarted(tmp_path / "elsewhere")
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    assert not signals.is_restarted(tmp_path)
    signals.remember_job(tmp_path)
    assert signals.is_restarted(tmp_path)
    monkeypatch.delenv("SLURM_JOB_ID")
    assert not signals.is_restarted(tmp_path)
