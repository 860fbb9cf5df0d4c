"""How many cores a process may use, by the files of a kernel, and what OpenMP is told before torch is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from radixtrain.cores import SPINS, WAITING, num_cores, share_cores

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/cpu,cpuacct"


@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        ("0::/", {f"{V2}/cpu.max": "max 100000\n"}, CORES),
        ("0::/", {f"{V2}/cpu.max": "50000 100000\n"}, 1),  # half a core
        ("0::/a/b", {f"{V2}/a/b/cpu.max": "max 100000\n", f"{V2}/a/cpu.max": "150000 100000\n"}, 1),  # of one above
        ("0::/elsewhere", {f"{V2}/cpu.max": "100000 100000\n"}, 1),  # a container sees its own as the top
        ("0::/", {f"{V2}/cpu.max": "99900000 100000\n"}, CORES),  # more than there are
        (
            "5:memory:/a\n4:cpu,cpuacct:/a",
            {f"{V1}/a/cpu.cfs_quota_us": "100000\n", f"{V1}/a/cpu.cfs_period_us": "100000\n"},
            1,
        ),
        ("4:cpu,cpuacct:/", {f"{V1}/cpu.cfs_quota_us": "-1\n", f"{V1}/cpu.cfs_period_us": "100000\n"}, CORES),
        (None, {}, CORES),  # no Linux
    ],
)
def test_cores_of_a_quota(own: str | None, files: dict[str, str], cores: int, tmp_path: Path) -> None:
    for name, text in {**files, **({"proc/self/cgroup": own} if own else {})}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert num_cores(tmp_path) == cores


def test_a_command_says_it_before_torch_is_imported_and_answers_a_wrong_key_without_it() -> None:
    code = (
        "import os, sys\nfrom radixtrain.__main__ import main\ncode = main(['fit', '--model.learning_rte', '1'])\n"
        "print(code, 'torch' in sys.modules, os.environ.get('GOMP_SPINCOUNT'))"
    )
    unset = {name: value for name, value in os.environ.items() if name not in WAITING}
    for given, spins in (({}, SPINS), ({"OMP_WAIT_POLICY": "active"}, "None"), ({"GOMP_SPINCOUNT": "9"}, "9")):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**unset, **given})
        assert done.stdout.split() == ["2", "False", spins], done.stderr
        assert done.stderr == "error: no key model.learning_rte, did you mean model.learning_rate?\n"


def test_nothing_is_set_once_torch_has_read_it() -> None:
    environment: dict[str, str] = {}
    share_cores(environment)
    assert "torch" in sys.modules and environment == {}
