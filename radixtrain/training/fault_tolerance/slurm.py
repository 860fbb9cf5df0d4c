"""SLURM: SIGUSR1 before the time limit saves and requeues the job, and the requeued job resumes.

With `#SBATCH --signal=SIGUSR1@90` a job gets the signal 90 seconds before its limit, if it was started by `srun`.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
from pathlib import Path

from radixtrain.checkpoints.atomic import writing_file
from radixtrain.training.devices.launcher_env import INTERACTIVE

logger = logging.getLogger(__name__)

RECORD = ".slurm_job"  # in the output folder: names the job that wrote it
SECONDS = 60  # for `scontrol` to answer


def job_id() -> str | None:
    """Return the job's id, `123`, or `120_4` for a task of an array; None outside SLURM."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    found = f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID", "")
    return found if re.fullmatch(r"\d+(_\d+)?", found) else None


def is_batch_job() -> bool:
    """Return whether SLURM runs this process as a job that can be requeued, and not in a terminal."""
    return job_id() is not None and os.environ.get("SLURM_JOB_NAME") not in INTERACTIVE


def requeue() -> None:
    """Ask SLURM to run this job again. If it refuses, a warning says why, and how to continue."""
    job = job_id()
    assert job is not None
    try:
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, timeout=SECONDS)
        reason = "" if done.returncode == 0 else done.stderr.strip() or f"exit code {done.returncode}"
    except FileNotFoundError:
        reason = "no scontrol in PATH"
    except subprocess.TimeoutExpired:
        reason = f"no answer in {SECONDS} s"
    if reason:
        logger.warning("SLURM job %s was not requeued (%s); submit it again with --ckpt_path last", job, reason)
    else:
        logger.info("SLURM job %s requeued", job)


def remember_job(output_dir: Path) -> None:
    """Record which job runs in this folder, for `is_restarted`. Does nothing outside SLURM."""
    job = job_id()
    if job is None:
        return
    with writing_file(output_dir / RECORD) as partial:
        partial.write_text(f"{job}\n", encoding="utf-8")


def is_restarted(output_dir: Path) -> bool:
    """Return whether SLURM has started this job again, and the run in the folder is its own.

    Then `fit` resumes from the newest valid checkpoint there, whatever `ckpt_path` says, and starts anew if there is
    none yet. A folder that another job has written is not resumed.
    """
    count = os.environ.get("SLURM_RESTART_COUNT", "0")
    record = output_dir / RECORD
    if not (count.isdigit() and int(count)) or not record.is_file():
        return False
    return record.read_text(encoding="utf-8").strip() == job_id()
