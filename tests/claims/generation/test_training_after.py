"""Generation between training steps: it never meets keys of other weights, and leaves the model as it was.

Weights change in every way that training and users change them, between two calls on one cache. Afterwards attention,
hooks, modes, gradients and random states are compared with those before, also if the call failed, and a training step
after it is bit-equal to one without it.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from radixtrain import RadixCache, RadixCollator, generate, prepare_model, share_prefixes

PROMPTS = [[7, 8, 9, 10, 11, 1, 2], [7, 8, 9, 10, 11, 3], [30, 31, 32, 33]]
OPTIONS: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
ROUNDING = 1e-5


def with_lora(model: Any, **options: Any) -> Any:
    peft = pytest.importorskip("peft", reason="pip install 'radixtrain[peft]'")
    return peft.get_peft_model(
        model, peft.LoraConfig(target_modules=["q_proj", "k_proj"], init_lora_weights=False, **options)
    )


def train_a_step(model: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.tensor([PROMPTS[0]])
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def add_to_data(model: Any) -> None:
    model.get_input_embeddings().weight.data[9].add_(0.3)


def swap_rows(model: Any) -> None:
    weight = model.get_input_embeddings().weight.data
    weight[[8, 9]] = weight[[9, 8]]


def load_a_checkpoint(model: Any) -> None:
    model.load_state_dict({name: value * 1.05 for name, value in model.state_dict().items()})


def scale_an_adapter(model: Any) -> None:
    for module in model.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.scaling["default"] *= 2


def disable_adapters(model: Any) -> None:
    model.base_model.disable_adapter_layers()


CHANGES = [train_a_step, add_to_data, swap_rows, load_a_checkpoint]
CHANGES_OF_ADAPTERS = [train_a_step, scale_an_adapter, disable_adapters]


def check_two_calls(model: Any, change: Callable[[Any], None]) -> None:
    """What a cache gives after a change is what no cache gives."""
    cache = RadixCache()
    generate(model, PROMPTS, cache=cache, **OPTIONS)
    again = generate(model, PROMPTS, cache=cache, **OPTIONS)
    assert again.stats.num_cached_tokens == sum(len(prompt) - 1 for prompt in PROMPTS), "nothing changed, nothing found"
    change(model)
    found, fresh = generate(model, PROMPTS, cache=cache, **OPTIONS), generate(model, PROMPTS, **OPTIONS)
    assert [len(each) for each in found.logprobs] == [len(each) for each in fresh.logprobs]
    assert np.abs(np.array(found.logprobs) - np.array(fresh.logprobs)).max() <= ROUNDING, "old keys were met"
    assert found.stats.num_cached_tokens < again.stats.num_cached_tokens


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("prepare", [None, prepare_model, share_prefixes], ids=["plain", "prepared", "shared"])
def test_changed_weights(tiny_qwen3: Callable[..., Any], change: Callable[[Any], None], prepare: Any) -> None:
    model = tiny_qwen3()
    check_two_calls(model if prepare is None else prepare(model), change)


@pytest.mark.parametrize("change", CHANGES_OF_ADAPTERS, ids=lambda change: change.__name__)
def test_changed_adapters(tiny_qwen3: Callable[..., Any], change: Callable[[Any], None]) -> None:
    check_two_calls(with_lora(tiny_qwen3()), change)


def test_another_adapter(tiny_qwen3: Callable[..., Any]) -> None:
    model = with_lora(tiny_qwen3())
    model.add_adapter("other", deepcopy(model.peft_config["default"]))
    check_two_calls(model, lambda model: model.set_adapter("other"))


@pytest.mark.parametrize("change", [*CHANGES, *CHANGES_OF_ADAPTERS[1:]], ids=lambda change: change.__name__)
def test_without_a_look_at_the_weights(
    tiny_qwen3: Callable[..., Any], change: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test is tested: a cache that does not ask for the weights answers with old keys."""
    monkeypatch.setattr(RadixCache, "of_weights", lambda self, fingerprint: None)
    model = with_lora(tiny_qwen3()) if change in CHANGES_OF_ADAPTERS[1:] else tiny_qwen3()
    with pytest.raises(AssertionError, match="old keys were met"):
        check_two_calls(model, change)


def trained_by(kind: str, tiny_qwen3: Callable[..., Any]) -> Any:
    """A model in training mode, as one of its ways to train leaves it."""
    model = tiny_qwen3().train()
    if kind == "prepared":
        return prepare_model(model)
    if kind == "shared":
        return share_prefixes(model, min_ratio=0.0)
    if kind == "PEFT":
        return with_lora(model, lora_dropout=0.2).train()
    if kind == "PEFT, prepared":
        return prepare_model(with_lora(model)).train()
    return model


KINDS = ["plain", "prepared", "shared", "PEFT", "PEFT, prepared"]


def batch_for(kind: str) -> dict[str, Any]:
    if "prepared" in kind:
        return RadixCollator()([{"input_ids": ids, "labels": ids} for ids in PROMPTS])
    longest = max(map(len, PROMPTS))
    padded = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in PROMPTS])
    mask = (padded != 0).long()
    return {"input_ids": padded, "attention_mask": mask, "labels": padded.masked_fill(mask == 0, -100)}


def state_of(model: Any) -> dict[str, Any]:
    """All that generation could leave changed, apart from weights."""
    modules = dict(model.named_modules())
    hooks = {
        f"{name}: {kind}": list(getattr(module, kind).items())
        for name, module in modules.items()
        for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    }
    configs = {name: getattr(module, "config", None) for name, module in modules.items()}
    return {
        "hooks": hooks,
        "forward": {name: module.__dict__.get("forward") for name, module in modules.items()},
        "training": {name: module.training for name, module in modules.items()},
        "attention": {name: getattr(config, "_attn_implementation", None) for name, config in configs.items()},
        "use_cache": {name: getattr(config, "use_cache", None) for name, config in configs.items()},
        "requires_grad": {name: parameter.requires_grad for name, parameter in model.named_parameters()},
        "gradients": torch.is_grad_enabled(),
        "generation_config": model.generation_config.to_dict(),
    }


def random_state() -> list[Any]:
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002 - it is the global state that must not move
    return [torch.get_rng_state().tolist(), keys.tolist(), rest, kind, random.getstate()]


class Interrupted(Exception):
    pass


@contextmanager
def interrupted(where: str, model: Any) -> Iterator[dict[str, Any]]:
    """Options with which a call fails in the third step, or a layer that does."""
    calls = [0]

    def fail(*arguments: Any) -> None:
        calls[0] += 1
        if calls[0] == 3:
            raise Interrupted

    def processor(token_ids: Tensor, scores: Tensor) -> Tensor:
        fail()
        return scores

    if where == "processor":
        yield {"logits_processor": [processor]}
        return
    layer: nn.Module = next(module for name, module in model.named_modules() if name.endswith("layers.1.mlp"))
    handle = layer.register_forward_hook(fail)
    try:
        yield {}
    finally:
        handle.remove()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampled", [False, True])
def test_all_is_restored(tiny_qwen3: Callable[..., Any], kind: str, sampled: bool) -> None:
    model = trained_by(kind, tiny_qwen3)
    how = {"do_sample": True, "seed": 4} if sampled else {}
    before, drawn = state_of(model), random_state()
    generate(model, PROMPTS, **{**OPTIONS, **how})
    assert state_of(model) == before
    assert random_state() == drawn


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["processor", "layer"])
def test_all_is_restored_after_an_error(tiny_qwen3: Callable[..., Any], kind: str, where: str) -> None:
    model, cache = trained_by(kind, tiny_qwen3), RadixCache()
    before, drawn = state_of(model), random_state()
    with interrupted(where, model) as options, pytest.raises(Interrupted):
        generate(model, PROMPTS, cache=cache, batch_size=2, **OPTIONS, **options)
    assert state_of(model) == before
    assert random_state() == drawn
    assert not cache.root.locks and not cache.num_reserved
    assert cache.pool.capacity - cache.pool.num_free == cache.num_tokens
    after, fresh = generate(model, PROMPTS, cache=cache, **OPTIONS), generate(model, PROMPTS, **OPTIONS)
    assert np.abs(np.array(after.logprobs) - np.array(fresh.logprobs)).max() <= ROUNDING


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_bit_equal(tiny_qwen3: Callable[..., Any], kind: str) -> None:
    """With dropout in the adapters of one of them, so that the random state counts."""
    with_answers, without = (trained_by(kind, tiny_qwen3) for _ in range(2))
    without.load_state_dict(with_answers.state_dict())
    results = []
    for model in (with_answers, without):
        torch.manual_seed(0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for _ in range(3):
            if model is with_answers:
                generate(model, PROMPTS, cache=RadixCache(), **OPTIONS)
                generate(model, PROMPTS, **{**OPTIONS, "do_sample": True, "seed": 1})
            loss = model(**batch_for(kind)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        results.append([*losses, *model.state_dict().values()])
    assert all(map(torch.equal, *results))
    assert not torch.equal(results[0][0], results[0][2]), "nothing was trained"
