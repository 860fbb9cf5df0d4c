"""A mixer's `forward` and the hooks of its layer: who gets the call of a batch, when, and what stays afterwards."""

import logging
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from radixtrain import RadixCollator, prepare_model, restore_model, verify_equivalence
from radixtrain.errors import UserError
from radixtrain.hf.recurrent import layers
from radixtrain.hf.recurrent.layers import Checkpoint, LayerHooks, Mixer, Progress, install_mixers, remove_mixers
from radixtrain.hf.recurrent.mixers import mixers_of
from radixtrain.hf.windows import no_mask
from radixtrain.testing import FREE_FORKS

ROWS = [[7, 8, 9, 1, 2, 3, 4, 5], [7, 8, 9, 1, 2, 6], [7, 8, 9, 1, 4]]


def batch_of(rows: list[list[int]] = ROWS) -> dict[str, Any]:
    return RadixCollator(run_cost=FREE_FORKS, loss_on_all=True)([{"input_ids": ids} for ids in rows])


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


def hooked() -> tuple[Layer, LayerHooks]:
    layer = Layer()
    layer.__dict__["stand_in"] = Mixer(layer.mixer)
    hooks = LayerHooks([layer.stand_in], [layer], Progress())
    layer.register_forward_pre_hook(hooks.enter, with_kwargs=True, prepend=True)
    layer.register_forward_hook(hooks.leave, always_call=True)
    return layer, hooks


class TestWhichCall:
    CALL = SimpleNamespace(name="of this batch")

    def test_none(self) -> None:
        layer, _ = hooked()
        layer(torch.ones(1, 2))
        assert layer.seen == [None]

    def test_among_the_arguments(self) -> None:
        layer, hooks = hooked()
        layer(torch.ones(1, 2), radix_call=self.CALL)
        assert layer.seen == [self.CALL]
        assert hooks.call is None and layer.stand_in.call is None

    def test_on_the_mask(self) -> None:
        layer, _ = hooked()
        layer(torch.ones(1, 2), attention_mask=no_mask(False, torch.device("cpu"), self.CALL))
        assert layer.seen == [self.CALL]

    def test_of_the_pass(self) -> None:
        """The layer's input is marked: the same tensor again, after the pass, is of the same batch."""
        layer, hooks = hooked()
        hidden = torch.ones(1, 2)
        hooks.progress.call = self.CALL
        layer(hidden)
        hooks.progress.call = None
        layer(hidden)
        layer(hidden.clone())
        assert layer.seen == [self.CALL, self.CALL, None]

    @pytest.mark.parametrize("wants", [True, False])
    def test_a_mark_that_would_be_lost(self, wants: bool) -> None:
        """Reentrant checkpointing is an autograd function; without gradients there is nothing to compute again."""
        layer, hooks = hooked()
        hooks.progress.call = self.CALL

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
        layer, hooks = hooked()
        with pytest.raises(RuntimeError, match="shapes"):
            layer(torch.ones(1, 3), radix_call=self.CALL)
        assert layer.seen == [self.CALL]
        assert hooks.call is None and layer.stand_in.call is None


class TestCheckpoint:
    def checkpointing(self) -> tuple[Layer, LayerHooks, Any]:
        layer, hooks = hooked()
        kept: list[Any] = []

        def compute(function: Callable[..., Any], *args: Any) -> Any:
            kept.append((function, args))
            return function(*args)

        layer._gradient_checkpointing_func = compute
        return layer, hooks, kept

    def test_the_call_is_there_again(self) -> None:
        """Of two batches each has its own, in any order, and an ordinary batch between them has none."""
        layer, hooks, kept = self.checkpointing()
        stock = layer._gradient_checkpointing_func
        calls = [SimpleNamespace(number=number) for number in range(2)]
        for call in calls:
            hooks.give(call)
            assert isinstance(layer._gradient_checkpointing_func, Checkpoint)
            layer._gradient_checkpointing_func(lambda: layer.seen.append(layer.stand_in.call))
            hooks.give(None)
            assert layer._gradient_checkpointing_func is stock
        layer._gradient_checkpointing_func(lambda: layer.seen.append(layer.stand_in.call))
        for function, args in reversed(kept):
            function(*args)
            assert layer.stand_in.call is None
        assert layer.seen == [*calls, None, None, *reversed(calls)]

    def test_an_error_when_it_runs_again(self) -> None:
        layer, hooks, _ = self.checkpointing()
        call, passes = SimpleNamespace(), iter([True])

        def only_once() -> None:
            next(passes)

        hooks.give(call)
        compute = layer._gradient_checkpointing_func
        compute(only_once)
        hooks.give(None)
        with pytest.raises(StopIteration):
            compute(only_once)
        assert hooks.call is None and not isinstance(layer._gradient_checkpointing_func, Checkpoint)

    def test_giving_twice_wraps_once(self) -> None:
        layer, hooks, _ = self.checkpointing()
        stock = layer._gradient_checkpointing_func
        for _ in range(2):
            hooks.give(SimpleNamespace())
        assert layer._gradient_checkpointing_func.original is stock


def ours(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Without what transformers says of missing kernels, once a process."""
    return [record for record in caplog.records if record.name.startswith("radixtrain")]


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
            "(said once for all its layers)"
        ]
        assert losses[0] == losses[1]
        assert len(asked) == 1

    def test_layers_of_one_kind_are_tried_once(
        self, tiny_hybrid: Any, asked: list[Any], caplog: pytest.LogCaptureFixture
    ) -> None:
        """The third one has a `forward` of its own, so it is another kind."""
        kinds = ["linear_attention"] * 3 + ["full_attention"]
        model = tiny_hybrid("Qwen3.5", num_hidden_layers=4, layer_types=kinds)
        third = model.model.layers[2].linear_attn
        third.forward = partial(type(third).forward, third)
        self.answers.extend(["it is a stone", "it is water"])
        prepare_model(model)(**batch_of())
        assert len(asked) == 2
        assert [each.args[1:] for each in ours(caplog)] == [(0, "it is a stone"), (2, "it is water")]

    def test_whole_sequences_have_the_same_values(self, model: Any, asked: list[Any]) -> None:
        forked = model.double()(**batch_of()).logits
        mixer_in(model).trials.clear()
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

    def test_a_refused_model_is_as_it_was(self, tiny_hybrid: Callable[..., Any]) -> None:
        model = tiny_hybrid("Qwen3.5")
        before = model.config._attn_implementation
        model.model.front = model.model.layers[0].linear_attn
        with pytest.raises(UserError, match="outside of the decoder layers"):
            prepare_model(model)
        assert model.config._attn_implementation == before
        assert "forward" not in model.model.front.__dict__

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

    def test_two_layers_that_share_a_mixer(self, tiny_hybrid: Callable[..., Any]) -> None:
        """In the second one it had no call, and read all unique rows as one sequence."""
        kinds = ["linear_attention", "linear_attention", "full_attention"]
        model = tiny_hybrid("Qwen3.5", num_hidden_layers=3, layer_types=kinds)
        layers = model.model.layers
        layers[1].linear_attn = layers[0].linear_attn
        features = [{"input_ids": ids, "labels": ids} for ids in ROWS]
        report = verify_equivalence(model, features, collator=RadixCollator(run_cost=FREE_FORKS))
        assert report["float64"].passed, str(report)

    def test_a_model_that_only_attends(self, tiny_qwen3: Callable[..., Any]) -> None:
        model = tiny_qwen3()
        assert install_mixers(model.model, Progress()) == []
        assert not any(module._forward_pre_hooks for module in model.modules())

    def test_hooks_on_layers_go(self, model: Any) -> None:
        layer = model.model.layers[0]
        assert len(layer._forward_pre_hooks) == len(layer._forward_hooks) == 1
        restore_model(model)
        assert not layer._forward_pre_hooks and not layer._forward_hooks
        assert not layer._forward_hooks_always_called and not layer._forward_pre_hooks_with_kwargs
