"""Rates that no machine was measured for: with them the same choices are made everywhere.

The choice of strategy and branches changes the order of sums, and so the last digits of a loss. A calibration makes it,
so two machines, or a busy and a quiet one, give two results for one seed. Runs that must be the same bit for bit
(`trainer.deterministic: true`) choose by these round numbers instead, which are near enough to be fast.
"""

from __future__ import annotations

from dataclasses import replace

from radixtrain.hf.rates import Layer
from radixtrain.hf.run_rates import can_fork
from radixtrain.tree.cost_model import Rates
from radixtrain.tree.runs import RunCost

__all__ = ["fixed_rates"]

FIXED = {
    "cpu": Rates(call=1e-4, rectangle=1e-5, pair=1e-9, element=4e-9, flop=2e-11),  # about one core
    "cuda": Rates(call=5e-5, rectangle=0.0, pair=1e-12, element=4e-12, flop=5e-15),  # about a data-centre GPU
}


def fixed_rates(layer: Layer) -> Rates:
    """Those of the kind of device. Of recurrent layers: the defaults of `RunCost`, whose unit is a row."""
    rates = FIXED[layer.device.type]
    if not layer.mixers:
        return rates
    hidden = layer.model.hidden_size
    row = rates.flop * 24 * hidden * hidden  # four square matrices, forward and backward
    default = RunCost()
    runs = RunCost(call=row * default.call, row=row, state=row * default.state, can_fork=can_fork(layer))
    return replace(rates, runs=runs)
