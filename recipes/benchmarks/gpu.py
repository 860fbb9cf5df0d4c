"""What one GPU says about radixtrain, in eight minutes: is it the same, how fast are its parts, how fast is a step?

    python recipes/benchmarks/gpu.py --csv gpu.csv
    python recipes/benchmarks/gpu.py --parts step --models Qwen3-4B --attention cascade path
    python recipes/benchmarks/gpu.py --device cpu --tiny         # the same code, in seconds

Needs torch, transformers and numpy (and what transformers needs); Triton, flash-attn and flash-attn-3 are measured if
they are installed. Nothing is downloaded: weights and tokens are random. Three parts, most important first:

- equivalence: a small Qwen3 in bfloat16, every strategy with every installed kernel. The error of each gradient against
  a float64 run of the ordinary model, beside the error of the ordinary bfloat16 model.
- kernels: gather and segment sum at the shapes of Table 6 of the RadixMLP paper, beside a copy of as many bytes from
  device to device. Indices are uniform; gather counts a row read and one written for each index, a segment sum each
  row read once and each result written once.
- step: forward and backward, and only forward, of the shapes of Qwen3-0.6B, 4B and 8B on 32 sequences of 2,048 shared
  and 256 own tokens, in bfloat16. Both arms take turns, and the ideal is beside the measured. The ordinary arm is
  Hugging Face's `sdpa` on sequences of equal length: without padding that is the work of packed varlen attention, on
  the same flash kernel. If memory does not hold a step, it is several micro-batches, as few as fit, cut for each arm.
  Only losses are compared here; gradients are in the first part, because 8B of them in float32 take minutes.

Each part looks at the clock, and leaves out by name what no longer fits.
"""

import argparse
import csv
import importlib.util
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from radixtrain import RadixCollator, verify_equivalence
from radixtrain.attention import EVERYWHERE, choose_attention
from radixtrain.bench.arms import Arm, OrdinaryArm, RadixArm, seconds_in_turns
from radixtrain.bench.cells import features_of_cell
from radixtrain.bench.environment import environment
from radixtrain.bench.measure import Cell, ModelShape, Work, build_model, work_of
from radixtrain.bench.memory import peak_bytes
from radixtrain.errors import UserError
from radixtrain.hf.head import has_plain_head
from radixtrain.hf.prepare import restore_model
from radixtrain.kernels.row_order import row_order
from radixtrain.kernels.rows import sum_rows
from radixtrain.kernels.varlen import KERNELS, varlen_kernel

PARTS = ("equivalence", "kernels", "step")
QWEN3 = {"vocab_size": 151_936, "head_dim": 128, "num_key_value_heads": 8}
MODELS = (
    ModelShape(28, 1024, 3072, 16, **QWEN3, name="Qwen3-0.6B"),
    ModelShape(36, 2560, 9728, 32, **QWEN3, name="Qwen3-4B"),
    ModelShape(36, 4096, 12288, 32, **QWEN3, tie_word_embeddings=False, name="Qwen3-8B"),
)
TINY_MODELS = (ModelShape(2, 64, head_dim=16, vocab_size=100, name="tiny"),)
# Rows of the source, elements of a row, rows of the result, dtype: Table 6, with bfloat16 in place of float16.
GATHERS = (
    (100, 128, 200, torch.float32),
    (16_000, 1024, 12_000, torch.float32),
    (16_000, 1024, 12_000, torch.bfloat16),
    (16_000, 1024, 70_000, torch.float32),
    (16_000, 1024, 70_000, torch.bfloat16),
    (100_000, 2048, 500_000, torch.float32),
    (100_000, 2048, 500_000, torch.bfloat16),
)
TINY_GATHERS = ((10, 16, 20, torch.float32), (10, 16, 40, torch.bfloat16))
VERIFIED = ModelShape(4, 256, head_dim=64, vocab_size=512, name="small")  # wide enough for every kernel
MEMORY_SHARES = (0.8, 0.4, 0.2)  # of the free memory, for the activations of a micro-batch; the rest is for fragments
CPU_BYTES = 2**30
MAX_TURNS = 5
ERRORS = ("median_ratio", "worst_error", "ordinary_worst_error")  # of all gradients, relative L2
DEVICE_PACKAGES = ("triton", "flash-attn", "flash-attn-3")


@dataclass
class Run:
    """What to measure, how much time is left, and what was found.

    seconds: for all parts together.
    attention: strategies of the part `step`.
    header: date, commit, hardware and versions.
    csv: a file that is written again after every result.
    start: by the clock.
    results: part, case and measures of each.
    left_out: what was not measured, and why.
    """

    device: torch.device
    seconds: float
    attention: tuple[str, ...]
    header: dict[str, Any]
    csv: Path | None = None
    start: float = field(default_factory=time.perf_counter)
    results: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    @property
    def seconds_left(self) -> float:
        return self.seconds - (time.perf_counter() - self.start)

    def found(self, part: str, case: str, **measures: Any) -> None:
        self.results.append((part, case, measures))
        self.say(f"{part}: {case}: {_said(measures)}")

    def leave_out(self, what: str, why: object) -> None:
        self.left_out.append(f"{what}: {str(why).splitlines()[0] if str(why) else type(why).__name__}")
        self.say(f"left out: {self.left_out[-1]}")

    def say(self, line: str) -> None:
        print(f"[{self.seconds - self.seconds_left:4.0f} s] {line}", flush=True)
        if self.csv is not None:
            write_csv(self.csv, self)

    def has_time(self, what: str, needed: float = 0.0) -> bool:
        if self.seconds_left > needed:
            return True
        self.leave_out(what, f"{self.seconds_left:.0f} of {self.seconds:.0f} seconds were left")
        return False


def equivalence(run: Run, shape: ModelShape, prompt_length: int) -> None:
    """Every strategy and kernel on one model and one nested batch."""
    model = build_model(shape, run.device, torch.bfloat16, "sdpa")
    features = features_of_cell(Cell(shape, prompt_length, prompt_length // 8, 10, tree="nested"))
    for strategy, kernel in ways(run, shape.head_dim):
        case = f"{strategy}, {kernel}"
        if not run.has_time(f"equivalence {case}"):
            return
        collator = RadixCollator(tree_tiles=strategy == "tree")
        options = {"attention": strategy, "kernel": kernel, "collator": collator, "precisions": ["bfloat16"]}
        try:
            rung = verify_equivalence(model, features, **options)["bfloat16"]
        except Exception as error:  # a kernel that raises is a result too, and the others are still to be measured
            run.leave_out(f"equivalence {case}", error)
            run.found("equivalence", case, passed=False, **dict.fromkeys(ERRORS, math.nan))
            continue
        found = rung.median_ratio, rung.worst.radix, rung.worst_ordinary
        run.found("equivalence", case, passed=rung.passed, **dict(zip(ERRORS, found, strict=True)))


def ways(run: Run, head_dim: int) -> Iterator[tuple[str, str]]:
    """Every strategy with every installed kernel; `reference` needs none, `tree` has its own."""
    for kernel in KERNELS:
        try:
            choose_attention("path", kernel, run.device, torch.bfloat16, head_dim)
            varlen_kernel(kernel, run.device)
        except (ValueError, ImportError) as error:
            run.leave_out(f"equivalence with {kernel}", error)
        else:
            yield from ((strategy, kernel) for strategy in EVERYWHERE if strategy != "reference")
    yield "reference", "auto"
    if run.device.type == "cuda" and importlib.util.find_spec("triton"):
        yield "tree", "auto"


def kernels(run: Run, shapes: tuple[tuple[int, int, int, torch.dtype], ...]) -> None:
    """Gather and segment sum, each beside a copy of as many bytes."""
    triton_rows = _rows_in_triton(run)
    for num_rows, width, num_indices, dtype in shapes:
        case = f"[{num_rows}, {width}] x {num_indices} {str(dtype).removeprefix('torch.')}"
        if not run.has_time(f"kernels {case}"):
            return
        try:
            _gather_and_sum(run, case, num_rows, width, num_indices, dtype, triton_rows)
        except RuntimeError as error:  # most likely out of memory
            run.leave_out(f"kernels {case}", error)


def _rows_in_triton(run: Run) -> Any:
    """The module of the Triton kernels, or None if they cannot run."""
    if run.device.type != "cuda":
        return run.leave_out("kernels in Triton", "they need CUDA")
    try:
        from radixtrain.kernels import rows_triton
    except ImportError as error:
        return run.leave_out("kernels in Triton", f"not importable: {error}")
    return rows_triton


def _gather_and_sum(
    run: Run, case: str, num_rows: int, width: int, num_indices: int, dtype: torch.dtype, triton_rows: Any
) -> None:
    generator = torch.Generator(run.device).manual_seed(0)
    options: dict[str, Any] = {"device": run.device, "generator": generator}
    x_UD = torch.randn(num_rows, width, dtype=dtype, **options)
    x_TD = torch.randn(num_indices, width, dtype=dtype, **options)
    indices = torch.randint(num_rows, (num_indices,), **options)
    gathers: dict[str, Callable[[], Tensor]] = {"torch index_select": lambda: x_UD.index_select(0, indices)}
    sums: dict[str, Callable[[], Tensor]] = {
        "torch index_add_": lambda: torch.zeros_like(x_UD).index_add_(0, indices, x_TD),
        "sorted index_put_ in float32": lambda: sum_rows(x_TD, indices, num_rows),
    }
    if triton_rows is not None:
        order = row_order(indices, num_rows)  # a collator's work, so it is not timed
        gathers["Triton"] = lambda: triton_rows.gather_rows(x_UD, order)
        sums["Triton, float32"] = lambda: triton_rows.sum_rows(x_TD, order)
    row_bytes = width * dtype.itemsize
    _beside_a_copy(run, f"gather {case}", gathers, 2 * num_indices * row_bytes)
    _beside_a_copy(run, f"segment sum {case}", sums, (num_indices + num_rows) * row_bytes)


def _beside_a_copy(run: Run, case: str, arms: dict[str, Callable[[], Tensor]], num_bytes: int) -> None:
    """num_bytes: read and written by each arm; a copy reads half of them and writes half."""
    source = torch.zeros(num_bytes // 2, dtype=torch.uint8, device=run.device)
    target = torch.empty_like(source)
    copy = seconds_of(lambda: target.copy_(source), run.device)
    expected = next(iter(arms.values()))()
    for name, arm in arms.items():
        try:
            difference = float((arm().float() - expected.float()).norm() / expected.float().norm())
            took = seconds_of(arm, run.device)
        except Exception as error:  # a compiler's, say
            run.leave_out(f"kernels {case}, {name}", error)
            continue
        rates = {"gigabytes_per_second": num_bytes / took / 1e9, "share_of_copy": copy / took}
        run.found("kernels", f"{case}, {name}", microseconds=took * 1e6, **rates, difference_to_torch=difference)


def seconds_of(call: Callable[[], Any], device: torch.device, at_least: float = 0.02) -> float:
    """Of one call: the median of five rounds of at least so many seconds; shorter rounds do not count."""
    number, rounds = 1, []
    while len(rounds) < 5:
        _wait_for(device)
        start = time.perf_counter()
        for _ in range(number):
            call()
        _wait_for(device)
        took = time.perf_counter() - start
        if took < at_least and number < 1000:
            number, rounds = number * 4, []
        else:
            rounds.append(took / number)
    return statistics.median(rounds)


def steps(run: Run, models: tuple[ModelShape, ...], prompt: int, suffix: int, num_sequences: int) -> None:
    """A training step and a forward pass of each model, the smallest first."""
    cells = [Cell(shape, prompt, suffix, num_sequences, mode=mode) for shape in models for mode in ("step", "forward")]
    model, built = None, None
    for number, cell in enumerate(cells):
        if not run.has_time(f"step {cell}", needed=run.seconds / 20):
            continue
        try:
            if built != cell.model:
                model, built = None, cell.model  # frees the memory of the last one first
                model = build_model(cell.model, run.device, torch.bfloat16, "sdpa")
            _measure_what_fits(run, model, cell, run.seconds_left / (len(cells) - number))
        except (RuntimeError, UserError) as error:
            run.leave_out(f"step {cell}", error)


def _measure_what_fits(run: Run, model: Any, cell: Cell, seconds: float) -> None:
    """Once more in smaller micro-batches if the estimate was wrong."""
    for share in MEMORY_SHARES:
        try:
            return _measure(run, model, cell, seconds, share)
        except torch.OutOfMemoryError:
            if share == MEMORY_SHARES[-1]:
                raise
        finally:
            restore_model(model).zero_grad(set_to_none=True)


def _measure(run: Run, model: Any, cell: Cell, seconds: float, memory_share: float) -> None:
    """One cell, within so many seconds."""
    deadline = time.perf_counter() + seconds
    plain_head = has_plain_head(model)
    ordinary = OrdinaryArm(plain_head=plain_head)
    radix = [RadixArm(attention=name, plain_head=plain_head) for name in run.attention]
    arms: list[Arm] = [ordinary, *radix]
    work = fitting_work(run, model, cell, memory_share, ordinary, radix[0]).to(run.device)
    losses = {arm: _loss(model, work, arm) for arm in arms}
    peaks = {arm: _peak(model, work, arm) for arm in arms}
    turn = sum(seconds_in_turns(model, {arm: (arm, work)}, 1)[arm][0] for arm in arms)
    repeats = min(MAX_TURNS, int((deadline - time.perf_counter()) / turn))
    if repeats < 1:
        return run.leave_out(f"step {cell}", f"a turn takes {turn:.1f} s, more than its share is left")
    turns = seconds_in_turns(model, {arm: (arm, work) for arm in arms}, repeats)
    shared = {
        "sequences": cell.sequences,
        "r": work.num_tokens / work.num_unique_tokens("cascade"),
        "turns": repeats,
        "ordinary_teraflops_per_second": work.ordinary_teraflops(model.config) / statistics.median(turns[ordinary]),
        "ordinary_micro_batches": len(work.ordinary),
        "radix_micro_batches": len(work.radix),
        "ordinary_peak_gigabytes": peaks[ordinary] / 1e9,
    }
    for arm in radix:
        measures = _against(turns[ordinary], turns[arm], work.ideal_speedup(model.config))
        measures["loss_difference"] = abs(losses[arm] - losses[ordinary]) / abs(losses[ordinary])
        measures["radix_peak_gigabytes"] = peaks[arm] / 1e9
        run.found("step", f"{cell.model}, {cell.mode}, {arm}", **shared, **measures)


def _against(ordinary: list[float], radix: list[float], ideal: float) -> dict[str, float]:
    """Measures of the seconds of the turns of both arms."""
    speedup = statistics.median(one / other for one, other in zip(ordinary, radix, strict=True))
    seconds = {"ordinary_seconds": statistics.median(ordinary), "radix_seconds": statistics.median(radix)}
    return {"ideal": ideal, "measured": speedup, "efficiency": speedup / ideal, **seconds}


def fitting_work(run: Run, model: Any, cell: Cell, memory_share: float, ordinary: OrdinaryArm, radix: RadixArm) -> Work:
    """The cell, cut into as few micro-batches as memory holds, for each arm on its own.

    Each runs a single sequence first, which shows how many bytes a token needs.
    """
    features, length = features_of_cell(cell), cell.prompt_length + cell.suffix_length
    one = work_of(replace(cell, num_sequences=1), features[:1]).to(run.device)
    most = [int(memory_share * _free_bytes(run) * length / _peak(model, one, arm)) for arm in (ordinary, radix)]
    num_batches = math.ceil(cell.num_sequences / max(1, most[0] // length))
    return work_of(cell, features, math.ceil(cell.num_sequences / num_batches), max(length, most[1]))


def _free_bytes(run: Run) -> int:
    """Of the device; on CPU what a laptop can spare."""
    if run.device.type != "cuda":
        return CPU_BYTES
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(run.device)[0]


def _loss(model: Any, work: Work, arm: Arm) -> float:
    arm.prepare(model)
    with torch.no_grad():
        return float(sum(arm.loss_terms(model, work)))


def _peak(model: Any, work: Work, arm: Arm) -> int:
    """Bytes beyond weights, batch and, in a step, gradients, which the first of two passes leaves."""
    arm.prepare(model)
    arm.run_step(model, work)
    return peak_bytes(lambda: arm.run_step(model, work), work.radix[0].tensors["input_ids"].device)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def facts(device: torch.device) -> dict[str, Any]:
    """Date, commit, hardware and versions."""
    found = environment(device, "bfloat16")
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {"gpu_memory_gigabytes": round(properties.total_memory / 1e9, 1), "cuda": torch.version.cuda}
        found["compute_capability"] = f"{properties.major}.{properties.minor}"
    return {**found, **{package: _version(package) for package in DEVICE_PACKAGES}}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def write_csv(path: Path, run: Run) -> None:
    """`#` lines for the machine and the date, then a line for each measure."""
    with path.open("w", newline="", encoding="utf-8") as file:
        file.writelines(f"# {name}: {value}\n" for name, value in run.header.items())
        file.writelines(f"# left out: {line}\n" for line in run.left_out)
        writer = csv.writer(file)
        writer.writerow(["part", "case", "measure", "value"])
        writer.writerows((part, case, *pair) for part, case, measures in run.results for pair in measures.items())


def print_tables(run: Run) -> None:
    columns = {
        "equivalence": ("passed", *ERRORS),
        "kernels": ("microseconds", "gigabytes_per_second", "share_of_copy", "difference_to_torch"),
        "step": ("r", "ideal", "measured", "efficiency", "ordinary_seconds", "radix_seconds", "radix_peak_gigabytes"),
    }
    for part, names in columns.items():
        rows = [(case, measures) for row_part, case, measures in run.results if row_part == part]
        if rows:
            print("\n| " + " | ".join([part, *(name.replace("_", " ") for name in names)]) + " |")
            print("|" + "---|" * (len(names) + 1))
        for case, measures in rows:
            print("| " + " | ".join([case, *(_shown(measures[name]) for name in names)]) + " |")
    for line in run.left_out:
        print(f"\nleft out: {line}", end="")
    print(f"\n{len(run.results)} results in {run.seconds - run.seconds_left:.0f} s")


def _said(measures: dict[str, Any]) -> str:
    return ", ".join(f"{name} {_shown(value)}" for name, value in measures.items())


def _shown(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="shapes that a laptop measures in seconds")
    parser.add_argument("--seconds", type=float, default=440, help="in all; a result that was begun is finished")
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--models", nargs="+", choices=[str(shape) for shape in MODELS], help="of step; default all")
    parser.add_argument("--attention", nargs="+", default=["cascade"], choices=["cascade", "path", "expand"])
    parser.add_argument("--csv", type=Path, help="a file to write")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    options = parse(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("error: torch sees no CUDA device; --device cpu --tiny runs the same code", file=sys.stderr)
        return 1
    device = torch.device(options.device)
    run = Run(device, options.seconds, tuple(options.attention), facts(device), options.csv)
    print(", ".join(f"{name} {value}" for name, value in run.header.items()), flush=True)
    models = TINY_MODELS if options.tiny else MODELS
    models = tuple(shape for shape in models if options.models is None or str(shape) in options.models)
    parts = {
        "equivalence": lambda: equivalence(
            run, TINY_MODELS[0] if options.tiny else VERIFIED, 32 if options.tiny else 256
        ),
        "kernels": lambda: kernels(run, TINY_GATHERS if options.tiny else GATHERS),
        "step": lambda: steps(run, models, *((32, 8, 4) if options.tiny else (2048, 256, 32))),
    }
    try:
        for part in (part for part in PARTS if part in options.parts):
            parts[part]()
    finally:
        print_tables(run)
    same = all(measures["passed"] for part, _, measures in run.results if part == "equivalence")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
