"""What was shared: the report, the warning that nothing was, and that of an optimizer which rounds updates away."""

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from radixtrain import RadixCollator, StepCollator, restore_model, share_prefixes, sharing_report, step_losses
from radixtrain.__main__ import main
from radixtrain.hf.sharing_report import NOT_ALIKE as NOT_ALIKE_REASON
from radixtrain.hf.sharing_report import NUM_CALLS, _warn
from tests.support.models import with_adapters

SHARED = [{"input_ids": ids, "labels": ids} for ids in ([7, 8, 9, 1, 2], [7, 8, 9, 3])]
UNSHARED = [{"input_ids": ids, "labels": ids} for ids in ([7, 8, 9, 1, 2], [6, 8, 9, 3])]
ORDINARY, UNLIKE = (
    dict.fromkeys(("input_ids", "labels"), torch.tensor(ids))
    for ids in ([[7, 8, 9, 1, 2], [7, 8, 9, 3, 4]], [[7, 8, 9, 1, 2], [6, 8, 9, 3, 4]])
)
TOO_LITTLE = "calls not shared: less than min_ratio = 1.1 to save"
NOT_ALIKE = "the first 10 training batches of Qwen3ForCausalLM shared nothing: no two sequences of a batch began alike"
NOTHING_TO_SHARE: dict[str, tuple[dict[str, Any], str]] = {
    "ordinary": (UNLIKE, TOO_LITTLE),
    "radix": (RadixCollator()(UNSHARED), NOT_ALIKE),
    "radix, padded": (RadixCollator(pad_to_multiple_of=16)(UNSHARED), NOT_ALIKE),
}


@pytest.fixture
def model(tiny_qwen3: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level(logging.WARNING, logger="radixtrain")
    return share_prefixes(tiny_qwen3()).train()


def run(model: Any, batch: dict[str, Any], times: int) -> None:
    for _ in range(times):
        model(**batch)


@pytest.mark.parametrize(("batch", "message"), NOTHING_TO_SHARE.values(), ids=NOTHING_TO_SHARE)
class TestTheWarningThatNothingWasShared:
    def test_is_given_once(
        self, model: Any, caplog: pytest.LogCaptureFixture, batch: dict[str, Any], message: str
    ) -> None:
        """And by a copy, which counts by itself."""
        run(model, batch, NUM_CALLS - 1)
        assert not caplog.records
        for each in (copy.deepcopy(model), model):
            run(each, batch, 2 * NUM_CALLS)
        assert [message in record.getMessage() for record in caplog.records] == [True, True]

    def test_not_if_one_batch_shared(
        self, model: Any, caplog: pytest.LogCaptureFixture, batch: dict[str, Any], message: str
    ) -> None:
        """Also if it shared less than its padding."""
        for sharing in (RadixCollator()(SHARED), RadixCollator(pad_to_multiple_of=64)(SHARED)):
            run(share_prefixes(model), batch, NUM_CALLS - 2)
            run(model, sharing, 1)
            run(model, batch, 2 * NUM_CALLS)
        assert not caplog.records

    def test_not_without_training(
        self, model: Any, caplog: pytest.LogCaptureFixture, batch: dict[str, Any], message: str
    ) -> None:
        """A reference model computes with gradients on or off."""
        run(model.eval(), batch, 2 * NUM_CALLS)
        with torch.no_grad():
            run(model.train(), batch, 2 * NUM_CALLS)
            model.generate(input_ids=torch.tensor([[7, 8]]), max_new_tokens=2 * NUM_CALLS, pad_token_id=0)
        run(model.requires_grad_(False), batch, 2 * NUM_CALLS)
        assert not caplog.records


class TestCounts:
    """Counted by hand."""

    def test_of_every_kind_of_batch(self, model: Any) -> None:
        run(model, RadixCollator()(SHARED), 2)  # 5 + 4 tokens, 6 unique; 4 + 3 labels have a token before them
        run(model, RadixCollator()(UNSHARED), 1)  # 9 tokens and unique ones: it counts in r
        run(model, ORDINARY, 1)  # 10 tokens, 7 unique
        run(model, UNLIKE, 3)
        sharing_report(model).plan_seconds = 1e-9
        with torch.no_grad():
            model.generate(input_ids=torch.tensor([[7, 8]]), max_new_tokens=4, pad_token_id=0)
        assert str(sharing_report(model)).splitlines() == [
            "3 calls shared: 40 places, 37 tokens, 28 unique, r = 1.32; plans took 0.00 s",
            "the head computed 43 rows for 40 places",
            "3 calls not shared: less than min_ratio = 1.1 to save",
            f"1 calls not shared: {NOT_ALIKE_REASON}",
            "4 calls of generation",
        ]

    def test_a_batch_that_only_fills_up(self, model: Any) -> None:
        """Of a rank that has no sequence left."""
        collators = [StepCollator(num_ranks=3, rank=rank) for rank in range(3)]
        steps = [collator(SHARED) for collator in collators]
        for step in steps:
            list(step_losses(model, step))
        assert sharing_report(model).num_tokens == steps[0].num_tokens == 9


ROWS = [{"input_ids": [7, 8, 9, 7, 8, 9, n], "labels": [-100] * 6 + [n]} for n in range(10, 14)]
SAID = "the optimizer changes weights in torch.{}: unless it keeps float32 copies, an update of less than {} % of a"
BFLOAT16, FLOAT16 = SAID.format("bfloat16", "0.20"), SAID.format("float16", "0.02")


@pytest.fixture
def in_a_new_process(caplog: pytest.LogCaptureFixture) -> None:
    """As in a new process."""
    _warn.cache_clear()
    caplog.set_level(logging.WARNING, logger="radixtrain")


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records]
    return [text for text in found if text.startswith("the optimizer changes weights")]


def train(model: Any, optimizer: Any, autocast: bool) -> None:
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            model(**RadixCollator()(ROWS)).loss.backward()
        optimizer.step()


CASES: dict[str, tuple[torch.dtype, str, str]] = {  # of the weights, what is special, what is said
    "bfloat16": (torch.bfloat16, "", BFLOAT16),
    "float16": (torch.float16, "", FLOAT16),
    "float32": (torch.float32, "", ""),
    "float32 under autocast": (torch.float32, "autocast", ""),
    "float32 LoRA on bfloat16": (torch.bfloat16, "lora", ""),
    "an optimizer of float32 copies": (torch.bfloat16, "copies", ""),
    "frozen weights in the optimizer": (torch.bfloat16, "lora, all", ""),
}


@pytest.mark.usefixtures("in_a_new_process")
@pytest.mark.parametrize(("dtype", "special", "message"), CASES.values(), ids=CASES)
def test_weights_of_16_bits_are_named_once(
    dtype: torch.dtype,
    special: str,
    message: str,
    tiny_qwen3: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = tiny_qwen3().to(dtype).train()
    model = share_prefixes(with_adapters(model, target_modules=["q_proj"]) if "lora" in special else model)
    weights = [weight for weight in model.parameters() if weight.requires_grad or special == "lora, all"]
    if special == "copies":  # DeepSpeed and FSDP step these, and write them back into the model
        weights = [weight.detach().float().requires_grad_() for weight in weights]
    optimizer = torch.optim.SGD(weights, lr=1e-3)
    train(model, optimizer, special == "autocast")
    restore_model(model)
    assert [text.startswith(message) for text in said(caplog)] == [True] * bool(message)


@pytest.mark.usefixtures("in_a_new_process")
def test_fit_says_it_once(arguments: Callable[..., list[str]], caplog: pytest.LogCaptureFixture) -> None:
    """Without sharing too."""
    assert main(arguments(trainer__max_steps=1, model__dtype="bfloat16", dedup="off")) == 0
    assert [text.startswith(BFLOAT16) for text in said(caplog)] == [True]
