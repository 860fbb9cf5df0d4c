"""What is assumed of transformers, asked once a process of two models of a few numbers.

All else is asked of the user's model: of its modules, of its masks, at each pass. But who reads a keyword does not
notice that it has another name now.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor

from radixtrain.errors import TRAIN_WITHOUT_SHARING, UserError, first_line
from radixtrain.hf.attention_interface import take_over
from radixtrain.hf.class_code import attends
from radixtrain.hf.windows import no_mask
from radixtrain.versions import installed

TINY: dict[str, Any] = {
    **{"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "sliding_window": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "attn_implementation": "eager"},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1},
}


class _Call:
    """In place of a `RadixCall`: writes down what every layer asked for."""

    def __init__(self) -> None:
        self.layout = SimpleNamespace(max_seqlen=3, blocks=None)
        self.window_may_bind = True
        self.calls: list[int] = []
        self.asked: list[dict[str, Any]] = []

    def attend(self, layer: int, heads: tuple[Tensor, ...], window: int | None, **scoring: Any) -> Tensor:
        self.asked.append({"window": window, **scoring})
        return heads[0]


def check_transformers() -> None:
    """Raise UserError with the sentence that does not hold for the installed transformers."""
    if broken := _broken():
        raise UserError(
            f"transformers {installed('transformers')}: it no longer holds that {'; that '.join(broken)}. Use a "
            f"version of transformers that radixtrain knows, or {TRAIN_WITHOUT_SHARING}"
        )


@cache
def _broken() -> list[str]:
    """The sentences that do not hold. Takes 40 ms of one core, half of it the import of the two models."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        gemma = transformers.Gemma2Model(
            transformers.Gemma2Config(**TINY, query_pre_attn_scalar=25, attn_logit_softcapping=30.0)
        )
        oss = transformers.GptOssModel(transformers.GptOssConfig(**TINY, num_local_experts=2, num_experts_per_tok=1))
    try:
        (sliding, full), (sinking, _) = _asked(gemma), _asked(oss)
    except Exception as error:  # of whatever is no longer as it was
        return [f"every layer calls the attention that its configuration names ({first_line(error)})"]
    layer = gemma.layers[0]
    holds = {
        "a class that attends, and no other, refers to AttentionInterface": (
            attends(type(layer.self_attn)) and not attends(type(layer.mlp))
        ),
        "a layer gives its scale as `scaling`": sliding["scale"] == full["scale"] == 1 / 5,
        "a layer gives its soft-cap as `softcap`": sliding["softcap"] == 30.0,
        "a layer gives its sinks as `s_aux`": sinking["sinks"] is not None,
        "a mask shows the window of its layer": (sliding["window"], full["window"]) == (2, None),
    }
    return [sentence for sentence, is_true in holds.items() if not is_true]


@torch.no_grad()
def _asked(model: Any) -> list[dict[str, Any]]:
    """What each layer asked for."""
    if reason := take_over(model):
        raise UserError(reason)
    call, ids = _Call(), torch.zeros(1, 3, dtype=torch.int64, device="cpu")
    mask = no_mask(True, ids.device, call)
    model(input_ids=ids, position_ids=ids, attention_mask=mask, use_cache=False, radix_call=call)
    return call.asked
