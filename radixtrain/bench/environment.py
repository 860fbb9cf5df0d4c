"""What a measured number depends on besides the shapes: date, commit, machine, threads, versions."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
import transformers


def environment(device: torch.device, dtype: str) -> dict[str, Any]:
    """Column to value, for a file of numbers. Names no host and no path."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": _commit(),
        "machine": torch.cuda.get_device_name(device) if device.type == "cuda" else processor(),
        "num_cores": os.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "dtype": dtype,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def header(device: torch.device, dtype: str, repeats: int) -> str:
    """Describe it in one line, for people, with the load of the machine at that moment."""
    facts = environment(device, dtype)
    commit = f", commit {facts['commit']}" if facts["commit"] else ""
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return (
        f"{facts['date']}{commit}, {facts['machine']}, {facts['num_cores']} cores, {facts['num_threads']} threads"
        f"{load}, {dtype}, torch {facts['torch']}, transformers {facts['transformers']}, medians of {repeats} "
        f"alternating runs"
    )


def processor() -> str:
    """The CPU's model, or only its architecture if the model is unknown."""
    described = Path("/proc/cpuinfo").read_text(errors="replace") if Path("/proc/cpuinfo").exists() else ""
    models = [line.partition(":")[2].strip() for line in described.splitlines() if line.startswith("model name")]
    return f"{models[0]} ({platform.machine()})" if models else platform.processor() or platform.machine()


def _commit() -> str:
    """The commit of the repository that holds this file, `-dirty` if changed; empty for an installed package."""
    for command in (["ls-files", "--error-unmatch", __file__], ["describe", "--always", "--dirty", "--exclude=*"]):
        try:
            done = subprocess.run(
                ["git", *command], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
            )
        except (OSError, subprocess.CalledProcessError):
            return ""
    return done.stdout.strip()
