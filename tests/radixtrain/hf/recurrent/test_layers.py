"""The mixers of a prepared model: tried once before they fork, installed in every layer, and refused outside of one.

That they get the tree of their batch, also when activations are recomputed, is in tests/claims/recurrent.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from radixtrain import RadixCollator, share_prefixes, verify_equivalence
from radixtrain.errors import UserError
from radixtrain.hf.recurrent import layers

pytestmark = pytest.mark.usefixtures("free_forks")
ROWS = [[7, 8, 9, 1, 2, 3, 4, 5], [7, 8, 9, 1, 2, 6], [7, 8, 9, 1, 4]]
KINDS = ["linear_attention", "linear_attention", "full_attention"]


def batch_of(rows: list[list[int]] = ROWS) -> dict[str, Any]:
    return RadixCollator(loss_on_all=True)([{"input_ids": ids} for ids in rows])


@pytest.fixture
def model(tiny_hybrid: Callable[..., Any]) -> Any:
    return share_prefixes(tiny_hybrid("Qwen3.5"))


def ours(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Without what transformers says of missing kernels, once a process."""
    return [record for record in caplog.records if record.name.startswith("radixtrain")]


@pytest.mark.usefixtures("without_the_trial")
class TestTheTrial:
    """`why_it_cannot_fork` is asked once for a device and dtype, and only if a batch forks."""

    @pytest.fixture
    def asked(self, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        answers: list[Any] = []
        asked: list[Any] = []

        def answer(module: Any, forward: Any, given: Any) -> Any:
            asked.append(given["hidden_states"].dtype)
            return answers.pop(0) if answers else ""

        monkeypatch.setattr(layers, "why_it_cannot_fork", answer)
        self.answers = answers
        return asked

    def test_once(self, model: Any, asked: list[Any]) -> None:
        model(**batch_of([[1, 2, 3], [4, 5]]))
        assert not asked, "nothing forks"
        for _ in range(2):
            model(**batch_of())
        assert asked == [torch.float32]
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                model(**batch_of())
        assert asked == [torch.float32] * 2
        model.bfloat16()(**batch_of())
        assert asked == [torch.float32] * 2 + [torch.bfloat16]

    def test_again_if_undecided(self, model: Any, asked: list[Any], caplog: pytest.LogCaptureFixture) -> None:
        """There is no warning, because the next batch may decide otherwise."""
        self.answers.extend([None, None, ""])
        for _ in range(4):
            model(**batch_of())
        assert len(asked) == 3
        assert not ours(caplog)

    def test_a_reason_is_said_once(self, model: Any, asked: list[Any], caplog: pytest.LogCaptureFixture) -> None:
        self.answers.append("it is a stone")
        with caplog.at_level(logging.WARNING):
            losses = [model(**batch_of()).loss.item() for _ in range(2)]
        assert [record.message for record in ours(caplog)] == [
            "Qwen3_5GatedDeltaNet of layer 0 computes every sequence from its first token on: it is a stone "
            "(logged once for all layers)"
        ]
        assert losses[0] == losses[1]
        assert len(asked) == 1

    def test_layers_of_one_kind_are_tried_once(
        self, tiny_hybrid: Any, asked: list[Any], caplog: pytest.LogCaptureFixture
    ) -> None:
        """The third one has a `forward` of its own, so it is another kind."""
        model = tiny_hybrid("Qwen3.5", num_hidden_layers=4, layer_types=["linear_attention", *KINDS])
        third = model.model.layers[2].linear_attn
        third.forward = partial(type(third).forward, third)
        self.answers.extend(["it is a stone", "it is water"])
        share_prefixes(model)(**batch_of())
        assert len(asked) == 2
        assert [each.args[1:] for each in ours(caplog)] == [(0, "it is a stone"), (2, "it is water")]


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
