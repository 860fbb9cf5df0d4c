"""What `model.generate` does with a batch, `radixtrain.generate` does: its options, its result, its draws, in float64.

What needs another cache or other inputs is refused by name.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from radixtrain import RadixCache, generate
from radixtrain.errors import UserError
from radixtrain.verification.oracle import float64_throughout
from tests.support.batches import batch_of, with_pieces_of
from tests.support.models import tiny_model

PROMPTS = [[7, 8, 9, 10, 11, 12, 1, 2], [7, 8, 9, 10, 11, 12, 3], [30, 31, 32, 33]]
LENGTH = {"max_new_tokens": 10, "pad_token_id": 0, "eos_token_id": None}
GREEDY = {"do_sample": False}
ENDS = list(range(16, 60, 4))


def raised(scores: torch.Tensor) -> torch.Tensor:
    scores[:, 5] += 0.5
    return scores


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy, with end tokens": {**GREEDY, "eos_token_id": ENDS, "use_cache": False},
    "a kind of cache": {**GREEDY, "cache_implementation": "dynamic"},
    "a generation_config": {"generation_config": GenerationConfig(max_new_tokens=7, do_sample=False, pad_token_id=0)},
    "the length of a row": {**GREEDY, "max_new_tokens": None, "max_length": 16},
    "no length but the model's": {**GREEDY, "max_new_tokens": None},
    "several samples": {"do_sample": True, "num_return_sequences": 3, "top_k": 20, "temperature": 1.3},
    "several beams": {"num_beams": 4, "num_return_sequences": 2, "eos_token_id": ENDS, "do_sample": False},
    "beams that are drawn": {"num_beams": 3, "do_sample": True},
    "processors": {**GREEDY, "repetition_penalty": 1.3, "logits_processor": [lambda ids, scores: raised(scores)]},
    "a criterion": {**GREEDY, "stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(max_length=11)])},
    "guidance": {**GREEDY, "guidance_scale": 1.5},
    "a prompt in chunks": {**GREEDY, "prefill_chunk_size": 2},
    "a dictionary with scores": {**GREEDY, "return_dict_in_generate": True, "output_scores": True},
}


@pytest.fixture(scope="module")
def model(tiny_qwen3: Callable[..., Any]) -> Any:
    return tiny_qwen3().eval()


def both(model: Any, cache: RadixCache | None, prompts: list[list[int]] = PROMPTS, **options: Any) -> tuple[Any, Any]:
    """What `model.generate` returns, and `radixtrain.generate`, from one state of the generators."""
    torch.manual_seed(0)
    expected = model.generate(**batch_of(prompts), **options | {"prefill_chunk_size": None})  # wrong in 5.2, if padded
    torch.manual_seed(0)
    return expected, generate(model, **batch_of(prompts), cache=cache, **options)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "MistralForCausalLM"])
def test_as_model_generate(architecture: str, name: str) -> None:
    """With a cache too, which then holds prompts. Mistral's window binds."""
    model, options = tiny_model(architecture).eval(), {**LENGTH, **OPTIONS[name]}
    if "generation_config" in options:
        options = OPTIONS[name]
    for cells in (1, 512):
        with float64_throughout(model), with_pieces_of(cells):
            for cache in (None, RadixCache()):
                expected, found = both(model, cache, **options)
                if isinstance(expected, dict):
                    assert all(map(torch.allclose, found.scores, expected.scores))
                    expected, found = expected["sequences"], found["sequences"]
                assert torch.equal(found, expected)
        assert cache is not None
        assert cache.num_tokens == 7 + 3, "prompts without their last tokens, of which the second shares all"


def test_a_length_of_none_overrides_that_of_the_model() -> None:
    """The window binds only after what the model's own setting allows."""
    model = tiny_model("MistralForCausalLM").eval()
    model.generation_config.max_new_tokens = 1
    with float64_throughout(model), with_pieces_of(1):
        expected, found = both(model, None, [[7, 8], [7, 9, 3], [4]], **LENGTH | GREEDY | {"max_new_tokens": None})
    assert torch.equal(found, expected)


def test_a_streamer_gets_every_token(model: Any) -> None:
    got: list[int] = []

    class Streamer(BaseStreamer):
        def put(self, value: torch.Tensor) -> None:
            got.extend(value.flatten().tolist())

        def end(self) -> None:
            pass

    found = generate(model, **batch_of(PROMPTS[:1]), streamer=Streamer(), **GREEDY, **LENGTH)
    assert got == found[0].tolist()


def test_a_processor_may_generate(model: Any) -> None:
    def answer(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        generate(model, **batch_of(PROMPTS[:1]), **GREEDY, **LENGTH)
        return scores

    expected, found = both(model, None, PROMPTS[1:], logits_processor=[answer], **GREEDY, **LENGTH)
    assert torch.equal(found, expected)


def test_padding_is_inferred_as_by_model_generate(model: Any) -> None:
    ids = batch_of(PROMPTS)["input_ids"]
    assert torch.equal(generate(model, ids, **GREEDY, **LENGTH), model.generate(ids, **GREEDY, **LENGTH))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "images": ({"pixel_values": torch.zeros(1, 3, 4, 4)}, "pixel_values: prompts are token ids of text"),
    "a cache of transformers": ({"past_key_values": DynamicCache()}, "past_key_values: prompts are computed into"),
    "hidden states": (
        {"generation_config": GenerationConfig(output_hidden_states=True)},
        "output_hidden_states=True is not supported",
    ),
    **{
        name: ({name: value}, f"{name}=.* is not supported, because")
        for name, value in {
            "cache_implementation": "static",
            "output_attentions": True,
            "custom_generate": "transformers-community/dola",
            "trust_remote_code": True,
            "use_mtp": True,
            "assistant_model": torch.nn.Linear(1, 1),
            "assistant_early_exit": 1,
            "prompt_lookup_num_tokens": 3,
        }.items()
    },
    "no RadixCache": ({"cache": DynamicCache()}, "cache: expected a RadixCache, or None .*, got DynamicCache"),
    "padding on the right": (
        {"attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1]])},
        r"padding on the left only.*: set tokenizer.padding_side = 'left'",
    ),
    "a shorter mask": ({"attention_mask": torch.ones(2, 2)}, r"attention_mask: .* \(2, 3\), got \(2, 2\)"),
    "a mask as lists": ({"attention_mask": [[1, 1, 1]] * 2}, "attention_mask: .*, got list"),
    "lists": ({"input_ids": [[1, 2]]}, r"input_ids: expected a tensor \(B, L\) of token ids.*, got list"),
    "one prompt": ({"input_ids": torch.tensor([1, 2])}, r"got torch.int64 \(2,\)"),
    "a label": ({"input_ids": torch.tensor([[1, -100, 2]])}, r"token ids from 0 on, .*, got torch.int64 \(1, 3\)"),
    "a mask of other numbers": ({"attention_mask": torch.tensor([[1, 1, 1], [2, 2, 1]])}, "0 and then 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(tiny_qwen3: Callable[..., Any], name: str) -> None:
    given, message = REFUSED[name]
    with pytest.raises(UserError, match=message):
        generate(tiny_qwen3(vocab_size=50), **{"input_ids": torch.tensor([[1, 2, 3], [4, 5, 6]]), **given})


MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "another head": (lambda: tiny_model("Qwen3ForSequenceClassification"), "is not a causal language model"),
    "both ways": (lambda: tiny_model("BertLMHeadModel"), "BertSelfAttention of layer 0 is not causal"),
    "chunks": (lambda: tiny_model("Llama4ForCausalLM", attention_chunk_size=8), "within chunks of 8 tokens"),
    "dynamic rotary embeddings": (
        lambda: tiny_model(
            "Qwen3ForCausalLM",
            rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
            max_position_embeddings=8,
        ),
        "Qwen3ForCausalLM has dynamic rotary embeddings",
    ),
    "a table of positions": (lambda: tiny_model("GPT2LMHeadModel", n_positions=10), "has a table of 10 positions"),
}


@pytest.mark.parametrize("known", [True, False], ids=["at the start", "when it gets there"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_cannot_be_exact_is_refused_by_name(name: str, known: bool) -> None:
    """Also if only the model's own max_length says how long answers are: then at the token that is too far."""
    build, message = MODELS[name]
    length = {"max_new_tokens": 8} if known else {"max_length": 12}
    with pytest.raises(UserError, match=message) as raised_error:
        generate(build(), torch.tensor([[7, 8, 9, 1]]), do_sample=False, eos_token_id=None, **length)
    assert "dedup: false" not in str(raised_error.value), "that is for training"


@pytest.mark.usefixtures("hooks_that_may_stay", "without_the_trial")
def test_a_layer_that_does_not_attend_is_missed(tiny_qwen3: Callable[..., Any]) -> None:
    model = tiny_qwen3()
    module = model.model.layers[1].self_attn
    module.forward = wraps(module.forward)(lambda hidden_states, **rest: (hidden_states, None))
    with pytest.raises(RuntimeError, match=r"attention ran in 1 of 2 layers of Qwen3Model.*; use model\.generate"):
        generate(model, torch.tensor([[7, 8, 9]]), max_new_tokens=2)
