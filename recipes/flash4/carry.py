"""Pack flash-attn-4, its compiler and the compiled kernels into `runs/carry/flash4`, for a machine without a network.

    python3.12 -m pip install --no-deps --target runs/flash4/site flash-attn-4==4.0.0b36 apache-tvm-ffi==0.1.15.post2 \\
      quack-kernels==0.6.5 einops nvidia-cutlass-dsl==4.8.1 nvidia-cutlass-dsl-libs-{base,core,cu13}==4.8.1
    S=runs/flash4/site; export PYTHONPATH=$PWD:$S/nvidia_cutlass_dsl/dsl_packages:$S
    python3.12 recipes/flash4/compile.py runs/flash4/cache
    for folder in site cache; do python3.12 recipes/flash4/carry.py pack runs/flash4/$folder; done

and there, from the root, with torch:

    eval "$(python recipes/flash4/carry.py unpack /tmp/flash4)" && python -m pytest -m gpu tests/kernels/test_cuda.py

Most of it is one library, the compiler in `_cutlass_ir`: `flash_attn.cute.interface` imports it before anything else,
and without it not even a kernel in the cache can be loaded.
"""

import lzma
import sys
import tarfile
from pathlib import Path

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
    {"pack": pack, "unpack": unpack}[sys.argv[1]](Path(sys.argv[2]))
