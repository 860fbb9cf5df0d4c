"""The terms of the loss of a step, by `step_losses`."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from radixtrain import share_prefixes, step_losses
from radixtrain.collators.steps import Step, StepCollator
from radixtrain.errors import UserError
from radixtrain.verification.oracle import float64_throughout, float64_truth, gradients_of
from tests.support.models import tiny_model, with_adapters
from tests.support.steps import FEATURES, Build, same


def step_of(max_tokens: int | None = 20) -> Step:
    return StepCollator(max_tokens=max_tokens)(FEATURES)


def test_a_model_that_is_not_prepared_is_refused(tiny_qwen3: Build) -> None:
    """Also beside one that is, after which no call is watched."""
    share_prefixes(tiny_qwen3())
    with pytest.raises(UserError, match="Qwen3ForCausalLM got a radix batch, but it is not shared"):
        next(step_losses(tiny_qwen3(), step_of(max_tokens=None)))


ARMS = ["one by one", "as a list", "their sum", "reentrant checkpoints"]


@pytest.mark.parametrize("arm", ARMS)
def test_other_ways_to_go_backward(tiny_qwen3: Build, arm: str) -> None:
    model = tiny_qwen3()
    truth = float64_truth(model, FEATURES)

    def terms() -> Iterator[torch.Tensor]:
        losses = step_losses(model, step_of())
        yield from [sum(losses)] if "sum" in arm else list(losses) if "list" in arm else losses

    if "reentrant" in arm:
        model.gradient_checkpointing_enable({"use_reentrant": True})
    with float64_throughout(model):
        share_prefixes(model)
        assert not same(truth, gradients_of(model, terms)).dead


def doubled(module: Any, given: Any, of_output: Any) -> Any:
    return (given[0] * 2,)


def halved_logits(module: Any, args: Any, output: Any) -> Any:
    output.logits = output.logits / 2
    return output


def with_lora_and_a_hook(model: Any) -> Any:
    model = with_adapters(model, target_modules=["q_proj"])
    model.register_full_backward_hook(doubled)
    return model


def with_a_hook(model: Any) -> Any:
    model.register_forward_hook(halved_logits)
    return model


def with_another_loss(model: Any) -> Any:
    model.loss_function = torch.nn.functional.cross_entropy
    return model


NOT_ITS_LOSS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "router": (
        lambda _: tiny_model("Qwen3MoeForCausalLM", output_router_logits=True),
        r"adds a router loss \(output_router_logits=True\), .* set output_router_logits to False, or use the drop-in",
    ),
    "AdaLoRA": (
        lambda model: with_adapters(model, "AdaLoraConfig", target_modules=["q_proj"], total_step=10),
        r"adds a regularizer of AdaLoRA \(orth_reg_weight=0\.5\), .* set orth_reg_weight to 0\.0",
    ),
    "its own": (with_another_loss, r"has its own loss_function \(torch\.nn\.functional\)"),
    "learned prompts": (
        lambda model: with_adapters(model, "PromptTuningConfig", task_type="CAUSAL_LM", num_virtual_tokens=2),
        "PeftModelForCausalLM puts learned rows or keys before the tokens",
    ),
    "a hook on the model": (with_a_hook, r"a hook on Qwen3ForCausalLM .*halved_logits\) would see the unique tokens"),
    "a hook on PEFT": (with_lora_and_a_hook, "calls the Qwen3ForCausalLM inside of PeftModel.*, so hooks on that"),
}


@pytest.mark.parametrize("name", NOT_ITS_LOSS)
def test_a_loss_that_is_more_than_the_cross_entropy_is_refused(tiny_qwen3: Build, name: str) -> None:
    change, message = NOT_ITS_LOSS[name]
    model = share_prefixes(change(tiny_qwen3()))
    with pytest.raises(UserError, match=message):
        next(step_losses(model, step_of(max_tokens=None)))


def test_a_wrapper_of_ranks_is_refused_with_what_to_do(tiny_qwen3: Build) -> None:
    wrapped = torch.nn.DataParallel(share_prefixes(tiny_qwen3()))
    with pytest.raises(TypeError, match=r"got DataParallel: give it the model inside .*, and average each \.grad"):
        next(step_losses(wrapped, step_of()))
