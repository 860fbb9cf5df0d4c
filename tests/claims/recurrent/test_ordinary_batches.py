"""A call that is not shared has the bits of the stock model: it runs the same operations."""

from typing import Any

import pytest
import torch

from radixtrain import share_prefixes
from radixtrain.hf.progress import running
from tests.support import cases
from tests.support.batches import padded
from tests.support.models import since, tiny_hybrid
from tests.support.steps import ONE_KIND, ROWS, batch_of, generated, mixers_in

UNSHARED: dict[str, Any] = {"min_ratio": 100.0}
HOOKS_INSIDE = "checkpointing runs the hooks of a layer too, and they end only with an Exception"


@ONE_KIND
def test_packed(kind: str) -> None:
    """Rows back to back with positions from 0: whatever the stock model does, its refusal included."""
    rows = ROWS[2:5]
    batch = {
        "input_ids": torch.tensor([[token for row in rows for token in row]]),
        "position_ids": torch.tensor([[n for row in rows for n in range(len(row))]]),
    }
    results = []
    for model in (tiny_hybrid(kind), share_prefixes(tiny_hybrid(kind))):
        try:
            results.append(model(**batch).logits.tolist())
        except ValueError as error:
            results.append(str(error))
    assert results[0] == results[1]


@ONE_KIND
@pytest.mark.parametrize("beams", cases([1, 2], [1]))
def test_generation(kind: str, beams: int) -> None:
    """With a cache: the prompt, then token by token; before and after a radix batch."""
    model = tiny_hybrid(kind).eval()
    stock = generated(model, num_beams=beams)
    share_prefixes(model)
    for _ in range(2):
        found = generated(model, num_beams=beams)
        assert torch.equal(found.sequences, stock.sequences)
        assert all(map(torch.equal, found.scores, stock.scores))
        model(**batch_of())


@pytest.mark.usefixtures("hooks_that_may_stay")
@ONE_KIND
@pytest.mark.parametrize("error", [ValueError, pytest.param(KeyboardInterrupt, marks=since("5.23", HOOKS_INSIDE))])
def test_after_an_exception(kind: str, error: type[BaseException]) -> None:
    """A pass that ends in the middle leaves nothing that an ordinary batch would read."""
    model = tiny_hybrid(kind)
    batch = padded(ROWS, "left")
    stock = model(**batch).logits
    share_prefixes(model, **UNSHARED).gradient_checkpointing_enable()

    def stop(*args: Any) -> None:
        raise error

    for broken in (model.model.layers[0], mixers_in(model)[0].module):
        for register in (broken.register_forward_pre_hook, broken.register_forward_hook):
            handle = register(stop)
            with pytest.raises(error):
                model(**batch_of())
            handle.remove()
            assert torch.equal(model(**batch).logits, stock)
            assert running.call is None
