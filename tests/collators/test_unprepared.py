"""A radix batch for a model that was not prepared is an error that names it, before it computes; nothing else is."""

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import radixtrain.collators.unprepared as unprepared
from radixtrain import RadixCollator, prepare_model, restore_model
from radixtrain.collators.steps import StepCollator
from radixtrain.errors import UserError

FEATURES = [{"input_ids": ids, "labels": ids} for ids in ([7, 8, 9, 1, 2], [7, 8, 9, 3])]
MESSAGE = (
    r"Qwen3ForCausalLM got a batch of RadixCollator, but it is not prepared: call model = .*prepare_model\(model\)"
)


@pytest.fixture(autouse=True)
def no_model_prepared_yet() -> Iterator[None]:
    """As in a new process."""
    unprepared.end_watch()
    unprepared.allow_watch()
    yield
    unprepared.end_watch()


def is_watching() -> bool:
    return unprepared._Watch.handle is not None


def wrapped_by_a_module(model: Any) -> Any:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, **batch: Any) -> Any:
            return self.model(**batch)

    return Wrapper()


def wrapped_by_peft(model: Any) -> Any:
    peft = pytest.importorskip("peft", reason="pip install 'radixtrain[peft]'")
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))


def wrapped_by_ddp(model: Any) -> Any:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    return nn.parallel.DistributedDataParallel(model)


def wrapped_by_accelerate(model: Any) -> Any:
    accelerate = pytest.importorskip("accelerate", reason="pip install 'radixtrain[dev]'")
    return accelerate.Accelerator(cpu=True).prepare(model)


def compiled(model: Any) -> Any:
    return torch.compile(model, backend="eager")


WRAPPERS = [lambda model: model, wrapped_by_a_module, wrapped_by_peft, wrapped_by_ddp, wrapped_by_accelerate, compiled]
NAMES = ["by itself", "module", "PEFT", "DDP", "Accelerate", "torch.compile"]


@pytest.fixture
def close_process_group() -> Iterator[None]:
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("wrap", WRAPPERS, ids=NAMES)
@pytest.mark.usefixtures("close_process_group")
@pytest.mark.filterwarnings("ignore:Using `torch.compile")
class TestWrappers:
    def test_refused_before_it_computes(self, tiny_qwen3: Callable[..., Any], wrap: Callable[[Any], Any]) -> None:
        """It said: Expected input batch_size (6) to match target batch_size (8)."""
        batch, model = RadixCollator()(FEATURES), tiny_qwen3()
        ran: list[Any] = []
        model.get_input_embeddings().register_forward_hook(lambda *_: ran.append(1))
        with pytest.raises(UserError, match=MESSAGE):
            wrap(model)(**batch)
        assert not ran
        assert is_watching(), "the next attempt may forget it again"

    def test_prepared(self, tiny_qwen3: Callable[..., Any], wrap: Callable[[Any], Any]) -> None:
        batch, model = RadixCollator()(FEATURES), prepare_model(tiny_qwen3())
        assert not is_watching()
        assert wrap(model)(**batch).loss.isfinite()


class TestTheWatchEnds:
    def test_when_a_model_is_prepared(self, tiny_qwen3: Callable[..., Any]) -> None:
        RadixCollator()
        assert is_watching()
        prepare_model(tiny_qwen3())
        assert not is_watching()
        RadixCollator()
        assert not is_watching(), "nor does it begin again"

    def test_when_a_prepared_model_gets_a_batch(self, tiny_qwen3: Callable[..., Any]) -> None:
        """After another was restored. Called by its backbone too."""
        first, second = prepare_model(tiny_qwen3()), prepare_model(tiny_qwen3())
        for call in (second, second.model):
            restore_model(prepare_model(first))
            batch = RadixCollator()(FEATURES)
            assert is_watching()
            if call is second.model:
                del batch["labels"], batch["shift_labels"]
            call(**batch)
            assert not is_watching()

    def test_a_restored_model_is_watched_again(self, tiny_qwen3: Callable[..., Any]) -> None:
        """`verify_equivalence` leaves a model restored; the next step may forget to prepare it."""
        model = restore_model(prepare_model(tiny_qwen3()))
        with pytest.raises(UserError, match=MESSAGE):
            model(**RadixCollator()(FEATURES))

    def test_when_a_prepared_model_is_unpickled(self, tiny_qwen3: Callable[..., Any]) -> None:
        pickled = pickle.dumps(prepare_model(tiny_qwen3()))
        unprepared.allow_watch()
        batch = RadixCollator()(FEATURES)
        assert is_watching()
        model = pickle.loads(pickled)
        assert not is_watching()
        assert model(**batch).loss.isfinite()


class TestModulesOfTheUser:
    """They hold a Hugging Face model, and do with a radix batch what they like."""

    def test_only_embeddings(self, tiny_qwen3: Callable[..., Any]) -> None:
        class Embedded(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.model = tiny_qwen3()

            def forward(self, **batch: Any) -> torch.Tensor:
                return self.model.get_input_embeddings()(batch["input_ids"])

        batch, module = RadixCollator()(FEATURES), nn.parallel.DataParallel(Embedded())
        assert module(**batch).shape[:2] == batch["input_ids"].shape
        module(**batch)
        assert not is_watching(), "or every call of a module would pay for it"

    def test_prepared_when_it_is_first_called(self, tiny_qwen3: Callable[..., Any]) -> None:
        class Late(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.model = tiny_qwen3()

            def forward(self, **batch: Any) -> Any:
                return prepare_model(self.model)(**batch)

        assert Late()(**RadixCollator()(FEATURES)).loss.isfinite()

    def test_a_model_with_a_forward_of_its_own(self, tiny_qwen3: Callable[..., Any]) -> None:
        class Own(type(tiny_qwen3())):  # type: ignore[misc]
            def forward(self, **batch: Any) -> int:
                return len(batch)

        batch = RadixCollator()(FEATURES)
        assert Own(tiny_qwen3().config)(**batch) == len(batch)

    def test_named_at_every_attempt(self, tiny_qwen3: Callable[..., Any]) -> None:
        """By a module of the user's own inside one of torch."""
        batch, module = RadixCollator()(FEATURES), nn.parallel.DataParallel(wrapped_by_a_module(tiny_qwen3()))
        for _ in range(3):
            with pytest.raises(UserError, match=MESSAGE):
                module(**batch)


class TestLeftAlone:
    def test_an_ordinary_batch(self, tiny_qwen3: Callable[..., Any]) -> None:
        RadixCollator()
        ids = torch.tensor([[7, 8, 9]])
        assert tiny_qwen3()(input_ids=ids, labels=ids).loss.isfinite()
        assert is_watching()

    def test_a_module_of_the_user_s_own(self) -> None:
        """It may call `tree_attention` itself."""

        class Own(nn.Module):
            def forward(self, **batch: Any) -> int:
                return len(batch)

        batch = RadixCollator()(FEATURES)
        assert Own()(**batch) == len(batch)

    def test_a_compiled_function(self, tiny_qwen3: Callable[..., Any]) -> None:
        """torch traces the hook with the modules; what it does there must not break the graph."""
        model, ids = tiny_qwen3(), torch.tensor([[7, 8, 9]])
        expected = model(input_ids=ids).logits
        RadixCollator()
        function = torch.compile(lambda ids: model(input_ids=ids).logits, backend="eager", fullgraph=True)
        assert torch.allclose(function(ids), expected)


class TestCollators:
    def test_one_hook_for_all(self) -> None:
        RadixCollator()
        first = unprepared._Watch.handle
        RadixCollator()
        assert unprepared._Watch.handle is first

    def test_copies_install_none(self) -> None:
        collator = RadixCollator()
        unprepared.end_watch()
        unprepared.allow_watch()
        for copied in (pickle.loads(pickle.dumps(collator)), copy.deepcopy(collator)):
            assert torch.equal(copied(FEATURES)["input_ids"], collator(FEATURES)["input_ids"])
        assert not is_watching()

    def test_workers_install_none(self) -> None:
        loader = DataLoader([FEATURES], batch_size=1, num_workers=1, collate_fn=watching_after_collation)
        assert list(loader) == [False]
        assert watching_after_collation([FEATURES])

    def test_a_step_installs_none_for_a_prepared_model(self, tiny_qwen3: Callable[..., Any]) -> None:
        prepare_model(tiny_qwen3())
        StepCollator(max_tokens=8)(FEATURES)
        assert not is_watching()


def watching_after_collation(batches: list[Any]) -> bool:
    RadixCollator()(batches[0])
    return is_watching()


def test_a_new_user(fresh: Any) -> None:
    """In a fresh process, as in a first script."""
    code = (
        "from transformers import Qwen3Config, Qwen3ForCausalLM\n"
        "from radixtrain import RadixCollator\n"
        "sizes = dict(vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, head_dim=8)\n"
        "model = Qwen3ForCausalLM(Qwen3Config(**sizes, num_attention_heads=2, num_key_value_heads=1))\n"
        f"model(**RadixCollator()({FEATURES!r}))\n"
    )
    returned, ran = fresh(code)
    assert returned == 1
    message = "radixtrain.errors.UserError: Qwen3ForCausalLM got a batch of RadixCollator"
    assert ran.error().startswith(message), ran.said()
