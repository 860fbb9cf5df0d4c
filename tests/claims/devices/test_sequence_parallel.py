"""One batch split over the ranks of a group: loss and gradient are those of one process, in float64.

Ranks are forked, and meet by gloo. Each returns its gradients averaged over all ranks, as DDP averages.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from device_trajectories import BAR as BAR_OF_STEPS
from device_trajectories import distances
from families import FAMILIES, MULTIMODAL, skip_if_it_fails_by_itself
from forked_ranks import on_ranks
from tiers import FULL, cases
from tiny_models import tiny_qwen3
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from trainer_harness import assert_as_near

from radixtrain import RadixCollator, position_wise, restore_model, share_prefixes
from radixtrain.checkpoints.sharded import whole
from radixtrain.errors import UserError
from radixtrain.hf import sequence_parallel
from radixtrain.hf.sequence_parallel import RowSplit, SplitCall, SplitModel
from radixtrain.testing import relative_error
from radixtrain.verification.oracle import float64_throughout

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
        gradient = result[1].get(name, torch.zeros_like(parameter))
        dist.all_reduce(gradient)
        gradients[name] = gradient / size
    return loss.item() / size, gradients


def split(
    build: Callable[[], Any],
    features: list[Any],
    ranks: int = 2,
    groups: int = 1,
    wrap: Callable[[Any], Any] = lambda model: model,
    **options: Any,
) -> tuple[Result, Result]:
    """What one process computes and what `ranks` of them average. groups: data-parallel groups, one batch each."""
    share = len(features) // groups
    batches = [RadixCollator()(features[i * share : (i + 1) * share]) for i in range(groups)]
    model = share_prefixes(build().double(), **options)
    results = [learn(model, batch) for batch in batches]
    model.zero_grad()
    ordinary = learn_mean(build, batches, options) if groups > 1 else results[0]

    def work(rank: int) -> Result:
        torch.set_num_threads(1)
        size = ranks // groups
        made = [dist.new_group(list(range(i * size, (i + 1) * size))) for i in range(groups)]
        own = share_prefixes(build().double(), sp_group=made[rank // size], **options)
        return averaged(own, learn(own, batches[rank // size], wrap), ranks)

    answers = on_ranks(ranks, work)
    return ordinary, answers[0]


def learn_mean(build: Callable[[], Any], batches: list[Any], options: Any) -> Result:
    """The mean over data-parallel groups."""
    results = []
    for batch in batches:
        results.append(learn(share_prefixes(build().double(), **options), batch))
    gradients = {name: sum(found[name] for _, found in results) / len(results) for name in results[0][1]}
    return sum(loss for loss, _ in results) / len(results), gradients  # type: ignore[return-value]


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


@pytest.mark.parametrize(
    ("name", "ranks"), cases([(name, ranks) for name in QUICK for ranks in (2, 4)], [(name, 2) for name in QUICK])
)
def test_families(name: str, ranks: int, print_after: Print) -> None:
    family = EVERY[name]
    results = split(lambda: family.build(num_attention_heads=4), rows(), ranks)
    assert_equal(*results, f"{name}, {ranks} ranks", print_after)


def tiny(**settings: Any) -> Any:
    return tiny_qwen3(num_attention_heads=4, **settings)


def with_lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(target_modules=["q_proj", "down_proj"], r=2, init_lora_weights=False))


def checkpointed(reentrant: bool) -> Any:
    model = tiny().train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
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
    "four ranks": (tiny, rows(), {"ranks": 4}),
    "2 x 2": (tiny, rows(count=8), {"ranks": 4, "groups": 2}),
    "2 x 2, DDP": (tiny, rows(count=8), {"ranks": 4, "groups": 2, "wrap": DistributedDataParallel}),
    "FSDP2": (tiny, rows(), {"wrap": fsdp2}),
    "FSDP2, a rank without predictions": (tiny, without_prompts(rows()), {"wrap": fsdp2}),
    "FSDP2, checkpointing": (lambda: checkpointed(False), rows(), {"wrap": fsdp2}),
    "Accelerate": (tiny, rows(), {"wrap": accelerated}),
    "2 x 2, FSDP2": (tiny, rows(count=8), {"ranks": 4, "groups": 2, "wrap": fsdp2}),
    "2 x 2, FSDP2 in groups": (tiny, rows(count=8), {"ranks": 4, "groups": 2, "wrap": hybrid_fsdp2}),
    "untied": (lambda: tiny(tie_word_embeddings=False, attention_bias=True), rows(), {}),
    "one key head, four ranks": (lambda: tiny(num_key_value_heads=1), rows(), {"ranks": 4}),
    "LoRA": (lambda: with_lora(tiny()), rows(), {}),
    "checkpointing": (lambda: checkpointed(False), rows(), {}),
    "reentrant checkpointing": (lambda: checkpointed(True), rows(), {}),
    "router loss": (with_router_loss, rows(), {}),
    "fewer rows than ranks": (tiny, [{"input_ids": [7, 8, 9], "labels": [-100, 8, 9]}], {"ranks": 4}),
    "a rank without predictions": (tiny, without_prompts(rows()), {}),
    "as many predictions as rows": (lambda: EVERY["Qwen3.5"].build(), AS_MANY, {}),
    "paths": (tiny, rows(), {"attention": "path"}),
    "ten batches": (tiny, rows(1, 23), {"ranks": 3, "num_heads": 6}),
}
FULL_CASES = ["FSDP2, a rank without predictions", "FSDP2, checkpointing", "2 x 2, FSDP2"]


@pytest.mark.parametrize("case", cases(CASES, [case for case in CASES if case not in FULL_CASES]))
def test_one_step(case: str, print_after: Print) -> None:
    build, features, options = CASES[case]
    num_heads = options.get("num_heads")
    built = (lambda: tiny_qwen3(num_attention_heads=num_heads)) if num_heads else build
    options = {name: value for name, value in options.items() if name != "num_heads"}
    assert_equal(*split(built, features, **options), case, print_after)


@FULL
@pytest.mark.parametrize("name", [name for name in EVERY if name not in QUICK])
def test_every_family(name: str, print_after: Print) -> None:
    """On four ranks each is equal, or refused before anything is trained."""

    def build() -> Any:
        return EVERY[name].build()

    batch = RadixCollator()(rows())
    try:
        learn(share_prefixes(build()), batch)
    except UserError as refusal:
        pytest.skip(f"refused without sp_group, too: {refusal}")
    except AttributeError as error:
        skip_if_it_fails_by_itself(EVERY[name], error)
    try:
        ordinary, other = split(build, rows(), ranks=4)
    except AssertionError as error:
        assert "UserError: sp_group" in str(error), error
    else:
        assert_equal(ordinary, other, name, print_after)


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


STEPS = 20
Trajectory = tuple[list[float], dict[str, Tensor], dict[str, Tensor]]


def trajectory(model: Any, wrap: Callable[[Any], Any] = lambda model: model) -> Trajectory:
    """Losses, weights and moments of steps of AdamW on batches of their own, in float64."""
    with float64_throughout(model):
        wrapped = wrap(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses = []
        for step in range(STEPS):
            loss = wrapped(**RadixCollator()(rows(step, 5 + step % 4))).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        weights = {name: whole(x.detach()).clone() for name, x in model.named_parameters()}
        moments = {
            f"{name}, {moment}": whole(optimizer.state[x][moment]).clone()
            for name, x in model.named_parameters()
            for moment in ("exp_avg", "exp_avg_sq")
        }
        return losses, weights, moments


@pytest.mark.parametrize("wrap", cases([DistributedDataParallel, fsdp2], [DistributedDataParallel]))
def test_trajectory(wrap: Callable[[Any], Any], print_after: Print) -> None:
    """Twenty steps on two ranks are those of one process."""

    def work(rank: int) -> Trajectory:
        return trajectory(share_prefixes(tiny().double(), sp_group=dist.new_group([0, 1])), wrap)

    losses, weights, moments = trajectory(share_prefixes(tiny().double()))
    assert losses[-1] != pytest.approx(losses[0], rel=0.05)
    for found in on_ranks(2, work):
        assert found[0] == pytest.approx(losses, rel=BAR_OF_STEPS)
        worst = {**distances(found[1], weights), **distances(found[2], moments)}
        assert max(worst.values()) <= BAR_OF_STEPS, worst
    print_after("one batch over several ranks", f"20 steps, {wrap.__name__}: {max(worst.values()):.1e}")


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


@pytest.mark.parametrize(("ranks", "num_key_heads"), [(2, 2), (4, 4)])
def test_bytes_that_travel(ranks: int, num_key_heads: int) -> None:
    """(n - 1) / n x U / n x (2N + 2K) x H numbers in a layer and pass, as recipes/benchmarks/2026-11-24-split.md
    says; 2 key heads are copied for 4 ranks.
    """
    batch, num_layers, head_dim = RadixCollator()(rows()), 2, 8
    num_rows = -(-batch["position_ids"].shape[1] // ranks)
    numbers = (ranks - 1) * num_rows * (2 * 4 + 2 * num_key_heads) * head_dim // ranks

    def work(rank: int) -> int:
        sent, send = [], dist.all_to_all_single

        def counted(received: Tensor, parts: Tensor, group: Any) -> None:
            sent.append(parts.nbytes - parts[rank].nbytes)
            send(received, parts, group=group)

        dist.all_to_all_single = counted
        learn(share_prefixes(tiny(num_hidden_layers=num_layers), sp_group=dist.new_group(list(range(ranks)))), batch)
        return sum(sent)

    assert on_ranks(ranks, work) == [2 * num_layers * 8 * numbers] * ranks


def heads_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    original = RowSplit.heads_to_rows
    monkeypatch.setattr(RowSplit, "heads_to_rows", lambda self, x: original(self, x).flip(1))


def rows_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    original = RowSplit.rows_to_heads
    monkeypatch.setattr(RowSplit, "rows_to_heads", lambda self, x: original(self, x).roll(1, 0))


def a_row_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    original = sequence_parallel.own_inputs

    def cut(*args: Any) -> dict[str, Tensor]:
        return {name: rows.index_fill(-1, torch.tensor([0]), 0) for name, rows in original(*args).items()}

    monkeypatch.setattr(sequence_parallel, "own_inputs", cut)


def gradients_not_sent_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence_parallel._AllToAll, "backward", staticmethod(lambda ctx, gradient: (gradient, None)))


def a_loss_that_is_not_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    def unscaled(self: RowSplit, loss: Tensor) -> Tensor:
        total = loss.detach().clone()
        dist.all_reduce(total, group=self.group)
        return loss + (total - loss).detach()

    monkeypatch.setattr(RowSplit, "sum", unscaled)


def a_label_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    original = SplitModel.cut

    def cut(self: SplitModel, *given: Any) -> Any:
        args, kwargs = original(self, *given)
        split = self.progress.call
        own = split.labels.clone()
        own[0, int((own[0] != own[0, 0]).nonzero()[0])] = own[0, 0]  # sequences that share a label have it in order
        split.labels = own
        return args, {**kwargs, "shift_labels": own, "labels": own.roll(1)}

    monkeypatch.setattr(SplitModel, "cut", cut)


def positions_of_the_first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    original = SplitModel.cut

    def cut(self: SplitModel, model: Any, args: Any, kwargs: Any) -> Any:
        args, changed = original(self, model, args, kwargs)
        count = changed["position_ids"].shape[-1]
        return args, {**changed, "position_ids": kwargs["position_ids"][:, :count]}

    monkeypatch.setattr(SplitModel, "cut", cut)


def keys_of_another_head(monkeypatch: pytest.MonkeyPatch) -> None:
    original = SplitCall.attend

    def attend(self: SplitCall, heads: Any, *rest: Any, **scoring: Any) -> Tensor:
        return original(self, (heads[0], heads[1].flip(1), heads[2]), *rest, **scoring)

    monkeypatch.setattr(SplitCall, "attend", attend)


def own_count_of_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    original = SplitModel.cut

    def cut(self: SplitModel, *given: Any) -> Any:
        found = original(self, *given)
        split = self.progress.call
        split.num_items = (split.labels != -100).sum()
        return found

    monkeypatch.setattr(SplitModel, "cut", cut)


def a_sink_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    original = SplitCall.attend

    def attend(self: SplitCall, heads: Any, window: Any, **scoring: Any) -> Tensor:
        first = scoring["sinks"][: len(scoring["sinks"]) // 2]
        return original(self, heads, window, **{**scoring, "sinks": torch.cat([first, first])})

    monkeypatch.setattr(SplitCall, "attend", attend)


MUTATIONS = [
    *(heads_in_another_order, rows_in_another_order, a_row_left_out, gradients_not_sent_back),
    *(a_loss_that_is_not_scaled, a_label_counted_twice, positions_of_the_first_rank, keys_of_another_head),
    *(own_count_of_labels, a_sink_not_cut),
]


@pytest.mark.parametrize("mutate", MUTATIONS)
def test_mutations_are_seen(mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    build = (lambda: EVERY["gpt-oss"].build(num_attention_heads=4)) if mutate is a_sink_not_cut else tiny
    mutate(monkeypatch)
    ordinary, other = split(build, rows())
    assert worst(ordinary, other) > 1e-6


def refused(build: Callable[[Any, int], Any], ranks: int = 2) -> str:
    """What every rank of a group says of `build(group, rank)`."""

    def work(rank: int) -> str:
        with pytest.raises(UserError) as error:
            build(dist.new_group(list(range(ranks))), rank)
        return str(error.value)

    found = set(on_ranks(ranks, work))
    assert len(found) == 1
    return found.pop()


def test_an_object_in_a_tuple() -> None:
    """Each rank has its own, at another address."""

    def loss(rank: int) -> float:
        kept = [object() for _ in range(rank + 1)]
        model = share_prefixes(tiny(), sp_group=dist.new_group([0, 1]))
        return model(**RadixCollator()(rows()), note=(kept[-1], torch.ones(1))).loss.item()

    one, other = on_ranks(2, loss)
    assert one == other


def test_refusals() -> None:
    """What would not be the gradient of the batch is refused on every rank, in the same words."""

    def call(group: Any, seed: int = 0, **options: Any) -> Any:
        return share_prefixes(tiny(), sp_group=group)(**RadixCollator(**options)(rows(seed)))

    def nearly(group: Any, rank: int, name: str, changes: list[int]) -> Any:
        batch = RadixCollator()(rows())
        values = batch[name] if name in batch else getattr(batch["radix"], name)
        values[..., : len(changes)] += rank * torch.tensor(changes)
        return share_prefixes(tiny(), sp_group=group)(**batch)

    def kept_on_one(rank: int) -> bool:
        batch = RadixCollator()(rows())
        assert rank == 0 or batch["radix"].layout.paths
        return bool(share_prefixes(tiny(), sp_group=dist.group.WORLD)(**batch).loss.isfinite())

    def counted(group: Any, rank: int, kind: Callable[[int], Any]) -> Any:
        return share_prefixes(tiny(), sp_group=group)(**RadixCollator()(rows()), num_items_in_batch=kind(30 + rank))

    def own_loss(group: Any, rank: int, count: int) -> Any:
        model = tiny()
        forward = model.forward

        def with_losses(labels: Any = None, **given: Any) -> Any:
            output = forward(**given)
            output.loss = sum(model.loss_function(output.logits, labels, 50) for _ in range(count))
            return output

        model.forward = with_losses
        return share_prefixes(model, sp_group=group)(**RadixCollator()(rows()))

    assert all(on_ranks(2, kept_on_one)), "what a layout has kept for its layers is not part of the batch"
    assert "got different batches" in refused(call)
    for name in ("input_ids", "position_ids", "predictor_indices"):
        assert "got different batches" in refused(partial(nearly, name=name, changes=[1, -2, 1]))
    for kind in (int, float, np.float32, torch.tensor, lambda n: ((torch.tensor(n),),)):
        assert "got different batches" in refused(partial(counted, kind=kind))
    assert "more than once" in refused(partial(own_loss, count=2))
    assert "computes its loss without its loss_function" in refused(partial(own_loss, count=0))
    assert "without merge_labels" in refused(lambda group, rank: call(group, merge_labels=True))
    assert "these numbers do: 1, 2, 4" in refused(lambda group, rank: call(group), ranks=3)
    assert "has no head" in refused(lambda group, rank: share_prefixes(tiny().model, sp_group=group))
    not_split = refused(lambda group, rank: share_prefixes(tiny(), sp_group=group).model(**RadixCollator()(rows())))
    assert "without having been split over its ranks" in not_split

    def outside(rank: int) -> None:
        group = dist.new_group([0])
        if rank:
            with pytest.raises(UserError, match="this rank is not in it"):
                share_prefixes(tiny(), sp_group=group)

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
