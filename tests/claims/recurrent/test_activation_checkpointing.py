"""Recurrent layers that are computed again in the backward pass get the tree again."""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

from radixtrain import share_prefixes
from radixtrain.verification.oracle import (
    float64_throughout,
    float64_truth,
    gradients_of,
    ordinary_one_by_one,
    radix_batch,
)
from tests.support.models import tiny_hybrid
from tests.support.steps import FEATURES, ONE_KIND, PROMPT, assert_exact, batch_of, same

OTHERS = [{"input_ids": ids, "labels": [-100, *ids[1:]]} for ids in ([5, 4, 3, 2, 7, 1], [5, 4, 3, 2, 7, 9, 9], [5, 6])]


def gradients_by_stock_names(model: Any) -> Any:
    """Of a batch with forks, for a model whose layers were wrapped after it was prepared."""
    with float64_throughout(model):
        found = gradients_of(model, lambda: radix_batch(model, batch_of()))
    tensors = {
        re.sub(r"(?<=layers\.\d\.)(layer\.|_checkpoint_wrapped_module\.)+", "", k): x for k, x in found.tensors.items()
    }
    return replace(found, tensors=tensors)


@pytest.mark.parametrize("implementation", CheckpointImpl)
@ONE_KIND
def test_around_a_layer(kind: str, implementation: CheckpointImpl) -> None:
    """As FSDP and Lightning do: the whole layer runs again, its hooks too."""
    model = tiny_hybrid(kind)
    truth = float64_truth(model, FEATURES)
    share_prefixes(model)
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = checkpoint_wrapper(layer, implementation)
    same(truth, gradients_by_stock_names(model))


@pytest.mark.parametrize("use_reentrant", [False, True])
@ONE_KIND
def test_two_batches_before_the_backward_pass(kind: str, use_reentrant: bool) -> None:
    """transformers computes a layer's `forward` again, without the layer's hooks: each batch with its own tree, and an
    ordinary one between them without one.
    """
    model = tiny_hybrid(kind)
    ids = torch.tensor([PROMPT])

    def terms() -> Iterator[Tensor]:
        both = [next(radix_batch(model, batch_of(features))) for features in (FEATURES, OTHERS)]
        both.insert(1, model(input_ids=ids, labels=ids).loss)
        yield torch.stack(both).sum()

    def stock() -> Iterator[Tensor]:
        yield from ordinary_one_by_one(model, FEATURES)
        yield model(input_ids=ids, labels=ids).loss
        yield from ordinary_one_by_one(model, OTHERS)

    with float64_throughout(model):
        truth = gradients_of(model, stock)
    share_prefixes(model).gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    assert_exact(model, truth, terms)
