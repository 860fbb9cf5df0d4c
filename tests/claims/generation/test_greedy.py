"""Greedy answers are those of `model.generate`, row by row, for every family that generates; the others are refused.

Prompts are nested, one is a prefix of others, and they are longer than every sliding window. There are more of them
than lanes, so that lanes are used again. `make test` tries a family of each mechanism, `make test-full` all.

All in float64, where two ways to compute a logit differ by a few units of 1e-15 for each size of the largest one:
tokens are equal, and logits are within EXACT of `generate`'s and of an ordinary forward pass over the finished text.
In float32 they are as close to an ordinary forward pass as another attention of Hugging Face is.
"""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from answers import Answered, answered, finished_logits, texts_of, with_pieces_of, worst_errors
from families import CORE, CORE_MULTIMODAL, MULTIMODAL, REST, Family, skip_if_it_fails_by_itself
from noise import assert_within_noise
from tiers import cases
from tiny_models import tiny_model

from radixtrain.errors import UserError
from radixtrain.verification.oracle import float64_throughout
from radixtrain.versions import transformers_is_before

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
# `generate` with its cache gives other tokens than without it, once the window binds.
WITHOUT_CACHE = ["Moshi", *(["Gemma 3n"] if transformers_is_before("5.6") else [])]
# Why a family is refused: patterns of the error, which names the layer or the class.
REASONS = [
    *("recurrent layers", "computes a token from others", "cannot be tried on a few tokens", "its model made"),
    *("has not made", "a mask of its own", "position_bias", "sparse attention"),
    *("does not take position_ids", "counts positions from padding_idx", "not a plain decoder"),
    *("does not predict next tokens", "is not causal", "within chunks", "dynamic mask"),
    *("no head that predicts next tokens", "a whole language model with a head of its own"),
    "encoder_no_repeat_ngram_size",  # in the configuration of Blenderbot
]


def answers(model: Any) -> Answered:
    with with_pieces_of(4):
        return answered(model, PROMPTS, max_new_tokens=6, batch_size=3, do_sample=False)


@pytest.mark.parametrize("name", cases(FAMILIES, QUICK))
def test_equal_or_refused(name: str, print_after: Callable[[str, str], None]) -> None:
    family: Family = FAMILIES[name]
    model = family.build().eval()
    with float64_throughout(model):
        try:
            found = answers(model)
        except UserError as error:
            assert any(re.search(reason, str(error)) for reason in REASONS), str(error)
            print_after("generation: families", f"{name}: refused: {error}")
            return
        except AttributeError as error:
            skip_if_it_fails_by_itself(family, error)
        largest = max(1.0, *(each.abs().max().item() for each in found.logits.values()))
        from_whole_texts = max(worst_errors(model, found)) / largest
        from_generate = compare_with_generate(model, found, family.name not in WITHOUT_CACHE) / largest
    assert from_whole_texts <= EXACT
    assert from_generate <= EXACT
    print_after("generation: families", f"{name}: {from_whole_texts:.1e}, from generate {from_generate:.1e}")


def compare_with_generate(model: Any, found: Answered, use_cache: bool = True) -> float:
    """The largest difference of a logit from `model.generate`'s; its tokens are equal."""
    worst = 0.0
    for prompt, answer in texts_of(found.generated):
        ids = torch.tensor([prompt])
        fixed = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0, "use_cache": use_cache}
        result = model.generate(
            input_ids=ids, max_new_tokens=6, do_sample=False, output_logits=True, return_dict_in_generate=True, **fixed
        )
        assert answer == result.sequences[0, len(prompt) :].tolist(), prompt
        for step, (theirs,) in enumerate(result.logits):
            ours = found.logits[tuple(prompt + answer[:step])]
            worst = max(worst, (ours - theirs).abs().max().item())
    return worst


@pytest.mark.parametrize("name", cases(["text: Mistral", "text: Qwen3", "text: DeepSeek-V3"], ["text: Mistral"]))
def test_in_float32(name: str) -> None:
    """On its own answers, which another processor may give other tokens."""
    model = FAMILIES[name].build().eval()
    found = answers(model)
    texts = texts_of(found.generated)
    ours = [found.logits[tuple(prompt + answer[:step])] for prompt, answer in texts for step in range(len(answer))]
    ordinary = torch.cat(finished_logits(model, texts))
    model.set_attn_implementation("eager")
    assert_within_noise(torch.stack(ours), ordinary, torch.cat(finished_logits(model, texts)), name)


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
        assert compare_with_generate(model, answers(model)) <= EXACT * 10
