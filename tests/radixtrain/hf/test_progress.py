"""Calls of a model that run while another of its calls does: in another thread, in a hook, in a backward pass.

Each has to compute what it computes by itself. A hook in the middle of one begins the other, so that what happens at
the same time is always the same.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from radixtrain import generate, share_prefixes
from radixtrain.collators.steps import PaddedCollator
from radixtrain.errors import UserError
from radixtrain.hf.head import has_plain_head
from radixtrain.hf.predicting_rows import forward_rows
from radixtrain.testing import relative_error
from tests.support import cases
from tests.support.batches import padded
from tests.support.models import tiny_hybrid, tiny_model, tiny_qwen3
from tests.support.steps import FEATURES, PROMPT, ROWS, assert_same_gradient, batch_of

# Without the probe: its trial would meet the hooks here, which wait for another call, before the call itself does.
pytestmark = pytest.mark.usefixtures("hooks_that_may_stay", "free_forks", "without_the_trial")

BAR = 1e-12
GROUP = padded(ROWS[:4], "right")
ALONE = torch.tensor([[*PROMPT, 3, 4], [*PROMPT[::-1], 5, 6]])  # nothing to share
PROMPTS, GREEDY = padded(ROWS[:4], "left"), {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}


MODELS: dict[str, Callable[[], Any]] = {
    "untouched": lambda: tiny_qwen3().double().eval(),
    "Qwen3": lambda: share_prefixes(MODELS["untouched"]()),
    "LFM2": lambda: share_prefixes(tiny_hybrid("LFM2").double().eval()),
    "Qwen3.5": lambda: share_prefixes(tiny_hybrid("Qwen3.5").double().eval()),
}
CALLS: dict[str, Callable[[Any], Tensor]] = {
    "shared": lambda model: model(**GROUP, use_cache=False).logits[GROUP["attention_mask"].bool()],
    "ordinary": lambda model: model(ALONE, use_cache=False).logits,
    "radix": lambda model: model(**batch_of()).logits,
    "answers": lambda model: generate(model, **PROMPTS, **GREEDY).double(),
    "scores": lambda model: forward_rows(model, PaddedCollator()(FEATURES), plain_head=False).logprobs(),
}
SHARED, KINDS = ("Qwen3", "LFM2", "Qwen3.5"), ("shared", "ordinary", "radix")
PAIRS = [(model, outer, inner) for model, outer, inner in product(SHARED, KINDS, KINDS) if outer != inner]
# Of what these return, no row is taken out of what another call returns.
AROUND = [("Qwen3", "answers", "ordinary"), *(("untouched", outer, "ordinary") for outer in ("answers", "scores"))]
QUICK = [
    *((model, "shared", "ordinary") for model in SHARED),
    *(("Qwen3.5", outer, "shared") for outer in ("ordinary", "radix")),
]


Run = Callable[[], Any]


def nested(module: nn.Module, outer: Run, inner: Run) -> tuple[Any, Any]:
    """The results of a call in whose module, on its way, the other call runs."""
    found: list[Any] = []

    def run(*_: Any) -> None:
        if not began:
            began.append(True)
            found.append(inner())

    began: list[bool] = []
    hook = module.register_forward_pre_hook(run)
    try:
        return outer(), found[0]
    finally:
        hook.remove()


def in_a_thread(module: nn.Module, outer: Run, inner: Run) -> tuple[Any, Any]:
    """As above, in another thread."""

    def run() -> Any:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(torch.no_grad()(inner)).result()

    return nested(module, outer, run)


def overlapping(module: nn.Module, outer: Run, inner: Run) -> tuple[Any, Any]:
    """In another thread, which waits in the same module until the first call has ended."""
    arrived, ended = threading.Event(), threading.Event()

    def wait(*_: Any) -> None:
        arrived.set()
        assert threading.get_ident() == thread or ended.wait(600)

    def begin() -> Any:
        found = pool.submit(torch.no_grad()(inner))
        assert arrived.wait(600)
        return found

    thread = threading.get_ident()
    with ThreadPoolExecutor(1) as pool:
        hook = module.register_forward_pre_hook(lambda *_: None if threading.get_ident() == thread else wait())
        try:
            first, second = nested(module, outer, begin)
        finally:
            ended.set()
            hook.remove()
        return first, second.result()


Way = Callable[[nn.Module, Run, Run], tuple[Any, Any]]
WAYS: list[Way] = [nested, in_a_thread, overlapping]


def start_of(model: Any) -> nn.Module:
    """What the first layer begins with: before it the layer has been entered, and its mixer comes after it."""
    layer = model.model.layers[0]
    return next(module for path, module in layer.named_modules() if path.endswith(("input_layernorm", "operator_norm")))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("kind", "outer", "inner"), cases([*PAIRS, *AROUND], [*QUICK, *AROUND]))
def test_two_calls(kind: str, outer: str, inner: str, way: Way) -> None:
    model = MODELS[kind]()
    first, second = partial(CALLS[outer], model), partial(CALLS[inner], model)
    with torch.no_grad():
        expected = first(), second()
        # A call in the head of a call that is scored would get the rows of that: it has the same thread.
        for place in [start_of(model)] if outer == "scores" else [start_of(model), model.lm_head]:
            both = way(place, first, second)
            assert all(relative_error(one, other) <= BAR for one, other in zip(both, expected, strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    ("kind", "outer", "inner"),
    cases(PAIRS, [("Qwen3.5", "shared", "ordinary"), ("LFM2", "ordinary", "shared")]),
)
def test_a_backward_pass_within_a_call(kind: str, outer: str, inner: str, reentrant: bool) -> None:
    """With checkpointing it recomputes the layers of an earlier call while those of a later one wait."""
    model = MODELS[kind]().train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})

    def loss(name: str) -> Tensor:
        return model(**batch_of()).loss if name == "radix" else CALLS[name](model).logsumexp(-1).square().mean()

    def gradient() -> Tensor:
        grads = [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
        model.zero_grad()
        return torch.cat(grads)

    loss(outer).backward()
    loss(inner).backward()
    expected = gradient()
    nested(start_of(model), partial(loss, outer), loss(inner).backward)[0].backward()
    assert relative_error(gradient(), expected) <= BAR


def test_a_call_beside_generate_in_training_mode() -> None:
    """Generation evaluates, and a module has one mode for all threads."""
    model = tiny_qwen3().train()
    answers = partial(CALLS["answers"], model)
    with pytest.raises(UserError, match="another thread has temporarily put Qwen3ForCausalLM into evaluation mode"):
        in_a_thread(model.model.layers[1], answers, partial(CALLS["ordinary"], model))
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("way", [in_a_thread, overlapping])
def test_a_call_while_a_head_is_tried(way: Way) -> None:
    """Every call of the thread that tries it gets the rows of the trial, and no other one."""
    model = tiny_qwen3().double().eval()
    call = partial(CALLS["ordinary"], model)
    with torch.no_grad():
        assert relative_error(way(model.lm_head, partial(has_plain_head, model), call)[1], call()) <= BAR


def test_two_models_around_one_backbone(tiny_qwen3: Callable[..., Any]) -> None:
    """A policy and a value model, of which one is shared: the gradient of both. Sharing the other is refused."""
    policy = tiny_qwen3()
    value = tiny_model("Qwen3ForSequenceClassification", num_labels=1, pad_token_id=0).double()
    value.model = policy.model

    def loss_of(policy: Any) -> Tensor:
        values = value(**GROUP, use_cache=False).logits
        return CALLS["shared"](policy).logsumexp(-1).sin().sum() + values.square().sum()

    assert assert_same_gradient(policy, loss_of).num_shared == 2
    with pytest.raises(UserError, match="Qwen3Model is shared already, alone or inside another model"):
        share_prefixes(value)
