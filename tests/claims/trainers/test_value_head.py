"""Models of the user's own around a shared one: a value head on a causal model, and a network around a backbone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from trainer_harness import compare
from trainer_loop import IGNORED, Batch, Loop, Metrics, padded_batches
from transformers import AutoModel

from radixtrain import restore_model, share_prefixes, sharing_report


class CausalModelWithValueHead(nn.Module):
    """Logits and a value for every token, from the last of the hidden states, as PPO trainers have it."""

    def __init__(self, pretrained_model: Any):
        super().__init__()
        self.pretrained_model = pretrained_model
        self.v_head = seeded(lambda: nn.Linear(pretrained_model.config.hidden_size, 1))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        output = self.pretrained_model(input_ids=input_ids, attention_mask=attention_mask, output_hidden_states=True)
        return output.logits, self.v_head(output.hidden_states[-1]).squeeze(-1)


class Critic(nn.Module):
    """Reads `last_hidden_state` of a backbone, with a tower of its own on top."""

    def __init__(self, backbone: Any):
        super().__init__()
        self.backbone = backbone
        width = backbone.config.hidden_size
        self.tower = seeded(lambda: nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        output = self.backbone(input_ids, attention_mask=attention_mask, return_dict=False, use_cache=False)
        return self.tower(output[0]).squeeze(-1)


def seeded(make: Callable[[], nn.Module]) -> Any:
    """A module whose first weights are the same every time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make()


def policy_and_value(model: Any, batch: Batch) -> Metrics:
    """A policy gradient with returns that differ by token, and the squared error of the value."""
    logits, values = model(batch["input_ids"], batch["attention_mask"])
    taken, targets = batch["labels"][:, 1:] != IGNORED, batch["input_ids"][:, 1:]
    log_probabilities = logits[:, :-1].log_softmax(-1).gather(-1, targets[..., None]).squeeze(-1)[taken]
    found, wanted = values[:, :-1][taken], returns_of(targets)[taken]
    terms = -log_probabilities * (wanted - found.detach())
    policy_loss, value_loss = terms.mean(), (found - wanted).square().mean()
    size = terms.detach().abs().mean()
    return {"loss": policy_loss + value_loss, "policy": policy_loss, "value": value_loss, "policy size": size}


def returns_of(targets: Tensor) -> Tensor:
    return (targets % 7).float() / 7


def value_only(model: Any, batch: Batch) -> Metrics:
    errors = model(batch["input_ids"], batch["attention_mask"]) - returns_of(batch["input_ids"])
    return {"loss": errors[batch["attention_mask"].bool()].square().mean()}


@pytest.mark.parametrize("side", ["right", "left"])
def test_value_head_on_a_causal_model(tiny_qwen3, table, side):
    def build(share: Callable[[Any], Any]) -> Loop:
        return Loop(CausalModelWithValueHead(share(tiny_qwen3())), padded_batches(side), policy_and_value)

    # Advantages have both signs, so the policy's loss is small beside its terms.
    sizes = {"policy": lambda entry: entry["policy size"], "loss": lambda entry: entry["policy size"] + entry["value"]}
    found = compare(build, differences=sizes)
    assert found.r > 2
    table(f"value head on a causal model, {side}", found)


@pytest.mark.parametrize("side", ["right", "left"])
def test_module_around_a_backbone(tiny_qwen3, tmp_path, table, side):
    """The backbone is loaded without a head, and its output is asked for as a tuple."""
    tiny_qwen3().save_pretrained(tmp_path)

    def build(share: Callable[[Any], Any]) -> Loop:
        return Loop(Critic(share(AutoModel.from_pretrained(tmp_path))), padded_batches(side), value_only)

    found = compare(build)
    assert found.r > 2
    table(f"value network of one's own, {side}", found)


class TestWholeModule:
    """`share_prefixes` of a module of one's own, instead of the model in it."""

    @pytest.mark.parametrize(
        ("make", "step"),
        [(CausalModelWithValueHead, policy_and_value), (lambda model: Critic(model.model), value_only)],
        ids=["causal model", "backbone"],
    )
    def test_the_one_model_inside_is_found(self, tiny_qwen3, make, step):
        model, (batch,) = make(tiny_qwen3()), padded_batches(steps=1)
        plain = step(model, batch)["loss"].item()
        assert share_prefixes(model) is model
        assert step(model, batch)["loss"].item() == pytest.approx(plain, rel=1e-6)
        assert sharing_report(model).num_shared == 1 and sharing_report(model).compression_ratio > 2
        assert step(restore_model(model), batch)["loss"].item() == plain

    @pytest.mark.parametrize("number", [0, 2])
    def test_without_exactly_one_it_is_refused(self, tiny_qwen3, number):
        module = nn.ModuleList([nn.Linear(2, 2), *(tiny_qwen3(seed) for seed in range(number))])
        with pytest.raises(TypeError, match="ModuleList"):
            share_prefixes(module)
