"""Greedy answers are those of `model.generate`, row by row, for every family that generates; the others are refused.

Prompts are nested, one is a prefix of others, and they are longer than every sliding window. There are more of them
than lanes, so that lanes are used again. `make test` tries a dozen families, `make test-full` all.

Logits of float32 are within 1e-5 of `generate`'s. Where logits are so large that this is less than 16 of their
roundings (MiniCPM3's are up to 63), or where `generate` is itself further than that from the float64 logits (Gemma 3n),
the bar is 16 roundings of the largest one, or twice as far as `generate` is. Two tokens may differ only if the logits
of both are closer than this bar; what follows such a token is another text, and is not compared. In float64 logits are
within 1e-12 of an ordinary forward pass over the finished text.
"""

import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from answers import Answered, answered, finished_logits, texts_of, with_pieces_of, worst_errors
from families import CORE, CORE_MULTIMODAL, MULTIMODAL, REST, Family
from torch import Tensor

from radixtrain.errors import UserError
from radixtrain.verification.oracle import float64_throughout

ALL = os.environ.get("RADIXTRAIN_FAMILIES") == "all"
IN_FULL = pytest.mark.skipif(not ALL, reason="make test-full runs this family (RADIXTRAIN_FAMILIES=all)")
QUICK = {
    "text": "DeepSeek-V3, Falcon-H1, Gemma 2, Gemma 3n, GPT-2, gpt-oss, Llama, Mistral, Phi-3, Qwen3, Qwen3-MoE",
    "multimodal": "Gemma 3, Qwen2.5-VL",
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
BAR, EXACT = 1e-5, 1e-12
WITHOUT_CACHE = ["Moshi"]  # `generate` with its cache gives other tokens than without it, once the window binds
# `generate` reads an id that the default configuration of these does not have.
MISSING = {"Qwen2.5-Omni": {"vision_start_token_id": 47}, "Qwen3-Omni-MoE": {"vision_start_token_id": 47}}
# Why a family is refused: patterns of the error, which names the layer or the class.
REASONS = [
    *("recurrent layers", "has a .*, whose state", "is '.*'", "attention code of its own", "AttentionInterface"),
    *("does not take position_ids", "counts positions from padding_idx", "not a plain decoder"),
    *("does not predict next tokens", "attends in both directions", "within chunks", "dynamic mask"),
    *("no head that predicts next tokens", "a whole language model with a head of its own"),
    "encoder_no_repeat_ngram_size",  # in the configuration of Blenderbot
]


def tried(group: str, families: list[Family]) -> list[Any]:
    quick = re.split(r",\s+", QUICK[group])
    return [
        pytest.param(family, id=f"{group}: {family.name}", marks=() if family.name in quick else IN_FULL)
        for family in families
    ]


@pytest.mark.parametrize("family", [*tried("text", CORE + REST), *tried("multimodal", CORE_MULTIMODAL + MULTIMODAL)])
def test_equal_or_refused(family: Family, print_after: Callable[[str, str], None]) -> None:
    model = family.build().eval()
    options = {"max_new_tokens": 6, "batch_size": 3, "do_sample": False}
    with with_pieces_of(4):
        try:
            found = answered(model, PROMPTS, **options)
        except UserError as error:
            assert any(re.search(reason, str(error)) for reason in REASONS), str(error)
            print_after("generation: families", f"{family.name}: refused: {error}")
            return
        with float64_throughout(model):
            exact = answered(model, PROMPTS, **options)
            in_float64, of_logprobs = worst_errors(model, exact)
            truth = truths(model, exact)
    assert in_float64 <= EXACT and of_logprobs <= EXACT, (in_float64, of_logprobs)
    for name, token in MISSING.get(family.name, {}).items():
        setattr(model.config, name, token)
    in_float32, num_compared = compare_with_generate(model, found, truth, family.name not in WITHOUT_CACHE)
    assert num_compared >= 0.9 * sum(map(len, found.generated.token_ids)), "too many ties to prove anything"
    print_after("generation: families", f"{family.name}: float64 {in_float64:.1e}, float32 {in_float32:.1e}")


def compare_with_generate(
    model: Any, found: Answered, truth: dict[tuple[int, ...], Tensor], use_cache: bool
) -> tuple[float, int]:
    """The largest difference of a float32 logit from `generate`'s, and how many tokens were compared."""
    worst, num_compared = 0.0, 0
    for prompt, answer in texts_of(found.generated):
        tokens, logits = by_generate(model, prompt, use_cache)
        for step, (token, theirs) in enumerate(zip(tokens, logits, strict=True)):
            text = tuple(prompt + tokens[:step])
            theirs_off = (theirs - truth[text]).abs().max().item() if text in truth else 0.0
            rounding = torch.finfo(theirs.dtype).eps * theirs.abs().max().item()
            bar, off = max(BAR, 16 * rounding, 2 * theirs_off), (found.logits[text] - theirs).abs().max().item()
            assert off <= bar, f"a logit after {text} differs by {off:.1e}, the bar is {bar:.1e}"
            worst, num_compared = max(worst, off), num_compared + 1
            if answer[step] != token:
                gap = (theirs[token] - theirs[answer[step]]).item()
                assert gap <= 2 * bar, f"after {text}: {answer[step]}, not {token}, whose logit is {gap:.1e} higher"
                break
        else:
            assert answer == tokens
    return worst, num_compared


def by_generate(model: Any, prompt: list[int], use_cache: bool) -> tuple[list[int], list[Tensor]]:
    """Tokens of `model.generate` for one prompt, and the logits of each."""
    ids = torch.tensor([prompt])
    fixed = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0, "use_cache": use_cache}
    result = model.generate(
        input_ids=ids, max_new_tokens=6, do_sample=False, output_logits=True, return_dict_in_generate=True, **fixed
    )
    return result.sequences[0, len(prompt) :].tolist(), [each[0] for each in result.logits]


def truths(model: Any, exact: Answered) -> dict[tuple[int, ...], Tensor]:
    """The float64 logits after each text."""
    texts = texts_of(exact.generated)
    return {
        tuple(prompt + answer[:step]): row
        for (prompt, answer), logits in zip(texts, finished_logits(model, texts), strict=True)
        for step, row in enumerate(logits)
    }


def test_the_prompts_bite() -> None:
    """Windows are shorter than the prompts, prompts share kept rows, and lanes are used again."""
    model = next(family for family in CORE if family.name == "Mistral").build().eval()
    assert model.config.sliding_window < min(len(prompt) for prompt in PROMPTS[:-1])
    with with_pieces_of(4):
        stats = answered(model, PROMPTS, max_new_tokens=6, batch_size=3, do_sample=False).generated.stats
    assert stats.num_computed_tokens + stats.num_cached_tokens < stats.num_prompt_tokens
    assert stats.num_cached_tokens > 0, "no later prompt continued what an earlier one had computed"


ADAPTERS: dict[str, dict[str, Any]] = {
    "layers": {"target_modules": "all-linear"},
    "embeddings": {"target_modules": ["embed_tokens", "q_proj"]},
    "new tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [7, 8]},
    "a copy of the embeddings": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
}


@pytest.mark.parametrize("where", ADAPTERS)
def test_adapters(where: str) -> None:
    """Wrapped by PEFT, its embeddings too."""
    peft = pytest.importorskip("peft", reason="pip install 'radixtrain[peft]'")
    base = next(family for family in CORE if family.name == "Qwen3").build()
    model = peft.get_peft_model(base, peft.LoraConfig(init_lora_weights=False, **ADAPTERS[where])).eval()
    with with_pieces_of(4):
        found = answered(model, PROMPTS, max_new_tokens=6, batch_size=3, do_sample=False)
    num_tokens = sum(map(len, found.generated.token_ids))
    assert compare_with_generate(model, found, {}, use_cache=True)[1] >= 0.9 * num_tokens
