"""A share of the decoder layers recomputes: which ones, seen by their calls; and the gradient is the ordinary one."""

from collections import Counter
from typing import Any

import pytest
import torch

from radixtrain import RadixCollator, share_prefixes
from radixtrain.errors import UserError
from radixtrain.hf.backbone import recompute
from radixtrain.verification.oracle import float64_truth, radix_batch
from tests.support import cases
from tests.support.models import FAMILIES, tiny_model, tiny_qwen3
from tests.support.steps import FEATURES, same_step

pytestmark = pytest.mark.usefixtures("hooks_that_may_stay", "free_forks")

# Windows with soft caps, latent attention and experts, layers with the keys of others, one layer in several places,
# recurrent layers that fork, and those that run on whole sequences.
CLASSES = [
    *("Gemma2ForCausalLM", "DeepseekV3ForCausalLM", "GptOssForCausalLM", "Qwen3MoeForCausalLM", "Gemma3nForCausalLM"),
    *("Zamba2ForCausalLM", "Qwen3_5ForCausalLM", "JambaForCausalLM", "KimiLinearForCausalLM"),
]


def recomputing(model: Any) -> list[int]:
    """The layers that a backward pass calls again."""
    calls: Counter[int] = Counter()
    for index, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_pre_hook(lambda *_, index=index: calls.update([index]))
    loss = model(**RadixCollator()(FEATURES)).loss
    assert set(calls) == set(range(len(model.model.layers)))
    calls.clear()
    loss.backward()
    return [index for index, count in sorted(calls.items()) if count == 1]


@pytest.mark.parametrize(
    ("num_layers", "share", "expected"),
    [
        (4, 0.25, [2]),
        (4, 0.5, [0, 2]),
        (4, 0.75, [0, 1, 2]),
        (4, 1.0, [0, 1, 2, 3]),
        (4, True, [0, 1, 2, 3]),
        (4, 0.1, []),
        (8, 0.25, [2, 6]),
        (7, 0.5, [0, 2, 4, 5]),
        (1, 0.5, [0]),
    ],
)
def test_layers_at_even_distances_recompute(num_layers: int, share: float, expected: list[int]) -> None:
    model = tiny_qwen3(num_hidden_layers=num_layers).train()
    recompute(model, share)
    assert recomputing(share_prefixes(model)) == expected


@pytest.mark.parametrize("model_class", cases(CLASSES, ["Gemma3nForCausalLM", "Qwen3_5ForCausalLM"]))
def test_gradients_of_families(model_class: str) -> None:
    """In float64, of every parameter, with some layers that recompute beside some that keep."""
    family = next(each for each in FAMILIES if each.model_class == model_class)
    model = family.build(**{"num_hidden_layers": 4, **family.settings})
    truth = float64_truth(model, FEATURES)
    for share in (0.25, 0.5, 0.75):
        recompute(model, share)
        same_step(model, truth, lambda model: radix_batch(model, RadixCollator()(FEATURES)), what=share)


def test_adapters_recompute_too() -> None:
    peft = pytest.importorskip("peft", reason="pip install peft")
    model = tiny_qwen3(num_hidden_layers=4).train()
    recompute(model, 0.5)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear"))
    share_prefixes(adapted)
    assert recomputing(adapted.get_base_model()) == [0, 2]


def test_a_model_without_one_list_of_layers() -> None:
    model = tiny_model("GPT2LMHeadModel")
    recompute(model, 0.5)
    assert [block.gradient_checkpointing for block in model.transformer.h] == [True, False]
    model.transformer.h.append(torch.nn.Identity())
    recompute(model, True)
    with pytest.raises(
        UserError, match=r"activation_checkpointing 0\.5: the decoder layers of GPT2LMHeadModel are not"
    ):
        recompute(model, 0.5)
    model.supports_gradient_checkpointing = False
    with pytest.raises(UserError, match=r"activation_checkpointing: GPT2LMHeadModel has none; set it to false"):
        recompute(model, True)
