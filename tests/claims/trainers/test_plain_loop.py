"""A loop of the user's own under `share_prefixes`: every kind of padding, and what users do to a model around it.

The loop calls the model as its author wrote it: nothing is said about a cache, and loss is computed from labels or from
logits.
"""

from collections.abc import Callable
from typing import Any

import pytest

from tests.claims.loops import Loop
from tests.support import FULL, cases
from tests.support.trainers import (
    EOS,
    LOOP_PROMPT,
    STEPS,
    compare,
    padded_batches,
    padded_with_labels,
)

PADDINGS = [(side, pad) for side in ("right", "left", "both") for pad in (0, EOS)]


@pytest.mark.parametrize(("side", "pad"), cases(PADDINGS, [("left", EOS)]))
def test_default_call(tiny_qwen3, table, side, pad):
    """The model keeps a cache by default, and nothing in the call says otherwise."""

    def build(share: Callable[[Any], Any]) -> Loop:
        model = share(tiny_qwen3())
        assert model.config.use_cache
        return Loop(model, padded_batches(side, pad), STEPS)

    found = compare(build)
    assert found.r > 2
    table(f"plain loop, {side} padding{', pad == eos' * (pad == EOS)}", found)


@FULL
def test_a_label_on_the_first_padding_reads_the_last_token(tiny_qwen3):
    """Its prediction comes from the token before it, which is computed; nothing else of the padding is read."""
    rows = [[*LOOP_PROMPT, 20, 21, 22], [*LOOP_PROMPT, 30, 31], [*LOOP_PROMPT, 40, 41, 42]]
    batch = padded_with_labels(rows, [[*row, 7][:15] for row in rows], "right", pad=7)
    assert (batch["labels"][batch["attention_mask"] == 0] == 7).all()
    compare(lambda share: Loop(share(tiny_qwen3()), [batch], 1))
