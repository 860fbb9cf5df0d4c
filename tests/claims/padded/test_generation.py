"""A model of `share_prefixes` generates as before, between training steps too: the hooks do not engage.

While it generates, its calls are the ordinary ones bit for bit, so tokens and scores are compared with `torch.equal`.
The weights of a model that trained on shared batches differ from the ordinary ones by rounding, so then only the tokens
are compared, which float64 draws far from every tie.
"""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch

from radixtrain import restore_model, share_prefixes, sharing_report
from radixtrain.verification.oracle import float64_arithmetic
from tests.support import FULL, cases
from tests.support.models import CORE
from tests.support.steps import PROMPTS, assert_generates_the_same, generated

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 3},
    "without a cache": {"use_cache": False},
    "beams without a cache": {"num_beams": 2, "use_cache": False},
    "a static cache": {"cache_implementation": "static"},
    "chunks of the prompt": {"prefill_chunk_size": 2},
    "prompt lookup": {"prompt_lookup_num_tokens": 2},
}


@pytest.mark.parametrize("way", cases(WAYS, ["greedy", "sampled", "beams without a cache"]))
def test_ways_to_generate(tiny_qwen3: Callable[..., Any], way: str) -> None:
    """In training mode too, in which some trainers sample."""
    for training in (True, False):
        assert_generates_the_same(tiny_qwen3().train(training), **WAYS[way])


@FULL
@pytest.mark.parametrize("name", ["DeepSeek-V3", "Gemma 2", "GPT-2", "gpt-oss", "Mistral", "OPT", "Qwen3-MoE"])
def test_families(name: str) -> None:
    model = next(family for family in CORE if family.name == name).build()
    for use_cache in (True, False):
        assert_generates_the_same(restore_model(model), use_cache=use_cache)


@pytest.mark.parametrize("checkpointing", cases([False, True], [True]))
def test_between_training_steps(tiny_qwen3: Callable[..., Any], checkpointing: bool) -> None:
    """Three steps, each after a sample, as in reinforcement learning: the tokens are those of the untouched model."""
    ordinary = tiny_qwen3().double().train()
    shared = share_prefixes(deepcopy(ordinary))
    if checkpointing:
        for model in (ordinary, shared):
            model.gradient_checkpointing_enable({"use_reentrant": False})
    with float64_arithmetic():
        histories = [sampled_and_trained(model) for model in (ordinary, shared)]
    for plain, other in zip(*histories, strict=True):
        assert torch.equal(plain, other)
    assert not torch.equal(histories[0][0], histories[0][-1]), "no step changed what is sampled"
    report = sharing_report(shared)
    assert report.num_shared == 3 and report.compression_ratio > 1.4, report


def sampled_and_trained(model: Any) -> list[torch.Tensor]:
    """The tokens that are sampled before each of three steps on them, and after the last."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    history = [generated(model, do_sample=True, num_return_sequences=4).sequences]
    for _ in range(3):
        ids = history[-1]
        mask = torch.nn.functional.pad(PROMPTS["attention_mask"].repeat_interleave(4, 0), (0, 8), value=1)
        labels = ids.masked_fill(mask == 0, -100)
        labels[:, :6] = -100
        model(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append(generated(model, do_sample=True, num_return_sequences=4).sequences)
    return history
