"""What a layer of a model costs, for the collator to choose strategy and branches by: `step_cost_of` and `calibrate`.

`step_cost_of` measures nothing: the rates are `FIXED_RATES`, the same on every machine, and so are the choices, which
change the order of sums and with it the last digits of a loss. `calibrate` is for a machine on which they may choose
worse, above all a GPU: a few small batches are timed under every strategy, forward and backward, and the rates of
`radixtrain/tree/cost_model.py` are fitted to the times by least squares of the relative errors, none below 0.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import nn

from radixtrain.attention import choose_attention, tree_attention, unlogged
from radixtrain.errors import UserError
from radixtrain.hf.backbone import parts_of
from radixtrain.hf.model_dims import LayerKinds, ModelDimensions, kinds_of_mixers
from radixtrain.hf.recurrent.forking import can_fork
from radixtrain.timing import seconds_in_turns
from radixtrain.tree.cost_model import CHOICES, FIXED_RATES, Rates, StepCost, attention_work
from radixtrain.tree.layout import TreeLayout
from radixtrain.tree.plan import PrefixPlan, build_prefix_plan
from radixtrain.tree.runs import RunCost

logger = logging.getLogger(__name__)
REPEATS = 4  # keep the minimum: other load can only slow a run down
ROWS = 512  # of the matrix product that is timed


def step_cost_of(model: nn.Module, attention: str = "auto") -> StepCost:
    """The cost of a layer of this model, the mean one if they differ. Nothing is measured.

    model: a Hugging Face decoder, or one wrapped by PEFT, on the device that trains it: a CPU or CUDA.
    attention: `auto` to choose among all strategies, or the one that will be used.

    Raises UserError for another device, an attention without a known cost, or a configuration that does not say its
    dimensions.
    """
    if attention not in ("auto", *CHOICES):
        raise UserError(f"attention must be auto or one of {', '.join(CHOICES)}, got {attention!r}")
    device = next(model.parameters()).device
    if device.type not in FIXED_RATES:
        raise UserError(f"the cost of a step is known on a CPU or a CUDA device, and the model is on {device}")
    parts = parts_of(model)
    dimensions, kinds = ModelDimensions.of(parts.base.config), LayerKinds.of(parts.decoder)
    rates = FIXED_RATES[device.type]
    mlp = dimensions.mlp_parameters(dimensions.intermediate_size or 4 * dimensions.hidden_size)
    return StepCost(
        rates=replace(rates, runs=_run_cost(parts.decoder, dimensions.hidden_size, rates.flop)),
        on_host=device.type == "cpu",
        num_heads=dimensions.num_attention_heads,
        num_key_value_heads=dimensions.num_key_value_heads,
        head_dim=dimensions.widest_head_dim,
        row_flops=6.0 * (kinds.attention * dimensions.attention_parameters + kinds.mlps * mlp),
        strategies=CHOICES if attention == "auto" else (attention,),
        attention_share=kinds.attention,
        mixer_share=kinds.mixers,
    )


def _run_cost(decoder: Any, hidden_size: int, flop: float) -> RunCost | None:
    """The defaults of `RunCost` in seconds; None without recurrent layers."""
    mixers = [mixer for mixer, _ in kinds_of_mixers(decoder)]
    if not mixers:
        return None
    forks = any(can_fork(mixer, hidden_size) for mixer in mixers)
    if not forks:
        logger.warning(
            "%s cannot start from a state with a gradient, so recurrent layers compute every sequence from its first "
            "token on; all else is shared",
            " and ".join(sorted({type(mixer).__name__ for mixer in mixers})),
        )
    # Four square matrices, forward and backward, take 24 h^2. A whole mixer was measured at 2.5 to 10 times that.
    row, default = flop * 60 * hidden_size**2, RunCost()
    return RunCost(call=row * default.call, row=row, state=row * default.state, can_fork=forks)


def calibrate(
    model: nn.Module, *, attention: str = "auto", kernel: str = "auto", dtype: torch.dtype | None = None
) -> StepCost:
    """The cost of a layer of this model on the device of its weights, measured now. The layers need not be alike.

    model: a Hugging Face decoder, or one wrapped by PEFT, on the device that trains it: a CPU or CUDA.
    attention: `auto` to choose among all strategies, or the one that will be used.
    kernel: as for `prepare_model`.
    dtype: of the computation; default: of the weights. Under autocast it is another.

    For `RadixCollator(step_cost=...)`. Attention and matrix products are measured; recurrent layers cost what is known
    of their kind, relative to a matrix product. It takes seconds and waits for the device; the global random state does
    not change. Raises UserError for another device, an attention without a known cost, a kernel that cannot run there,
    or a configuration that does not say its dimensions.
    """
    cost, weight = step_cost_of(model, attention), next(model.parameters())
    dtype = dtype or weight.dtype
    options = {"device": weight.device, "dtype": dtype}
    # Lightning validates and predicts in inference mode
    with unlogged(), torch.inference_mode(False), torch.enable_grad():
        kernel = choose_attention("cascade", kernel, weight.device, dtype, cost.head_dim).kernel
        flop = _seconds_per_flop(ModelDimensions.of(parts_of(model).base.config).hidden_size, options)
        return replace(cost, rates=_rates(cost, kernel, flop, options))


def _rates(cost: StepCost, kernel: str, flop: float, options: dict[str, Any]) -> Rates:
    """The measured rates. flop: seconds of a floating-point operation. options: of random tensors."""
    counts, seconds = [], []
    for plan in _batches():
        steps = _attention_steps(cost, kernel, TreeLayout.from_plan(plan).to(options["device"]), options)
        counts += [cost.counts(attention_work(plan, strategy, cost.on_host)) for strategy in CHOICES]
        seconds += [_fastest(step, options) for step in steps]
    call, rectangle, pair, element = non_negative_fit(np.array(counts, dtype=np.float64), np.array(seconds))
    runs, slower = cost.rates.runs, flop / cost.rates.flop
    if runs is not None:
        runs = replace(runs, call=runs.call * slower, row=runs.row * slower, state=runs.state * slower)
    return Rates(call=call, rectangle=rectangle, pair=pair, element=element, flop=flop, runs=runs)


def _batches() -> Iterator[PrefixPlan]:
    """Nothing shared, in long and in short sequences; one prompt; a deep tree; accidental sharing."""
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


def _attention_steps(
    cost: StepCost, kernel: str, layout: TreeLayout, options: dict[str, Any]
) -> Iterator[Callable[[], object]]:
    """Attention of random rows, forward and backward, by each strategy."""
    generator = torch.Generator(options["device"]).manual_seed(0)  # of its own: measuring does not move a run's seed
    heads = cost.num_heads, cost.num_key_value_heads, cost.num_key_value_heads
    shapes = [(layout.num_rows, n, cost.head_dim) for n in heads]
    q, k, v = (torch.randn(shape, generator=generator, **options).requires_grad_() for shape in shapes)
    dout = torch.randn(q.shape, generator=generator, **options)
    for strategy in CHOICES:

        def run(strategy: str = strategy) -> object:
            out = tree_attention(q, k, v, layout, attention=strategy, kernel=kernel)
            return torch.autograd.grad(out, (q, k, v), dout)

        yield run


def _seconds_per_flop(hidden_size: int, options: dict[str, Any]) -> float:
    """Measured on a matrix as wide as an MLP, forward and backward."""
    generator = torch.Generator(options["device"]).manual_seed(0)
    width = 4 * hidden_size
    x, weight, dout = (
        torch.randn(shape, generator=generator, **options)
        for shape in ((ROWS, hidden_size), (width, hidden_size), (ROWS, width))
    )
    x.requires_grad_(), weight.requires_grad_()
    seconds = _fastest(lambda: torch.autograd.grad(nn.functional.linear(x, weight), (x, weight), dout), options)
    return seconds / (6.0 * ROWS * hidden_size * width)


def _fastest(run: Callable[[], object], options: dict[str, Any]) -> float:
    """Seconds of the fastest run, after one that does not count."""
    return min(seconds_in_turns({"": run}, options["device"], REPEATS, num_warmups=1)[""])


def non_negative_fit(work: np.ndarray, seconds: np.ndarray) -> list[float]:
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
