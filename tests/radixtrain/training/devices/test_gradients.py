"""One optimizer step on several ranks has the gradient and the loss of one process, whatever each rank computes.

With DDP and with FSDP2, in float64. That the steps of a run follow from it: `tests/claims/devices`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from radixtrain.checkpoints.tensors import is_sharded, whole
from radixtrain.collators.steps import Step, StepCollator
from radixtrain.distributed import add_gradient, ranks
from radixtrain.errors import UserError
from radixtrain.hf.backbone import backbone_of
from radixtrain.hf.share import share_prefixes
from radixtrain.training.devices.fsdp2 import METHODS, shard
from radixtrain.training.module import RadixModule
from radixtrain.verification.oracle import float64_arithmetic
from tests.support import FULL
from tests.support.models import tiny_hybrid, tiny_model, tiny_qwen3
from tests.support.processes import on_ranks

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
        trained = {name: each.grad for name, each in self.named_parameters() if each.requires_grad}
        gradients = {name: whole(each).clone() for name, each in trained.items()}
        self.found = {"gradients": gradients, "loss": loss.item(), "grad_norm": grad_norm.item()}
        return False


def one_step(module: Watched, step: Step, strategy: str = "ddp") -> dict[str, Any]:
    """What a rank finds in its part of a step, in float64."""
    with float64_arithmetic():
        return found_in(module, step, strategy)


def found_in(module: Watched, step: Step, strategy: str = "ddp") -> dict[str, Any]:
    """What a rank finds in its part of a step."""
    if strategy == "fsdp2":
        shard(module, module.model, torch.device("cpu"), ranks().size, METHODS)
    optimizer = torch.optim.SGD(module.parameters())
    module.take_step(step, optimizer, None, partial(add_gradient, module, strategy == "fsdp2"))
    return module.found


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor], bar: float = EXACT) -> None:
    assert found.keys() == expected.keys() and expected
    for name, there in expected.items():
        assert there.abs().max() > 0, name
        assert found[name].dtype == there.dtype, name
        assert (found[name] - there).abs().max() <= bar * there.abs().max(), name


def with_lora(model: Any, **settings: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model, LoraConfig(r=3, **{"target_modules": "all-linear", **settings}))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    return adapted


def checkpointing(model: Any, use_reentrant: bool = False) -> Any:
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    if use_reentrant:
        model.enable_input_require_grads()
    return model


def half_frozen(model: Any) -> Any:
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    return model


def with_experts() -> Any:
    """By the implementation that computes in float64."""
    model = tiny_model("Qwen3MoeForCausalLM")
    model.set_experts_implementation("eager")
    return model


def untied() -> Any:
    return tiny_qwen3(tie_word_embeddings=False)


MODELS: dict[str, Callable[[], Any]] = {
    "tied": tiny_qwen3,
    "half frozen": lambda: half_frozen(untied()),
    "LoRA": lambda: with_lora(tiny_qwen3()),
    "DoRA on an untied head": lambda: with_lora(untied(), use_dora=True, target_modules=["q_proj", "lm_head"]),
    "reentrant checkpointing": lambda: checkpointing(tiny_qwen3(), use_reentrant=True),
    "LoRA, checkpointing": lambda: with_lora(checkpointing(tiny_qwen3())),
    "a head that scales": lambda: tiny_model("GraniteForCausalLM", logits_scaling=3.0),
    "recurrent": lambda: tiny_hybrid("Qwen3.5"),
    "experts": with_experts,
    "ordinary": tiny_qwen3,
}
STRATEGIES = ("ddp", "fsdp2")


class Case(NamedTuple):
    """What the ranks compute a step of.

    rows: three leave a rank of four without one; nine make several micro-batches, with other label counts on each rank.
    sp_size: ranks of a group, each of which has its rows of the micro-batches of the group.
    """

    model: str
    strategy: str
    size: int
    rows: int
    sp_size: int = 1

    def collator(self) -> StepCollator:
        return StepCollator(max_tokens=14 if self.sp_size == 1 else 7, dedup=self.dedup)

    @property
    def dedup(self) -> bool:
        return self.model != "ordinary"

    def prepare(self, model: Any, **options: Any) -> None:
        if self.dedup:
            share_prefixes(model, attention="reference", **options)


DEDUP = [name for name in MODELS if name != "ordinary"]
CASES = [
    *(Case(name, strategy, 2, 9) for name in MODELS for strategy in STRATEGIES),
    *(Case(name, strategy, 2, 9, 2) for name in DEDUP for strategy in STRATEGIES),
    *(Case(name, strategy, 4, 3, sp) for name in ("tied", "LoRA") for strategy in STRATEGIES for sp in (1, 2)),
    *(Case("tied", "ddp", size, 9, sp) for size, sp in ((3, 1), (4, 2))),
    Case("LoRA, checkpointing", "fsdp2", 4, 9, 2),
]
QUICK = [
    *(Case("tied", strategy, 2, 9) for strategy in STRATEGIES),
    *(Case("tied", "ddp", 2, 9, 2), Case("tied", "ddp", 4, 3, 2), Case("tied", "ddp", 4, 9, 2)),
    *(Case(name, "ddp", 2, 9, 2) for name in ("LoRA", "reentrant checkpointing")),
]


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in QUICK else FULL, id="-".join(map(str, case))) for case in CASES]
)
def test_the_step_of_one_process(case: Case) -> None:
    model, cut = MODELS[case.model]().double().train(), case.collator()
    module = Watched.around(model, dedup=case.dedup)

    def work(rank: int) -> tuple[dict[str, Any], set[bool], list[int]]:
        case.prepare(model, **({"sp_group": ranks().sp_group} if case.sp_size > 1 else {}))
        step = replace(cut, rank=rank, num_ranks=case.size, sp_size=case.sp_size)(features(case.rows))
        found = one_step(module, step, case.strategy)
        are_sharded = {is_sharded(each) for each in module.parameters()}
        return found, are_sharded, [*map(len, step.members)]

    def alone(rank: int) -> dict[str, Any]:
        case.prepare(model)
        return one_step(module, StepCollator(max_tokens=14, dedup=case.dedup)(features(case.rows)))

    (expected,) = on_ranks(1, alone)
    answers = on_ranks(case.size, work, sp_size=case.sp_size)
    _, _, members = zip(*answers, strict=True)
    if case.rows > case.size:
        assert all(len(each) > 1 for each in members), "one micro-batch"
    elif case.sp_size == 1:
        assert not all(map(any, members)), "every rank has a row"
    assert len(set(map(len, members))) == 1
    for found, are_sharded, *_ in answers:
        assert are_sharded == {case.strategy == "fsdp2"}
        assert_near(found["gradients"], expected["gradients"])
        for figure in ("loss", "grad_norm"):
            assert found[figure] == answers[0][0][figure] == pytest.approx(expected[figure], rel=EXACT)


@FULL
@pytest.mark.usefixtures("hooks_that_may_stay")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_16_bits(dtype: torch.dtype) -> None:
    """Under autocast each micro-batch computes the same bits. Weights of 16 bits are gathered so, and reduced in 32."""
    model, cut, cached = tiny_qwen3().to(dtype).train(), StepCollator(max_tokens=14), list[bool]()
    module = Watched.around(share_prefixes(model, attention="reference"))

    def work(rank: int) -> tuple[dict[str, Tensor], list[bool]]:
        backbone_of(model).register_forward_pre_hook(lambda *_: cached.append(torch.is_autocast_cache_enabled()))
        step = replace(cut, rank=rank, num_ranks=ranks().size)(features(2))
        assert len(step.micro_batches) == 2 // ranks().size
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            return found_in(module, step, "fsdp2" if ranks().size > 1 else "ddp")["gradients"], cached

    ((expected, _),) = on_ranks(1, work)  # so on one thread, too
    (found, was_cached), _ = on_ranks(2, work)
    assert set(was_cached) == {False}
    for name, there in expected.items():
        one_rounding = torch.finfo(there.dtype).eps * there.abs().max()  # of the sum
        assert found[name].dtype == there.dtype and (found[name] - there).abs().max() <= one_rounding, name


def test_two_dtypes_are_refused() -> None:
    model = share_prefixes(tiny_qwen3())
    model.model.norm.to(torch.bfloat16)

    def work(rank: int) -> None:
        with pytest.raises(UserError, match="trains weights of bfloat16 and float32"):
            found_in(Watched.around(model), StepCollator()(features(2)), "fsdp2")

    on_ranks(1, work)


class Experts(nn.Module):
    """Four weights, of which a micro-batch reaches those that it names."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.full((2,), float(place + 1)) for place in range(4)])

    def loss_sum(self, batch: list[int]) -> Any:
        return sum((each + 1.0) * self.weights[each].square().sum() for each in batch) * ranks().size


def left(steps: list[list[list[int]]]) -> list[list[list[float] | None]]:
    """The gradients after each step of micro-batches."""
    module, found = Experts(), []
    for batches in steps:
        module.zero_grad()
        for place, batch in enumerate(batches):
            add_gradient(module, False, batch, 1.0, is_last=place == len(batches) - 1)
        found.append([None if each.grad is None else each.grad.tolist() for each in module.weights])
    return found


@FULL
@pytest.mark.parametrize("bucket_bytes", [1, 25 << 20])
def test_weights_that_some_ranks_do_not_reach(bucket_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the last micro-batch, in none of one rank, and in none of any: that gradient stays None, as AdamW needs it."""
    monkeypatch.setattr("radixtrain.distributed.BUCKET_BYTES", bucket_bytes)
    shares = [[[[0], [1]], [[1]], [[3, 0]]], [[[0, 2], [0]], [[1]], [[2]]]]
    gradients = left([first + second for first, second in zip(*shares, strict=True)])
    assert [[each is None for each in step] for step in gradients] == [
        [False, False, False, True],
        [True, False, True, True],
        [False, True, False, False],
    ]
    assert on_ranks(2, lambda rank: left(shares[rank])) == [gradients] * 2
