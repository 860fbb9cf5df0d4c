"""`calibrate`: what the layers of a model cost on this machine, for the collator to choose by.

How much to share is measured. The rates of the machine (`radixtrain/hf/rates.py`) are measured once for a number of
threads and a model's dimensions, and kept in a file (`radixtrain/hf/rates_file.py`).
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from radixtrain.attention import choose_attention, unlogged
from radixtrain.errors import UserError
from radixtrain.hf.backbone import parts_of
from radixtrain.hf.fixed_rates import fixed_rates
from radixtrain.hf.layer_kinds import LayerKinds, kinds_of_mixers
from radixtrain.hf.rates import Layer, measured_rates
from radixtrain.hf.rates_file import file_of, keep_rates, read_rates
from radixtrain.hf.run_rates import measured_run_cost, mixers_key
from radixtrain.hf.shape import ModelDimensions
from radixtrain.tree.cost_model import CHOICES, Rates, StepCost

__all__ = ["calibrate"]

logger = logging.getLogger(__name__)
MAX_ERROR = 0.5  # root mean square of the relative errors above which rates are not kept
_MEASURED: dict[Path, Rates] = {}  # so that a folder that cannot be written is not measured for every loader


def calibrate(
    model: nn.Module,
    *,
    attention: str = "auto",
    kernel: str = "auto",
    dtype: torch.dtype | None = None,
    rates: Rates | None = None,
    measure: bool = True,
) -> StepCost:
    """The cost of a layer of this model on the device of its weights, from the file or measured and kept.

    In a hybrid model it is the mean layer, with what the recurrent ones cost on a tree, measured on those of the model.

    model: a Hugging Face decoder, or one wrapped by PEFT, on the device that trains it: a CPU or CUDA.
    attention: `auto` to choose among all strategies, or the one that will be used.
    kernel: as for `prepare_model`.
    dtype: of the computation; default: of the weights. Under autocast it is another.
    rates: of an earlier calibration, as a checkpoint keeps them; nothing is measured then.
    measure: False for rates that are the same on every machine, and so are the choices and the order of all sums.

    For `RadixCollator(step_cost=...)`. Measuring takes seconds and waits for the device; the global random state does
    not change. Raises UserError for another device, an attention without a known cost, a kernel that cannot run there,
    or a configuration that does not say its dimensions.
    """
    if attention not in ("auto", *CHOICES):
        raise UserError(f"attention must be auto or one of {', '.join(CHOICES)}, got {attention!r}")
    weight = next(model.parameters())
    if weight.device.type not in ("cpu", "cuda"):
        raise UserError(f"a calibration needs the model on a CPU or a CUDA device, it is on {weight.device}")
    parts = parts_of(model)
    dimensions = ModelDimensions.of(parts.base.config)
    dtype = dtype or weight.dtype
    with unlogged():
        choice = choose_attention("cascade", kernel, weight.device, dtype, dimensions.widest_head_dim)
    layer = Layer(
        model=dimensions,
        device=weight.device,
        dtype=dtype,
        kernel=choice.kernel,
        kinds=LayerKinds.of(parts.decoder),
        mixers=kinds_of_mixers(parts.decoder),
    )
    rates = rates or (_known_rates(layer) if measure else _fixed_rates(layer))
    return layer.cost(rates, CHOICES if attention == "auto" else (attention,))


def _known_rates(layer: Layer) -> Rates:
    """The rates that this process has used before, those of the file, or measured ones."""
    path = file_of(_key(layer))
    if path not in _MEASURED:
        rates = _MEASURED[path] = read_rates(path) or _measured_and_kept(layer, path)
        if rates.runs is not None and not rates.runs.can_fork:
            logger.warning(
                "%s cannot start from a state with a gradient, so recurrent layers compute every sequence from its "
                "first token on; all else is shared",
                " and ".join(sorted({type(mixer).__name__ for mixer, _ in layer.mixers})),
            )
    return _MEASURED[path]


def _fixed_rates(layer: Layer) -> Rates:
    with unlogged(), torch.inference_mode(False), torch.enable_grad():
        return fixed_rates(layer)


def _measured_and_kept(layer: Layer, path: Path) -> Rates:
    began = time.perf_counter()
    # Lightning validates and predicts in inference mode
    with unlogged(), torch.inference_mode(False), torch.enable_grad():
        rates, error = _measured(layer)
    hint = "trainer.deterministic: true chooses without it, the same on every machine"
    logger.info("calibrated in %.1f s: %s (%s)", time.perf_counter() - began, path, hint)
    if error > MAX_ERROR:
        logger.warning(
            "the calibration is %.0f %% off its own measurements, as on a busy machine; it is used for this run and "
            "not kept",
            100 * error,
        )
        return rates
    return keep_rates(path, rates, _key(layer))


def _key(layer: Layer) -> dict[str, Any]:
    """All that the rates depend on."""
    return {**layer.key, **({"mixers": mixers_key(layer)} if layer.mixers else {})}


def _measured(layer: Layer) -> tuple[Rates, float]:
    """Of attention, and of recurrent layers if the model has some, with the larger error of both."""
    rates, error = measured_rates(layer)
    if not layer.mixers:
        return rates, error
    runs, error_of_runs = measured_run_cost(layer)
    return replace(rates, runs=runs), max(error, error_of_runs)
