"""How many steps a run has, and what AdamW and the schedule make of its settings."""

from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from radixtrain.errors import UserError
from radixtrain.training.optimizer import (
    check_package,
    moment_bytes,
    num_steps_of_run,
    optimizer_of,
    schedule,
    set_hyperparameters,
)


def settings(**changes: Any) -> SimpleNamespace:
    adam = {"learning_rate": 1.0, "weight_decay": 0.1, "adam_beta1": 0.5, "adam_beta2": 0.6, "adam_epsilon": 1e-3}
    return SimpleNamespace(
        **{**adam, "optimizer": "adamw", "warmup_steps": 0.0, "lr_scheduler_type": "linear", **changes}
    )


@pytest.mark.parametrize(("epochs", "steps", "expected"), [(3, -1, 30), (3, 7, 7), (3, 70, 30), (-1, 70, 70)])
def test_steps_of_a_run(epochs: int, steps: int, expected: int) -> None:
    assert num_steps_of_run(SimpleNamespace(max_epochs=epochs, max_steps=steps), 10) == expected


def test_only_matrices_decay_and_only_what_is_trained() -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 1).requires_grad_(False))
    optimizer = optimizer_of(module, settings())
    assert [(len(group["params"]), group["weight_decay"]) for group in optimizer.param_groups] == [(1, 0.1), (3, 0.0)]
    assert {(group["lr"], group["betas"], group["eps"]) for group in optimizer.param_groups} == {
        (1.0, (0.5, 0.6), 1e-3)
    }


@pytest.mark.parametrize("warmup_steps", [2, 0.2])
def test_warm_up_in_steps_or_as_a_share(warmup_steps: float) -> None:
    optimizer = optimizer_of(nn.Linear(1, 1), settings())
    scheduler = schedule(optimizer, settings(warmup_steps=warmup_steps), 10)
    rates = []
    for _ in range(10):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    expected = [0, 0.5, *(step / 8 for step in range(8, 0, -1))]
    assert rates == pytest.approx(expected, rel=1e-12)


NAMES = {"adamw": 2, "muon": 1, "adamw_8bit": 0.5}  # moments of a hidden matrix: times its bytes in float32


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    if request.param == "adamw_8bit":
        pytest.importorskip("bitsandbytes", reason="pip install bitsandbytes")
    return request.param


def trained(model: Any, optimizers: list[Any], num_steps: int, seed: int) -> None:
    """Steps on drawn gradients, each with the schedule."""
    schedulers = [schedule(each, settings(lr_scheduler_type="constant"), num_steps) for each in optimizers]
    for step in range(num_steps):
        torch.manual_seed(seed + step)
        for weight in model.parameters():
            weight.grad = torch.randn_like(weight)
        for each in (*optimizers, *schedulers):
            each.step()


def assert_equal_weights(one: Any, other: Any) -> None:
    assert all(map(torch.equal, one.parameters(), other.parameters()))


ADAM = {"lr": 1e-2, "betas": (0.5, 0.6), "eps": 1e-3}


def decayed(decaying: list[Any], others: list[Any]) -> list[dict[str, Any]]:
    return [{"params": decaying, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def of_muon(model: Any) -> list[Any]:
    """Muon takes the matrices of hidden layers; a bias and the embeddings are AdamW's."""
    hidden, decaying, others = [], [], []
    for key, weight in model.named_parameters():
        is_outside = key.startswith(("model.embed_tokens", "lm_head"))
        (others if weight.ndim == 1 else decaying if is_outside else hidden).append(weight)
    assert hidden and len(decaying) == 2 and others
    muon = torch.optim.Muon(hidden, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(decayed(decaying, others), **ADAM)]


def of_bitsandbytes(model: Any) -> list[Any]:
    """Moments of the embeddings have 32 bits."""
    optim = pytest.importorskip("bitsandbytes.optim", reason="pip install bitsandbytes")
    outside = [model.get_input_embeddings().weight, model.lm_head.weight]
    inside = [weight for weight in model.parameters() if all(weight is not x for x in outside)]
    groups = decayed(*([weight for weight in inside if (weight.ndim == 1) == is_last] for is_last in (False, True)))
    return [optim.AdamW8bit(groups, **ADAM), optim.AdamW32bit(outside, **ADAM, weight_decay=0.1)]


@pytest.mark.parametrize(("name", "apart"), [("muon", of_muon), ("adamw_8bit", of_bitsandbytes)])
def test_each_step_is_that_of_two_optimizers_side_by_side(name: str, apart: Any, tiny_qwen3: Any) -> None:
    """Bit for bit."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "attention_bias": True, "tie_word_embeddings": False}
    ours, theirs = (tiny_qwen3(**sizes) for _ in range(2))
    pair = apart(theirs)
    trained(ours, [optimizer_of(ours, settings(optimizer=name, learning_rate=1e-2))], 3, 0)
    trained(theirs, pair, 3, 0)
    assert_equal_weights(ours, theirs)


def test_what_the_optimizer_keeps(tiny_qwen3: Any, name: str) -> None:
    model = tiny_qwen3(hidden_size=64, intermediate_size=128)
    chosen = settings(optimizer=name)
    optimizer = optimizer_of(model, chosen)
    trained(model, [optimizer], 1, 0)
    kept = {"exp_avg", "exp_avg_sq", "momentum_buffer", "state1", "state2"}
    held = sum(state[key].nbytes for state in optimizer.state.values() for key in kept & state.keys())
    assert held == moment_bytes(model, chosen)
    hidden = model.model.layers[0].mlp.up_proj.weight
    assert sum(optimizer.state[hidden][key].nbytes for key in kept & optimizer.state[hidden].keys()) == (
        NAMES[name] * hidden.nbytes
    )


def test_a_restored_optimizer_goes_on_bit_for_bit_and_takes_new_settings(tiny_qwen3: Any, name: str) -> None:
    whole, stopped = (tiny_qwen3(hidden_size=64, intermediate_size=128) for _ in range(2))
    chosen = settings(optimizer=name, learning_rate=1e-2)
    trained(whole, [optimizer := optimizer_of(whole, chosen)], 2, 0)
    stopped.load_state_dict(whole.state_dict())
    restored = optimizer_of(stopped, chosen)
    restored.load_state_dict(deepcopy(optimizer.state_dict()))
    changed = settings(optimizer=name, learning_rate=1e-3, weight_decay=0.2, adam_beta1=0.7)
    for model, each in ((whole, optimizer), (stopped, restored)):
        scheduler = schedule(each, chosen, 9)
        set_hyperparameters(each, scheduler, model, changed)
        assert {group["lr"] for group in each.param_groups} == {1e-3}
        assert {group["betas"] for group in each.param_groups if "betas" in group} == {(0.7, 0.6)}
        assert {group["weight_decay"] for group in each.param_groups} == {0.2, 0.0}
        trained(model, [each], 2, 7)
    assert_equal_weights(whole, stopped)


def test_adamw_8bit_is_refused_where_it_does_not_work(monkeypatch: pytest.MonkeyPatch, tiny_qwen3: Any) -> None:
    """float64, a device without its kernels, and no package."""
    optim = pytest.importorskip("bitsandbytes.optim", reason="pip install bitsandbytes")
    chosen = settings(optimizer="adamw_8bit")
    with pytest.raises(
        UserError, match=r"^model\.optimizer adamw_8bit computes in float32; set model\.dtype to float32"
    ):
        optimizer_of(tiny_qwen3().double(), chosen)

    def step(*_: Any) -> None:
        raise NotImplementedError("no kernel\nat all")

    monkeypatch.setattr(optim.AdamW8bit, "step", step)
    with pytest.raises(UserError, match=r"bitsandbytes \S+ has no 8-bit AdamW on cpu: no kernel; set adamw$"):
        optimizer_of(tiny_qwen3(), chosen)
    monkeypatch.setattr("radixtrain.training.optimizer.find_spec", lambda package: None)
    with pytest.raises(
        UserError, match=r"adamw_8bit needs the package bitsandbytes: pip install -U 'bitsandbytes>=0\.46\.1'$"
    ):
        check_package("adamw_8bit")
