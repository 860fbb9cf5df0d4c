"""Assumptions about transformers, tried once per process on a tiny model.

Everything else is checked on the user's model, its modules and masks, at each pass. But code that reads a keyword does
not notice if it is renamed.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor

from radixtrain.errors import UserError, first_line
from radixtrain.hf.attention_interface import take_over
from radixtrain.hf.windows import no_mask
from radixtrain.versions import installed, untested

LONGEST, WINDOW, SCALAR = 3, 2, 25
TINY: dict[str, Any] = {
    **{"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "sliding_window": WINDOW},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "query_pre_attn_scalar": SCALAR},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, "attn_implementation": "eager"},
}


def check_transformers(instead: str) -> None:
    """Raise UserError with the assumption that the installed transformers breaks. instead: another way."""
    if broken := _broken():
        raise UserError(
            f"transformers {installed('transformers')}: it no longer holds that {broken}. Use a version of "
            f"transformers that radixtrain knows, or {instead}{untested()}"
        )


@cache
def _broken() -> str | None:
    """Return the first assumption that does not hold. Takes 15 ms of one core, the import of Gemma 2 included."""
    try:
        scales, windows = zip(*_requested_by_gemma(), strict=True)
    except Exception as error:  # something in torch or transformers has changed
        return f"every layer calls the attention that its configuration names ({first_line(error)})"
    if scales != (SCALAR**-0.5, SCALAR**-0.5):
        return "a layer gives its attention its scale as `scaling`"
    return None if windows == (WINDOW, None) else "a layer gives its attention its window as `sliding_window`"


@torch.no_grad()
def _requested_by_gemma() -> list[tuple[float, int | None]]:
    """Return the scale and window of each of two layers; with flash attention, whose windows come by keyword only."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        model: Any = transformers.Gemma2Model(transformers.Gemma2Config(**TINY))
        ids = torch.zeros(1, LONGEST, dtype=torch.int64)
    model.config._attn_implementation = "flash_attention_2"
    if reason := take_over(model):
        raise UserError(reason)
    asked: list[tuple[float, int | None]] = []

    def attend(heads: tuple[Tensor, ...], window: int | None, scale: float, **_: object) -> Tensor:
        asked.append((scale, window))
        return heads[0]

    layout = SimpleNamespace(max_seqlen=LONGEST, blocks=None)
    call = SimpleNamespace(layout=layout, window_may_bind=True, attend=attend, calls=[])
    mask = no_mask(True, ids.device, call)
    model(input_ids=ids, position_ids=ids, attention_mask=mask, use_cache=False, radix_call=call)
    return asked
