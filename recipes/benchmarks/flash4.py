"""flash-attn-4 for a machine with a GPU and without a network: compile its kernels ahead, and pack what it needs.

    python3.12 -m pip install --no-deps --target runs/flash4/site flash-attn-4==4.0.0b36 apache-tvm-ffi==0.1.15.post2 \\
      quack-kernels==0.6.5 einops nvidia-cutlass-dsl==4.8.1 nvidia-cutlass-dsl-libs-{base,core,cu13}==4.8.1
    S=runs/flash4/site; export PYTHONPATH=$PWD:$S/nvidia_cutlass_dsl/dsl_packages:$S
    python3.12 recipes/benchmarks/flash4.py compile runs/flash4/cache   # on a machine without a GPU, for Hopper
    python3.12 recipes/benchmarks/flash4.py check runs/flash4/cache     # the same calls, none of which may compile
    for folder in site cache; do python3.12 recipes/benchmarks/flash4.py pack runs/flash4/$folder; done

and there, from the root, with torch:

    eval "$(python recipes/benchmarks/flash4.py unpack /tmp/flash4)"; python -m pytest -m gpu tests/kernels/test_cuda.py

The calls are those of `FlashAttn4Kernel` itself, on tensors without memory: for each case below every call that the
strategies make. A kernel belongs to a kind of call (see that class), so a few shapes stand for many. Python must be of
the same minor version as the GPU's machine (3.12). Most of what is packed, in `runs/carry/flash4`, is one library, the
compiler in `_cutlass_ir`: `flash_attn.cute.interface` imports it before anything else, and without it not even a kernel
in the cache can be loaded.
"""

import argparse
import lzma
import os
import sys
import tarfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from radixtrain.kernels.flash import FlashAttn4Kernel
from radixtrain.kernels.varlen_args import Ragged, Scoring
from radixtrain.tree.layout import TreeLayout
from radixtrain.tree.plan import PrefixPlan, build_prefix_plan

CARRIED = Path("runs/carry/flash4")
MOST = 58 * 2**20  # bytes, beside 5 MiB of repository in an upload of 64 MiB
LEFT_OUT = {
    "__pycache__",
    "bin",
    "include",
    "stubs",
    "profiler",
    "libiket_cubin_info.so",
    "nvidia_cutlass_dsl_packages.pth",
}
# x86 code: jumps as absolute addresses; no alignment to profit from; and nearly all of it at once in memory.
CODE = {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 256 * 2**20, "lc": 4, "lp": 0, "pb": 0}
FILTERS = [{"id": lzma.FILTER_X86}, CODE]


TARGET = {
    "FLASH_ATTENTION_ARCH": "sm_90",
    "CUTE_DSL_ARCH": "sm_90a",
    "FLASH_ATTENTION_NUM_SMS": "132",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
}


class Case(NamedTuple):
    """Heads of queries, and of keys and values; how wide; what else a score depends on."""

    query: int
    key: int
    dim: int
    dtype: torch.dtype = torch.bfloat16
    window: int | None = None
    softcap: float | None = None


def three_levels(trunk: int, middle: int, own: int, groups: int) -> PrefixPlan:
    """A trunk for all, a middle for each group, and tokens of each of four sequences' own."""
    trunks, each = list(range(trunk)), range(groups * 4)
    rows = [[*trunks, *[10_000 + row // 4] * middle, *[20_000 + row] * own] for row in each]
    return build_prefix_plan(np.concatenate(rows), np.cumsum([0, *map(len, rows)]))


BF16, F16 = torch.bfloat16, torch.float16
TREES = [
    three_levels(2048, 0, 256, 8),  # gpu.py, and RadixMLP's
    three_levels(512, 0, 64, 8),
    three_levels(1024, 128, 256, 2),
]
MODELS = [Case(32, 8, 128), Case(16, 8, 128), Case(32, 8, 128, F16), Case(32, 8, 64), Case(9, 3, 64)]
# Of tests/kernels/test_cuda.py, which has its own tree, and a window and a soft-cap.
TESTS = [
    *(Case(heads, key, dim) for heads, key in ((4, 4), (8, 2), (4, 1)) for dim in (64, 128)),
    *(Case(8, 2, 64, BF16, window, softcap) for window, softcap in ((100, None), (None, 5.0), (100, 5.0))),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["compile", "check", "pack", "unpack"])
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    if options.action == "pack":
        pack(options.folder)
    elif options.action == "unpack":
        unpack(options.folder)
    else:
        compile_all(options.folder, options.action == "check")


def compile_all(folder: Path, check: bool) -> None:
    """Compile the kernels of all calls. check: nothing may compile, all of it must be there."""
    os.environ |= TARGET | {"FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(folder.resolve())}
    torch.cuda.current_device = lambda: 0  # type: ignore[assignment] # the exchange of tensors asks for it
    warnings.simplefilter("ignore")
    kernel = FlashAttn4Kernel()
    compiled = watch(forbid=check)
    for name, case, ragged in calls():
        start, before = time.perf_counter(), len(compiled)
        totals = [int(bounds[-1]) for bounds in (ragged.cu_seqlens_q, ragged.cu_seqlens_k)]
        with FakeTensorMode():
            run(kernel, case, ragged, *totals)
        print(f"{name}: {len(compiled) - before} kernels, {time.perf_counter() - start:.1f} s", flush=True)


def calls() -> Iterator[tuple[str, Case, Ragged]]:
    """One for each kind of call that the strategies make of a case."""
    seen = set[tuple[Any, ...]]()
    for case in (*MODELS, *TESTS):
        for ragged in calls_of_tests(case) if case in TESTS else calls_of(case, TREES):
            longest = ragged.max_seqlen_q, ragged.max_seqlen_k
            kind = case, ragged.causal, *(min(length, 256) for length in longest)
            if kind not in seen:
                seen.add(kind)
                yield f"{case}, {'causal' if ragged.causal else 'level'} of {longest}", case, ragged


def calls_of(case: Case, trees: list[PrefixPlan]) -> Iterator[Ragged]:
    for plan in trees:
        layout = TreeLayout.from_plan(plan)
        if case.window is None:
            yield from (piece.ragged for piece in layout.pieces)
        yield from (piece.ragged for piece in (layout.paths, layout.sequences))


def calls_of_tests(case: Case) -> Iterator[Ragged]:
    """Of tests/kernels/test_cuda.py: `nested_plan` by its lengths, and `ragged_call`."""
    yield from calls_of(case, [three_levels(200, 60, 30, 2)])
    if case.window is case.softcap is None:
        bounds = (
            torch.tensor(each, dtype=torch.int32) for each in ([0, 0, 100, 100, 101, 171], [0, 64, 194, 199, 232, 302])
        )
        yield Ragged(*bounds, 100, 130, causal=True)


def run(kernel: FlashAttn4Kernel, case: Case, ragged: Ragged, num_q: int, num_k: int) -> None:
    """Both directions, on tensors of which only shape, strides and dtype exist."""
    bounds = [torch.empty(len(x), dtype=torch.int32, device="cuda") for x in (ragged.cu_seqlens_q, ragged.cu_seqlens_k)]
    on_cuda = replace(ragged, cu_seqlens_q=bounds[0], cu_seqlens_k=bounds[1])
    shapes = [(num_q, case.query), (num_k, case.key), (num_k, case.key), (num_q, case.query)]
    q, k, v, dout = (torch.empty(*shape, case.dim, dtype=case.dtype, device="cuda") for shape in shapes)
    scoring = Scoring(case.dim**-0.5, case.softcap, case.window)
    out, lse = kernel.forward(q, k, v, on_cuda, scoring)
    kernel.backward(dout, q, k, v, out, lse, on_cuda, scoring)


def watch(forbid: bool) -> list[str]:
    """A list that grows with every kernel that is compiled. forbid: raise instead."""
    import cutlass.cute as cute

    compiled, original = list[str](), cute.compile

    def compile(kernel: Any, *args: Any, **options: Any) -> Any:
        assert not forbid, f"{type(kernel).__name__} is not in the cache"
        compiled.append(type(kernel).__name__)
        return original(kernel, *args, **options)

    cute.compile = compile
    return compiled


def pack(folder: Path) -> None:
    """`NAME.tar.xz` of a folder of that name. The cache is packed again in a second, the site in ten minutes."""
    CARRIED.mkdir(parents=True, exist_ok=True)
    sizes: dict[str, int] = {}
    packed = CARRIED / f"{folder.name}.tar.xz"
    with lzma.open(packed, "wb", filters=FILTERS) as pressed, tarfile.open(fileobj=pressed, mode="w|") as archive:
        for path in sorted(folder.rglob("*")):
            inside = path.relative_to(folder)
            if path.is_file() and path.suffix != ".lock" and not LEFT_OUT & {*inside.parts}:
                archive.add(path, f"{folder.name}/{inside}")
                sizes[inside.parts[0]] = sizes.get(inside.parts[0], 0) + path.stat().st_size
    for part, size in sorted(sizes.items(), key=lambda entry: -entry[1]):
        print(f"{size / 2**20:8.2f} MiB  {part}")
    everything = {path: path.stat().st_size for path in sorted(CARRIED.iterdir())}
    for path, size in everything.items():
        print(f"{size / 2**20:8.2f} MiB  {path}, pressed")
    if sum(everything.values()) > MOST:
        sys.exit(f"more than {MOST / 2**20:.0f} MiB: leave something out")


def unpack(target: Path) -> None:
    """The files, and lines for a shell that uses them."""
    for packed in sorted(CARRIED.glob("*.tar.xz")):
        with lzma.open(packed) as pressed, tarfile.open(fileobj=pressed, mode="r|") as archive:
            archive.extractall(target, filter="data")
    target = target.resolve()
    print(f"export PYTHONPATH={target}/site/nvidia_cutlass_dsl/dsl_packages:{target}/site${{PYTHONPATH:+:$PYTHONPATH}}")
    print(f"export FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 FLASH_ATTENTION_CUTE_DSL_CACHE_DIR={target}/cache")


if __name__ == "__main__":
    main()
