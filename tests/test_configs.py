"""Every shipped configuration is accepted by the real command line, and its first lines say how to run it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "configs").rglob("*.yaml"))


def header(config: str) -> str:
    """The comment that the file begins with."""
    lines = (ROOT / config).read_text(encoding="utf-8").splitlines()
    comment = next((number for number, line in enumerate(lines) if not line.startswith("#")), len(lines))
    return "\n".join(lines[:comment])


def command_of(config: str) -> str:
    """Grids are in a folder of their own, everything else is a run."""
    return "bench" if Path(config).parent.name == "bench" else "fit"


def test_the_documented_ones_are_there() -> None:
    assert "configs/sft.yaml" in CONFIGS
    assert {f"configs/bench/{name}.yaml" for name in ("cpu", "table4", "qwen3")} <= set(CONFIGS)


@pytest.mark.parametrize("config", CONFIGS)
def test_header_carries_the_command(config: str) -> None:
    assert re.search(
        rf"python -m radixtrain {command_of(config)}\b.*--config {re.escape(config)}(?!\S)", header(config)
    )


@pytest.mark.parametrize("config", CONFIGS)
def test_command_line_accepts(config: str) -> None:
    command = [sys.executable, "-m", "radixtrain", command_of(config), "--config", config, "--print_config"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert {"fit": "model_name_or_path", "bench": "num_hidden_layers"}[command_of(config)] in done.stdout
