"""Mistakes that were made in data-parallel trainers, each as a function that a rank calls before it trains."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any


def mean_not_scaled() -> None:
    """The loss is not multiplied by the world size: data-parallel reduction averages, so the gradient is too small."""
    from radixtrain.distributed import ranks

    _divide_losses(lambda: ranks().size)


def labels_of_the_rank() -> None:
    """The divisor is that of the rank: a mean of means, in which the ranks weigh the same whatever they have."""
    from radixtrain.collators.steps import StepCollator

    share = StepCollator.__call__

    def mutated(collator: StepCollator, features: Any) -> Any:
        step = share(collator, features)
        own = [features[index]["labels"] for members in step.members for index in members]
        count = sum(int(label != -100) for labels in own for label in labels[1:])
        return replace(step, num_labels=max(1, count) * collator.num_ranks)

    _set(StepCollator, "__call__", mutated)


def whole_step_on_every_rank() -> None:
    """Nothing is shared out."""
    _collate_as(rank=0, num_ranks=1)


def other_rows_on_every_rank() -> None:
    """Every rank draws its own steps, as with a `DistributedSampler`, and shares them out as if they were one."""
    from radixtrain.data.steps import StepSampler
    from radixtrain.distributed import ranks

    order = StepSampler.order
    _set(StepSampler, "order", lambda sampler: (order(sampler) + ranks().rank) % sampler.num_conversations)


def first_rank_twice() -> None:
    """Both ranks compute the share of the first one."""
    _collate_as(rank=0)


def weightless_is_weighted() -> None:
    """A micro-batch that only fills up counts like any other."""
    from radixtrain.collators import steps

    make = steps.dummy_features

    def mutated(*arguments: Any, **options: Any) -> Any:
        found = make(*arguments, **options)
        return replace(found, loss_weights=found.loss_weights + 1)

    vars(steps)["dummy_features"] = mutated


def only_the_first_is_synchronised() -> None:
    """Gradients are exchanged after the first micro-batch of a step and not after its last."""
    from radixtrain.training import loop

    add, place = loop.add_gradient, [0]

    def mutated(module: Any, is_sharded: bool, batch: Any, divisor: float, is_last: bool) -> Any:
        is_first = place[0] == 0
        place[0] = 0 if is_last else place[0] + 1
        return add(module, is_sharded, batch, divisor, is_first)

    vars(loop)["add_gradient"] = mutated


def loss_of_the_rank_is_logged() -> None:
    """The logged loss is the rank's own, and so is that of a validation."""
    from radixtrain import distributed

    _set(distributed.Ranks, "sum", lambda here, tensor: tensor)


MUTATIONS: list[Callable[[], None]] = [
    mean_not_scaled,
    labels_of_the_rank,
    weightless_is_weighted,
    only_the_first_is_synchronised,
    whole_step_on_every_rank,
    other_rows_on_every_rank,
    first_rank_twice,
    loss_of_the_rank_is_logged,
]


def labels_once_on_each_rank() -> None:
    """Every rank of a group counts a label as often as the group has ranks."""
    from radixtrain.tree.radix_inputs import with_radix

    _change_split(lambda part, rank, size: with_radix(part, loss_weights=part["radix"].loss_weights * size))


def last_prediction_left_out() -> None:
    """As by a border between two ranks that is off by one."""
    from radixtrain.tree.radix_inputs import with_radix

    def changed(part: dict[str, Any], rank: int, size: int) -> dict[str, Any]:
        weights = part["radix"].loss_weights.clone()
        weights[weights.nonzero()[-1:]] = 0  # after it stand ignored ones
        return with_radix(part, loss_weights=weights)

    _change_split(changed)


def positions_of_the_first_rank() -> None:
    """Every rank counts positions from 0."""

    def changed(part: dict[str, Any], rank: int, size: int) -> dict[str, Any]:
        positions = part["position_ids"]
        return {**part, "position_ids": positions - positions[..., :1]}

    _change_split(changed)


def gradients_averaged_over_groups() -> None:
    """The loss is scaled by the number of groups, and DDP averages over all ranks."""
    from radixtrain.distributed import ranks

    _divide_losses(lambda: ranks().sp_size)


SPLIT_MUTATIONS: list[Callable[[], None]] = [
    labels_once_on_each_rank,
    last_prediction_left_out,
    positions_of_the_first_rank,
    gradients_averaged_over_groups,
]


"""Of runs with `sp_size`."""


def weight_read_unsharded() -> None:
    """The head multiplies by the weight that the model had before it was sharded."""
    from torch.nn.functional import linear

    from radixtrain.hf.guards import code

    def captured(hooks: Any) -> None:
        head = hooks.model.get_output_embeddings()
        weight = head.weight
        head.forward = lambda rows: linear(rows, weight)
        code.KNOWN |= {__name__.partition(".")[0]}

    _change_install(lambda hooks, backbone: captured(hooks) or backbone)


def hook_lost_by_wrapping() -> None:
    """The hooks are on a backbone that the model does not call."""
    _change_install(lambda hooks, backbone: deepcopy(backbone))


def gradient_reduced_twice() -> None:
    """What the ranks' gradients add up to is accumulated twice."""
    import torch.distributed as dist

    name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"  # torch 2.12
    reduce = getattr(dist, name)

    def mutated(output: Any, *arguments: Any, **options: Any) -> Any:
        work = reduce(output, *arguments, **options)
        output.mul_(2)
        return work

    setattr(dist, name, mutated)


SHARDED_MUTATIONS: list[Callable[[], None]] = [weight_read_unsharded, hook_lost_by_wrapping, gradient_reduced_twice]


"""Of models that FSDP shards."""


def _change_install(change: Callable[[Any, Any], Any]) -> None:
    from radixtrain.hf.hooks import BackboneHooks

    install = BackboneHooks.install
    _set(BackboneHooks, "install", lambda hooks, backbone: install(hooks, change(hooks, backbone)))


def _change_split(change: Callable[[dict[str, Any], int, int], dict[str, Any]]) -> None:
    from radixtrain.collators import steps

    split = steps.split_batch
    vars(steps)["split_batch"] = lambda batch, share: change(split(batch, share), *share)


def _collate_as(**fields: int) -> None:
    from radixtrain.collators.steps import StepCollator

    share = StepCollator.__call__
    _set(StepCollator, "__call__", lambda collator, given: share(replace(collator, **fields), given))


def _divide_losses(divisor: Callable[[], int]) -> None:
    """Divide the loss of every micro-batch once more."""
    from radixtrain.training import loop

    add = loop.add_gradient
    vars(loop)["add_gradient"] = lambda module, is_sharded, batch, number, is_last: add(
        module, is_sharded, batch, number * divisor(), is_last
    )


def _set(owner: type, name: str, function: Any) -> None:
    setattr(owner, name, function)
