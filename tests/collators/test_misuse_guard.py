"""A radix batch for a model that was not shared is an error that names it, before it computes; nothing else is."""

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from radixtrain import RadixCollator, restore_model, share_prefixes
from radixtrain.collators.misuse_guard import check_not_dispatched, end_watch
from radixtrain.collators.steps import StepCollator
from radixtrain.errors import UserError
from radixtrain.verification.oracle import float64_throughout
from tests.support import FULL, cases
from tests.support.models import tiny_qwen3

FEATURES = [{"input_ids": ids, "labels": ids} for ids in ([7, 8, 9, 1, 2], [7, 8, 9, 3])]
MESSAGE = (
    r"Qwen3ForCausalLM got a batch of RadixCollator, but it is not shared: call radixtrain.share_prefixes\(model\)"
)


@pytest.fixture(autouse=True)
def no_model_prepared_yet() -> Iterator[None]:
    """As in a new process."""
    end_watch()
    yield
    end_watch()


def is_watching() -> bool:
    """Whether calls of modules cost something: nothing else here installs a hook for all of them."""
    return num_hooks() > 0


def num_hooks() -> int:
    return len(torch.nn.modules.module._global_forward_pre_hooks)


class Wrapper(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Any) -> Any:
        return self.model(**batch)


def wrapped_by_ddp(model: Any) -> Any:
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    return nn.parallel.DistributedDataParallel(model)


def compiled(model: Any) -> Any:
    return torch.compile(model, backend="eager")


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "by itself": lambda model: model,
    "module": Wrapper,
    "DDP": wrapped_by_ddp,
    "torch.compile": compiled,
}


@pytest.fixture
def close_process_group() -> Iterator[None]:
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", cases(WRAPPERS, ["by itself", "module", "DDP"]))
@pytest.mark.usefixtures("close_process_group")
@pytest.mark.filterwarnings("ignore:Using `torch.compile")
def test_refused_before_it_computes_and_prepared(name: str) -> None:
    """It said: Expected input batch_size (6) to match target batch_size (8)."""
    batch, model = RadixCollator()(FEATURES), tiny_qwen3()
    ran: list[Any] = []
    model.get_input_embeddings().register_forward_hook(lambda *_: ran.append(1))
    wrapped = WRAPPERS[name](model)
    for _ in range(2):  # the next attempt may forget it again
        with pytest.raises(UserError, match=MESSAGE):
            wrapped(**batch)
    assert not ran
    prepared = WRAPPERS[name](share_prefixes(tiny_qwen3()))
    assert prepared(**batch).loss.isfinite()
    assert not is_watching()


def test_another_model_was_prepared() -> None:
    """The watch is one hook, until a prepared model gets a batch."""
    share_prefixes(tiny_qwen3())
    RadixCollator()
    StepCollator(max_tokens=8)(FEATURES)
    assert num_hooks() == 1
    for model in (tiny_qwen3(), restore_model(share_prefixes(tiny_qwen3()))):
        with pytest.raises(UserError, match=MESSAGE):
            model(**RadixCollator()(FEATURES))


def test_the_watch_ends_when_a_prepared_model_gets_a_batch() -> None:
    """Called by its backbone too, and in a process that has not shared it."""
    model = share_prefixes(tiny_qwen3())
    for call in (model, model.model, pickle.loads(pickle.dumps(model))):
        batch = RadixCollator()(FEATURES)
        assert is_watching()
        if call is model.model:
            del batch["labels"], batch["shift_labels"]
        call(**batch)
        assert not is_watching()


class Own(nn.Module):
    """A module of the user's own may do with a radix batch what it likes: call `tree_attention`, for instance."""

    def __init__(self, model: Any = None) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Any) -> Any:
        return len(batch)


class Late(Own):
    """Prepares its model when it is first called."""

    def forward(self, **batch: Any) -> Any:
        assert share_prefixes(self.model)(**batch).loss.isfinite()
        return len(batch)


def test_modules_of_the_user_are_left_alone() -> None:
    class Derived(type(tiny_qwen3())):  # type: ignore[misc]
        def forward(self, **batch: Any) -> int:
            return len(batch)

    for module in (Own(), Derived(tiny_qwen3().config), Late(tiny_qwen3())):
        batch = RadixCollator()(FEATURES)
        assert is_watching()
        assert module(**batch) == len(batch)


def test_an_ordinary_batch_is_left_alone() -> None:
    RadixCollator()
    ids = torch.tensor([[7, 8, 9]])
    assert tiny_qwen3()(input_ids=ids, labels=ids).loss.isfinite()
    assert is_watching()


@FULL
def test_a_compiled_function_is_left_alone() -> None:
    """torch traces the hook with the modules; what it does there must not break the graph."""
    model, ids = tiny_qwen3(), torch.tensor([[7, 8, 9]])
    with float64_throughout(model):
        expected = model(input_ids=ids).logits
        RadixCollator()
        function = torch.compile(lambda ids: model(input_ids=ids).logits, backend="eager", fullgraph=True)
        assert (function(ids) - expected).norm() <= 1e-12 * expected.norm()


def test_copies_and_workers_install_no_hook() -> None:
    collator = RadixCollator()
    end_watch()
    for copied in (pickle.loads(pickle.dumps(collator)), copy.deepcopy(collator)):
        assert torch.equal(copied(FEATURES)["input_ids"], collator(FEATURES)["input_ids"])
    assert not is_watching()
    loader = DataLoader([FEATURES], batch_size=1, num_workers=1, collate_fn=watching_after_collation)
    assert list(loader) == [False]
    assert watching_after_collation([FEATURES])


def watching_after_collation(batches: list[Any]) -> bool:
    RadixCollator()(batches[0])
    return is_watching()


class Numbers(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


def collate(numbers: list[int]) -> Any:
    check_not_dispatched()
    return {"sum": sum(numbers)}


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", [DataLoader, DataLoaderShard, DataLoaderDispatcher])
def test_only_a_dispatching_loader_is_found(kind, num_workers):
    """In its own process, and in a worker that is forked from it, whose stack begins with that of the loader."""
    loader = kind(Numbers(), batch_size=2, collate_fn=collate, num_workers=num_workers)
    if kind is DataLoaderDispatcher:
        with pytest.raises(UserError, match=r'accelerator_config=\{"dispatch_batches": False\}'):
            next(iter(loader))
    else:
        assert [batch["sum"] for batch in loader] == [1, 5]


def test_the_loop_around_a_dispatching_loader_may_collate():
    """Its generator is suspended then: only who asks for this batch counts."""
    for _ in DataLoaderDispatcher(Numbers(), batch_size=2, collate_fn=torch.tensor):
        assert collate([1, 2]) == {"sum": 3}
        break
