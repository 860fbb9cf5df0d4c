"""A step in several passes, run by `step_losses`. That it is exact is in tests/claims/equivalence."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tiers import FULL
from tiny_models import tiny_model

from radixtrain import prepare_model, step_losses
from radixtrain.collators.steps import Step, StepCollator
from radixtrain.errors import UserError
from radixtrain.hf.pass_cache import LayerRows, PassCache
from radixtrain.verification.equivalence import compare_gradients
from radixtrain.verification.oracle import float64_throughout, float64_truth, gradients_of

PROMPT = [7, 8, 9, 10, 11, 12]
FEATURES = [{"input_ids": [*PROMPT, n, 2, n + 1], "labels": [*PROMPT, n, 2, n + 1]} for n in range(13, 17)]


def collator(**options: Any) -> StepCollator:
    return StepCollator(**{"max_tokens": 6, "share_across_micro_batches": True, **options})


def step_of(holds_graph: bool = False, **options: Any) -> Step:
    return collator(holds_graph=holds_graph, **options)(FEATURES)


def test_the_order_of_the_terms(tiny_qwen3: Callable[..., Any]) -> None:
    """Two micro-batches of two rows, and the prompt last; their sum is the loss of the step."""
    step, model = step_of(), prepare_model(tiny_qwen3())
    assert [tuple(each) for each in step.passes] == [(0, False), (1, True), (2, True), (0, True)]
    with torch.no_grad():
        losses = [float(loss) for loss in step_losses(model, step)]
        whole = [float(loss) for loss in step_losses(model, step_of(max_tokens=None))]
    assert len(losses) == step.num_losses == 3 and len(whole) == 1
    assert sum(losses) == pytest.approx(whole[0], rel=1e-5)


def test_a_sum_of_the_terms_is_refused(tiny_qwen3: Callable[..., Any]) -> None:
    """The prompt would go backward first, without the gradients of those that continue it."""
    model = prepare_model(tiny_qwen3())
    with pytest.raises(UserError, match="call backward on each loss of step_losses before asking for the next one"):
        sum(step_losses(model, step_of())).backward()


@pytest.mark.parametrize("holds_graph", [False, True])
def test_a_prefix_that_is_left_out_is_refused(tiny_qwen3: Callable[..., Any], holds_graph: bool) -> None:
    """The prompt predicts no label, so its own loss is 0; the gradients of those that continue it go through it."""
    rows = [{**row, "labels": [-100] * 7 + row["labels"][7:]} for row in FEATURES]
    step = collator(holds_graph=holds_graph)(rows)
    with pytest.raises(UserError, match="a prefix did not go backward after the micro-batches that continue it"):
        for loss in step_losses(prepare_model(tiny_qwen3()), step):
            if loss:
                loss.backward()


@pytest.mark.parametrize("holds_graph", [False, True])
def test_a_second_time_is_refused(tiny_qwen3: Callable[..., Any], holds_graph: bool) -> None:
    """A look at the gradient of a term would go into that of the prompt, beside the term itself."""
    model = prepare_model(tiny_qwen3())
    loss = next(step_losses(model, step_of(holds_graph)))
    torch.autograd.grad(loss, [*model.parameters()], retain_graph=True)
    with pytest.raises(UserError, match="a loss of step_losses goes backward a second time"):
        loss.backward()


def test_a_model_that_is_not_prepared_is_refused(tiny_qwen3: Callable[..., Any]) -> None:
    """Also beside one that is, after which no call is watched."""
    prepare_model(tiny_qwen3())
    with pytest.raises(UserError, match="Qwen3ForCausalLM got a radix batch, but it is not prepared"):
        next(step_losses(tiny_qwen3(), step_of(max_tokens=None)))


ARMS = ["one by one", "as a list", "their sum, with graphs that are held", "reentrant checkpoints", "reentrant, held"]


@pytest.mark.parametrize("arm", ARMS)
def test_other_ways_to_go_backward(tiny_qwen3: Callable[..., Any], arm: str) -> None:
    model = tiny_qwen3()
    truth = float64_truth(model, FEATURES)

    def terms() -> Iterator[torch.Tensor]:
        losses = step_losses(model, step_of(holds_graph="held" in arm))
        yield from [sum(losses)] if "sum" in arm else list(losses) if "list" in arm else losses

    if "reentrant" in arm:
        model.gradient_checkpointing_enable({"use_reentrant": True})
    with float64_throughout(model):
        prepare_model(model)
        rung = compare_gradients("float64", truth, truth, gradients_of(model, terms))
    assert rung.worst.radix <= 1e-12 and not rung.dead


@pytest.mark.parametrize("recompute", [False, pytest.param(True, marks=FULL)])
def test_under_autocast_every_weight_has_its_gradient(tiny_qwen3: Callable[..., Any], recompute: bool) -> None:
    """A pass without gradients must leave no cast of a weight to those that train."""
    model = prepare_model(tiny_qwen3())
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    gradients = []
    for step in (step_of(), step_of(max_tokens=None)):
        with torch.autocast("cpu", torch.bfloat16):
            for loss in step_losses(model, step):
                loss.backward()
        gradients.append({name: weight.grad for name, weight in model.named_parameters()})
        model.zero_grad()
    for name, one in gradients[1].items():
        assert (gradients[0][name] - one).norm() <= 0.1 * one.norm(), name


def test_a_micro_batch_by_itself_is_refused(tiny_qwen3: Callable[..., Any]) -> None:
    model, step = prepare_model(tiny_qwen3()), step_of()
    with pytest.raises(UserError, match=r"train it by radixtrain\.step_losses\(model, step\)"):
        model(**step.micro_batches[1])


def doubled(module: Any, given: Any, of_output: Any) -> Any:
    return (given[0] * 2,)


def halved_in_training(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output / 2 if module.training else output


def halved_logits(module: Any, args: Any, output: Any) -> Any:
    output.logits = output.logits / 2
    return output


HOOKS: dict[str, Callable[[Any], Any]] = {
    "on the head, backward": lambda model: model.lm_head.register_full_backward_hook(doubled),
    "on the head, in train()": lambda model: model.lm_head.register_forward_hook(halved_in_training),
    "on the model": lambda model: model.register_forward_hook(halved_logits),
}


@pytest.mark.usefixtures("hooks_that_may_stay")
@pytest.mark.parametrize("name", HOOKS)
def test_hooks_that_a_fused_head_would_not_run(tiny_qwen3: Callable[..., Any], name: str) -> None:
    model = tiny_qwen3().train()
    HOOKS[name](model)
    ids = torch.tensor([row["input_ids"] for row in FEATURES])

    def ordinary() -> Iterator[torch.Tensor]:
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        yield torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    with float64_throughout(model):
        truth = gradients_of(model, ordinary)
        prepare_model(model)
        ours = gradients_of(model, lambda: step_losses(model, step_of()))
        rung = compare_gradients("float64", truth, truth, ours)
    assert rung.worst.radix <= 1e-12 and not rung.dead


def with_adalora(model: Any) -> Any:
    peft = pytest.importorskip("peft", reason="pip install peft")
    return peft.get_peft_model(model, peft.AdaLoraConfig(target_modules=["q_proj"], total_step=10))


def with_lora_and_a_hook(model: Any) -> Any:
    peft = pytest.importorskip("peft", reason="pip install peft")
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    model.register_full_backward_hook(doubled)
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
        with_adalora,
        r"adds a regularizer of AdaLoRA \(orth_reg_weight=0\.5\), .* set orth_reg_weight to 0\.0",
    ),
    "its own": (with_another_loss, r"has its own loss_function \(torch\.nn\.functional\)"),
    "a hook on PEFT": (with_lora_and_a_hook, "calls the Qwen3ForCausalLM inside of PeftModel.*, so hooks on that"),
}


@pytest.mark.parametrize("name", NOT_ITS_LOSS)
def test_a_loss_that_is_more_than_the_cross_entropy_is_refused(tiny_qwen3: Callable[..., Any], name: str) -> None:
    change, message = NOT_ITS_LOSS[name]
    model = prepare_model(change(tiny_qwen3()))
    with pytest.raises(UserError, match=message):
        next(step_losses(model, step_of(max_tokens=None)))


def test_a_wrapper_of_ranks_is_refused_with_what_to_do(tiny_qwen3: Callable[..., Any]) -> None:
    wrapped = torch.nn.DataParallel(prepare_model(tiny_qwen3()))
    with pytest.raises(TypeError, match=r"got DataParallel: give it the model inside .*, and average each \.grad"):
        next(step_losses(wrapped, step_of()))


@pytest.mark.parametrize("attention", ["expand", "reference"])
def test_an_attention_that_reads_no_context_is_refused(tiny_qwen3: Callable[..., Any], attention: str) -> None:
    model = prepare_model(tiny_qwen3(), attention=attention)
    with pytest.raises(UserError, match="cannot attend to rows of an earlier micro-batch: use auto, cascade or path"):
        list(step_losses(model, step_of()))


def test_dropout_that_is_allowed_is_refused(tiny_qwen3: Callable[..., Any]) -> None:
    model = prepare_model(tiny_qwen3(), allow_dropout=["lora_dropout"])
    with pytest.raises(UserError, match=r"allow_dropout=\['lora_dropout'\]: .* dropout would draw twice"):
        list(step_losses(model, step_of()))


@pytest.mark.parametrize("is_first", [False, True])
def test_keys_that_have_a_gradient_in_some_micro_batches_are_refused(is_first: bool) -> None:
    """As after a layer of which only some experts are trained: the share of the other micro-batches would be lost."""
    kept, frozen = LayerRows(), torch.zeros(2, 1, 4)
    with torch.no_grad():
        PassCache(kept, []).keys_and_values(0, frozen, frozen)
    of_prefix, of_later = PassCache(kept, []), PassCache(None, [(kept, 0, 2)])
    trained = frozen.clone().requires_grad_()
    calls = [(of_prefix, trained), (of_later, frozen)]
    first, second = calls if is_first else reversed(calls)
    first[0].keys_and_values(0, first[1], first[1])
    with pytest.raises(UserError, match="weights are trained that only some micro-batches of the step reach"):
        second[0].keys_and_values(0, second[1], second[1])
