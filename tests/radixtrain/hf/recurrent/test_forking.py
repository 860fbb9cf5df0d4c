"""Whether a mixer can fork: what the trial lets pass, what it catches, and that nothing outside of it changes.

A kernel is a module of its package's name, with the kernel's own signature. A fresh copy of the modelling code imports
it.
"""

import importlib.util
import sys
from collections.abc import Callable
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from hybrids import FEATURES, KINDS, assert_exact
from older_transformers import NEEDS_FORKS
from tiers import cases
from torch import Tensor, nn

from radixtrain import share_prefixes
from radixtrain.hf.modules import mixers_of
from radixtrain.hf.recurrent.forking import why_it_cannot_fork
from radixtrain.verification.oracle import float64_truth

pytestmark = [NEEDS_FORKS, pytest.mark.usefixtures("free_forks")]

LOST = "the gradient of rows before a fork does not come through the state"
IGNORED = "the value of rows after a fork ignores the state"
WEIGHTS: dict[str, Callable[[Any], Any]] = {
    "order one": lambda model: model,
    "fresh": lambda model: type(model)(model.config),
    "tiny": lambda model: scaled(model, 1e-3),
    "large": lambda model: scaled(model, 10.0),
    "zero": lambda model: scaled(model, 0.0),
}


def scaled(model: nn.Module, factor: float) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)
    return model


def tried(module: nn.Module, dtype: torch.dtype = torch.float32) -> str | None:
    given = {"hidden_states": torch.zeros(1, 9, 32, dtype=dtype)}
    return why_it_cannot_fork(module, type(module).forward.__get__(module), given)


def mixer_of(model: Any) -> Any:
    (mixer,) = mixers_of(model.model).values()
    return mixer


class TestStockMixers:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("weights", cases(WEIGHTS, quick=["order one", "zero"]))
    def test_all_can(self, tiny_hybrid: Callable[..., Any], kind: str, weights: str) -> None:
        torch.manual_seed(0)
        mixer = mixer_of(WEIGHTS[weights](tiny_hybrid(kind)))
        assert tried(mixer) == ""
        with torch.autocast("cpu", torch.bfloat16):
            assert tried(mixer) == ""
        assert tried(mixer.bfloat16(), torch.bfloat16) == ""

    def test_mamba_cannot(self) -> None:
        """Its first version takes no state that it would start from."""
        from transformers import JambaConfig
        from transformers.models.jamba.modeling_jamba import JambaMambaMixer

        config = JambaConfig(hidden_size=32, mamba_d_state=4, mamba_dt_rank=2, use_mamba_kernels=False)
        assert tried(JambaMambaMixer(config, 0)) == LOST


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


def written_into(state: Tensor) -> Tensor:
    with torch.no_grad():
        state.mul_(0.5)
    return state


def not_a_number(state: Tensor) -> Tensor:
    return state + torch.zeros_like(state).fill_(torch.nan)


def asserts(state: Tensor) -> Tensor:
    raise AssertionError("only float16")


# What a kernel does with the state that it starts from or leaves, and why it cannot fork.
BAD: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "ignores": (torch.zeros_like, IGNORED),
    "detaches": (Tensor.detach, LOST),
    "returns no gradient": (Ignores.apply, LOST),
    "writes in place": (written_into, IGNORED),
    "is not a number": (not_a_number, IGNORED),
    "raises in backward": (Raises.apply, "NotImplementedError: no backward pass yet"),
    "asserts": (asserts, "AssertionError: only float16"),
}

SCALES = "writes in place", "leaves"  # a kernel whose final state is half as large is another one, not a bad one


class StandIn:
    """A package with one kernel. reads, leaves: what the kernel does with its first state, and with the final one."""

    def __init__(self) -> None:
        self.calls = 0
        self.reads: Callable[[Tensor], Tensor] = lambda state: state
        self.leaves: Callable[[Tensor], Tensor] = lambda state: state

    def run(self, kernel: Callable[..., Any], name: str, state: Tensor | None, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        output = kernel(*args, **kwargs, **{name: None if state is None else self.reads(state)})
        if not isinstance(output, tuple) or output[1] is None:
            return output
        return output[0], self.leaves(output[1])


def delta_rule(stand_in: StandIn) -> Callable[..., Any]:
    """With the signature of flash-linear-attention 0.6."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as stock

    def chunk_gated_delta_rule(
        q: Any, k: Any, v: Any, g: Any, beta: Any, scale: Any = None, initial_state: Any = None,
        output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
        use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False, state_v_first: bool = False,
        cu_seqlens: Any = None, cu_seqlens_cpu: Any = None, chunk_indices: Any = None, cp_context: Any = None,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        assert cu_seqlens is None and scale is None
        given = {"output_final_state": output_final_state, "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
        kernel = stock.torch_chunk_gated_delta_rule
        return stand_in.run(kernel, "initial_state", initial_state, q, k, v, g=g, beta=beta, **given)

    return chunk_gated_delta_rule


@pytest.fixture
def with_kernel(tiny_hybrid: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, StandIn]:
    """The tiny Qwen3.5 on a kernel of a package that stands in for flash-linear-attention."""
    stand_in, stock = StandIn(), tiny_hybrid("Qwen3.5")
    kernel = delta_rule(stand_in)
    modules = [ModuleType(name) for name in ("fla", "fla.ops", "fla.ops.gated_delta_rule")]
    for parent, child in pairwise(modules):
        setattr(parent, child.__name__.rpartition(".")[2], child)
    setattr(modules[-1], kernel.__name__, kernel)
    name = "transformers.models.qwen3_5.modeling_qwen3_5"
    spec = importlib.util.spec_from_file_location(f"{name}_with_kernel", sys.modules[name].__file__)
    assert spec and spec.loader
    copied = importlib.util.module_from_spec(spec)
    for module in (*modules, copied):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    spec.loader.exec_module(copied)
    model = getattr(copied, type(stock).__name__)(stock.config)
    model.load_state_dict(stock.state_dict())
    return model, stand_in


class TestKernels:
    def test_a_good_one_forks(self, with_kernel: Any, caplog: pytest.LogCaptureFixture) -> None:
        model, stand_in = with_kernel
        truth = float64_truth(model, FEATURES)
        assert stand_in.calls > 0
        assert tried(mixer_of(model)) == ""
        assert_exact(share_prefixes(model), truth)
        assert not [each for each in caplog.records if each.name.startswith("radixtrain")]

    def test_a_bad_one_cannot(self, with_kernel: Any) -> None:
        model, stand_in = with_kernel
        for what, (state, reason) in BAD.items():
            for which in ("reads", "leaves"):
                if (what, which) == SCALES:
                    continue
                setattr(stand_in, which, state)
                assert (tried(mixer_of(model)) or "").startswith(reason), (what, which)
                setattr(stand_in, which, lambda state: state)

    def test_a_bad_one_is_exact_all_the_same(self, with_kernel: Any, caplog: pytest.LogCaptureFixture) -> None:
        """It computes whole sequences, and a warning names the reason."""
        model, stand_in = with_kernel
        truth = float64_truth(model, FEATURES)
        stand_in.reads, reason = BAD["detaches"]
        assert_exact(share_prefixes(model), truth)
        (record,) = [each for each in caplog.records if each.name.startswith("radixtrain")]
        assert f"of layer 0 computes every sequence from its first token on: {reason}" in record.message


class Nothing(nn.Module):
    """A mixer whose output does not depend on its input."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(32, 32)

    def forward(self, hidden_states: Tensor, cache_params: Any = None) -> Tensor:
        if cache_params is not None:
            cache_params.get_recurrent_state(0)
            cache_params.update_recurrent_state(hidden_states.sum(1), 0)
        return self.proj(hidden_states * 0)


def test_without_any_gradient_it_is_open() -> None:
    assert tried(Nothing()) is None


class TestNothingElseNotices:
    @pytest.mark.parametrize("kind", cases(KINDS, quick=["Qwen3.5"]))
    @pytest.mark.parametrize("error", [False, True])
    def test_weights_and_gradients(
        self, tiny_hybrid: Callable[..., Any], kind: str, error: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The weights are the same tensors again, after an error too."""
        mixer = mixer_of(tiny_hybrid(kind))
        first, *rest = mixer.parameters()
        first.grad = torch.ones_like(first)
        rest[0].requires_grad_(False)
        before = [(p.data_ptr(), p.clone(), p.requires_grad, p._version) for p in mixer.parameters()]
        state = torch.get_rng_state()
        if error:
            monkeypatch.setattr(nn.Linear, "forward", asserts)
            assert (tried(mixer) or "").startswith("TypeError")
        else:
            assert tried(mixer) == ""
        assert torch.equal(torch.get_rng_state(), state)
        for parameter, (place, value, wants, version) in zip(mixer.parameters(), before, strict=True):
            assert (parameter.data_ptr(), parameter.requires_grad, parameter._version) == (place, wants, version)
            assert torch.equal(parameter, value)
        assert torch.equal(first.grad, torch.ones_like(first))
        assert not any(parameter.grad is not None for parameter in rest)

    def test_autocast_keeps_no_copies(self, tiny_hybrid: Callable[..., Any]) -> None:
        """It would cast a weight once, and use the copy for the rest of the pass."""
        mixer = mixer_of(tiny_hybrid("Qwen3.5"))
        hidden = torch.randn(1, 9, 32)
        with torch.autocast("cpu", torch.bfloat16):
            stock = mixer(hidden)
        with torch.autocast("cpu", torch.bfloat16):
            assert tried(mixer) == ""
            assert torch.is_autocast_cache_enabled()
            assert torch.equal(mixer(hidden), stock)

    def test_dropout_does_not_draw(self, tiny_hybrid: Callable[..., Any]) -> None:
        """An adapter's, which the trial would take for a lost gradient."""
        mixer = mixer_of(tiny_hybrid("Qwen3.5"))
        dropout = nn.Dropout(0.5)
        mixer.in_proj_qkv = nn.Sequential(dropout, mixer.in_proj_qkv)
        state = torch.get_rng_state()
        assert tried(mixer) == ""
        assert torch.equal(torch.get_rng_state(), state)
        assert dropout.training and dropout.p == 0.5
