"""The fingerprint that `generate` gives a radix cache: every change on which keys and values depend is seen."""

import copy
import gc
from collections.abc import Callable
from itertools import combinations
from typing import Any

import peft
import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from radixtrain import restore_model, share_prefixes
from radixtrain.generation.generate import fingerprint, word_sums
from radixtrain.hf.guards.code import position_wise
from radixtrain.hf.guards.draws import evaluating
from tests.support import cases

Change = Callable[[Any], object]


def seen(model: Any) -> Any:
    """The fingerprint, in evaluation mode, as `generate` takes it."""
    with evaluating(model):
        return fingerprint(model)


def swap_rows(model: Any) -> None:
    """Through `.data`, which no version counter sees."""
    weight = k_proj(model).weight.data
    weight[[0, 3]] = weight[[3, 0]]


def k_proj(model: Any) -> nn.Linear:
    linear: nn.Linear = model.model.layers[1].self_attn.k_proj
    return linear


def one_bit(model: Any) -> None:
    k_proj(model).weight.data.view(torch.int32)[3, 5] ^= 1


def with_adapters(model: Any) -> Any:
    """Two LoRA adapters, the first of them active."""
    config = peft.LoraConfig(target_modules=["k_proj", "v_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)
    adapted.add_adapter("second", config)
    return adapted


def scaled(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("default", 0.5)


@position_wise
class Declared(nn.Sequential):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x)


def of_a_class(model: Any) -> None:
    model.model.layers[0].mlp = Declared(model.model.layers[0].mlp)


def forward_of_a_layer(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    of_class = type(mlp).forward
    mlp.forward = position_wise(lambda x: 2 * of_class(mlp, x))


OF_OTHERS: dict[str, Change] = {
    "a hook": lambda model: k_proj(model).register_forward_hook(position_wise(lambda *_: None)),
    "a forward": forward_of_a_layer,
    "a class": of_a_class,
}
CHANGES: dict[str, Change] = {
    "one bit of one weight": one_bit,
    "two rows swapped": swap_rows,
    "all signs": lambda model: k_proj(model).weight.data.neg_(),
    "every second sign": lambda model: k_proj(model).weight.data[:, 1::2].neg_(),
    "a function": lambda model: setattr(model.model.norm, "radix_test", nn.functional.relu),
    "a tensor": lambda model: setattr(model.model.norm, "radix_test", torch.ones(1)),
    "a buffer": lambda model: model.model.rotary_emb.inv_freq.mul_(0.5),
    "a setting of a module": lambda model: setattr(model.model.norm, "variance_epsilon", 1e-3),
    "a setting of the configuration": lambda model: setattr(model.config, "sliding_window", 4),
    "one layer fewer": lambda model: setattr(model.model, "layers", model.model.layers[:1]),
    "bfloat16": lambda model: model.to(torch.bfloat16),
}
OF_ADAPTERS: dict[str, Change] = {
    "set_adapter": lambda model: model.set_adapter("second"),
    "scaling": scaled,
    "merge": lambda model: model.merge_adapter(),
    "disabled": lambda model: model.base_model.disable_adapter_layers(),
    "deleted": lambda model: model.delete_adapter("second"),
}


@pytest.mark.parametrize("change", cases(CHANGES | OF_ADAPTERS, [*CHANGES][:5] + [*OF_ADAPTERS][:2]))
def test_a_change_is_seen(change: str, tiny_qwen3: Callable[..., Any]) -> None:
    model = with_adapters(tiny_qwen3()) if change in OF_ADAPTERS else tiny_qwen3()
    before = seen(model)
    (CHANGES | OF_ADAPTERS)[change](model)
    after = seen(model)
    assert after != before
    assert after == seen(model) and hash(after) == hash(seen(model))


@pytest.mark.parametrize("code", OF_OTHERS)
def test_what_other_code_reads_may_have_changed(code: str, tiny_qwen3: Callable[..., Any]) -> None:
    model = tiny_qwen3()
    OF_OTHERS[code](model)
    assert seen(model) != seen(model)


@position_wise
class Mode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_what_code_around_the_model_reads_may_have_changed(tiny_qwen3: Callable[..., Any]) -> None:
    model = tiny_qwen3()
    with Mode():
        assert seen(model) != seen(model)
    handle = nn.modules.module.register_module_forward_hook(position_wise(lambda *_: None))
    try:
        assert seen(model) != seen(model)
    finally:
        handle.remove()
    assert seen(model) == seen(model)


NO_CHANGES: dict[str, Change] = {
    "the mode": lambda model: model.train(not model.training),
    "generate": lambda model: model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=2, do_sample=False),
    "weights that are loaded again": lambda model: model.load_state_dict(copy.deepcopy(model.state_dict())),
    "shared and restored": lambda model: restore_model(share_prefixes(model)),
}


@pytest.mark.parametrize("change", NO_CHANGES)
def test_what_leaves_the_weights_alone(change: str, tiny_qwen3: Callable[..., Any]) -> None:
    model = tiny_qwen3()
    before = seen(model)
    NO_CHANGES[change](model)
    assert seen(model) == before


def test_autocast_and_another_model_with_the_same_weights(tiny_qwen3: Callable[..., Any]) -> None:
    """Also when the first model is gone, so that the second may have its address."""
    model = tiny_qwen3()
    found = [seen(model), seen(copy.deepcopy(model))]
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            found.append(seen(model))
    del model
    gc.collect()
    found.append(seen(tiny_qwen3()))
    assert all(one != other for one, other in combinations(found, 2))


storage = torch.arange(40, dtype=torch.bfloat16)
KINDS = {
    "no dimension": torch.tensor(3.0),
    "an odd number of bytes": torch.tensor([True, False, True]),
    "off its storage's beginning": storage[1:9],
    "strided": storage[::3],
    "complex": torch.ones(3, dtype=torch.complex64),
    "float8": torch.ones(5).to(torch.float8_e4m3fn),
}


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_of_every_kind(kind: str) -> None:
    tensor = KINDS[kind].clone() if kind in ("no dimension", "complex") else KINDS[kind]
    before = torch.stack([*word_sums(tensor)])
    tensor.view(-1)[-1:] = torch.zeros(1).to(tensor.dtype) if kind != "an odd number of bytes" else False
    assert not torch.equal(torch.stack([*word_sums(tensor)]), before)
