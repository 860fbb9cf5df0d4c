"""Compile flash-attn-4's kernels for Hopper ahead of time, on a machine without a GPU, into its disk cache.

    python recipes/flash4/compile.py runs/flash4/cache           # seconds for each, and a list with sizes and sha256
    python recipes/flash4/compile.py runs/flash4/cache --check   # the same calls, none of which may compile

The calls are those of `FlashAttn4Kernel` itself, on tensors without memory: for each case below every call that the
strategies make. A kernel belongs to a kind of call (see that class), so a few shapes stand for many.

Needs Python of the same minor version as the GPU's machine (3.12), and beside torch what `carry.py` packs.
"""

import argparse
import hashlib
import json
import os
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

from gpu_parts.plans import one_prompt, three_levels

from radixtrain.kernels.flash import FlashAttn4Kernel
from radixtrain.kernels.varlen_args import Ragged, Scoring
from radixtrain.tree.layout import TreeLayout
from radixtrain.tree.plan import PrefixPlan

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


BF16, F16 = torch.bfloat16, torch.float16
TREES = [
    one_prompt(2048, 256, 32),  # gpu.py, and RadixMLP's
    one_prompt(512, 64, 32),
    three_levels(1024, 128, 256, 2),
]
MODELS = [Case(32, 8, 128), Case(16, 8, 128), Case(32, 8, 128, F16), Case(32, 8, 64), Case(9, 3, 64)]
# Of tests/kernels/test_cuda.py, which has its own tree, and a window and a soft-cap.
TESTS = [
    *(Case(heads, key, dim) for heads, key in ((4, 4), (8, 2), (4, 1)) for dim in (64, 128)),
    *(Case(8, 2, 64, BF16, window, softcap) for window, softcap in ((100, None), (None, 5.0), (100, 5.0))),
]


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--check", action="store_true", help="nothing may compile: all of it must be there")
    parser.add_argument("--only", type=int, help="the first so many cases")
    options = parser.parse_args(argv)
    os.environ |= TARGET | {"FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(options.folder.resolve())}
    torch.cuda.current_device = lambda: 0  # type: ignore[assignment] # the exchange of tensors asks for it
    warnings.simplefilter("ignore")
    kernel = FlashAttn4Kernel()
    compiled = watch(forbid=options.check)
    for name, case, ragged in list(calls())[: options.only]:
        start, before = time.perf_counter(), len(compiled)
        totals = [int(bounds[-1]) for bounds in (ragged.cu_seqlens_q, ragged.cu_seqlens_k)]
        with FakeTensorMode():
            run(kernel, case, ragged, *totals)
        print(f"{name}: {len(compiled) - before} kernels, {time.perf_counter() - start:.1f} s", flush=True)
    write_list(options.folder)


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
            yield from (piece.ragged for piece in layout.packed_pieces())
        yield from (layout.paths, layout.sequences)


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


def write_list(folder: Path) -> None:
    """`list.json`: name, size and sha256 of every object."""
    objects = sorted(folder.rglob("*.o"))
    entries = [
        {"name": str(path.relative_to(folder)), "size": path.stat().st_size,
         "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for path in objects
    ]  # fmt: skip
    (folder / "list.json").write_text(json.dumps(entries, indent=1))
    print(f"{len(objects)} objects, {sum(entry['size'] for entry in entries) / 2**20:.2f} MiB, in {folder}/list.json")


if __name__ == "__main__":
    main(sys.argv[1:])
