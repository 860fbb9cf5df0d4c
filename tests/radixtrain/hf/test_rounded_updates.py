"""An optimizer that changes weights of 16 bits is named once, whoever makes it; one with float32 weights is not."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from radixtrain import RadixCollator, restore_model, share_prefixes
from radixtrain.__main__ import main
from radixtrain.hf import sharing_report

ROWS = [{"input_ids": [7, 8, 9, 7, 8, 9, n], "labels": [-100] * 6 + [n]} for n in range(10, 14)]
SAID = "the optimizer changes weights in torch.{}: unless it keeps float32 copies, an update of less than {} % of a"
BFLOAT16, FLOAT16 = SAID.format("bfloat16", "0.20"), SAID.format("float16", "0.02")


@pytest.fixture(autouse=True)
def in_a_new_process(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """As in a new process."""
    sharing_report._warn.cache_clear()
    caplog.set_level(logging.WARNING, logger="radixtrain")
    yield
    sharing_report._warn.cache_clear()


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records]
    return [text for text in found if text.startswith("the optimizer changes weights")]


def batch(is_radix: bool) -> dict[str, Any]:
    if is_radix:
        collated: dict[str, Any] = RadixCollator()(ROWS)
        return collated
    return {name: torch.tensor([row[name] for row in ROWS]) for name in ("input_ids", "labels")}


def train(model: Any, optimizer: Any, is_radix: bool, autocast: bool = False, steps: int = 2) -> None:
    for _ in range(steps):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            model(**batch(is_radix)).loss.backward()
        optimizer.step()


def with_lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))


CASES: dict[str, tuple[torch.dtype, str, str]] = {  # of the weights, what is special, what is said
    "bfloat16": (torch.bfloat16, "", BFLOAT16),
    "float16": (torch.float16, "", FLOAT16),
    "float32": (torch.float32, "", ""),
    "float32 under autocast": (torch.float32, "autocast", ""),
    "float32 LoRA on bfloat16": (torch.bfloat16, "lora", ""),
    "an optimizer of float32 copies": (torch.bfloat16, "copies", ""),
    "frozen weights in the optimizer": (torch.bfloat16, "lora, all", ""),
}


@pytest.mark.parametrize("share", [share_prefixes])
@pytest.mark.parametrize(("dtype", "special", "message"), CASES.values(), ids=CASES)
def test_weights_of_16_bits_are_named_once(
    share: Callable[..., Any],
    dtype: torch.dtype,
    special: str,
    message: str,
    tiny_qwen3: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = tiny_qwen3().to(dtype).train()
    model = share(with_lora(model) if "lora" in special else model)
    weights = [weight for weight in model.parameters() if weight.requires_grad or special == "lora, all"]
    if special == "copies":  # DeepSpeed and FSDP step these, and write them back into the model
        weights = [weight.detach().float().requires_grad_() for weight in weights]
    optimizer = torch.optim.SGD(weights, lr=1e-3)
    train(model, optimizer, share is share_prefixes, special == "autocast")
    restore_model(model)
    assert [text.startswith(message) for text in said(caplog)] == [True] * bool(message)


@pytest.mark.parametrize(
    ("options", "is_named"),
    [
        ({"model.dtype": "bfloat16"}, True),
        ({"model.dtype": "bfloat16", "dedup": "off"}, True),
        ({"trainer.precision": "bf16-true"}, True),
        ({"trainer.precision": "bf16-mixed"}, False),
    ],
    ids=str,
)
def test_fit_says_it_once(
    options: dict[str, str],
    is_named: bool,
    arguments: Callable[..., list[str]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    chosen = {name.replace(".", "__"): value for name, value in options.items()}
    assert main(arguments(trainer__max_steps=1, **chosen)) == 0
    assert [text.startswith(BFLOAT16) for text in said(caplog)] == [True] * is_named
