"""The mixers of a prepared model: installed in every layer, and refused outside of one.

That they get the tree of their batch, also when activations are recomputed, is in tests/claims/recurrent.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from radixtrain import RadixCollator, share_prefixes, verify_equivalence
from radixtrain.errors import UserError

pytestmark = pytest.mark.usefixtures("free_forks")
ROWS = [[7, 8, 9, 1, 2, 3, 4, 5], [7, 8, 9, 1, 2, 6], [7, 8, 9, 1, 4]]
KINDS = ["linear_attention", "linear_attention", "full_attention"]


def batch_of(rows: list[list[int]] = ROWS) -> dict[str, Any]:
    return RadixCollator(loss_on_all=True)([{"input_ids": ids} for ids in rows])


@pytest.fixture
def model(tiny_hybrid: Callable[..., Any]) -> Any:
    return share_prefixes(tiny_hybrid("Qwen3.5"))


class TestInstalling:
    def test_outside_of_a_layer(self, tiny_hybrid: Callable[..., Any]) -> None:
        """A model that is refused is as it was."""
        model = tiny_hybrid("Qwen3.5")
        before = model.config._attn_implementation
        model.model.front = model.model.layers[0].linear_attn
        with pytest.raises(UserError, match=r"GatedDeltaNet \(front\) carries .* outside of the decoder layers"):
            share_prefixes(model)
        assert model.config._attn_implementation == before
        assert "forward" not in vars(model.model.front)

    def test_two_layers_that_share_a_mixer(self, tiny_hybrid: Callable[..., Any]) -> None:
        """In the second one it had no call, and read all unique rows as one sequence."""
        model = tiny_hybrid("Qwen3.5", num_hidden_layers=3, layer_types=KINDS)
        model.model.layers[1].linear_attn = model.model.layers[0].linear_attn
        features = [{"input_ids": ids, "labels": ids} for ids in ROWS]
        report = verify_equivalence(model, features, precisions=["float64"])
        assert report.passed, str(report)


def test_the_same_bits_every_time(model: Any) -> None:
    """Rows and states of several runs are added up in one order."""

    def gradients() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(model(**batch_of()).loss, list(model.parameters()))

    assert all(map(torch.equal, gradients(), gradients()))
