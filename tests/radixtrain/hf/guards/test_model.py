"""What a model does with a few tokens: whether code in it, its adapters and its own layers may be shared."""

import random
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from threading import Thread
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv
from transformers.models.qwen3 import modeling_qwen3

from radixtrain import RadixCollator, generate, score_completions, share_prefixes, sharing_report
from radixtrain.errors import UserError
from radixtrain.hf.attention_interface import RadixCall
from radixtrain.hf.guards import model as probe
from radixtrain.hf.share import leave_refused_calls
from radixtrain.testing import relative_error
from tests.support.models import tiny_model

WIDTH = 32
IDS = torch.tensor([[7, 8, 9, 1, 2, 4, 8], [7, 8, 9, 1, 3, 7, 7], [7, 8, 9, 4, 5, 7, 2]])
IDS = torch.cat([IDS, IDS[:, 2:].flip(1)], dim=1)
LABELS = IDS.masked_fill(torch.arange(12) < 3, -100)
Change = Callable[[Any], object]  # of a model


def after_mlp(make: Callable[[], nn.Module]) -> Change:
    def change(model: Any) -> None:
        layer = model.model.layers[0]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            layer.mlp = nn.Sequential(layer.mlp, make())

    return change


class CausalConv(nn.Conv1d):
    """Overrides nothing but a method that torch's `forward` calls."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        columns = functional.pad(input.transpose(1, 2), (2, 0))
        return functional.conv1d(columns, weight, bias).transpose(1, 2)


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.sign()


class Clip(nn.Conv1d):
    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return Clipped.apply(input)  # type: ignore[no-any-return]


class Capacity(nn.Conv1d):
    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows = input.flatten(0, 1)
        return (rows * (torch.arange(len(rows)) < 30)[:, None]).view_as(input)


class Average(nn.Conv1d):
    """Keeps a mean of its tokens that nothing reads, in a buffer, which it replaces or changes, or in a list."""

    def __init__(self, how: str) -> None:
        super().__init__(WIDTH, WIDTH, 1)
        self.how, self.losses = how, [torch.zeros(())]
        self.register_buffer("mean", torch.zeros(WIDTH))

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        found = 0.9 * self.mean + input.detach().flatten(0, 1).mean(dim=0)
        if self.how == "a list":
            self.losses.append(input.square().mean())
        elif self.how == "in place":
            self.mean.copy_(found)
        else:
            self.mean = found
        return input


class PerCall(nn.Conv1d):
    """Depends on how often it was called, which is once in a call."""

    count = 0

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        self.count += 1
        return input * self.count


def replaced_forward(inner: nn.Module) -> Change:
    def change(model: Any) -> None:
        mlp = model.model.layers[1].mlp
        mlp.forward = nn.Sequential(deepcopy(mlp), inner).forward

    return change


def mix(x: Tensor) -> Tensor:
    return x + x.roll(1, dims=-2)


def a_function_on_an_instance(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    activation = mlp._modules.pop("act_fn")
    mlp.act_fn = lambda x: mix(activation(x))


def another_activation(function: Callable[[Tensor], Tensor]) -> Change:
    def change(model: Any) -> None:
        mlp = model.model.layers[0].mlp
        mlp._modules.pop("act_fn", None)
        mlp.act_fn = function

    return change


def another_call(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    mlp._call_impl = MethodType(lambda self, x: mix(type(self).forward(self, x)), mlp)


MIXES, DRAWS, COPIES = "computes a token from others", "draws at random", "the copies of a token|how often its token"
STATE = "leaves another state in a module"
# What is put into a model -> what its calls are unshared for; empty if they are shared.
PUT_IN: dict[str, tuple[Change, str]] = {
    "a method that torch calls": (after_mlp(lambda: CausalConv(WIDTH, WIDTH, 3)), MIXES),
    "an encoder": (after_mlp(lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.0, batch_first=True)), MIXES),
    "a softmax over columns": (after_mlp(lambda: nn.Softmax(dim=-1)), ""),
    "a mixer of another family": (
        after_mlp(lambda: Lfm2ShortConv(tiny_model("Lfm2ForCausalLM").config, 0)),
        "further recurrent layers",
    ),
    "a slope that is drawn": (after_mlp(lambda: nn.RReLU(0.1, 0.9)), DRAWS),
    "an activation": (after_mlp(nn.Softplus), ""),
    "a bound forward": (replaced_forward(nn.Softmax(dim=1)), MIXES),
    "a bound forward that may stay": (replaced_forward(nn.Softplus()), ""),
    "a function": (a_function_on_an_instance, MIXES),
    "a function of torch over tokens": (another_activation(partial(torch.softmax, dim=1)), MIXES),
    "another call": (another_call, MIXES),
    "an activation over tokens": (lambda model: setattr(model.model.layers[0].mlp, "act_fn", nn.Softmax(dim=1)), MIXES),
    "a gradient by frequency": (lambda model: setattr(model.model.embed_tokens, "scale_grad_by_freq", True), COPIES),
    "a largest norm": (lambda model: setattr(model.model.embed_tokens, "max_norm", 3.0), ""),
    "only the first 30 tokens": (after_mlp(lambda: Capacity(WIDTH, WIDTH, 1)), MIXES),
    "a mean that is changed in place": (after_mlp(lambda: Average("in place")), STATE),
    "losses in a list": (after_mlp(lambda: Average("a list")), STATE),
    "a count of calls": (after_mlp(lambda: PerCall(WIDTH, WIDTH, 1)), ""),
    "a gradient that is clipped": (after_mlp(lambda: Clip(WIDTH, WIDTH, 1)), COPIES),
}


def of_calls(model: Any, **given: Any) -> list[Tensor]:
    """The loss and all gradients of a padded call."""
    model.zero_grad()
    torch.manual_seed(0)
    loss = model(input_ids=IDS, labels=LABELS, use_cache=False, **given).loss
    loss.backward()
    return [loss.detach(), *(torch.zeros(()) if p.grad is None else p.grad for p in model.parameters())]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    """In float32. The gradient of a bias of keys is 0 but for rounding, so all of them are one vector."""
    assert relative_error(found[0], expected[0]) <= 1e-5
    assert relative_error(*(torch.cat([each.flatten() for each in grads[1:]]) for grads in (found, expected))) <= 1e-5


@pytest.mark.parametrize("is_early", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("name", PUT_IN)
def test_code_that_is_put_in(tiny_qwen3: Callable[..., Any], name: str, is_early: bool) -> None:
    """Before a model is shared, or after it has run."""
    change, reason = PUT_IN[name]
    runs_on_the_tree = is_early and name == "a mixer of another family"
    reason = "" if runs_on_the_tree else reason
    ordinary = tiny_qwen3(tie_word_embeddings=False)
    change(ordinary)
    shared, prepared = (tiny_qwen3(tie_word_embeddings=False) for _ in range(2))
    batch = RadixCollator()([{"input_ids": i, "labels": j} for i, j in zip(IDS.tolist(), LABELS.tolist(), strict=True)])
    if is_early:
        change(shared), change(prepared)
    try:
        share_prefixes(shared), share_prefixes(prepared)
    except UserError:
        assert runs_on_the_tree, "with a transformers whose mixers are not known"
        return
    if not is_early:
        of_calls(shared), prepared(**batch)
        change(shared), change(prepared)
    before = sharing_report(shared).num_shared
    expected = of_calls(ordinary)
    assert_same(of_calls(shared), expected)
    report = sharing_report(shared)
    assert report.num_shared - before == (not reason)
    assert {True for why in report.not_shared if reason and any(each in why for each in reason.split("|"))} == (
        {True} if reason else set()
    )
    if reason:
        with pytest.raises(UserError, match=reason):
            prepared(**batch)
    else:
        assert relative_error(prepared(**batch).loss.detach(), expected[0]) <= 1e-5


@pytest.mark.parametrize("name", ["a method that torch calls", "a bound forward", "a softmax over columns"])
def test_generation(tiny_qwen3: Callable[..., Any], name: str) -> None:
    model = tiny_qwen3()
    change, reason = PUT_IN[name]
    change(model)
    for use, way_out in (
        (lambda: generate(model, IDS, max_new_tokens=1), ".*use model.generate"),
        (lambda: score(model), ""),
    ):
        if reason:
            with pytest.raises(UserError, match=f"{reason}{way_out}"):
                use()
        else:
            assert len(use())


def test_a_head_that_mixes_its_rows(tiny_qwen3: Callable[..., Any]) -> None:
    """It gets the rows that predict; with share_prefixes, every token at its place."""
    model = tiny_qwen3(tie_word_embeddings=False)
    model.lm_head = nn.Sequential(model.lm_head, nn.Softmax(dim=1))
    ordinary = deepcopy(model)
    assert_same(of_calls(share_prefixes(model)), of_calls(ordinary))
    assert sharing_report(model).num_shared == 1
    with pytest.raises(UserError, match=MIXES):
        share_prefixes(ordinary)(**RadixCollator()([{"input_ids": ids, "labels": ids} for ids in IDS.tolist()]))


def score(model: Any) -> Any:
    return score_completions(model, [[7, 8, 9], [7, 8]], [[[1, 2]], [[1, 2], [3]]])


def test_functions_of_the_file(tiny_qwen3: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the model's file and torch name may be replaced; the code is judged when a call comes."""
    shared, rotary = share_prefixes(tiny_qwen3()), modeling_qwen3.apply_rotary_pos_emb
    silu, rsqrt = functional.silu, torch.rsqrt
    replaced: list[tuple[Any, str, Any]] = [
        (modeling_qwen3, "apply_rotary_pos_emb", lambda *args, **more: rotary(*args, **more)),  # it does the same
        (modeling_qwen3, "apply_rotary_pos_emb", lambda q, *rest, **more: rotary(mix(q), *rest, **more)),
        (functional, "silu", lambda x, **more: mix(silu(x))),
        (torch, "rsqrt", lambda x: mix(rsqrt(x))),
    ]
    for each in replaced:
        with monkeypatch.context() as patch:
            patch.setattr(*each)
            assert_same(of_calls(shared), of_calls(tiny_qwen3()))
        assert sharing_report(shared).num_shared == 1


def test_threads(tiny_qwen3: Callable[..., Any]) -> None:
    """One tries a model while others call it."""
    model = tiny_qwen3()
    after_mlp(nn.Softplus)(model)
    share_prefixes(model)
    threads = [Thread(target=of_calls_without_gradients, args=(model,)) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not sharing_report(model).not_shared


@torch.no_grad()
def of_calls_without_gradients(model: Any) -> None:
    model(input_ids=IDS, labels=LABELS, use_cache=False)


@pytest.mark.parametrize(("dim", "reason"), [(-1, ""), (1, MIXES)])
def test_a_head_by_what_it_does(tiny_qwen3: Callable[..., Any], dim: int, reason: str) -> None:
    """It gets only the rows that predict in a radix batch, and all of them in a padded one."""
    models = [tiny_qwen3(tie_word_embeddings=False) for _ in range(3)]
    for each in models:
        each.lm_head = nn.Sequential(nn.Softmax(dim=dim), each.lm_head)
    ordinary, shared, prepared = models
    expected = of_calls(ordinary)
    assert_same(of_calls(share_prefixes(shared)), expected)
    batch = RadixCollator()([{"input_ids": i, "labels": j} for i, j in zip(IDS.tolist(), LABELS.tolist(), strict=True)])
    share_prefixes(prepared)
    if reason:
        with pytest.raises(UserError, match=rf"\(0, a Softmax\) {reason}"):
            prepared(**batch)
    else:
        assert relative_error(prepared(**batch).loss.detach(), expected[0]) <= 1e-5


def test_a_setting_that_changes(tiny_qwen3: Callable[..., Any]) -> None:
    model = share_prefixes(tiny_qwen3())
    model.model.layers[0].mlp = nn.Sequential(model.model.layers[0].mlp, nn.Softmax(dim=-1))
    of_calls(model)
    model.model.layers[0].mlp[1].dim = 1
    of_calls(model)
    model.model.layers[0].mlp[1].dim = -1
    of_calls(model)
    assert (sharing_report(model).num_shared, sum(sharing_report(model).not_shared.values())) == (2, 1)


class Drawing(nn.Conv1d):
    """Draws from every generator, and counts in a buffer, a number, a list and one made in the first call."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, 1)
        self.generator, self.count, self.counts = torch.Generator().manual_seed(0), 0, [0]
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(()))

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        self.seen += 1
        self.replaced, self.count = self.replaced + 1, self.count + 1
        self.counts.append(1)
        self.late = getattr(self, "late", 0) + 1
        drawn = torch.rand(()) + random.random() + float(np.random.random())  # noqa: NPY002
        return input + drawn + torch.rand((), generator=self.generator)


def test_it_leaves_no_trace(tiny_qwen3: Callable[..., Any]) -> None:
    model = tiny_qwen3()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    mlp = model.model.layers[0].mlp
    model.model.layers[0].mlp = nn.Sequential(mlp, Drawing())
    model.model.embed_tokens.max_norm = 1.0
    ordinary, shared = deepcopy(model), share_prefixes(model)
    found = []
    for each in (ordinary, shared):
        torch.manual_seed(0), random.seed(0), np.random.seed(0)  # noqa: NPY002
        modes = [module.training for module in each.modules()]
        loss = each(input_ids=IDS, labels=LABELS, use_cache=False).loss
        left = [torch.rand(()), torch.tensor(random.random()), torch.tensor(np.random.random())]  # noqa: NPY002
        drawing = each.model.layers[0].mlp[1]
        left += [torch.tensor([drawing.count, drawing.late, len(drawing.counts)])]
        found.append([loss.detach(), *left, *each.buffers(), *each.parameters()])
        assert all(p.grad is None for p in each.parameters())
        assert modes == [module.training for module in each.modules()]
        assert each.model.layers[0].gradient_checkpointing
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    (reason,) = sharing_report(shared).not_shared
    assert DRAWS in reason


HELD = {  # numbers that modules hold: the class, its setting, and how a module names it
    "residual dropout": ("Starcoder2ForCausalLM", "residual_dropout"),
    "dropout": ("OPTForCausalLM", "dropout"),
    "jitter": ("MixtralForCausalLM", "router_jitter_noise"),
    "jitter of inputs": ("PhimoeForCausalLM", "input_jitter_noise"),
    "jitter of experts": ("PhimoeForCausalLM", "router_jitter_noise"),
}


@pytest.mark.parametrize("name", HELD)
def test_numbers_that_modules_hold(name: str) -> None:
    """The configuration says 0; the layers were made before."""
    model_class, setting = HELD[name]
    model = tiny_model(model_class, **{setting: 0.3})
    setattr(model.config, setting, 0.0)
    ordinary, prepared, run = deepcopy(model), share_prefixes(deepcopy(model)), share_prefixes(deepcopy(model))
    with pytest.raises(UserError, match=rf"{DRAWS} \(.*=0.3\)"):
        of_calls(share_prefixes(model))
    with pytest.raises(UserError, match=rf"{DRAWS} \(.*=0.3\)"):
        prepared(**RadixCollator()([{"input_ids": ids, "labels": ids} for ids in IDS.tolist()]))
    leave_refused_calls(run)
    for _ in range(2):
        assert_same(of_calls(run), of_calls(ordinary))
    assert (sharing_report(run).num_shared, sum(sharing_report(run).not_shared.values())) == (0, 2)
    shared = share_prefixes(model.eval())
    assert_same(of_calls(shared), of_calls(ordinary.eval()))
    assert sharing_report(shared).num_shared == 1, "nothing draws in evaluation mode"


@pytest.mark.parametrize("model_class", ["OPTForCausalLM", "BioGptForCausalLM"])
def test_numbers_that_are_drawn_for_nothing(model_class: str) -> None:
    """For each layer one, in training, whatever its layerdrop; a dropout that comes later is noticed."""
    model = share_prefixes(tiny_model(model_class))
    for _ in range(2):
        of_calls(model)
    assert sharing_report(model).num_shared == 2
    next(each for each in model.modules() if hasattr(each, "fc1")).dropout = 0.5
    with pytest.raises(UserError, match=DRAWS):
        of_calls(model)


def test_a_layer_that_is_left_out_seldom_is_refused() -> None:
    """Whether or not it was in the three passes of a trial."""
    for seed in range(8):
        model = share_prefixes(tiny_model("OPTForCausalLM", layerdrop=0.05))
        torch.manual_seed(seed)
        with pytest.raises(UserError, match=rf"{DRAWS} \(layerdrop=0.05\)"):
            of_calls(model)


def test_a_trajectory_with_and_without_the_trial(
    tiny_qwen3: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal to the bit: weights, moments, buffers and generators."""
    left = []
    for is_tried in (True, False):
        if not is_tried:
            monkeypatch.setattr("radixtrain.hf.padded.sharing.verdict_of", lambda *_, **__: probe.Verdict(None))
        torch.manual_seed(0)
        model = share_prefixes(tiny_qwen3(tie_word_embeddings=False))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(3):
            model(input_ids=IDS, labels=LABELS, use_cache=False).loss.backward()
            optimizer.step(), optimizer.zero_grad()
        assert sharing_report(model).num_shared == 3
        moments = [value for state in optimizer.state.values() for value in state.values()]
        left.append([*model.parameters(), *model.buffers(), *moments, torch.get_rng_state()])
    assert all(torch.equal(*pair) for pair in zip(*left, strict=True))


def test_it_is_tried_once_in_each_mode(tiny_qwen3: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first call that would be shared, not when the model is given, and again when a module has changed."""
    tries: list[int] = []
    tried = probe._tried
    monkeypatch.setattr(probe, "_tried", lambda *given: tries.append(1) or tried(*given))
    model = share_prefixes(tiny_qwen3())
    model(input_ids=IDS[:1], use_cache=False)
    assert not tries, "there was nothing to share"
    for _ in range(2):
        of_calls(model)
    of_calls_without_gradients(model)
    assert len(tries) == 2
    model.model.layers[0] = deepcopy(model.model.layers[0])
    of_calls(model)
    assert len(tries) == 3 and sharing_report(model).num_shared == 4
    for _ in range(3):  # as trainers do around each generation
        model.gradient_checkpointing_enable()
        model.gradient_checkpointing_disable()
        model.gradient_checkpointing_enable()
        of_calls(model)
    assert len(tries) == 4 and sharing_report(model).num_shared == 7


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_it_names_the_first_layer_that_differs(tiny_qwen3: Callable[..., Any], dtype: torch.dtype) -> None:
    """The model's own code, by a wrong scale in each layer but the first."""
    model = share_prefixes(tiny_qwen3(num_hidden_layers=3, layer_types=["full_attention"] * 3).to(dtype))
    with pytest.MonkeyPatch.context() as patch:
        attend = RadixCall.attend

        def without_scale(call: RadixCall, heads: Any, window: Any, **scoring: Any) -> Tensor:
            scale = scoring["scale"] / (1 if len(call.ran) == 0 else 4)
            return attend(call, heads, window, **{**scoring, "scale": scale})

        patch.setattr(RadixCall, "attend", without_scale)
        of_calls(model)
    (reason,) = sharing_report(model).not_shared
    assert reason == (
        "Qwen3Model computes a token from others, or from its place among them, first in layer 1 (Qwen3DecoderLayer)"
    )


def test_weights_that_are_not_here(tiny_qwen3: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """As with ZeRO-3 or FSDP: the rules and the count of layers decide, and foreign code is refused."""
    monkeypatch.setattr(probe, "_is_whole", lambda decoder: False)
    model = share_prefixes(tiny_qwen3())
    of_calls(model)
    assert sharing_report(model).num_shared == 1
    after_mlp(nn.Softplus)(model)
    of_calls(model)
    (reason,) = sharing_report(model).not_shared
    assert "the weights are not whole in this process" in reason


def test_an_adapter_that_adds_nothing_yet(tiny_qwen3: Callable[..., Any]) -> None:
    """Its gradient shows what it computes, in a call without gradients too: its weights may train later."""
    peft = pytest.importorskip("peft", reason="pip install peft")
    if "LILY" not in peft.PeftType.__members__:
        pytest.skip("PEFT has no LILY")
    model = peft.get_peft_model(tiny_qwen3(), peft.LilyConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    share_prefixes(model)
    of_calls_without_gradients(model)
    (reason,) = sharing_report(model).not_shared
    assert "has another gradient of layers.0.self_attn.q_proj.lily" in reason
