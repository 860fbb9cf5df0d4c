"""Greedy answers are those of `model.generate`, row by row, for every family that generates; the others are refused.

Prompts are nested, one is a prefix of others, and they are longer than every sliding window; some windows begin to bind
while tokens are generated. `make test` tries a family of each mechanism, `make test-full` all.

All in float64, where two ways to compute a logit differ by a few units of 1e-15 for each size of the largest one:
tokens are equal, and logits are within EXACT of those that `generate` computes for the prompt by itself. In float32
they are as close to them as another attention of Hugging Face is.
"""

import re
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch

from radixtrain import RadixCache
from radixtrain.errors import UserError
from radixtrain.verification.equivalence import TENSOR_FACTOR
from radixtrain.verification.oracle import float64_throughout
from radixtrain.versions import transformers_is_before
from tests.support import cases
from tests.support.batches import answers_of, by_generate, generated, logits_by_the_model, with_pieces_of, worst_logit
from tests.support.models import CORE, CORE_MULTIMODAL, MULTIMODAL, REST, Family, skip_if_it_fails_by_itself, tiny_model

# A plain one, windows, windows with sinks and experts, a soft-cap, latent attention, layers with the keys of others,
# learned positions; one that is refused; one of several modalities.
QUICK = [
    *("text: Qwen3", "text: Mistral", "text: gpt-oss", "text: Gemma 2", "text: DeepSeek-V3", "text: Gemma 3n"),
    *("text: GPT-2", "text: Falcon-H1", "multimodal: Gemma 3"),
]
FAMILIES = {
    f"{group}: {family.name}": family
    for group, families in (("text", CORE + REST), ("multimodal", CORE_MULTIMODAL + MULTIMODAL))
    for family in families
}
PROMPTS = [
    [7, 8, 9, 10, 11, 12, 1, 2, 3],
    [7, 8, 9, 10, 11, 12, 1, 4],
    [7, 8, 9, 10, 11, 12, 5],
    [7, 8, 9, 6, 6, 6, 13, 14],
    [30, 31, 32, 33, 34, 35, 36],
    [7, 8, 9, 10, 11, 12],
    [5],
]
EXACT = 1e-12  # for each size of the largest logit, but at least of 1
LENGTH = {"max_new_tokens": 6, "eos_token_id": None}
# `generate` with its cache gives other tokens than without it, once the window binds.
WITHOUT_CACHE = ["Moshi", *(["Gemma 3n"] if transformers_is_before("5.6") else [])]
# Why a family is refused: patterns of the error, which names the layer or the class.
REASONS = [
    *("recurrent layers", "computes a token from others", "cannot be tried on a few tokens", "its model made"),
    *("has not made", "a mask of its own", "position_bias", "sparse attention"),
    *("does not take position_ids", "counts positions from padding_idx", "not a plain decoder"),
    *("does not predict next tokens", "is not causal", "within chunks", "dynamic mask"),
    *("no head that predicts next tokens", "a whole language model with a head of its own"),
]


@pytest.mark.parametrize("name", cases(FAMILIES, QUICK))
def test_equal_or_refused(name: str, print_after: Callable[[str, str], None]) -> None:
    """Twice with one cache: the second time prompts come from it."""
    family: Family = FAMILIES[name]
    model, cache = family.build().eval(), RadixCache()
    with float64_throughout(model), with_pieces_of(4, max_rows=12):
        try:
            found = generated(model, PROMPTS, cache=cache, **LENGTH)
        except UserError as error:
            assert any(re.search(reason, str(error)) for reason in REASONS), str(error)
            print_after("generation: families", f"{name}: refused: {error}")
            return
        except AttributeError as error:
            skip_if_it_fails_by_itself(family, error)
        expected = by_generate(model, PROMPTS, use_cache=family.name not in WITHOUT_CACHE, **LENGTH)
        worst = compare(found, expected, PROMPTS)
        known = cache.counters.num_hits
        texts = [
            [*prompt, *answer, 3] for prompt, answer in zip(PROMPTS, answers_of(found.sequences, PROMPTS), strict=True)
        ]
        continued = generated(model, [*texts[:3], PROMPTS[0]], cache=cache, **LENGTH)
        assert cache.counters.num_hits - known == sum(map(len, PROMPTS[:3])) - 3 + len(PROMPTS[0]) - 1
        again = by_generate(model, [*texts[:3], PROMPTS[0]], use_cache=family.name not in WITHOUT_CACHE, **LENGTH)
        worst = max(worst, compare(continued, again, [*texts[:3], PROMPTS[0]]))
    assert worst <= EXACT
    print_after("generation: families", f"{name}: {worst:.1e}")


def compare(found: Any, expected: list[Any], prompts: list[list[int]]) -> float:
    """Tokens are equal; returns the largest difference of a logit."""
    answers = [each.sequences[0, len(prompt) :].tolist() for each, prompt in zip(expected, prompts, strict=True)]
    assert answers_of(found.sequences, prompts) == answers
    return worst_logit(found, expected)


@pytest.mark.parametrize("name", cases(["text: Mistral", "text: Qwen3", "text: DeepSeek-V3"], ["text: Mistral"]))
def test_in_float32(name: str) -> None:
    """On its own answers, which another processor may give other tokens."""
    model = FAMILIES[name].build().eval()
    eager = deepcopy(model)
    eager.set_attn_implementation("eager")
    with with_pieces_of(4):
        found = generated(model, PROMPTS, **LENGTH)
    texts = [[*prompt, *answer] for prompt, answer in zip(PROMPTS, answers_of(found.sequences, PROMPTS), strict=True)]
    ordinary, other = (torch.cat([logits_by_the_model(each, ids)[-7:-1] for ids in texts]) for each in (model, eager))
    ours = torch.stack([step[row] for row in range(len(PROMPTS)) for step in found.logits])
    error, noise = (float((each - ordinary).norm()) for each in (ours, other))
    # One sample of the noise may be small by luck.
    assert error <= TENSOR_FACTOR * noise + torch.finfo(torch.float32).eps * float(ordinary.norm()), (error, noise)


ADAPTERS: dict[str, dict[str, Any]] = {
    "layers": {"target_modules": "all-linear"},
    "embeddings": {"target_modules": ["embed_tokens", "q_proj"]},
    "new tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [7, 8]},
    "a copy of the embeddings": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
}


@pytest.mark.parametrize("where", cases(ADAPTERS, ["new tokens"]))
def test_adapters(where: str) -> None:
    """Wrapped by PEFT, its embeddings too."""
    peft = pytest.importorskip("peft", reason="pip install peft")
    base = tiny_model("Qwen3ForCausalLM")
    model = peft.get_peft_model(base, peft.LoraConfig(init_lora_weights=False, **ADAPTERS[where])).eval()
    with float64_throughout(model):
        found, expected = generated(model, PROMPTS, **LENGTH), by_generate(model, PROMPTS, **LENGTH)
        assert compare(found, expected, PROMPTS) <= EXACT * 10
