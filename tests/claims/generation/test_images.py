"""`generate` on prompts with images: the answers of `model.generate`, and each distinct image once in the tower.

In float64; the oracle generates one prompt at a time, without padding. The mutations at the end are mistakes that the
same check must see.
"""

import inspect
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from image_batches import IMAGE, KINDS, OF_SIZES, ROWS, Kind, Row, batch_of, letters_of
from image_rows import count_images
from tiers import cases
from tiny_models import tiny_model
from transformers.models.llava.modeling_llava import LlavaModel

from radixtrain import RadixCache, generate, score_completions
from radixtrain.errors import UserError
from radixtrain.generation.images import PromptImages
from radixtrain.images.tokens import ImageTokens
from radixtrain.images.tower import FEATURES
from radixtrain.verification.oracle import float64_throughout

pytestmark = pytest.mark.skipif(
    FEATURES not in inspect.signature(LlavaModel.forward).parameters,
    reason="this transformers does not take the features of images ready made, so such prompts are refused",
)
HYBRIDS = {"Qwen3.5", "Qwen3.5-MoE", "LFM3-VL"}  # whose state is not kept by a cache of keys and values
GREEDY = {"max_new_tokens": 5, "do_sample": False}


def expected_of(model: Any, kind: Kind, row: Row) -> tuple[list[int], torch.Tensor]:
    """The answer to one prompt, and the log-probabilities of its tokens."""
    inputs = batch_of(kind, [row])[0] if letters_of([row]) else {"input_ids": torch.tensor([row])}
    if "mm_token_type_ids" not in inspect.signature(model.forward).parameters:
        inputs.pop("mm_token_type_ids", None)
    found = model.generate(**inputs, **GREEDY, return_dict_in_generate=True, output_logits=True)
    answer = found.sequences[0, inputs["input_ids"].shape[1] :]
    return answer.tolist(), torch.cat(found.logits).log_softmax(-1).gather(-1, answer[:, None])[:, 0]


def check(kind: Kind, rows: list[Row] = ROWS, left: bool = True, **options: Any) -> Any:
    model = kind.build().eval()
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    inputs, _ = batch_of(kind, rows, left)
    images = count_images(model, has_gradients=False)
    with float64_throughout(model):
        found = generate(model, inputs, **GREEDY, **options)
        assert images == [(len({*letters_of(rows)}),) * 2], "each image once"
        for row, tokens, logprobs in zip(rows, found.token_ids, found.logprobs, strict=True):
            answer, expected = expected_of(model, kind, row)
            assert tokens == answer
            torch.testing.assert_close(torch.tensor(logprobs), expected, rtol=1e-12, atol=1e-12)
    assert found.stats.num_computed_tokens < found.stats.num_prompt_tokens
    return found


@pytest.mark.parametrize("name", cases([name for name in KINDS if name not in HYBRIDS], ["LLaVA", "Qwen3-VL"]))
def test_the_answers_are_those_of_the_model(name: str) -> None:
    check(KINDS[name])


@pytest.mark.parametrize("name", cases(["Mistral 3", "Gemma 4", "Qwen2.5-VL"], ["Qwen2.5-VL"]))
def test_images_of_different_sizes(name: str) -> None:
    check(KINDS[name], OF_SIZES, left=False)


def test_samples_of_a_prompt_fork_from_one_prefill() -> None:
    model = KINDS["Qwen3-VL"].build().eval()
    inputs, _ = batch_of(KINDS["Qwen3-VL"], [[7, "A", 8], [7, "B", 8]])
    inputs["pixel_values"] = inputs["pixel_values"].float()
    options = {"max_new_tokens": 5, "do_sample": True, "seed": 0, "num_return_sequences": 8}
    images = count_images(model, has_gradients=False)
    found = generate(model, inputs, **options)
    assert len(found) == 16 and len({tuple(ids) for ids in found.token_ids}) > 8 and images == [(2, 2)]
    assert found.stats.num_computed_tokens == 2 + 2 * (4 + 1)


@pytest.mark.parametrize(
    ("name", "change", "options", "message"),
    [
        ("LLaVA", {}, {"cache": RadixCache()}, "cache: a RadixCache knows tokens by their ids; leave it out"),
        ("LLaVA", {"input_ids": [[IMAGE] * 4]}, {}, "expected tensors"),
        ("LLaVA", {"input_ids": torch.tensor([[7, IMAGE, 8]])}, {}, "1 placeholders of images for 4 features"),
        ("LLaVA", {"token_type_ids": torch.ones(1, 6)}, {}, "token_type_ids is not supported"),
        ("Qwen3-VL", {"mm_token_type_ids": None}, {}, "images without mm_token_type_ids"),
        ("Qwen3.5", {}, {}, "recurrent layers, whose state is not kept by a cache"),
    ],
    ids=["cache", "lists", "placeholders", "types", "no types", "hybrid"],
)
def test_what_is_refused(name: str, change: dict[str, Any], options: dict[str, Any], message: str) -> None:
    inputs, _ = batch_of(KINDS[name], [[7, "A", 8]])
    inputs = {**inputs, "pixel_values": inputs["pixel_values"].float(), **change}
    if "input_ids" in change:
        inputs.pop("attention_mask")
    with pytest.raises(UserError, match=message):
        generate(KINDS[name].build().eval(), inputs, max_new_tokens=2, **options)


@pytest.mark.parametrize("name", ["Gemma 3", "Gemma 4, in both directions"])
def test_images_that_attend_in_both_directions(name: str) -> None:
    """Equal images of two prompts are adjacent in a pass, and a pass may have only the last token of a prompt."""
    check(KINDS[name], [[7, "A", "B"], [7, "A", "B", 8], [7, "A"], ["A"], ["A", 8], [7, "B"]])


@pytest.mark.parametrize("name", ["Gemma 3", "Gemma 4, in both directions"])
def test_images_after_tokens_of_an_earlier_pass(name: str) -> None:
    """A pass of fewer tokens than a window, and than the prompt."""
    before = [7 + place % 40 for place in range(200)]
    found = check(KINDS[name], [[*before, letter, 8] for letter in "ABCD"], batch_size=1)
    assert found.stats.num_cached_tokens == 3 * len(before)


BACKWARDS = {"text_config": {"use_bidirectional_attention": False}}  # and its prompts in both, by types of zeros


@pytest.mark.parametrize(
    ("model_class", "settings", "is_read"),
    [
        ("PaliGemmaForConditionalGeneration", BACKWARDS, True),
        ("GPT2LMHeadModel", {}, True),
        ("Gemma3ForConditionalGeneration", {}, False),
        ("Qwen3ForCausalLM", {}, False),
    ],
)
def test_types_of_zeros(model_class: str, settings: dict[str, Any], is_read: bool) -> None:
    """A processor returns them for text; most models compute the same without."""
    model = tiny_model(model_class, **settings).eval()
    prompts = {"input_ids": torch.tensor([[7, 8, 9]]), "token_type_ids": torch.zeros(1, 3, dtype=torch.int64)}
    for call in (lambda: generate(model, prompts, max_new_tokens=2), lambda: score_completions(model, prompts, [[8]])):
        with pytest.raises(UserError, match="token_type_ids of zeros changes") if is_read else nullcontext():
            call()


# Mistakes.

read, rows_at = PromptImages.read, ImageTokens.rows_at


def answers_at_their_places(*args: Any) -> PromptImages:
    """Positions after a prompt count its tokens."""
    found = read(*args)
    found.shifts = np.zeros_like(found.shifts)
    return found


MISTAKES = {
    "keys are ids": (ImageTokens, "codes", property(lambda self: self.ids)),
    "shifts": (PromptImages, "read", answers_at_their_places),
    "positions along each row": (ImageTokens, "axes_at", lambda self, tokens: None),
    "the next row of the features": (ImageTokens, "rows_at", lambda self, tokens: np.roll(rows_at(self, tokens), 1)),
}


@pytest.mark.parametrize(("owner", "name", "mistake"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_seen(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, mistake: Any) -> None:
    monkeypatch.setattr(owner, name, mistake)
    with pytest.raises((AssertionError, IndexError)):
        check(KINDS["Qwen3-VL"])
