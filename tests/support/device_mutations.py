"""Mistakes that were made in data-parallel trainers, each as a function that a rank calls before the command."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

__all__ = ["MUTATIONS"]


def mean_not_scaled() -> None:
    """The loss is not multiplied by the world size: data-parallel reduction averages, so the gradient is too small."""
    from radixtrain.distributed import ranks
    from radixtrain.training.module import RadixModule

    backward = RadixModule.manual_backward
    _set(RadixModule, "manual_backward", lambda module, loss: backward(module, loss / ranks().size))


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
    from radixtrain.collators.steps import StepCollator

    share = StepCollator.__call__
    _set(StepCollator, "__call__", lambda collator, given: share(replace(collator, rank=0, num_ranks=1), given))


def other_rows_on_every_rank() -> None:
    """Every rank draws its own steps, as with a `DistributedSampler`, and shares them out as if they were one."""
    from radixtrain.data.steps import StepSampler
    from radixtrain.distributed import ranks

    order = StepSampler.order
    _set(StepSampler, "order", lambda sampler: (order(sampler) + ranks().rank) % sampler.num_conversations)


def first_rank_twice() -> None:
    """Both ranks compute the share of the first one."""
    from radixtrain.collators.steps import StepCollator

    share = StepCollator.__call__
    _set(StepCollator, "__call__", lambda collator, given: share(replace(collator, rank=0), given))


def weightless_is_weighted() -> None:
    """A micro-batch that only fills up counts like any other."""
    from radixtrain.collators import steps

    make = steps.dummy_features

    def mutated(*arguments: Any, **options: Any) -> Any:
        found = make(*arguments, **options)
        return found._replace(loss_weights=found.loss_weights + 1)

    vars(steps)["dummy_features"] = mutated


def only_the_first_is_synchronised() -> None:
    """Gradients are exchanged after the first micro-batch of a step and not after its last."""
    from torch.nn.parallel import DistributedDataParallel as DDP

    from radixtrain.training import module
    from radixtrain.training.devices import gradient_sync

    backward = gradient_sync.backward
    place = [0]

    def mutated(here: Any, loss: Any, is_last: bool) -> None:
        is_first = place[0] == 0
        place[0] = 0 if is_last else place[0] + 1
        assert isinstance(here.trainer.strategy.model, DDP)
        backward(here, loss, is_first)

    for place_of_it in (module, gradient_sync):
        if "backward" in vars(place_of_it):
            vars(place_of_it)["backward"] = mutated


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


def _set(owner: type, name: str, function: Callable[..., Any]) -> None:
    setattr(owner, name, function)
