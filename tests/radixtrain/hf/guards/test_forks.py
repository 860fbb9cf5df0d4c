"""Whether recurrent layers fork, in any precision: what the trial lets pass and what it catches. It leaves no trace."""

from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from radixtrain import share_prefixes
from radixtrain.hf.backbone import mixers_of
from radixtrain.hf.guards import model as trial
from radixtrain.verification.oracle import float64_truth
from tests.support import cases
from tests.support.models import NEEDS_FORKS, tiny_model
from tests.support.steps import FEATURES, KINDS, Build, assert_exact, batch_of

pytestmark = [NEEDS_FORKS, pytest.mark.usefixtures("free_forks")]

LOST = "the gradient of rows before a fork does not come through the state"
WEIGHTS: dict[str, Callable[[Any], Any]] = {
    "order one": lambda model: model,
    "fresh": lambda model: type(model)(model.config),
    "tiny": lambda model: scaled(model, 1e-3),
    "zero": lambda model: scaled(model, 0.0),
}
PRECISIONS = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "autocast": None}


def scaled(model: nn.Module, factor: float) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)
    return model


@pytest.fixture
def why_whole(caplog: pytest.LogCaptureFixture) -> Callable[..., str]:
    """Why the layers of a model compute whole sequences in a batch that forks; empty if they do not."""

    def why(model: Any, precision: str = "float32", **options: Any) -> str:
        caplog.clear()
        dtype = PRECISIONS[precision]
        context = torch.autocast("cpu", torch.bfloat16) if dtype is None else nullcontext()
        with context:
            share_prefixes(model if dtype is None else model.to(dtype), **options)(**batch_of())
        said = [each.message for each in caplog.records if each.name.startswith("radixtrain")]
        assert len(said) < 2 and all("computes every sequence from its first token on" in each for each in said)
        return said[0].partition(" in recurrent layers: ")[2] if said else ""

    return why


EVERY = [*product(WEIGHTS, PRECISIONS)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("weights", "precision"), cases(EVERY, quick=[each for each in EVERY if each[0] in ("order one", "fresh", "zero")])
)
def test_stock_mixers_fork(tiny_hybrid: Build, why_whole: Any, kind: str, weights: str, precision: str) -> None:
    torch.manual_seed(0)
    reason = why_whole(WEIGHTS[weights](tiny_hybrid(kind)), precision)
    assert ("does not show" in reason) if weights == "zero" else not reason


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "autocast"])
def test_mamba_does_not(why_whole: Any, precision: str) -> None:
    """Its first version takes no state that it would start from."""
    assert why_whole(tiny_model("JambaForCausalLM"), precision).startswith(LOST)


class Ignores(torch.autograd.Function):
    """The value of a state, but no gradient in either direction, as of a kernel that has no backward for it."""

    @staticmethod
    def forward(ctx: Any, state: Tensor) -> Tensor:
        return state.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, state: Tensor) -> Tensor:
        return state.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise NotImplementedError("no backward pass yet\nand a second line")


def not_a_number(state: Tensor) -> Tensor:
    return state + torch.zeros_like(state).fill_(torch.nan)


def asserts(state: Tensor) -> Tensor:
    raise AssertionError("only float16")


# What a kernel does with the state that it starts from or leaves, and why it cannot fork.
BAD: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "ignores": (torch.zeros_like, LOST),
    "detaches": (Tensor.detach, LOST),
    "returns no gradient": (Ignores.apply, LOST),
    "is not a number": (not_a_number, LOST),
    "raises in backward": (Raises.apply, "no backward pass yet"),
    "asserts": (asserts, "only float16"),
}


class Kernel:
    """In place of the gated delta rule's. reads, leaves: what it does with its first state, and with the final one."""

    def __init__(self, kernel: Callable[..., Any]) -> None:
        self.kernel, self.calls = kernel, 0
        self.reads: Callable[[Tensor], Tensor] = lambda state: state
        self.leaves: Callable[[Tensor], Tensor] = lambda state: state

    def __call__(self, *args: Any, initial_state: Tensor | None = None, **options: Any) -> Any:
        self.calls += 1
        state = None if initial_state is None else self.reads(initial_state)
        output, left = self.kernel(*args, initial_state=state, **options)
        return output, None if left is None else self.leaves(left)


@pytest.fixture
def with_kernel(tiny_hybrid: Build, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Kernel]:
    """The tiny Qwen3.5 on a kernel that the file of the model names."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as file

    kernel = Kernel(file.torch_chunk_gated_delta_rule)
    monkeypatch.setattr(file, "torch_chunk_gated_delta_rule", kernel)
    return tiny_hybrid("Qwen3.5"), kernel


@pytest.mark.parametrize(
    ("weights", "precision"),
    cases([("fresh", "bfloat16"), ("order one", "float32"), ("fresh", "autocast")], quick=[("fresh", "bfloat16")]),
)
def test_kernels(with_kernel: Any, why_whole: Any, precision: str, weights: str) -> None:
    """A good one forks, and no bad one: in 16 bits with fresh weights too, where a state changes hardly anything."""
    model, kernel = with_kernel
    torch.manual_seed(0)
    model = WEIGHTS[weights](model)
    assert why_whole(model, precision) == "" and kernel.calls > 0
    for what, (state, reason) in BAD.items():
        for which in ("reads", "leaves"):
            setattr(kernel, which, state)
            trial._judged.clear()
            assert reason in why_whole(model, precision), (what, which)
            setattr(kernel, which, lambda state: state)


def test_weights_that_are_not_here(
    tiny_hybrid: Build, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As with ZeRO-3 or FSDP: nothing is tried, so sequences are whole, which is not said in every call."""
    model = tiny_hybrid("Qwen3.5")
    truth = float64_truth(model, FEATURES)
    monkeypatch.setattr(trial, "_is_whole", lambda decoder: False)
    assert_exact(share_prefixes(model), truth)
    assert "weights are not whole in this process" in caplog.text
    model(**batch_of())
    caplog.clear()
    model(**batch_of())
    assert not caplog.text


class Nothing(nn.Module):
    """A mixer whose output does not depend on its input."""

    def forward(self, hidden_states: Tensor, cache_params: Any = None, **options: Any) -> Tensor:
        if cache_params is not None:
            cache_params.get_recurrent_state(0)
            cache_params.update_recurrent_state(hidden_states.sum(1), 0)
        return hidden_states * 0


class Drops(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.drop = inner, nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.drop(x))


@pytest.mark.usefixtures("hooks_that_may_stay")
def test_a_state_that_does_not_show(tiny_hybrid: Build, why_whole: Any) -> None:
    model = tiny_hybrid("Qwen3.5")
    model.model.layers[0].linear_attn = Nothing()
    assert why_whole(model) == "the state of Nothing does not show"


@pytest.mark.usefixtures("hooks_that_may_stay")
def test_dropout_does_not_draw(tiny_hybrid: Build, why_whole: Any) -> None:
    """The trial would take it for a lost gradient."""
    model = tiny_hybrid("Qwen3.5")
    (mixer,) = mixers_of(model.model).values()
    mixer.in_proj_qkv = Drops(mixer.in_proj_qkv)
    assert why_whole(model, allow_dropout=["drop"]) == ""
