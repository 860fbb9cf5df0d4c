"""What CUDA would refuse is found without a GPU: whole steps on a device that checks everything and computes nothing.

Every operator of a step sees its tensors on `cuda:0` and refuses devices and dtypes that do not go together; autograd,
autocast and the optimizers take the path of CUDA; and wherever the host would wait for the device, the function that
does is known (`watch.py`). Torch's kernels give the shapes of their results, and what torch compiles becomes machine
code (`inductor.py`); values are not computed: those are what `make test-gpu` is for.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import FULL

HERE = Path(__file__).parent
TORCH = Path(torch.__file__).parent
STEP = {"radixtrain/training/fault_tolerance/nonfinite_guard.py:_are_finite": 1}
READ_BOUNDS = "radixtrain/kernels/cpu_loops.py:_entries"
SHARED = {"radixtrain/hf/padded/causes.py:_on_host": 1, "radixtrain/hf/padded/places.py:refuse_reading": 1}
# Where a step waits for the device, how often, and why; every other case must not.
WAITS = {
    "Gemma2": {READ_BOUNDS: 8},  # a soft-cap, without flash-attn: the eager kernel loops over two arrays of four calls
    "fit": STEP,  # once, before the optimizer steps
    "fit bf16-mixed": STEP,
    "fit, labels not merged": STEP,
    "share_prefixes": SHARED,  # to plan, and once in the backward pass
    "share_prefixes, path": SHARED,
    "share_prefixes, Qwen3.5": SHARED,
    "share_prefixes, text in LLaVA": SHARED,  # the embeddings of a plain lookup are not compared
}
# Kernels that are compiled. A merge reads and writes outputs once, by one kernel, and the log-sum-exps, which are few,
# by another; rows that are not consecutive are gathered, and then written to their places. Each twice for every size:
# with two block sizes, of which the faster one is taken. The loss has two of the logits and two of the targets.
MERGES = {"a merge of a slice": 2, "a merge of indices": 5, "a merge of sinks": 2}
KERNELS = {**MERGES, **{f"the loss in torch.{dtype}": 4 for dtype in ("bfloat16", "float32")}}
# In the attention of one layer. What the error says, or where the wait is.
MISTAKES: dict[str, Any] = {
    "another device": "found at least two devices, cuda:0 and cpu",
    "another dtype": "of torch.bfloat16, torch.float32",
    "a value": 1,
    "a shape": "nonzero",
    "a copy": 1,
    "backward": 1,
}
pytestmark = [
    FULL,
    pytest.mark.skipif(shutil.which("g++") is None, reason="with g++ installed this runs"),
    pytest.mark.skipif(torch.version.cuda is not None, reason="a torch that is built for the CPU runs this"),
]


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`device.cpp`, compiled in three seconds."""
    path = tmp_path_factory.mktemp("fake_cuda") / "device.so"
    command = ["g++", "-std=c++20", "-shared", "-fPIC", f"-I{TORCH / 'include'}", str(HERE / "device.cpp")]
    libraries = [f"-L{TORCH / 'lib'}", "-lc10", "-ltorch_cpu"]
    subprocess.run([*command, "-o", str(path), *libraries], check=True)
    return path


def ran(library: Path, group: str) -> dict[str, dict[str, Any]]:
    """What `device.py` says of the cases of a group, by name."""
    inductor = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    environment = {**os.environ, **inductor}
    command = [sys.executable, str(HERE / "device.py"), str(library), group]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"name"')]
    return {line["name"]: line for line in lines}


@pytest.mark.parametrize(("group", "number"), [("strategies", 18), ("commands", 8), ("compiled", 12)])
def test_steps_run_on_cuda_and_wait_where_it_is_known(library: Path, group: str, number: int) -> None:
    found = ran(library, group)
    assert len(found) == number
    failed = {name: case["where"] for name, case in found.items() if "error" in case}
    assert not failed, "\n".join(f"{name}:\n{where}" for name, where in failed.items())
    assert {name: case["waits"] for name, case in found.items()} == {name: WAITS.get(name, {}) for name in found}
    if group == "compiled":
        for name, case in found.items():
            assert max(shared for _, shared in case["shared"]) <= 227 * 1024, name
            kernels = [kernel for kernel, _ in case["shared"]]
            if name in KERNELS:
                assert len(set(kernels)) == KERNELS[name], name
                assert len(kernels) == 2 * len(set(kernels)) or name not in MERGES, "again for another number of rows"
                continue
            attention = [kernel for kernel in kernels if "_tem_" in kernel]
            assert len(attention) == (4 if name == "windows and sinks" else 2), "not one for each layer"


def test_how_many_kernels_a_step_launches(library: Path) -> None:
    """Head and loss are most of what runs beside the layers; too small chunks of them were 1,493 launches."""
    for name, case in ran(library, "launches").items():
        assert case["launches"]["beside the layers"] < 250, name
        assert case["launches"]["a layer"] < 200, name


def test_mistakes_are_seen(library: Path) -> None:
    found = ran(library, "mistakes")
    assert found.keys() == MISTAKES.keys()
    for name, expected in MISTAKES.items():
        if isinstance(expected, str):
            assert expected in found[name].get("error", ""), found[name]
        else:
            assert sum(found[name].get("waits", {}).values()) == expected, found[name]
