"""What a layer of a model costs, for the collator to choose strategy and branches by.

Nothing is measured: the rates are `FIXED_RATES`, the same on every machine, and so are the choices, which change the
order of sums and with it the last digits of a loss.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import torch
from torch import nn
from transformers import PreTrainedModel

from radixtrain.errors import UserError
from radixtrain.hf.backbone import parts_of
from radixtrain.hf.model_dims import LayerKinds, ModelDimensions, kinds_of_mixers
from radixtrain.hf.recurrent.forking import can_fork
from radixtrain.tree.cost_model import CHOICES, FIXED_RATES, StepCost
from radixtrain.tree.runs import RunCost

logger = logging.getLogger(__name__)


def step_cost_of(model: nn.Module, attention: str = "auto", device: torch.device | None = None) -> StepCost:
    """The cost of a layer of this model, the mean one if they differ. Nothing is measured.

    model: a Hugging Face decoder, or one wrapped by PEFT, on the device that trains it: a CPU or CUDA.
    attention: `auto` to choose among all strategies, or the one that will be used.
    device: that will train it, if it is not there yet.

    Raises UserError for another device, an attention without a known cost, or a configuration that does not say its
    dimensions.
    """
    if attention not in ("auto", *CHOICES):
        raise UserError(f"attention must be auto or one of {', '.join(CHOICES)}, got {attention!r}")
    device = device or next(model.parameters()).device
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


def _run_cost(decoder: PreTrainedModel, hidden_size: int, flop: float) -> RunCost | None:
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
