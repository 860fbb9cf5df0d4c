"""The fingerprint of a model changes with everything that changes its keys and values, and with nothing else."""

import copy
import gc
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from tiers import cases
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from radixtrain import restore_model, share_prefixes
from radixtrain.errors import UserError
from radixtrain.generation.fingerprint import fingerprint, word_factors, word_sums

Change = Callable[[Any], object]
CPU = torch.device("cpu")


def swap_rows(weight: torch.Tensor, one: Any, other: Any) -> None:
    """Through `.data`, which no version counter sees."""
    weight.data[one], weight.data[other] = weight.data[other].clone(), weight.data[one].clone()


def k_proj(model: Any) -> nn.Linear:
    linear: nn.Linear = model.model.layers[1].self_attn.k_proj
    return linear


def optimizer_step(model: Any) -> None:
    """On the token embeddings only."""
    weight = model.model.embed_tokens.weight
    weight.grad = torch.full_like(weight, 1e-3)
    torch.optim.AdamW([weight], lr=1e-6, fused=True).step()


def load(model: Any) -> None:
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state["model.norm.weight"][3] += 1e-6
    model.load_state_dict(state)


def replace(name: str, new: Callable[[Any], Any]) -> Change:
    def change(model: Any) -> None:
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, new(model.get_submodule(name)))

    return change


def untie(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() * 2)


def one_bit(model: Any) -> None:
    k_proj(model).weight.data.view(torch.int32)[3, 5] ^= 1


CHANGES: dict[str, Change] = {
    "a hook": lambda model: k_proj(model).register_forward_hook(lambda *_: None),
    "a hook before": lambda model: k_proj(model).register_forward_pre_hook(lambda *_: None),
    "one bit of one weight": one_bit,
    "p.data.add_": lambda model: k_proj(model).weight.data.add_(1e-7),
    "two rows swapped": lambda model: swap_rows(k_proj(model).weight, 0, 3),
    "minus zero": lambda model: model.model.norm.weight.data.neg_(),
    "AdamW": optimizer_step,
    "load_state_dict": load,
    "tied weights, by the other name": lambda model: model.lm_head.weight.data.mul_(1.001),
    "untied": untie,
    "a buffer": lambda model: model.model.rotary_emb.inv_freq.mul_(0.5),
    "a setting of a module": lambda model: setattr(model.model.norm, "variance_epsilon", 1e-3),
    "a setting of the configuration": lambda model: setattr(model.config, "sliding_window", 4),
    "a module replaced by its copy": replace("model.layers.0.mlp", copy.deepcopy),
    "a module left out": replace("model.layers.1.mlp", lambda _: nn.Identity()),
    "one layer fewer": lambda model: setattr(model.model, "layers", model.model.layers[:1]),
    "bfloat16": lambda model: model.to(torch.bfloat16),
    "one tensor in float64": lambda model: k_proj(model).double(),
}


QUICK = ["a hook", "one bit of one weight", "minus zero", "two rows swapped", "AdamW", "load_state_dict"]


@pytest.mark.parametrize("change", cases(CHANGES, QUICK))
def test_a_change_is_seen(change: str, tiny_qwen3: Callable[..., Any]) -> None:
    model = tiny_qwen3()
    if change == "minus zero":
        model.model.norm.weight.data.zero_()
    before = fingerprint(model)
    CHANGES[change](model)
    after = fingerprint(model)
    assert after != before
    assert after == fingerprint(model) and hash(after) == hash(fingerprint(model))


def forward(model: Any) -> None:
    model(input_ids=torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()


def generate(model: Any) -> None:
    model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=2, do_sample=False)


NO_CHANGES: dict[str, Change] = {
    "nothing": lambda model: None,
    "the mode": lambda model: model.train(not model.training),
    "a forward and a backward pass": forward,
    "generate": generate,
    "requires_grad": lambda model: model.requires_grad_(False),
    "a hook of gradients": lambda model: k_proj(model).register_full_backward_hook(lambda *_: None),
    "weights that are loaded again": lambda model: model.load_state_dict(copy.deepcopy(model.state_dict())),
    "equal values elsewhere": lambda model: setattr(k_proj(model).weight, "data", k_proj(model).weight.data.clone()),
    "another layout of the same values": lambda model: setattr(
        k_proj(model).weight, "data", k_proj(model).weight.data.T.contiguous().T
    ),
    "prepared": share_prefixes,
    "prepared and restored": lambda model: restore_model(share_prefixes(model)),
    "the attention function": lambda model: model.set_attn_implementation("eager"),
}


@pytest.mark.parametrize("change", cases(NO_CHANGES, ["a forward and a backward pass", "prepared", "the mode"]))
def test_what_leaves_the_weights_alone(change: str, tiny_qwen3: Callable[..., Any]) -> None:
    model = tiny_qwen3()
    before = fingerprint(model)
    NO_CHANGES[change](model)
    assert fingerprint(model) == before


def test_autocast_computes_other_rows(tiny_qwen3: Callable[..., Any]) -> None:
    model, found = tiny_qwen3(), set()
    found.add(fingerprint(model))
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            found.add(fingerprint(model))
    assert len(found) == 3


def test_another_model_with_the_same_weights_in_the_same_place(tiny_qwen3: Callable[..., Any]) -> None:
    """Also when the first one is gone, so that the second may have its address."""
    model = tiny_qwen3()
    before = fingerprint(model)
    assert fingerprint(copy.deepcopy(model)) != before
    del model
    gc.collect()
    assert fingerprint(tiny_qwen3()) != before


@pytest.fixture
def adapted(tiny_qwen3: Callable[..., Any]) -> Any:
    """A model with two LoRA adapters, the first of them active."""
    config = peft.LoraConfig(target_modules=["k_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(tiny_qwen3(), config)
    model.add_adapter("second", config)
    return model


def scaled(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("default", 0.5)


def one_lora_matrix(model: Any) -> None:
    next(p for name, p in model.named_parameters() if "lora_B.default" in name).data.mul_(1.01)


PEFT_CHANGES: dict[str, Change] = {
    "set_adapter": lambda model: model.set_adapter("second"),
    "scaling": scaled,
    "merge": lambda model: model.merge_adapter(),
    "a LoRA matrix": one_lora_matrix,
    "disabled": lambda model: model.base_model.disable_adapter_layers(),
    "deleted": lambda model: model.delete_adapter("second"),
}


@pytest.mark.parametrize("change", PEFT_CHANGES)
def test_a_change_of_adapters_is_seen(change: str, adapted: Any) -> None:
    before = fingerprint(adapted)
    with adapted.disable_adapter():
        without = fingerprint(adapted)
    assert without != before == fingerprint(adapted)
    PEFT_CHANGES[change](adapted)
    assert fingerprint(adapted) != before


def test_a_model_on_the_meta_device_is_refused() -> None:
    with torch.device("meta"):
        model = Qwen3ForCausalLM(Qwen3Config(vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=1))
    with pytest.raises(UserError, match=r"model\.embed_tokens\.weight is on the meta device and has no values: load"):
        fingerprint(model)


class Odd(nn.Module):
    """Tensors of every kind: no dimension, no element, an odd number of bytes, views off their storage's beginning."""

    def __init__(self) -> None:
        super().__init__()
        storage = torch.arange(40, dtype=torch.bfloat16)
        kinds = {
            "scalar": torch.tensor(3.0),
            "empty": torch.zeros(0, 4),
            "bools": torch.tensor([True, False, True]),
            "half words": storage[1:8],
            "off": storage[1:9],
            "strided": storage[::3],
            "complex": torch.ones(3, dtype=torch.complex64),
            "float8": torch.ones(5).to(torch.float8_e4m3fn),
        }
        for name, tensor in kinds.items():
            self.register_buffer(name.replace(" ", "_"), tensor)


def test_tensors_of_every_kind() -> None:
    model = Odd()
    for name, tensor in model.named_buffers():
        before = fingerprint(model)
        if tensor.numel():
            tensor.view(-1)[-1:] = torch.zeros(1).to(tensor.dtype)
            assert fingerprint(model) != before, name
    with torch.inference_mode():
        model.scalar = torch.tensor(5.0)
    assert fingerprint(model) == fingerprint(model)


# What a device without NumPy does, on the CPU.


def sums(tensor: torch.Tensor, factors: torch.Tensor) -> list[int]:
    return [int(each) for each in word_sums(tensor, factors)]


def test_every_single_word_and_every_swap_is_seen_by_word_sums() -> None:
    factors = word_factors(CPU)
    x = torch.randn(16, generator=torch.Generator().manual_seed(0))
    changed = [x.clone() for _ in range(16)]
    for place, each in enumerate(changed):
        each[place] = -each[place]
    for one in range(16):
        for other in range(one):
            order = list(range(16))
            order[one], order[other] = order[other], order[one]
            changed.append(x[order])
    assert len({tuple(sums(each, factors)) for each in [x, *changed]}) == 1 + len(changed)
