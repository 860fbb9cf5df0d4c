"""Hooks of others inside of a model: what they change, and whether its calls are shared."""

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from peft import EvaConfig, LoraConfig
from peft.tuners.lora.eva import get_eva_state_dict
from torch import Tensor, nn
from torch.ao.quantization.observer import RecordingObserver
from torch.ao.quantization.quantize import _observer_forward_hook
from torch.nn.utils.parametrizations import weight_norm

from radixtrain import RadixCollator, prepare_model, share_prefixes, sharing_report
from radixtrain.errors import UserError
from radixtrain.testing import relative_error
from radixtrain.verification.oracle import float64_throughout

IDS = torch.tensor([[7, 8, 9, 1, 2], [7, 8, 9, 1, 3], [7, 8, 9, 4, 5]])
Hang = Callable[[Any, list[Tensor]], object]


def keep_output(kept: list[Tensor], module: nn.Module, args: Any, output: Tensor) -> None:
    kept.append(output.abs().mean())


def steer(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Change the last token of every row."""
    return torch.cat([args[0][:, :-1], 2 * args[0][:, -1:]], dim=1), *args[1:]


def keep_norms(kept: list[Tensor], module: nn.Module, grad_in: Any, grad_out: tuple[Tensor, ...]) -> None:
    """Keep the norm of a gradient for each row of the batch, as DP-SGD clips it."""
    kept.extend(grad_out[0].detach().flatten(1).norm(dim=1))


def make_inputs_require_grad(module: nn.Module, args: Any, output: Tensor) -> None:
    output.requires_grad_(True)


READS: dict[str, Hang] = {
    "a penalty of activations": lambda model, kept: model.layers[0].mlp.register_forward_hook(
        partial(keep_output, kept)
    ),
    "all modules": lambda model, kept: nn.modules.module.register_module_forward_hook(
        lambda module, args, output: kept.append(output.abs().mean()) if module is model.norm else None
    ),
    "steering": lambda model, kept: model.layers[1].mlp.register_forward_pre_hook(steer),
    "gradients of rows": lambda model, kept: model.norm.register_full_backward_hook(partial(keep_norms, kept)),
}
CARES: dict[str, Hang] = {
    "gradients on, by transformers": lambda model, kept: model.enable_input_require_grads(),
    "gradients on, by a script": lambda model, kept: model.embed_tokens.register_forward_hook(make_inputs_require_grad),
    "torch's own": lambda model, kept: weight_norm(model.layers[0].mlp.up_proj),
}


@pytest.fixture(autouse=True)
def no_hook_on_all_modules_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.modules.module, "_global_forward_hooks", OrderedDict())


@pytest.mark.parametrize("name", READS)
def test_a_batch_of_a_collator_is_refused(tiny_qwen3: Callable[..., Any], name: str) -> None:
    model, rows = prepare_model(tiny_qwen3()), [{"input_ids": ids, "labels": ids} for ids in IDS.tolist()]
    READS[name](model.model, [])
    with pytest.raises(UserError, match=r"a hook on .* would see the unique tokens"):
        model(**RadixCollator()(rows))


@pytest.mark.parametrize("name", [*READS, *CARES])
def test_hooks(tiny_qwen3: Callable[..., Any], name: str) -> None:
    found = []
    for share in (lambda model: model, partial(share_prefixes, min_ratio=0.0)):
        model, kept = share(tiny_qwen3()), list[Tensor]()
        (READS | CARES)[name](model.model, kept)
        with float64_throughout(model):
            loss = sum(kept, model(input_ids=IDS, labels=IDS, use_cache=False).loss)
            loss.backward()
            found.append([loss.detach(), *kept, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert all(relative_error(*pair) <= 1e-12 for pair in zip(*found, strict=True))
    report = sharing_report(model)
    assert report.num_shared == (name in CARES)
    assert all("a hook on" in reason and __name__ in reason for reason in report.not_shared)


def test_a_lora_that_starts_from_activations_sees_every_token(tiny_qwen3: Callable[..., Any]) -> None:
    """Hooks of PEFT, which may stay, but for those that read."""
    config = LoraConfig(init_lora_weights="eva", eva_config=EvaConfig(rho=1.0), r=2, target_modules=["up_proj"])
    rows, found = [{"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}] * 3, []
    for share in (lambda model: model, partial(share_prefixes, min_ratio=0.0)):
        model = share(tiny_qwen3(use_cache=False))
        found.append(get_eva_state_dict(model, rows, config, show_progress_bar=False))
    assert sharing_report(model).num_shared == 0
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(start, found[1][name]) for name, start in found[0].items())


def test_an_observer_of_a_quantizer_sees_every_token(tiny_qwen3: Callable[..., Any]) -> None:
    """A hook of torch, whose others may stay."""
    model = share_prefixes(tiny_qwen3(), min_ratio=0.0)
    layer = model.model.layers[0].mlp
    layer.activation_post_process = RecordingObserver()
    layer.register_forward_hook(_observer_forward_hook)
    model(input_ids=IDS, labels=IDS)
    assert layer.activation_post_process.get_tensor_value()[0].shape[:2] == IDS.shape
    assert sharing_report(model).num_shared == 0
