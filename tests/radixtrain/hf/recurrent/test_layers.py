"""A mixer's `forward` and the hooks of its block: who gets the call of a batch, when, and what is left behind."""

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from radixtrain import RadixCollator, prepare_model, restore_model
from radixtrain.errors import UserError
from radixtrain.hf.recurrent import layers
from radixtrain.hf.recurrent.layers import Block, Checkpoint, Mixer, Progress, install_mixers, remove_mixers
from radixtrain.hf.recurrent.mixers import mixers_of
from radixtrain.hf.windows import no_mask
from radixtrain.tree.runs import RunCost

FORKS = RunCost(call=0.0, row=1.0, state=0.0)
ROWS = [[7, 8, 9, 1, 2, 3, 4, 5], [7, 8, 9, 1, 2, 6], [7, 8, 9, 1, 4]]


def batch_of(rows: list[list[int]] = ROWS) -> dict[str, Any]:
    return RadixCollator(run_cost=FORKS, loss_on_all=True)([{"input_ids": ids} for ids in rows])


@pytest.fixture
def model(tiny_hybrid: Callable[..., Any]) -> Any:
    return prepare_model(tiny_hybrid("Qwen3.5"))


def mixer_in(model: Any) -> Mixer:
    (path,) = mixers_of(model.model)
    return model.model.get_submodule(path).forward.__self__


class Layer(nn.Module):
    """A decoder layer that writes down which call its mixer has."""

    def __init__(self) -> None:
        super().__init__()
        self.mixer = nn.Linear(2, 2)
        self.seen: list[Any] = []

    def forward(self, hidden: Tensor, **kwargs: Any) -> Tensor:
        self.seen.append(self.stand_in.call)
        return self.mixer(hidden)


def hooked() -> tuple[Layer, Block]:
    layer = Layer()
    layer.__dict__["stand_in"] = Mixer(layer.mixer)
    block = Block([layer.stand_in], [layer], Progress())
    layer.register_forward_pre_hook(block.enter, with_kwargs=True, prepend=True)
    layer.register_forward_hook(block.leave, always_call=True)
    return layer, block


class TestWhichCall:
    CALL = SimpleNamespace(name="of this batch")

    def test_none(self) -> None:
        layer, _ = hooked()
        layer(torch.ones(1, 2))
        assert layer.seen == [None]

    def test_among_the_arguments(self) -> None:
        layer, block = hooked()
        layer(torch.ones(1, 2), radix_call=self.CALL)
        assert layer.seen == [self.CALL]
        assert block.call is None and layer.stand_in.call is None

    def test_on_the_mask(self) -> None:
        layer, _ = hooked()
        layer(torch.ones(1, 2), attention_mask=no_mask(False, torch.device("cpu"), self.CALL))
        assert layer.seen == [self.CALL]

    def test_of_the_pass(self) -> None:
        """The layer's input is marked: the same tensor again, after the pass, is of the same batch."""
        layer, block = hooked()
        hidden = torch.ones(1, 2)
        block.progress.call = self.CALL
        layer(hidden)
        block.progress.call = None
        layer(hidden)
        layer(hidden.clone())
        assert layer.seen == [self.CALL, self.CALL, None]

    @pytest.mark.parametrize("wants", [True, False])
    def test_a_mark_that_would_be_lost(self, wants: bool) -> None:
        """Reentrant checkpointing is an autograd function; without gradients there is nothing to compute again."""
        layer, block = hooked()
        block.progress.call = self.CALL

        class Reentrant(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, hidden: Tensor) -> Tensor:
                return layer(hidden)

        hidden = torch.ones(1, 2, requires_grad=wants)
        if wants:
            with pytest.raises(UserError, match=r"Layer has a recurrent state and .* set use_reentrant to False"):
                Reentrant.apply(hidden)
        else:
            Reentrant.apply(hidden)
            assert layer.seen == [self.CALL]

    def test_left_after_an_error(self) -> None:
        layer, block = hooked()
        with pytest.raises(RuntimeError, match="shapes"):
            layer(torch.ones(1, 3), radix_call=self.CALL)
        assert layer.seen == [self.CALL]
        assert block.call is None and layer.stand_in.call is None


class TestCheckpoint:
    def checkpointing(self) -> tuple[Layer, Block, Any]:
        layer, block = hooked()
        kept: list[Any] = []

        def compute(function: Callable[..., Any], *args: Any) -> Any:
            kept.append((function, args))
            return function(*args)

        layer._gradient_checkpointing_func = compute
        return layer, block, kept

    def test_the_call_is_there_again(self) -> None:
        """Of two batches each has its own, in any order, and an ordinary batch between them has none."""
        layer, block, kept = self.checkpointing()
        stock = layer._gradient_checkpointing_func
        calls = [SimpleNamespace(number=number) for number in range(2)]
        for call in calls:
            block.give(call)
            assert isinstance(layer._gradient_checkpointing_func, Checkpoint)
            layer._gradient_checkpointing_func(lambda: layer.seen.append(layer.stand_in.call))
            block.give(None)
            assert layer._gradient_checkpointing_func is stock
        layer._gradient_checkpointing_func(lambda: layer.seen.append(layer.stand_in.call))
        for function, args in reversed(kept):
            function(*args)
            assert layer.stand_in.call is None
        assert layer.seen == [*calls, None, None, *reversed(calls)]

    def test_an_error_when_it_runs_again(self) -> None:
        layer, block, _ = self.checkpointing()
        call, passes = SimpleNamespace(), iter([True])

        def only_once() -> None:
            next(passes)

        block.give(call)
        compute = layer._gradient_checkpointing_func
        compute(only_once)
        block.give(None)
        with pytest.raises(StopIteration):
            compute(only_once)
        assert block.call is None and not isinstance(layer._gradient_checkpointing_func, Checkpoint)

    def test_giving_twice_wraps_once(self) -> None:
        layer, block, _ = self.checkpointing()
        stock = layer._gradient_checkpointing_func
        for _ in range(2):
            block.give(SimpleNamespace())
        assert layer._gradient_checkpointing_func.original is stock


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
        for _ in range(2):
            model(**batch_of())
        assert asked == [torch.float32]
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                model(**batch_of())
        assert asked == [torch.float32] * 2
        model.bfloat16()(**batch_of())
        assert asked == [torch.float32] * 2 + [torch.bfloat16]

    def test_not_without_forks(self, model: Any, asked: list[Any]) -> None:
        model(**batch_of([[1, 2, 3], [4, 5]]))
        assert not asked

    def test_again_if_undecided(self, model: Any, asked: list[Any], caplog: pytest.LogCaptureFixture) -> None:
        """Nobody is warned of what may be different at the next batch."""
        self.answers.extend([None, None, ""])
        for _ in range(4):
            model(**batch_of())
        assert len(asked) == 3
        assert not caplog.records

    def test_a_reason_is_said_once(self, model: Any, asked: list[Any], caplog: pytest.LogCaptureFixture) -> None:
        self.answers.append("it is a stone")
        with caplog.at_level(logging.WARNING):
            losses = [model(**batch_of()).loss.item() for _ in range(2)]
        assert [record.message for record in caplog.records] == [
            "Qwen3_5GatedDeltaNet of layer 0 computes every sequence from its first token on: it is a stone"
        ]
        assert losses[0] == losses[1]
        assert len(asked) == 1

    def test_whole_sequences_have_the_same_values(self, model: Any, asked: list[Any]) -> None:
        forked = model.double()(**batch_of()).logits
        mixer_in(model).why_whole.clear()
        self.answers.append("no")
        whole = model(**batch_of()).logits
        assert not torch.equal(forked, whole)
        assert torch.allclose(forked, whole)


class TestInstalling:
    def test_outside_of_a_layer(self, tiny_hybrid: Callable[..., Any]) -> None:
        decoder = tiny_hybrid("Qwen3.5").model
        decoder.front = decoder.layers[0].linear_attn
        decoder.layers = decoder.layers[1:]
        with pytest.raises(
            UserError, match=r"Qwen3_5GatedDeltaNet \(front\) carries a state .* outside of the decoder"
        ):
            install_mixers(decoder, Progress())

    def test_what_stood_there_comes_back(self, tiny_hybrid: Callable[..., Any]) -> None:
        decoder = tiny_hybrid("Qwen3.5").model
        (module,) = mixers_of(decoder).values()
        remove_mixers(decoder)
        assert "forward" not in module.__dict__
        for own in (None, lambda *args, **kwargs: torch.ones(1)):
            if own is not None:
                module.forward = own
            assert install_mixers(decoder, Progress()) == [module]
            assert isinstance(module.forward.__self__, Mixer)
            if own is not None:
                assert torch.equal(module(torch.zeros(1, 1, 32)), torch.ones(1))
            remove_mixers(decoder)
            assert module.__dict__.get("forward") is own

    def test_a_model_that_only_attends(self, tiny_qwen3: Callable[..., Any]) -> None:
        model = tiny_qwen3()
        assert install_mixers(model.model, Progress()) == []
        assert not any(module._forward_pre_hooks for module in model.modules())

    def test_hooks_on_blocks_go(self, model: Any) -> None:
        layer = model.model.layers[0]
        assert len(layer._forward_pre_hooks) == len(layer._forward_hooks) == 1
        restore_model(model)
        assert not layer._forward_pre_hooks and not layer._forward_hooks
        assert not layer._forward_hooks_always_called and not layer._forward_pre_hooks_with_kwargs
