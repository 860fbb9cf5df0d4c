"""One batch split over the ranks of a group: loss and gradient are those of one process, in float64.

Ranks are forked, and meet by gloo. Each returns its gradients averaged over all ranks, as DDP averages.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from radixtrain import RadixCollator, position_wise, restore_model, share_prefixes
from radixtrain.checkpoints.tensors import whole
from radixtrain.collators.row_split import RowShare
from radixtrain.errors import UserError
from radixtrain.hf import sequence_parallel
from radixtrain.hf.sequence_parallel import RowSplit, SplitCall, SplitModel
from radixtrain.testing import relative_error
from radixtrain.verification.equivalence import MEDIAN_FACTOR
from radixtrain.verification.oracle import float64_throughout
from tests.support import cases
from tests.support.models import FAMILIES, MULTIMODAL, skip_if_it_fails_by_itself, tiny_qwen3
from tests.support.processes import on_ranks


def assert_as_near(truth: list[Tensor], ordinary: list[Tensor], shared: list[Tensor]) -> None:
    """Assert that gradients in bfloat16 are as near to the truth in float64 as ordinary ones are.

    Those of several steps or models: a single one has luck, of both signs (`radixtrain.verification.equivalence`).
    """
    errors = [relative_error(one, exact) for one, exact in zip(ordinary, truth, strict=True)]
    assert min(errors) > 1e-3, f"not bfloat16: {errors}"
    ratios = [relative_error(o, exact) / e for o, exact, e in zip(shared, truth, errors, strict=True)]
    assert statistics.median(ratios) <= MEDIAN_FACTOR, ratios


Result = tuple[float, dict[str, Tensor]]
BAR = 1e-12
QUICK = ["Qwen3", "Gemma 2", "gpt-oss", "DeepSeek-V3", "Qwen3-MoE", "Qwen3.5"]
EVERY = {family.name: family for family in [*FAMILIES, *MULTIMODAL]}


def rows(seed: int = 0, count: int = 7) -> list[dict[str, list[int]]]:
    """Three levels of prefixes: a prompt, three questions, answers of 1 to 6 tokens. Half of them train the prompt."""
    draw = np.random.default_rng(seed)
    prompt, questions = draw.integers(2, 30, 9).tolist(), draw.integers(2, 30, (3, 4)).tolist()
    found = []
    for number in range(count):
        ids = [*prompt, *questions[number % 3], *draw.integers(2, 30, 1 + number % 6).tolist()]
        labels = [-100] * 6 + ids[6:] if number % 2 else [-100] * 13 + ids[13:]
        found.append({"input_ids": ids, "labels": labels})
    return found


def learn(model: Any, batch: dict[str, Any], wrap: Callable[[Any], Any] = lambda model: model) -> Result:
    """Loss and gradients of one call in float64. wrap: what averages over all ranks goes around the model."""
    with float64_throughout(model):
        loss = wrap(model)(**batch).loss
        loss.backward()
        return loss.item(), {name: whole(x.grad).clone() for name, x in model.named_parameters() if x.grad is not None}


def fsdp2(model: Any) -> Any:
    """Each layer and the rest, over all ranks."""
    return sharded(model, init_device_mesh("cpu", (dist.get_world_size(),)))


def hybrid_fsdp2(model: Any) -> Any:
    """Over the two ranks of a group, and replicated over the groups."""
    return sharded(model, init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "sp")))


def sharded(model: Any, mesh: Any) -> Any:
    for unit in (*model.model.layers, model):
        fully_shard(unit, mesh=mesh)
    return model


def averaged(model: Any, result: Result, size: int) -> Result:
    """The average over all ranks, in which a rank without a gradient counts zeros."""
    loss, gradients = torch.tensor(result[0], dtype=torch.float64), {}
    dist.all_reduce(loss)
    for name, parameter in model.named_parameters():
        gradients[name] = result[1].get(name, torch.zeros_like(parameter))
        dist.all_reduce(gradients[name])
    return loss.item() / size, {name: gradient / size for name, gradient in gradients.items()}


def split(
    build: Callable[[], Any],
    features: list[Any],
    ranks: int = 2,
    groups: int = 1,
    wrap: Callable[[Any], Any] = lambda model: model,
    **options: Any,
) -> tuple[Result, Result]:
    """What one process computes and what `ranks` of them average. groups: data-parallel groups, one batch each."""
    share, size = len(features) // groups, ranks // groups
    batches = [RadixCollator()(features[i * share : (i + 1) * share]) for i in range(groups)]
    results = [learn(share_prefixes(build().double(), **options), batch) for batch in batches]
    means = {name: sum(found[name] for _, found in results) / groups for name in results[0][1]}

    def work(rank: int) -> Result:
        torch.set_num_threads(1)
        made = [dist.new_group(list(range(i * size, (i + 1) * size))) for i in range(groups)]
        own = share_prefixes(build().double(), sp_group=made[rank // size], **options)
        return averaged(own, learn(own, batches[rank // size], wrap), ranks)

    return (sum(loss for loss, _ in results) / groups, means), on_ranks(ranks, work)[0]


Print = Callable[[str, str], None]


def assert_equal(ordinary: Result, other: Result, name: str, print_after: Print) -> None:
    error = worst(ordinary, other)
    print_after("one batch over several ranks", f"{name}: {error:.1e}")
    assert error <= BAR


def worst(ordinary: Result, other: Result) -> float:
    """The worst relative error of the loss and of each tensor. A gradient of zeros must stay zero."""
    errors = [abs(other[0] / ordinary[0] - 1)]
    largest = max(float(x.abs().max()) for x in ordinary[1].values())
    for name, gradient in other[1].items():
        truth = ordinary[1].get(name, torch.zeros_like(gradient))
        if float(truth.abs().max()) < 1e-12 * largest:
            errors.append(float(gradient.abs().max()) / largest)
        else:
            errors.append(relative_error(gradient, truth))
    return max(errors)


ON_RANKS = [*((name, ranks) for name in QUICK for ranks in (2, 4)), *((name, 4) for name in EVERY if name not in QUICK)]


@pytest.mark.parametrize(("name", "ranks"), cases(ON_RANKS, [(name, 2) for name in QUICK]))
def test_families(name: str, ranks: int, print_after: Print) -> None:
    """Each is equal, or refused before anything is trained. Those of `QUICK` are not refused."""
    build = (lambda: EVERY[name].build(num_attention_heads=4)) if name in QUICK else EVERY[name].build
    try:
        learn(share_prefixes(build()), RadixCollator()(rows()))
    except UserError as refusal:
        pytest.skip(f"refused without sp_group, too: {refusal}")
    except AttributeError as error:
        skip_if_it_fails_by_itself(EVERY[name], error)
    try:
        results = split(build, rows(), ranks)
    except AssertionError as error:
        assert name not in QUICK and "UserError: sp_group" in str(error), error
    else:
        assert_equal(*results, f"{name}, {ranks} ranks", print_after)


def tiny(**settings: Any) -> Any:
    return tiny_qwen3(num_attention_heads=4, **settings)


def checkpointed() -> Any:
    model = tiny().train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def with_router_loss() -> Any:
    model = EVERY["Qwen3-MoE"].build(num_attention_heads=4)
    model.config.output_router_logits = True
    return model


def without_prompts(features: list[Any]) -> list[Any]:
    """Only the answers train, so the rank with the prompt predicts nothing."""
    return [{**row, "labels": [-100] * 13 + row["input_ids"][13:]} for row in features]


# One ignored prediction is added to the three of the first rank, which has four rows, and to the two of the other one.
AS_MANY = [{"input_ids": [*range(3, 11)], "labels": [-100, 4, 5, 6, -100, 8, 9, -100]}]


def accelerated(model: Any) -> Any:
    """With DDP around it. A loader that it prepared would give each rank batches of its own."""
    from accelerate import Accelerator

    return Accelerator(cpu=True).prepare(model)


CASES: dict[str, tuple[Callable[[], Any], list[Any], dict[str, Any]]] = {
    "2 x 2, DDP": (tiny, rows(count=8), {"ranks": 4, "groups": 2, "wrap": DistributedDataParallel}),
    "FSDP2": (tiny, rows(), {"wrap": fsdp2}),
    "FSDP2, a rank without predictions": (tiny, without_prompts(rows()), {"wrap": fsdp2}),
    "FSDP2, checkpointing": (checkpointed, rows(), {"wrap": fsdp2}),
    "Accelerate": (tiny, rows(), {"wrap": accelerated}),
    "2 x 2, FSDP2": (tiny, rows(count=8), {"ranks": 4, "groups": 2, "wrap": fsdp2}),
    "2 x 2, FSDP2 in groups": (tiny, rows(count=8), {"ranks": 4, "groups": 2, "wrap": hybrid_fsdp2}),
    "one key head, four ranks": (lambda: tiny(num_key_value_heads=1), rows(), {"ranks": 4}),
    "checkpointing": (checkpointed, rows(), {}),
    "router loss": (with_router_loss, rows(), {}),
    "fewer rows than ranks": (tiny, [{"input_ids": [7, 8, 9], "labels": [-100, 8, 9]}], {"ranks": 4}),
    "a rank without predictions": (tiny, without_prompts(rows()), {}),
    "as many predictions as rows": (lambda: EVERY["Qwen3.5"].build(), AS_MANY, {}),
    "paths": (tiny, rows(), {"attention": "path"}),
    "23 rows on three ranks": (lambda: tiny_qwen3(num_attention_heads=6), rows(1, 23), {"ranks": 3}),
}
FULL_CASES = ["FSDP2, a rank without predictions", "FSDP2, checkpointing", "2 x 2, FSDP2"]


@pytest.mark.parametrize("case", cases(CASES, [case for case in CASES if case not in FULL_CASES]))
def test_one_step(case: str, print_after: Print) -> None:
    build, features, options = CASES[case]
    assert_equal(*split(build, features, **options), case, print_after)


@position_wise
class ListOfExperts(torch.nn.Module):
    """A mixture of experts that runs those that some row is routed to, each by itself."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.router = torch.nn.Linear(width, count)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.router(x).argmax(-1)
        out = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            out = out + self.experts[number](x) * (chosen == number)[..., None]
        return out


def with_listed_experts() -> Any:
    model = tiny(num_hidden_layers=3)
    torch.manual_seed(0)
    for layer in model.model.layers:
        layer.mlp = ListOfExperts(model.config.hidden_size, 128)
    return model


def test_rows_that_fill_up_reach_no_further_expert() -> None:
    """An expert that no token is routed to has no gradient on any rank. AdamW decays the weights if it is 0."""
    model, batch = with_listed_experts().double(), RadixCollator()(rows())
    reached = set(learn(share_prefixes(model), batch)[1])
    model.zero_grad()
    assert len(reached) < len(list(model.parameters()))
    assert batch["input_ids"].shape[1] % 4  # rows are filled up

    def work(rank: int) -> set[str]:
        return set(learn(share_prefixes(model, sp_group=dist.new_group([0, 1, 2, 3])), batch)[1])

    assert set.union(*on_ranks(4, work)) == reached


def test_bfloat16() -> None:
    """Under autocast, as near the truth in float64 as one process."""
    batches = [RadixCollator()(rows(seed)) for seed in range(5)]

    def gradients(model: Any, wrap: Callable[[Any], Any] = lambda model: model) -> list[Tensor]:
        wrapped, found = wrap(model), []
        for batch in batches:
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = wrapped(**batch).loss
            loss.backward()
            found.append(flat({name: x.grad for name, x in model.named_parameters()}))
        return found

    def work(rank: int) -> list[Tensor]:
        return gradients(share_prefixes(tiny(), sp_group=dist.new_group([0, 1])), DistributedDataParallel)

    model = share_prefixes(tiny())
    truth = [flat(learn(model, batch)[1]) for batch in batches]
    assert_as_near(truth, gradients(model), on_ranks(2, work)[0])


def flat(gradients: dict[str, Tensor]) -> Tensor:
    return torch.cat([gradient.flatten() for gradient in gradients.values()])


def a_row_left_out(original: Any, *args: Any) -> dict[str, Tensor]:
    return {name: rows.index_fill(-1, torch.tensor([0]), 0) for name, rows in original(*args).items()}


def a_loss_that_is_not_scaled(original: Any, self: RowSplit, loss: Tensor) -> Tensor:
    total = loss.detach().clone()
    dist.all_reduce(total, group=self.group)
    return loss + (total - loss).detach()


def a_label_counted_twice(original: Any, self: SplitModel, *given: Any) -> Any:
    args, kwargs = original(self, *given)
    split = self.progress.call
    own = split.labels.clone()
    own[0, int((own[0] != own[0, 0]).nonzero()[0])] = own[0, 0]  # sequences that share a label have it in order
    split.labels = own
    return args, {**kwargs, "shift_labels": own, "labels": own.roll(1)}


def positions_of_the_first_rank(original: Any, self: SplitModel, model: Any, args: Any, kwargs: Any) -> Any:
    args, changed = original(self, model, args, kwargs)
    count = changed["position_ids"].shape[-1]
    return args, {**changed, "position_ids": kwargs["position_ids"][:, :count]}


def own_count_of_labels(original: Any, self: SplitModel, *given: Any) -> Any:
    found, split = original(self, *given), self.progress.call
    split.num_items = (split.labels != -100).sum()
    return found


def keys_of_another_head(original: Any, self: SplitCall, heads: Any, *rest: Any, **scoring: Any) -> Tensor:
    return original(self, (heads[0], heads[1].flip(1), heads[2]), *rest, **scoring)


def a_sink_not_cut(original: Any, self: SplitCall, heads: Any, window: Any, **scoring: Any) -> Tensor:
    first = scoring["sinks"][: len(scoring["sinks"]) // 2]
    return original(self, heads, window, **{**scoring, "sinks": torch.cat([first, first])})


MUTATIONS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "heads in another order": (RowSplit, "heads_to_rows", lambda original, self, x: original(self, x).flip(1)),
    "rows in another order": (RowSplit, "rows_to_heads", lambda original, self, x: original(self, x).roll(1, 0)),
    "a row left out": (RowShare, "inputs", a_row_left_out),
    "gradients not sent back": (sequence_parallel._AllToAll, "backward", lambda original, ctx, x: (x, None)),
    "a loss that is not scaled": (RowSplit, "sum", a_loss_that_is_not_scaled),
    "a label counted twice": (SplitModel, "cut", a_label_counted_twice),
    "positions of the first rank": (SplitModel, "cut", positions_of_the_first_rank),
    "own count of labels": (SplitModel, "cut", own_count_of_labels),
    "keys of another head": (SplitCall, "attend", keys_of_another_head),
    "a sink not cut": (SplitCall, "attend", a_sink_not_cut),
}
"""What takes the place of a function, whose first argument is the function."""


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutations_are_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, function, changed = MUTATIONS[name]
    original = getattr(owner, function)

    def mutated(*args: Any, **kwargs: Any) -> Any:
        return changed(original, *args, **kwargs)

    monkeypatch.setattr(owner, function, staticmethod(mutated) if function == "backward" else mutated)
    build = (lambda: EVERY["gpt-oss"].build(num_attention_heads=4)) if "sink" in name else tiny
    assert worst(*split(build, rows())) > 1e-6


def split_of(group: Any, model: Any = None) -> Any:
    return share_prefixes(model or tiny(), sp_group=group)


def different(group: Any, rank: int, name: str) -> Any:
    batch = RadixCollator()(rows())
    values = batch[name] if name in batch else getattr(batch["radix"], name)
    values[..., :3] += rank * torch.tensor([1, -2, 1])
    return split_of(group)(**batch)


def counted(group: Any, rank: int, kind: Callable[[int], Any]) -> Any:
    return split_of(group)(**RadixCollator()(rows()), num_items_in_batch=kind(30 + rank))


def with_losses(group: Any, rank: int, count: int) -> Any:
    """A model that calls its `loss_function` so often."""
    model = tiny()
    forward = model.forward

    def forward_with_losses(labels: Any = None, **given: Any) -> Any:
        output = forward(**given)
        output.loss = sum(model.loss_function(output.logits, labels, 50) for _ in range(count))
        return output

    model.forward = forward_with_losses
    return split_of(group, model)(**RadixCollator()(rows()))


KINDS: list[Callable[[int], Any]] = [float, np.float32, lambda n: ((torch.tensor(n),),)]
REFUSED: list[tuple[str, Callable[[Any, int], Any]]] = [
    *(("got different batches", partial(different, name=name)) for name in ("input_ids", "position_ids")),
    ("got different batches", partial(different, name="predictor_indices")),
    ("got different batches", lambda group, rank: split_of(group)(**RadixCollator()(rows(rank)))),
    *(("got different batches", partial(counted, kind=kind)) for kind in KINDS),
    ("more than once", partial(with_losses, count=2)),
    ("computes its loss without its loss_function", partial(with_losses, count=0)),
    ("without merge_labels", lambda group, rank: split_of(group)(**RadixCollator(merge_labels=True)(rows()))),
    ("has no head", lambda group, rank: split_of(group, tiny().model)),
    ("without having been split over its", lambda group, rank: split_of(group).model(**RadixCollator()(rows()))),
    ("these numbers do: 1, 2, 4", lambda group, rank: split_of(group)(**RadixCollator()(rows()))),  # on three ranks
]


def test_refusals() -> None:
    """What would not be the gradient of the batch is refused on every rank, in the same words."""

    def said(rank: int, builds: list[Callable[[Any, int], Any]]) -> list[str]:
        found = []
        for build in builds:
            with pytest.raises(UserError) as error:
                build(dist.group.WORLD, rank)
            found.append(str(error.value))
        return found

    for ranks, table in ((2, REFUSED[:-1]), (3, REFUSED[-1:])):
        told = on_ranks(ranks, partial(said, builds=[build for _, build in table]))
        assert all(each == told[0] for each in told)
        for (words, _), text in zip(table, told[0], strict=True):
            assert words in text

    def accepted(rank: int) -> float:
        """What a layout has kept for its layers is not of the batch, nor is where an object lies in memory."""
        batch, objects = RadixCollator()(rows()), [object() for _ in range(rank + 1)]
        assert rank == 0 or batch["radix"].layout.paths
        return split_of(dist.group.WORLD)(**batch, note=(objects[-1], torch.ones(1))).loss.item()

    def outside(rank: int) -> None:
        group = dist.new_group([0])
        with pytest.raises(UserError, match="this rank is not in it") if rank else nullcontext():
            split_of(group)

    assert len({*on_ranks(2, accepted)}) == 1
    on_ranks(2, outside)


def test_what_goes_on_as_before() -> None:
    """Ordinary batches, evaluation without gradients, a model that is restored, and a copy."""

    def work(rank: int) -> None:
        ids = torch.tensor([[5, 6, 7, 8]])
        model = tiny()
        ordinary = model(input_ids=ids, labels=ids).loss
        whole = share_prefixes(model)(**RadixCollator()(rows())).loss
        share_prefixes(model, sp_group=dist.new_group([0, 1]))
        torch.testing.assert_close(model(input_ids=ids, labels=ids).loss, ordinary)
        with torch.no_grad():
            torch.testing.assert_close(model.eval()(**RadixCollator()(rows())).loss, whole)
        copied = deepcopy(model)
        restore_model(model)
        torch.testing.assert_close(copied(**RadixCollator()(rows())).loss, whole)
        torch.testing.assert_close(model(input_ids=ids, labels=ids).loss, ordinary)
        assert model.loss_function.__name__ == "ForCausalLMLoss"

    on_ranks(2, work)
