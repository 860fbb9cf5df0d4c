"""What a sharded model keeps and gathers, and which are refused. Its gradient: `test_gradients.py`."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from forked_ranks import on_ranks
from tiers import FULL
from torch import Tensor, nn

from radixtrain.checkpoints.sharded import whole
from radixtrain.collators.radix import RadixCollator
from radixtrain.errors import UserError
from radixtrain.hf.backbone import backbone_of
from radixtrain.hf.head import has_plain_head
from radixtrain.hf.predictions import predict
from radixtrain.hf.prepare import prepare_model
from radixtrain.training.devices.gathering import gather_on_first
from radixtrain.training.devices.sharding import check_shardable, shard

CPU = torch.device("cpu")


class Module(nn.Module):
    """As a `RadixModule` uses its model."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = prepare_model(model.double().train(), attention="reference")
        self.plain_head = has_plain_head(model)

    def loss_sum(self, batch: dict[str, Any]) -> Tensor:
        return predict(self.model, batch, self.plain_head).loss_sum()


def micro_batches(count: int) -> list[dict[str, Any]]:
    """Two rows each, that share some tokens."""
    draw, collate = torch.Generator().manual_seed(0), RadixCollator(merge_labels=True)
    rows = torch.randint(2, 50, (count, 2, 10), generator=draw)
    rows[:, 1, :6] = rows[:, 0, :6]
    return [collate([{"input_ids": row, "labels": row} for row in pair]) for pair in rows.tolist()]


def gradients(module: nn.Module, batches: Sequence[dict[str, Any]], factor: float = 1.0) -> dict[str, Tensor]:
    """By name, whole on every rank, of the sum of the losses times the factor. None are left out."""
    for batch in batches:
        (module.loss_sum(batch) * factor).backward()
    return {name: whole(each.grad) for name, each in module.named_parameters() if each.requires_grad}


@FULL
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

    def alone(rank: int) -> dict[str, Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype != "bfloat16"):
            return gradients(module, shares)

    (expected,) = on_ranks(1, alone)  # so on one thread, too
    for name, there in expected.items():
        assert found[name].dtype == there.dtype
        one_rounding = torch.finfo(there.dtype).eps * there.abs().max()  # of the sum
        assert (found[name] - there).abs().max() <= one_rounding, name
    assert not is_cached


@FULL
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
