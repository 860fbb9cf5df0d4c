"""A loop of the user's own under `share_prefixes`: every kind of padding, and what users do to a model around it.

The loop calls the model as its author wrote it: nothing is said about a cache, and loss is computed from labels or from
logits.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from radixtrain import share_prefixes, sharing_report
from radixtrain.testing import relative_error
from tests.claims.loops import Loop
from tests.support import FULL, cases
from tests.support.models import tiny_model
from tests.support.trainers import (
    BAR,
    EOS,
    IGNORED,
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


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    rows, targets = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return nn.functional.cross_entropy(rows, targets, ignore_index=IGNORED)


@FULL
def test_a_label_on_the_first_padding_reads_the_last_token(tiny_qwen3):
    """Its prediction comes from the token before it, which is computed; nothing else of the padding is read."""
    rows = [[*LOOP_PROMPT, 20, 21, 22], [*LOOP_PROMPT, 30, 31], [*LOOP_PROMPT, 40, 41, 42]]
    batch = padded_with_labels(rows, [[*row, 7][:15] for row in rows], "right", pad=7)
    assert (batch["labels"][batch["attention_mask"] == 0] == 7).all()
    compare(lambda share: Loop(share(tiny_qwen3()), [batch], 1))


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@FULL
def test_compile(fresh_dynamo):
    """The untouched model is compiled too. Dynamo traces no mode that lifts casts, so it is a Phi, which has none."""
    losses, gradients = [], []
    share_prefixes(tiny_model("PhiForCausalLM", num_hidden_layers=1))  # both have our function from here on
    for share in (lambda model: model, share_prefixes):
        model = share(tiny_model("PhiForCausalLM", num_hidden_layers=1).double())
        compiled = torch.compile(model, backend="aot_eager")
        for batch in padded_batches(steps=2):
            labels = batch.pop("labels")
            loss = next_token_loss(compiled(**batch).logits, labels)
            loss.backward()
            losses.append(loss.item())
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    assert sharing_report(model).num_shared == 2
    assert losses[2:] == pytest.approx(losses[:2], rel=BAR)
    assert relative_error(gradients[1], gradients[0]) <= BAR
