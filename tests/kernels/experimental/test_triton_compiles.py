"""The Triton kernels through Triton's real compiler, for chips that need not be there.

The interpreter runs what the compiler refuses, and knows no shared memory. Here every launch of a forward and a
backward is compiled for the chip, down to machine code, and not run. It is a process of its own, since Triton
interprets or compiles for as long as a process lives.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiers import FULL

pytest.importorskip("triton", reason="pip install triton runs it")
pytestmark = FULL

SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 120: 99 * 1024}  # bytes of one program: A100, H100, RTX 5090
SMALLEST = 99 * 1024  # of an A10, an L4, an RTX 3090 or 4090 (8.6, 8.9), which run what is compiled for 8.0
SPILLED = {80: 112, 90: 8, 120: 72}  # bytes of registers that a thread keeps in memory: of dk and dv, in head dim 128
ROWS = {"_sum_kernel", "_merge_kernel"}
TREE = {"_forward_kernel", "_dq_kernel", "_dkdv_kernel"}


def compiled(chip: int, launches: str, cache: Path) -> list[dict[str, Any]]:
    """Name, shared memory and spilled registers, in bytes, of every kernel that `launches`, a function, asks for."""
    settings = {"TRITON_CACHE_DIR": str(cache), "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, __file__, str(chip), launches]
    done = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("chip", SHARED_MEMORY)
def test_every_kernel(chip: int, tmp_path: Path) -> None:
    """In the tiles that are chosen for each dtype and head dim, with query heads in groups and without.

    The kernels of rows and of the merge, which are small and the same everywhere, only for the oldest chip.
    """
    kernels = compiled(chip, "launch_tree_attention", tmp_path)
    assert {kernel["name"] for kernel in kernels} == TREE
    largest = max(kernel["shared"] for kernel in kernels)
    assert largest <= (SMALLEST if chip == 80 else SHARED_MEMORY[chip]), kernels
    assert max(kernel["spilled"] for kernel in kernels) <= SPILLED[chip], kernels
    if chip == 80:
        kernels = compiled(chip, "launch_rows_and_merge", tmp_path)
        assert {kernel["name"] for kernel in kernels} == ROWS
        assert max(kernel["shared"] for kernel in kernels) <= 8192


def launch_rows_and_merge() -> None:
    from radixtrain.kernels.experimental.rows_triton import merge_rows_, sum_rows

    for dtype, columns in ((torch.bfloat16, 1024), (torch.float32, 3)):
        sum_rows(torch.zeros(40, columns, dtype=dtype), torch.arange(40) % 16, 16)
    for rows in (slice(16, 48), torch.arange(32)):
        merge_rows_(torch.zeros(64, 2, 128), torch.zeros(2, 64), rows, torch.zeros(32, 2, 128), torch.zeros(2, 32))
    # Triton compiles arguments that are 1 as constants
    sum_rows(torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64), 1)
    merge_rows_(torch.zeros(3, 1, 1), torch.zeros(1, 3), slice(1, 2), torch.zeros(1, 1, 1), torch.zeros(1, 1))


def launch_tree_attention() -> None:
    from radixtrain.kernels.experimental.tree_tiles import tile_sizes, tree_tiles
    from radixtrain.kernels.experimental.tree_triton import tiled_tree_attention

    cases = ((torch.bfloat16, 64, 2, 64), (torch.bfloat16, 128, 2, 64), (torch.float16, 256, 4, 64))
    for dtype, head_dim, num_groups, num_rows in (*cases, (torch.float32, 128, 2, 64), (torch.bfloat16, 128, 4, 1)):
        tiles = tree_tiles([num_rows] * num_rows, *tile_sizes(head_dim, dtype))
        shapes = [(num_rows, heads, head_dim) for heads in (4, num_groups, num_groups)]
        q, k, v = (torch.zeros(shape, dtype=dtype, requires_grad=True) for shape in shapes)
        out = tiled_tree_attention(q, k, v, tiles, 0.1)
        out.backward(torch.zeros_like(out))


def spilled_bytes(ptx: str, chip: int) -> int:
    """What ptxas says of the registers that did not fit; with a Triton that ships none, an error."""
    import triton

    binaries = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    ptxas = binaries / ("ptxas-blackwell" if chip >= 100 else "ptxas")
    (target,) = re.findall(r"^\.target (\w+)", ptx, re.MULTILINE)
    command = [str(ptxas), "-v", f"--gpu-name={target}", "-o", os.devnull, "/dev/stdin"]
    said = subprocess.run(command, input=ptx, capture_output=True, text=True, check=True).stderr
    return sum(map(int, re.findall(r"(\d+) bytes spill stores", said)))


def compile_without_running(chip: int, launches: Callable[[], None]) -> None:
    """Every launch compiles for the chip and says so in a line; the tensors are on the CPU."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    class Chip:
        get_current_target = staticmethod(lambda: GPUTarget("cuda", chip, 32))
        get_current_device = get_current_stream = staticmethod(lambda *_: 0)

    def compile_only(function: Any, *args: Any, warmup: bool, **options: Any) -> None:
        kernel = run(function, *args, warmup=True, **options)
        assert kernel.asm["cubin"]
        spilled = spilled_bytes(kernel.asm["ptx"], chip)
        print(json.dumps({"name": function.__name__, "shared": kernel.metadata.shared, "spilled": spilled}))

    run, JITFunction.run = JITFunction.run, compile_only
    driver.set_active(Chip())
    launches()


if __name__ == "__main__":
    compile_without_running(int(sys.argv[1]), globals()[sys.argv[2]])
