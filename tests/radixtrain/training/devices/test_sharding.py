"""A sharded model has the gradient of a whole one, whatever its head, its adapters and the work of each rank."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from forked_ranks import on_ranks
from torch import Tensor, nn
from transformers import GraniteConfig, GraniteForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from radixtrain.checkpoints.sharded import is_sharded, whole
from radixtrain.collators.radix import RadixCollator
from radixtrain.errors import UserError
from radixtrain.hf.backbone import backbone_of
from radixtrain.hf.head import has_plain_head
from radixtrain.hf.predictions import predict
from radixtrain.hf.prepare import prepare_model
from radixtrain.training.devices.gathering import gather_on_first
from radixtrain.training.devices.sharding import check_shardable, shard
from radixtrain.tree.layout import LOSS_WEIGHTS

CPU = torch.device("cpu")
EXACT = 1e-12  # of a tensor: the largest difference over the largest magnitude, in float64


class Module(nn.Module):
    """As a `RadixModule` uses its model."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = prepare_model(model.double().train(), attention="reference")
        self.plain_head = has_plain_head(model)

    def loss_sum(self, batch: dict[str, Any]) -> Tensor:
        return predict(self.model, batch, self.plain_head).loss_sum()


def micro_batches(count: int) -> list[dict[str, Any]]:
    """Two or three rows each, that share some tokens, with unequal numbers of labels."""
    draw, collate = torch.Generator().manual_seed(0), RadixCollator(merge_labels=True)
    found = []
    for number in range(count):
        prompt = torch.randint(2, 50, (6,), generator=draw).tolist()
        rows = []
        for length in (2, 5, 3)[: 2 + number % 2]:
            answer = torch.randint(2, 50, (length + number,), generator=draw).tolist()
            rows.append({"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer})
        found.append(collate(rows))
    return found


def without_weight(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, LOSS_WEIGHTS: torch.zeros_like(batch[LOSS_WEIGHTS])}


def gradients(module: nn.Module, batches: Sequence[dict[str, Any]], factor: float = 1.0) -> dict[str, Tensor]:
    """By name, whole on every rank, of the sum of the losses times the factor. None are left out."""
    for batch in batches:
        (module.loss_sum(batch) * factor).backward()
    return {name: whole(each.grad) for name, each in module.named_parameters() if each.requires_grad}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys() and expected
    for name, there in expected.items():
        assert there.abs().max() > 0, name
        assert (found[name] - there).abs().max() <= EXACT * there.abs().max(), name


def with_lora(model: Any, **settings: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model, LoraConfig(r=3, **{"target_modules": "all-linear", **settings}))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    return adapted


def checkpointing(model: Any) -> Any:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


SIZES = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "pad_token_id": 0}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def random(model_class: Any, config: Any) -> Any:
    torch.manual_seed(0)
    return model_class(config)


def with_experts() -> Any:
    """A mixture of experts, by the implementation that computes in float64."""
    model = random(Qwen3MoeForCausalLM, Qwen3MoeConfig(**SIZES, **HEADS, **EXPERTS))
    model.set_experts_implementation("eager")
    return model


MODELS: dict[str, Callable[[Any, Any], Any]] = {
    "tied": lambda tiny, _: tiny(),
    "untied": lambda tiny, _: tiny(tie_word_embeddings=False),
    "activation checkpointing": lambda tiny, _: checkpointing(tiny()),
    "LoRA and checkpointing": lambda tiny, _: with_lora(checkpointing(tiny())),
    "DoRA on an untied head": lambda tiny, _: with_lora(
        tiny(tie_word_embeddings=False), use_dora=True, target_modules=["q_proj", "lm_head"]
    ),
    "a head that scales": lambda *_: random(GraniteForCausalLM, GraniteConfig(**SIZES, **HEADS, logits_scaling=3.0)),
    "experts": lambda *_: with_experts(),
    "recurrent": lambda _, hybrid: hybrid("Qwen3.5"),
}


@pytest.mark.parametrize(
    ("name", "size"), [*((name, 2) for name in MODELS), ("tied", 4), ("LoRA and checkpointing", 4)]
)
def test_the_gradient_is_that_of_one_process(
    name: str, size: int, tiny_qwen3: Callable[..., Any], tiny_hybrid: Callable[..., Any]
) -> None:
    module = Module(MODELS[name](tiny_qwen3, tiny_hybrid))
    batches = micro_batches(2 * size)
    shares = [batches[rank::size] for rank in range(size)]
    shares[-1] = [without_weight(batch) for batch in shares[-1]]  # a rank without work
    num_labels = 37

    def work(rank: int) -> dict[str, Tensor] | None:
        shard(module, module.model, CPU, size, ["loss_sum"])
        assert all(is_sharded(each) for each in module.parameters())
        found = gradients(module, shares[rank], size / num_labels)
        return found if rank == 0 else None

    found, *_ = on_ranks(size, work)
    expected = gradients(module, [batch for share in shares[:-1] for batch in share], 1 / num_labels)
    assert_equal(found, expected)


@pytest.mark.parametrize("dtype", ["float32 under autocast", "bfloat16"])
def test_16_bits(dtype: str, tiny_qwen3: Callable[..., Any]) -> None:
    """Under autocast each micro-batch computes the same bits. Weights of 16 bits are gathered so, and reduced in 32."""
    module = Module(tiny_qwen3())
    module.to(torch.bfloat16 if dtype == "bfloat16" else torch.float32)
    shares = micro_batches(2)

    def work(rank: int) -> tuple[dict[str, Tensor], bool]:
        shard(module, module.model, CPU, 2, ["loss_sum"])
        cached = []
        backbone_of(module.model).register_forward_pre_hook(lambda *_: cached.append(torch.is_autocast_cache_enabled()))
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype != "bfloat16"):
            found = gradients(module, shares[rank : rank + 1], 2)
            return found, cached != [False] or not torch.is_autocast_cache_enabled()

    (found, is_cached), _ = on_ranks(2, work)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype != "bfloat16"):
        expected = gradients(module, shares)
    bar = 2**-7 if dtype == "bfloat16" else 1e-6  # one rounding of the sum
    for name, there in expected.items():
        assert found[name].dtype == there.dtype
        assert (found[name] - there).abs().max() <= bar * there.abs().max(), name
    assert not is_cached


def test_gathered_on_the_first_rank(tiny_qwen3: Callable[..., Any]) -> None:
    """After a pass without gradients, which leaves the embedding whole; tied weights stay tied."""
    module = Module(tiny_qwen3())
    (batch,) = micro_batches(1)

    def work(rank: int) -> tuple[bool, bool, bool]:
        before = {name: each.clone() for name, each in module.state_dict().items()}
        shard(module, module.model, CPU, 2, ["loss_sum"])
        with torch.no_grad():
            module.loss_sum(batch)
        gather_on_first(module)
        state = module.state_dict()
        is_same = all(not each.is_meta and torch.equal(each, before[name]) for name, each in state.items())
        model = module.model
        return (
            is_same,
            model.lm_head.weight is model.model.embed_tokens.weight,
            any(each.is_meta for each in state.values()),
        )

    assert on_ranks(2, work) == [(True, True, False), (False, True, True)]


class TestRefused:
    """By name, before anything is divided."""

    def test_layers_that_share_a_weight(self, tiny_qwen3: Callable[..., Any]) -> None:
        model = tiny_qwen3()
        model.model.layers[1].mlp = model.model.layers[0].mlp
        with pytest.raises(UserError, match=r"layers 0 and 1 of Qwen3ForCausalLM share a weight.*use ddp"):
            check_shardable(model)

    def test_a_single_number(self, tiny_qwen3: Callable[..., Any]) -> None:
        model = tiny_qwen3()
        model.model.layers[0].register_parameter("gate", nn.Parameter(torch.tensor(1.0)))
        with pytest.raises(UserError, match=r"model\.layers\.0\.gate is a single number"):
            check_shardable(model)

    def test_a_list_of_experts(self, tiny_qwen3: Callable[..., Any]) -> None:
        model = tiny_qwen3()
        model.model.layers[0].mlp.experts = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        with pytest.raises(UserError, match="experts is a list of modules"):
            check_shardable(model)

    def test_two_dtypes(self, tiny_qwen3: Callable[..., Any]) -> None:
        module = Module(tiny_qwen3())
        module.model.model.norm.to(torch.bfloat16)

        def work(rank: int) -> None:
            with pytest.raises(UserError, match="trains weights of bfloat16 and float64"):
                shard(module, module.model, CPU, 1, ["loss_sum"])

        on_ranks(1, work)
