"""Models beside and around a shared one, in loops of the user's own: distillation from a teacher, value heads."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import FULL
from tests.support.trainers import IGNORED, Batch, Loop, Metrics, Step, compare, padded_batches, without_labels

pytestmark = FULL


def of_hidden_states(teacher: Any) -> Step:
    """Labels, and the states of every layer: those of the embeddings too, and those after the last norm."""

    def step(student: Any, batch: Batch) -> Metrics:
        wanted = teacher(**without_labels(batch), output_hidden_states=True, use_cache=False).hidden_states
        output = student(**batch, output_hidden_states=True)
        pairs = zip(output.hidden_states, wanted, strict=True)
        layers = [mean_over((one - other).square().mean(-1), batch["attention_mask"]) for one, other in pairs]
        assert len(layers) == student.config.num_hidden_layers + 1
        terms = {f"layer {index}": term for index, term in enumerate(layers)}
        return {"loss": output.loss + torch.stack(layers).mean(), "label loss": output.loss, **terms}

    return step


def mean_over(values_BL: Tensor, mask_BL: Tensor) -> Tensor:
    """The mean of the values that the mask keeps; the others are taken out, not multiplied by zero."""
    return values_BL[mask_BL.bool()].mean()


def test_distillation(tiny_qwen3, table):
    def build(share: Callable[[Any], Any]) -> Loop:
        student, teacher = share(tiny_qwen3()), share(tiny_qwen3(seed=1)).eval().requires_grad_(False)
        return Loop(student, padded_batches("left"), of_hidden_states(torch.no_grad()(teacher)))

    found = compare(build)
    assert found.r > 2
    table("distillation of hidden states", found)


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
    """Reads `last_hidden_state` of a backbone, asked for as a tuple, with a tower of its own on top."""

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
        return make().double()


def policy_and_value(model: Any, batch: Batch) -> Metrics:
    """A policy gradient with returns that differ by token, and the squared error of the value."""
    logits, values = model(batch["input_ids"], batch["attention_mask"])
    taken, targets = batch["labels"][:, 1:] != IGNORED, batch["input_ids"][:, 1:]
    log_probabilities = logits[:, :-1].log_softmax(-1).gather(-1, targets[..., None]).squeeze(-1)[taken]
    found, wanted = values[:, :-1][taken], returns_of(targets)[taken]
    policy_loss = -(log_probabilities * (wanted - found.detach())).mean()
    value_loss = (found - wanted).square().mean()
    return {"loss": policy_loss + value_loss, "policy": policy_loss, "value": value_loss}


def returns_of(targets: Tensor) -> Tensor:
    return (targets % 7).double() / 7


def value_only(model: Any, batch: Batch) -> Metrics:
    errors = model(batch["input_ids"], batch["attention_mask"]) - returns_of(batch["input_ids"])
    return {"loss": errors[batch["attention_mask"].bool()].square().mean()}


AROUND: list[tuple[Callable[[Any], nn.Module], Step]] = [
    (CausalModelWithValueHead, policy_and_value),
    (Critic, value_only),
]


def inside(make: Any, tiny_qwen3: Any) -> Any:
    """A causal model, or for a critic a backbone without a head."""
    return tiny_qwen3().model if make is Critic else tiny_qwen3()


@pytest.mark.parametrize(("make", "step"), AROUND)
@pytest.mark.parametrize("side", ["right", "left"])
def test_value_heads(tiny_qwen3, table, make, step, side):
    found = compare(lambda share: Loop(make(share(inside(make, tiny_qwen3))), padded_batches(side), step))
    assert found.r > 2
    table(f"{make.__name__}, {side}", found)
