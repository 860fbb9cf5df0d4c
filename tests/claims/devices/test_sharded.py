"""Both doors, in a loop of one's own on two ranks that hold parts of a model: the steps of a process that holds it.

That process takes the mean of what the ranks lose, whose batches share differently.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from radixtrain import RadixCollator, share_prefixes, sharing_report
from radixtrain.testing import relative_error
from radixtrain.verification.oracle import float64_throughout
from tests.claims.devices.mutations import SHARDED_MUTATIONS
from tests.support import FULL
from tests.support.models import tiny_qwen3
from tests.support.processes import on_ranks
from tests.support.trainers import gathered_weights, padded_batches

pytestmark = FULL

BAR = 1e-10
STEPS = 10
NUM_RANKS = 2
CPU = torch.device("cpu")
Values = list[Tensor]  # of each step its loss and the norm of its gradient, and then the weights


def fsdp2(model: Any, mesh: tuple[int, ...] = (NUM_RANKS,), **others: Any) -> Any:
    names = ("replicas", "shards")[-len(mesh) :]
    for each in (*model.model.layers, model):
        fully_shard(each, mesh=init_device_mesh("cpu", mesh, mesh_dim_names=names), **others)
    return model


def fsdp1(model: Any, of: Callable[[Any], nn.Module], use_orig_params: bool = False) -> Any:
    policy = ModuleWrapPolicy({type(of(model))})
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=use_orig_params, device_id=CPU)


def layer_of(model: Any) -> nn.Module:
    return model.model.layers[0]


SHARDED: dict[str, Callable[[Any], Any]] = {
    "DDP": DistributedDataParallel,  # each holds all of it
    "FSDP2": fsdp2,
    "FSDP2, offloaded": partial(fsdp2, offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "FSDP2, replicated": partial(fsdp2, mesh=(NUM_RANKS, 1)),
    "FSDP1": partial(fsdp1, of=layer_of),
    "FSDP1, use_orig_params": partial(fsdp1, of=layer_of, use_orig_params=True),
    "FSDP1, the backbone": partial(fsdp1, of=lambda model: model.model),
}
BATCHES = ["ordinary", "RadixCollator"]
REFUSED = {"FSDP1, the backbone": "share the model before it is wrapped"}  # if it is shared after that

# By numbers, or by refusals.
SEEN = "the steps differ by|size mismatch|must match the size|num_shared=0|did not pass the backbone"


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def batches_of(rank: int) -> list[dict[str, Tensor]]:
    return padded_batches("right", seed=rank, steps=STEPS)


def radix(batch: dict[str, Tensor]) -> dict[str, Any]:
    tensors = zip(batch["input_ids"], batch["labels"], batch["attention_mask"].bool(), strict=True)
    return RadixCollator()([{"input_ids": ids[seen], "labels": labels[seen]} for ids, labels, seen in tensors])


def trained(model: Any, batches: list[Any]) -> Values:
    """On each rank."""
    optimizer, values = optimizer_of(model), []
    for batch in batches:
        loss = model(**batch, use_cache=False).loss
        mean = loss.detach().clone()
        distributed.all_reduce(mean)
        loss.backward()
        values += [mean / NUM_RANKS, norm_of(model)]
        optimizer.step()
        optimizer.zero_grad()
    return values + gathered_weights(model)


def norm_of(model: Any) -> Any:
    if isinstance(model, FullyShardedDataParallel):
        return model.clip_grad_norm_(1e9)
    norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def model_of(name: str) -> Any:
    """Head and embedding are one weight, which has to be in one unit of FSDP1."""
    return tiny_qwen3(tie_word_embeddings="backbone" not in name).double().train()


def ordinary(name: str) -> Values:
    """One process, untouched."""
    model, values = model_of(name), []
    optimizer = optimizer_of(model)
    with float64_throughout(model):
        for batches in zip(*map(batches_of, range(NUM_RANKS)), strict=True):
            loss = sum(model(**batch, use_cache=False).loss for batch in batches) / NUM_RANKS
            loss.backward()
            values += [loss.detach(), nn.utils.clip_grad_norm_(model.parameters(), 1e9)]
            optimizer.step()
            optimizer.zero_grad()
    return values + [each.detach() for each in model.parameters()]


def run(rank: int, name: str, kind: str, is_late: bool = False) -> Values:
    inner = model = model_of(name)
    batches = batches_of(rank)
    with float64_throughout(model):
        model = SHARDED[name](model if is_late else share_prefixes(model))
        model = share_prefixes(model) if is_late else model
        values = trained(model, batches if kind == "ordinary" else list(map(radix, batches)))
    assert sharing_report(inner).num_shared == STEPS
    return values


def assert_steps_of_one_process(found: Values, name: str) -> None:
    worst = max(relative_error(*each) for each in zip(found, ordinary(name), strict=True))
    assert worst < BAR, f"the steps differ by {worst:.2g}"


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("name", SHARDED)
def test_steps(name: str, kind: str, is_late: bool) -> None:
    """is_late: the model is shared after it was sharded."""
    work = partial(run, name=name, kind=kind, is_late=is_late)
    if is_late and name in REFUSED:
        with pytest.raises(AssertionError, match=REFUSED[name]):
            on_ranks(NUM_RANKS, work)
    else:
        assert_steps_of_one_process(on_ranks(NUM_RANKS, work)[0], name)


@pytest.mark.parametrize("mutation", SHARDED_MUTATIONS, ids=lambda each: each.__name__)
@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("name", ["FSDP2", "FSDP1, use_orig_params"])
def test_a_mistake_is_seen(name: str, kind: str, mutation: Callable[[], None]) -> None:
    def mutated(rank: int) -> Values:
        mutation()
        return run(rank, name, kind)

    with pytest.raises(AssertionError, match=SEEN):
        assert_steps_of_one_process(on_ranks(NUM_RANKS, mutated)[0], name)
