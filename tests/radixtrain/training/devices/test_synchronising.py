"""One optimizer step under DDP has the gradient and the loss of one process, whatever each rank computes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any

import lightning as L
import pytest
import torch
from forked_ranks import on_ranks
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from radixtrain.collators.steps import Step, StepCollator
from radixtrain.distributed import ranks
from radixtrain.hf.prepare import prepare_model
from radixtrain.training.devices.synchronising import backward, wrap_again
from radixtrain.training.module import RadixModule
from radixtrain.verification.oracle import float64_throughout

EXACT = 1e-12  # of a tensor: the largest difference over the largest magnitude, in float64


def features(count: int) -> list[dict[str, Any]]:
    """Two prompts, whose answers have 1 to 6 labels."""
    draw = torch.Generator().manual_seed(0)
    prompts = [torch.randint(2, 50, (6,), generator=draw).tolist() for _ in range(2)]
    rows = []
    for number in range(count):
        answer = torch.randint(2, 50, (1 + number % 6,), generator=draw).tolist()
        prompt = prompts[number % 2]
        rows.append({"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer})
    return rows


class Watched(RadixModule):
    """Notes the gradients that AdamW would receive, and takes no step."""

    found: dict[str, Any]

    @classmethod
    def around(cls, model: Any, **settings: Any) -> Watched:
        module = cls("unused", max_grad_norm=0.0, **settings)
        module.model, module.guard.allows = model, module.note  # type: ignore[method-assign]
        return module

    def note(self, module: Any, loss: Tensor, grad_norm: Tensor, *_: Any) -> bool:
        gradients = {name: each.grad.clone() for name, each in self.named_parameters() if each.requires_grad}
        self.found = {"gradients": gradients, "loss": loss.item(), "grad_norm": grad_norm.item()}
        return False


def trainer_on(count: int, **options: bool) -> L.Trainer:
    """options: of `DistributedDataParallel`; by default as `check_devices` sets them."""
    strategy = DDPStrategy(**{"gradient_as_bucket_view": True, **options})
    several: dict[str, Any] = {"strategy": strategy, "devices": count} if count > 1 else {"devices": 1}
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler")
    return L.Trainer(accelerator="cpu", max_epochs=1, **several, **dict.fromkeys(off, False))


def one_step(module: Watched, step: Step, size: int) -> dict[str, Any]:
    """What a rank finds in its part of a step."""
    recomputes = module.model.is_gradient_checkpointing
    with nullcontext() if recomputes else float64_throughout(module.model):  # it does not reach what is recomputed
        trainer_on(size).fit(module, DataLoader([step], batch_size=None))
    return module.found


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor], bar: float = EXACT) -> None:
    assert found.keys() == expected.keys() and expected
    for name, there in expected.items():
        assert there.abs().max() > 0, name
        assert (found[name] - there).abs().max() <= bar * there.abs().max(), name


def prepared(model: Any) -> Any:
    return prepare_model(model.train(), attention="reference")


def with_lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model, LoraConfig(r=3, target_modules="all-linear"))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    return adapted


def checkpointing(model: Any, use_reentrant: bool = False) -> Any:
    model.double().gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    if use_reentrant:
        model.enable_input_require_grads()
    return model


def soft_capped() -> Any:
    """Its head scales the logits, so it is not fused with the loss."""
    from transformers import GraniteConfig, GraniteForCausalLM

    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    return GraniteForCausalLM(GraniteConfig(**sizes, **heads, logits_scaling=3.0))


def experts() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "moe_intermediate_size": 16}
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, num_experts=16, num_experts_per_tok=2))


def half_frozen(model: Any) -> Any:
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    return model


MODELS: dict[str, Callable[[Any, Any], Any]] = {
    "tied": lambda tiny, _: prepared(tiny()),
    "half frozen": lambda tiny, _: prepared(half_frozen(tiny(tie_word_embeddings=False))),
    "LoRA": lambda tiny, _: prepared(with_lora(tiny())),
    "checkpointing": lambda tiny, _: prepared(checkpointing(tiny())),
    "reentrant checkpointing": lambda tiny, _: prepared(checkpointing(tiny(), use_reentrant=True)),
    "LoRA, checkpointing": lambda tiny, _: prepared(with_lora(checkpointing(tiny()))),
    "its own head": lambda *_: prepared(soft_capped()),
    "recurrent": lambda _, hybrid: prepared(hybrid("Qwen3.5")),
    "experts": lambda *_: prepared(experts()),
    "ordinary": lambda tiny, _: tiny().train(),
}


@pytest.mark.parametrize(("name", "size", "rows"), [*((name, 2, 9) for name in MODELS), ("tied", 4, 3), ("LoRA", 3, 8)])
def test_the_step_of_one_process(
    name: str, size: int, rows: int, tiny_qwen3: Callable[..., Any], tiny_hybrid: Callable[..., Any]
) -> None:
    """With three rows a rank of four has none; nine make several micro-batches, with other label counts on each."""
    dedup = name != "ordinary"
    module = Watched.around(MODELS[name](tiny_qwen3, tiny_hybrid), dedup=dedup)
    cut = StepCollator(max_tokens=14, dedup=dedup)
    steps = [replace(cut, rank=rank, num_ranks=size)(features(rows)) for rank in range(size)]
    if rows < size:
        assert not all(any(step.members) for step in steps)
    else:
        assert len(steps[0].micro_batches) > 1
    answers = on_ranks(size, lambda rank: one_step(module, steps[rank], size))
    whole = cut(features(rows))
    if "checkpointing" in name:  # in the same micro-batches, since Hugging Face rounds parts of float64 to float32
        whole = replace(whole, micro_batches=[batch for step in steps for batch in step.micro_batches])
    expected = one_step(module, whole, 1)
    for answer in answers:
        assert_near(answer["gradients"], expected["gradients"])
        assert answer["loss"] == answers[0]["loss"] == pytest.approx(expected["loss"], rel=2e-7)
        assert answer["grad_norm"] == answers[0]["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-12)


def test_each_step_adds_in_the_same_order(tiny_qwen3: Callable[..., Any]) -> None:
    """So that the first step of a resumed run is that of the run which went through, on more than two ranks too."""
    module, cut = Watched.around(prepared(tiny_qwen3())), StepCollator(num_ranks=4)

    def gradients(rank: int) -> list[dict[str, Tensor]]:
        found: list[dict[str, Tensor]] = []
        step = replace(cut, rank=rank)(features(13))
        module.guard.allows = lambda *given: found.append(module.note(*given) or module.found["gradients"])
        trainer_on(4).fit(module, DataLoader([step] * 3, batch_size=None))
        return found

    first, *others = on_ranks(4, gradients)[0]
    assert len(others) == 2
    for other in others:
        assert [name for name, there in first.items() if not torch.equal(other[name], there)] == []


class Experts(L.LightningModule):
    """Four weights, of which a micro-batch reaches those that it names."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.weights = nn.ParameterList([torch.full((2,), float(place + 1)) for place in range(4)])
        self.found: list[list[float] | None] = []

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.5, weight_decay=0.5)

    def training_step(self, batches: list[list[int]], index: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        for place, batch in enumerate(batches):
            loss = sum((each + 1.0) * self.weights[each].square().sum() for each in batch) * ranks().size
            backward(self, loss, is_last=place == len(batches) - 1)
        self.found.append([None if each.grad is None else each.grad.tolist() for each in self.weights])
        optimizer.step()


def trained(steps: list[list[list[int]]], size: int, **options: bool) -> tuple[Any, list[list[float]]]:
    """The gradients of each step, and the weights after the last. options: of `trainer_on`."""
    module = Experts()
    trainer_on(size, **options).fit(module, DataLoader(steps, batch_size=None))
    return module.found, [each.tolist() for each in module.weights]


@pytest.mark.parametrize("option", ["gradient_as_bucket_view", "find_unused_parameters"])
@pytest.mark.parametrize("is_set", [True, False])
def test_weights_that_some_ranks_do_not_reach(option: str, is_set: bool) -> None:
    """In the last micro-batch, in none of one rank, and in none of any: that gradient stays None, as AdamW needs it."""
    shares = [[[[0], [1]], [[1]], [[3, 0]]], [[[0, 2], [0]], [[1]], [[2]]]]
    answers = on_ranks(2, lambda rank: trained(shares[rank], 2, **{option: is_set}))
    gradients, weights = trained([first + second for first, second in zip(*shares, strict=True)], 1)
    assert [[each is None for each in step] for step in gradients] == [
        [False, False, False, True],
        [True, False, True, True],
        [False, True, False, False],
    ]
    assert answers == [(gradients, weights)] * 2


class WithoutOne(Experts):
    """A weight has a gradient and no optimizer, which would set it to None before each step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.weights[1:], lr=0.5, weight_decay=0.5)


def test_a_weight_that_the_optimizer_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "Experts", WithoutOne)
    expected = trained([[[0, 1, 2, 3]], [[0, 1]]], 1)
    assert [each is None for each in expected[0][1]] == [False, False, True, True]
    answers = on_ranks(2, lambda rank: trained([[[0, 1], [2, 3]][rank : rank + 1], [[rank]]], 2))
    assert answers == [expected] * 2


def test_gradients_are_exchanged_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def count(rank: int) -> list[bool]:
        exchanged: list[bool] = []
        run = Experts.manual_backward

        def noting(module: Any, loss: Tensor) -> None:
            exchanged.append(module.trainer.strategy.model.require_backward_grad_sync)
            run(module, loss)

        monkeypatch.setattr(Experts, "manual_backward", noting)
        trained([[[0, 1, 2, 3]] * 3, [[0, 1, 2, 3]] * 2], 2)
        return exchanged

    assert on_ranks(2, count) == [[False, False, True, False, True]] * 2


def test_gradients_are_held_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each micro-batch adds to those in DDP's buckets, also after steps that have not reached a weight."""

    def places(rank: int) -> list[set[tuple[int, int]]]:
        found: list[set[tuple[int, int]]] = []
        run = Experts.manual_backward

        def noting(module: Any, loss: Tensor) -> None:
            run(module, loss)
            held = [each.grad for each in module.weights if each.grad is not None]
            found.append({(each.data_ptr(), each.untyped_storage().nbytes()) for each in held})

        monkeypatch.setattr(Experts, "manual_backward", noting)
        trained([[[0, 1, 2, 3]]] * 2 + [[[0], [1, 2], [3, 0]], [[0, 1]], [[2, 3], [0]]], 2)
        return found[2:]  # DDP lays out its buckets in the second step

    for found in on_ranks(2, places):
        assert len(found) == 6 and len(set.union(*found)) == 4
        assert {size for _, size in set.union(*found)} == {4 * 2 * 4}, "views of one bucket"


class Retyped(Experts):
    """Its weights have had another type for a moment, as in a comparison in float64, on rank 0 only."""

    def on_train_start(self) -> None:
        for each in self.weights if ranks().is_first else ():
            each.data = each.data.double()
            each.data = each.data.float()
        wrap_again(self.trainer.strategy)


def test_types_that_changed_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trained([[[0, 1], [2, 3]]] * 2, 1)
    monkeypatch.setattr(sys.modules[__name__], "Experts", Retyped)
    answers = on_ranks(2, lambda rank: trained([[[[0, 1]], [[2, 3]]][rank]] * 2, 2), timeout=timedelta(seconds=20))
    assert [weights for _, weights in answers] == [expected[1]] * 2
