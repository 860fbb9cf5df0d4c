from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
from torch.utils.data import DataLoader, IterableDataset

from radixtrain.collators.misuse_guard import check_not_dispatched
from radixtrain.errors import UserError


class Numbers(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


def collate(numbers: list[int]) -> Any:
    check_not_dispatched()
    return {"sum": sum(numbers)}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_dispatching_loader_is_found(num_workers):
    """In its own process, and in a worker that is forked from it, whose stack begins with that of the loader."""
    loader = DataLoaderDispatcher(Numbers(), batch_size=2, collate_fn=collate, num_workers=num_workers)
    with pytest.raises(UserError, match=r'accelerator_config=\{"dispatch_batches": False\}'):
        next(iter(loader))


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", [DataLoader, DataLoaderShard])
def test_other_loaders_are_not(kind, num_workers):
    loader = kind(Numbers(), batch_size=2, collate_fn=collate, num_workers=num_workers)
    assert [batch["sum"] for batch in loader] == [1, 5]


def test_the_loop_around_a_dispatching_loader_may_collate():
    """Its generator is suspended then: only who asks for this batch counts."""
    for _ in DataLoaderDispatcher(Numbers(), batch_size=2, collate_fn=torch.tensor):
        assert collate([1, 2]) == {"sum": 3}
        break
