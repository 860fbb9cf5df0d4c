"""The rates of this machine for a model: measured in seconds, kept in a file.

A few small batches (nothing shared, one prompt, a deep tree, accidental sharing) are timed under every strategy,
forward and backward. The rates of `radixtrain/tree/cost_model.py` are fitted to the times by least squares of the
relative errors, none below 0. The file is written once for a machine, a number of threads and a model's heads, and
never overwritten, so that a resumed run chooses as it did before. Delete the folder to measure again.

The folder is `$RADIXTRAIN_CACHE`, or `radixtrain` in `$XDG_CACHE_HOME` or `~/.cache`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from radixtrain.attention import choose_attention, tree_attention
from radixtrain.hf.prepare import pretrained_model_of
from radixtrain.kernels.cascade import BLOCK
from radixtrain.kernels.rectangles import LONG, STRIP
from radixtrain.tree.cost_model import CHOICES, Rates, StepCost, attention_work
from radixtrain.tree.layout import TreeLayout
from radixtrain.tree.plan import PrefixPlan, build_prefix_plan

__all__ = ["cache_folder", "calibrate"]

logger = logging.getLogger(__name__)
REPEATS = 4  # the fastest counts: what else the machine does can only add
VERSION = 1  # of the file
MAX_ERROR = 0.5  # root mean square of the relative errors above which rates are not kept
_MEASURED: dict[Path, Rates] = {}  # a folder that cannot be written must not be measured again for every loader


def calibrate(
    model: nn.Module,
    *,
    attention: str = "auto",
    kernel: str = "auto",
    dtype: torch.dtype | None = None,
    rates: Rates | None = None,
) -> StepCost:
    """The cost of a layer of this model where its weights are, from the file or measured and kept.

    model: a Hugging Face decoder, or one wrapped by PEFT, on the device that trains it: a CPU or CUDA.
    attention: `auto` to choose among all strategies, or the one that will be used.
    kernel: as for `prepare_model`.
    dtype: of the computation; default: of the weights. Under autocast it is another.
    rates: measured before, as a checkpoint keeps them; nothing is measured then.

    For `RadixCollator(step_cost=...)`. Measuring takes seconds and waits for the device; it leaves the global random
    state alone. Raises ValueError for another device, an attention that no cost is known of, or a kernel that cannot
    run there.
    """
    if attention not in ("auto", *CHOICES):
        raise ValueError(f"attention must be auto or one of {', '.join(CHOICES)}, got {attention!r}")
    weight = next(model.parameters())
    if weight.device.type not in ("cpu", "cuda"):
        raise ValueError(f"a calibration needs the model on a CPU or a CUDA device, it is on {weight.device}")
    config = pretrained_model_of(model).config.get_text_config()
    shape = _Shape(config, weight.device, dtype or weight.dtype, kernel)
    rates = rates or _known_rates(shape)
    return replace(shape.cost(rates), strategies=CHOICES if attention == "auto" else (attention,))


def _known_rates(shape: _Shape) -> Rates:
    """Of this process, of the file, or measured."""
    path = cache_folder() / f"rates-{shape.digest}.json"
    if path not in _MEASURED:
        _MEASURED[path] = _read(path) or _measured_and_kept(shape, path)
    return _MEASURED[path]


def _measured_and_kept(shape: _Shape, path: Path) -> Rates:
    began = time.perf_counter()
    with torch.inference_mode(False), torch.enable_grad():  # Lightning validates and predicts in inference mode
        rates, error = _measure(shape)
    logger.info("calibrated in %.1f s: %s", time.perf_counter() - began, path)
    if error > MAX_ERROR:
        logger.warning(
            "the calibration is %.0f %% off its own measurements, as on a busy machine; it is used for this run and "
            "not kept",
            100 * error,
        )
        return rates
    return _keep(path, rates, shape)


def cache_folder() -> Path:
    """Where calibrations lie."""
    if os.environ.get("RADIXTRAIN_CACHE"):
        return Path(os.environ["RADIXTRAIN_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "radixtrain"


class _Shape:
    """What the rates depend on."""

    def __init__(self, config: Any, device: torch.device, dtype: torch.dtype, kernel: str):
        self.device, self.dtype = device, dtype
        self.num_heads = config.num_attention_heads
        self.num_key_value_heads = getattr(config, "num_key_value_heads", None) or self.num_heads
        self.hidden = config.hidden_size
        self.head_dim = getattr(config, "head_dim", None) or self.hidden // self.num_heads
        self.intermediate = getattr(config, "intermediate_size", None) or 4 * self.hidden
        self.kernel = choose_attention("cascade", kernel, self.device, self.dtype, self.head_dim).kernel

    @property
    def key(self) -> dict[str, Any]:
        on_host = self.device.type == "cpu"
        return {
            "version": VERSION,
            "machine": _processor() if on_host else torch.cuda.get_device_name(self.device),
            "blocks": [STRIP, LONG, BLOCK],
            "threads": torch.get_num_threads() if on_host else None,
            "torch": torch.__version__,
            "kernel": self.kernel,
            "dtype": str(self.dtype),
            "heads": [self.num_heads, self.num_key_value_heads, self.head_dim],
            "hidden": [self.hidden, self.intermediate],
        }

    @property
    def random_options(self) -> dict[str, Any]:
        """For `torch.randn`, from a generator of its own: the seed of a run means the same with and without a file."""
        return {"device": self.device, "dtype": self.dtype, "generator": torch.Generator(self.device).manual_seed(0)}

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.key, sort_keys=True).encode()).hexdigest()[:16]

    def cost(self, rates: Rates) -> StepCost:
        queries, keys = self.num_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        parameters = 2 * self.hidden * (queries + keys) + 3 * self.hidden * self.intermediate
        heads = self.num_heads, self.num_key_value_heads, self.head_dim
        return StepCost(rates, self.device.type == "cpu", *heads, row_flops=6.0 * parameters)


def _measure(shape: _Shape) -> tuple[Rates, float]:
    """The rates, and how far they are from what was measured: root mean square of the relative errors."""
    on_host = shape.device.type == "cpu"
    counted = shape.cost(Rates(0, 0, 0, 0, 0))
    rows, seconds = [], []
    for plan in _batches():
        layout = TreeLayout.from_plan(plan).to(shape.device)
        run = _attention_step(shape, layout)
        for strategy in CHOICES:
            work = attention_work(plan, strategy, on_host)
            rectangles, pairs = work.rectangles * shape.num_heads, work.pairs * shape.num_heads * shape.head_dim
            rows.append([work.calls, rectangles, pairs, counted.elements(work)])
            seconds.append(_fastest(partial(run, strategy), shape.device))
    counts = np.array(rows, dtype=np.float64)
    call, rectangle, pair, element = fitted = _fit(counts, np.array(seconds))
    error = float(np.sqrt(np.square(counts @ np.array(fitted) / seconds - 1).mean()))
    return Rates(call, rectangle, pair, element, _seconds_per_flop(shape)), error


def _batches() -> Iterator[PrefixPlan]:
    """Of different make: nothing shared, long and short; one prompt; a deep tree; accidental sharing."""
    rng = np.random.default_rng(0)

    def ids(length: int) -> list[int]:
        return rng.integers(100, 10_000, length).tolist()

    trunk = ids(384)
    yield _plan([ids(256), ids(250), ids(131)])
    yield _plan([ids(int(length)) for length in rng.integers(4, 40, 48)])
    yield _plan([trunk + ids(int(length)) for length in rng.integers(8, 64, 24)])
    yield _plan([trunk[: 24 * (n + 1)] + ids(12) for n in range(16)])
    yield _plan([[int(token) for token in rng.integers(0, 4, 3)] + ids(24) for _ in range(48)])


def _plan(sequences: list[list[int]]) -> PrefixPlan:
    bounds = np.cumsum([0, *map(len, sequences)])
    return build_prefix_plan(np.concatenate([np.array(ids) for ids in sequences]), bounds)


def _attention_step(shape: _Shape, layout: TreeLayout) -> Callable[[str], None]:
    heads = shape.num_heads, shape.num_key_value_heads, shape.num_key_value_heads
    options = shape.random_options
    q, k, v = (torch.randn(layout.num_rows, n, shape.head_dim, **options).requires_grad_() for n in heads)
    dout = torch.randn(q.shape, **options)

    def run(strategy: str) -> None:
        out = tree_attention(q, k, v, layout, attention=strategy, kernel=shape.kernel)
        torch.autograd.grad(out, (q, k, v), dout)

    return run


def _seconds_per_flop(shape: _Shape, rows: int = 512) -> float:
    """Of a linear layer as wide as the model's, forward and backward."""
    options = shape.random_options
    x = torch.randn(rows, shape.hidden, **options).requires_grad_()
    weight = torch.randn(shape.intermediate, shape.hidden, **options).requires_grad_()
    dout = torch.randn(rows, shape.intermediate, **options)

    def run() -> None:
        torch.autograd.grad(nn.functional.linear(x, weight), (x, weight), dout)

    return _fastest(run, shape.device) / (6.0 * rows * shape.hidden * shape.intermediate)


def _fastest(run: Callable[[], None], device: torch.device) -> float:
    seconds = []
    for _ in range(1 + REPEATS):
        _wait_for(device)
        start = time.perf_counter()
        run()
        _wait_for(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def _fit(work: np.ndarray, seconds: np.ndarray) -> list[float]:
    """Rates >= 0 with the least squares of `work @ rates / seconds - 1`: the best of every set of rates above 0."""
    relative, ones = work / seconds[:, None], np.ones(len(seconds))
    scale = np.linalg.norm(relative, axis=0)
    scale[scale == 0] = 1
    best, least = np.zeros(work.shape[1]), np.inf
    for size in range(1, work.shape[1] + 1):
        for chosen in map(list, combinations(range(work.shape[1]), size)):
            rates, *_ = np.linalg.lstsq(relative[:, chosen] / scale[chosen], ones, rcond=None)
            error = float(np.square(relative[:, chosen] / scale[chosen] @ rates - 1).sum())
            if (rates >= 0).all() and error < least:
                best, least = np.zeros(work.shape[1]), error
                best[chosen] = rates / scale[chosen]
    return [float(rate) for rate in best]


def _read(path: Path) -> Rates | None:
    try:
        rates = json.loads(path.read_text(encoding="utf-8"))["rates"]
        if not all(0 <= rate < float("inf") for rate in rates.values()):
            raise ValueError(f"rates must be finite and not negative, got {rates}")
        return Rates(**rates)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        logger.warning("%s cannot be read and is measured again for this run: %r", path, error)
        return None


def _keep(path: Path, rates: Rates, shape: _Shape) -> Rates:
    """Write the file unless another process was first, whose rates then count. Says where it cannot be written."""
    text = json.dumps({"rates": asdict(rates), **shape.key}, indent=2)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            written = Path(folder) / path.name
            written.write_text(text, encoding="utf-8")
            os.link(written, path)
    except OSError as error:
        if path.is_file():
            return _read(path) or rates
        logger.warning("the calibration cannot be kept: %s", error)
    return rates


def _processor() -> str:
    described = Path("/proc/cpuinfo")
    lines = described.read_text(errors="replace").splitlines() if described.exists() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, f"{platform.machine()} {platform.node()}")


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
