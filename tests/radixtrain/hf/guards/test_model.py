"""What a model does with a few tokens: whether code in it, its adapters and its own layers may be shared."""

import random
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

from radixtrain import RadixCollator, generate, score_completions, share_prefixes, sharing_report
from radixtrain.errors import UserError
from radixtrain.hf.attention_interface import RadixCall
from radixtrain.hf.guards import model as probe
from radixtrain.hf.share import leave_refused_calls
from radixtrain.testing import relative_error
from tests.support.models import tiny_model
from tests.support.steps import Build

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


def conv(compute: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    """A module that overrides nothing but a method that torch's `forward` calls; what it may change are a buffer, a
    count and a list.
    """
    own = {"_conv_forward": lambda self, input, weight, bias: compute(self, input)}
    made: Any = type("Conv", (nn.Conv1d,), {"__module__": __name__, **own})(WIDTH, WIDTH, 1)
    made.count, made.losses = 0, [torch.zeros(())]
    made.register_buffer("seen", torch.zeros(()))
    return made


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.sign()


def first_30(module: Any, x: Tensor) -> Tensor:
    rows = x.flatten(0, 1)
    return (rows * (torch.arange(len(rows)) < 30)[:, None]).view_as(x)


def sum_in_place(module: Any, x: Tensor) -> Tensor:
    module.seen += x.detach().mean()
    return x


def keep_losses(module: Any, x: Tensor) -> Tensor:
    module.losses.append(x.square().mean())
    return x


def times_the_count(module: Any, x: Tensor) -> Tensor:
    """Once in a call."""
    module.count += 1
    return x * module.count


def replaced_forward(inner: nn.Module) -> Change:
    def change(model: Any) -> None:
        mlp = model.model.layers[1].mlp
        mlp.forward = nn.Sequential(deepcopy(mlp), inner).forward

    return change


def mix(x: Tensor) -> Tensor:
    return x + x.roll(1, dims=-2)


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
    "a method that torch calls": (after_mlp(lambda: conv(lambda module, x: mix(x))), MIXES),
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
    "a function": (another_activation(lambda x: mix(nn.functional.silu(x))), MIXES),
    "a function of torch over tokens": (another_activation(partial(torch.softmax, dim=1)), MIXES),
    "another call": (another_call, MIXES),
    "a gradient by frequency": (lambda model: setattr(model.model.embed_tokens, "scale_grad_by_freq", True), COPIES),
    "a largest norm": (lambda model: setattr(model.model.embed_tokens, "max_norm", 3.0), ""),
    "only the first 30 tokens": (after_mlp(lambda: conv(first_30)), MIXES),
    "a sum in place": (after_mlp(lambda: conv(sum_in_place)), STATE),
    "losses in a list": (after_mlp(lambda: conv(keep_losses)), STATE),
    "a count of calls": (after_mlp(lambda: conv(times_the_count)), ""),
    "a gradient that is clipped": (after_mlp(lambda: conv(lambda module, x: Clipped.apply(x))), COPIES),
}


def collated() -> dict[str, Any]:
    return RadixCollator()([{"input_ids": i, "labels": j} for i, j in zip(IDS.tolist(), LABELS.tolist(), strict=True)])


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


def check_collated(prepared: Any, reason: str, expected: list[Tensor]) -> None:
    """A batch of a collator is refused for the reason, or has the loss of the ordinary one."""
    if reason:
        with pytest.raises(UserError, match=reason):
            prepared(**collated())
    else:
        assert relative_error(prepared(**collated()).loss.detach(), expected[0]) <= 1e-5


@pytest.mark.parametrize("is_early", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("name", PUT_IN)
def test_code_that_is_put_in(tiny_qwen3: Build, name: str, is_early: bool) -> None:
    """Before a model is shared, or after it has run."""
    change, reason = PUT_IN[name]
    runs_on_the_tree = is_early and name == "a mixer of another family"
    reason = "" if runs_on_the_tree else reason
    ordinary, shared, prepared = (tiny_qwen3(tie_word_embeddings=False) for _ in range(3))
    change(ordinary)
    if is_early:
        change(shared), change(prepared)
    try:
        share_prefixes(shared), share_prefixes(prepared)
    except UserError:
        assert runs_on_the_tree, "with a transformers whose mixers are not known"
        return
    if not is_early:
        of_calls(shared), prepared(**collated())
        change(shared), change(prepared)
    before = sharing_report(shared).num_shared
    expected = of_calls(ordinary)
    assert_same(of_calls(shared), expected)
    report = sharing_report(shared)
    assert report.num_shared - before == (not reason)
    assert [bool(re.search(reason, why)) for why in report.not_shared] == [True] * bool(reason)
    check_collated(prepared, reason, expected)


@pytest.mark.parametrize("name", ["a method that torch calls", "a bound forward", "a softmax over columns"])
def test_generation(tiny_qwen3: Build, name: str) -> None:
    model, (change, reason) = tiny_qwen3(), PUT_IN[name]
    change(model)
    for use, way_out in (
        (lambda: generate(model, IDS, max_new_tokens=1), ".*use model.generate"),
        (lambda: score_completions(model, [[7, 8, 9]], [[[1, 2], [3]]]), ""),
    ):
        with pytest.raises(UserError, match=f"{reason}{way_out}") if reason else nullcontext():
            use()


@torch.no_grad()
def of_calls_without_gradients(model: Any) -> None:
    model(input_ids=IDS, labels=LABELS, use_cache=False)


HEADS: dict[str, tuple[Callable[[nn.Module], nn.Module], str]] = {
    "columns": (lambda head: nn.Sequential(nn.Softmax(dim=-1), head), ""),
    "rows": (lambda head: nn.Sequential(nn.Softmax(dim=1), head), rf"\(0, a Softmax\) {MIXES}"),
    "rows of logits": (lambda head: nn.Sequential(head, nn.Softmax(dim=1)), MIXES),
}


@pytest.mark.parametrize("name", HEADS)
def test_a_head_by_what_it_does(tiny_qwen3: Build, name: str) -> None:
    """It gets only the rows that predict in a radix batch, and every token at its place in a padded one."""
    put_around, reason = HEADS[name]
    ordinary, shared, prepared = (tiny_qwen3(tie_word_embeddings=False) for _ in range(3))
    for each in (ordinary, shared, prepared):
        each.lm_head = put_around(each.lm_head)
    expected = of_calls(ordinary)
    assert_same(of_calls(share_prefixes(shared)), expected)
    assert sharing_report(shared).num_shared == 1
    check_collated(share_prefixes(prepared), reason, expected)


def test_a_setting_that_changes(tiny_qwen3: Build) -> None:
    model, softmax = share_prefixes(tiny_qwen3()), nn.Softmax(dim=-1)
    after_mlp(lambda: softmax)(model)
    for dim in (-1, 1, -1):
        softmax.dim = dim
        of_calls(model)
    assert (sharing_report(model).num_shared, sum(sharing_report(model).not_shared.values())) == (2, 1)


def draw_and_count(module: Any, x: Tensor) -> Tensor:
    """Draws from every generator, and counts in buffers, a list, a number, and one that is new in the first call."""
    times_the_count(module, keep_losses(module, sum_in_place(module, x)))
    module.replaced, module.late = module.replaced + 1, getattr(module, "late", 0) + 1
    drawn = torch.rand(()) + random.random() + float(np.random.random())  # noqa: NPY002
    return x + drawn + torch.rand((), generator=module.generator)


def test_it_leaves_no_trace(tiny_qwen3: Build) -> None:
    model = tiny_qwen3()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    drawing: Any = conv(draw_and_count)
    drawing.generator = torch.Generator().manual_seed(0)
    drawing.register_buffer("replaced", torch.zeros(()))
    after_mlp(lambda: drawing)(model)
    model.model.embed_tokens.max_norm = 1.0
    ordinary, shared = deepcopy(model), share_prefixes(model)
    found = []
    for each in (ordinary, shared):
        torch.manual_seed(0), random.seed(0), np.random.seed(0)  # noqa: NPY002
        modes = [module.training for module in each.modules()]
        loss = each(input_ids=IDS, labels=LABELS, use_cache=False).loss
        left = [torch.rand(()), torch.tensor(random.random()), torch.tensor(np.random.random())]  # noqa: NPY002
        drawing = each.model.layers[0].mlp[1]
        left += [torch.tensor([drawing.count, drawing.late, len(drawing.losses)])]
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
        prepared(**collated())
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


def test_it_is_tried_once_in_each_mode(tiny_qwen3: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first call that would be shared, not when the model is given; other threads wait until it has ended."""
    tries: list[int] = []
    tried = probe._tried

    def counted(*given: Any) -> str | None:
        tries.append(1)
        with ThreadPoolExecutor(1) as pool:
            assert not pool.submit(probe._trying.acquire, blocking=False).result()
        return tried(*given)

    monkeypatch.setattr(probe, "_tried", counted)
    model = share_prefixes(tiny_qwen3())
    model(input_ids=IDS[:1], use_cache=False)
    assert not tries, "there was nothing to share"
    with pytest.MonkeyPatch.context() as patch:  # memory of this moment: no verdict on the model

        def without_memory(*_: Any) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory")

        patch.setattr(probe, "_passed", without_memory)
        with pytest.raises(torch.OutOfMemoryError):
            of_calls(model)
    tries.clear()
    for _ in range(2):
        of_calls(model)
    of_calls_without_gradients(model)
    assert len(tries) == 2 and sharing_report(model).num_shared == 3
    for _ in range(3):  # as trainers do around each generation
        model.gradient_checkpointing_disable()
        model.config.use_cache = True
        of_calls(model)
        model.config.use_cache = False
        model.gradient_checkpointing_enable()
        of_calls(model)
    assert len(tries) == 5 and sharing_report(model).num_shared == 9


FAR: list[tuple[torch.dtype, str | None]] = [
    *((torch.float32, fault) for fault in (None, "a function", "a gradient that is clipped")),
    *((torch.bfloat16, fault) for fault in (None, "a function")),
]


@pytest.mark.parametrize(("dtype", "fault"), FAR)
@pytest.mark.parametrize("outlier", [1, 3000])
@pytest.mark.parametrize("model_class", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_weights_in_which_rounding_gets_far(
    model_class: str, outlier: float, dtype: torch.dtype, fault: str | None
) -> None:
    """As in pretrained ones: layers that add much to the residual stream, one channel of it far more."""
    model = tiny_model(model_class, num_hidden_layers=8, layer_types=["full_attention"] * 8)
    scales = {"o_proj": 3, "down_proj": 3, "q_proj": 4, "k_proj": 4}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.mul_(scales.get(name.split(".")[-2], 1))
        model.model.layers[1].mlp.down_proj.weight[3] *= outlier
    if fault:
        PUT_IN[fault][0](model)
    share_prefixes(model.to(dtype).train())
    of_calls(model)
    assert sharing_report(model).num_shared == (fault is None), str(sharing_report(model))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_it_names_the_first_layer_that_differs(tiny_qwen3: Build, dtype: torch.dtype) -> None:
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


def test_weights_that_are_not_here(tiny_qwen3: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with ZeRO-3 or FSDP: the rules and the count of layers decide, and foreign code is refused."""
    monkeypatch.setattr(probe, "_is_whole", lambda decoder: False)
    model = share_prefixes(tiny_qwen3())
    of_calls(model)
    assert sharing_report(model).num_shared == 1
    after_mlp(nn.Softplus)(model)
    of_calls(model)
    (reason,) = sharing_report(model).not_shared
    assert "the weights are not whole in this process" in reason
