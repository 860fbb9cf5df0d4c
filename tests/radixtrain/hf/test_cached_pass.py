"""A pass of `generate` through a model: what reaches its head, what is refused, a layer that is missed.

That all is set back afterwards, after errors too, is in tests/claims/generation/test_training_after.py.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
import torch
from tiny_models import tiny_model

from radixtrain import RadixCache, generate
from radixtrain.errors import UserError
from radixtrain.hf.backbone import parts_of

PROMPT = [7, 8, 9, 10, 11]
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}


def answer(model: Any, num_tokens: int = 2, **options: Any) -> list[int]:
    settings = {"max_new_tokens": num_tokens, "do_sample": False, "eos_token_id": None}
    return generate(model, [PROMPT], **settings, **options).token_ids[0]


def test_modes_that_differ_come_back_one_by_one(tiny_qwen3: Callable[..., Any]) -> None:
    """A user who froze one part keeps it in evaluation mode."""
    model = tiny_qwen3().train()
    model.model.layers[0].eval()
    before = [each.training for each in model.modules()]
    answer(model)
    assert [each.training for each in model.modules()] == before and True in before and False in before


@pytest.mark.usefixtures("hooks_that_may_stay")
def test_only_the_rows_that_are_wanted_reach_the_head(tiny_qwen3: Callable[..., Any]) -> None:
    model, seen = tiny_qwen3(), []
    model.lm_head.register_forward_pre_hook(lambda head, args: seen.append(args[0].shape))
    answer(model)
    assert seen[-2:] == [(1, 1, 32)] * 2 and len(seen) == 5, "after three passes of the probe"


def test_under_autocast_rows_are_stored_in_its_dtype(tiny_qwen3: Callable[..., Any]) -> None:
    cache = RadixCache()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        answer(tiny_qwen3(), cache=cache)
    assert {rows.dtype for stored in cache.store.calls for rows in stored} == {torch.bfloat16}


class TestMissedLayers:
    MESSAGE = "attention ran in 1 of 2 layers of Qwen3Model: the others did not see the stored rows; use model.generate"

    @pytest.mark.usefixtures("hooks_that_may_stay")
    def test_a_layer_that_does_not_run(self, tiny_qwen3: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("radixtrain.hf.cached_pass.why_inexact", lambda *_, **__: None)
        model = tiny_qwen3()
        module = model.model.layers[1].self_attn
        module.forward = wraps(module.forward)(lambda hidden_states, **rest: (hidden_states, None))
        with pytest.raises(RuntimeError, match=self.MESSAGE):
            answer(model)


class TestRefused:
    """By name, with what to do instead. Other models and options: tests/radixtrain/generation/test_generate.py."""

    def refusal(self, model: Any, num_tokens: int = 2) -> str:
        with pytest.raises(UserError) as raised:
            answer(model, num_tokens)
        assert "dedup: false" not in str(raised.value), "that is for training"
        return str(raised.value)

    def test_another_head(self) -> None:
        message = self.refusal(tiny_model("Qwen3ForSequenceClassification"))
        assert "Qwen3ForSequenceClassification is not a causal language model" in message

    def test_rotary_embeddings_that_change(self, tiny_qwen3: Callable[..., Any]) -> None:
        model = tiny_qwen3(rope_parameters=DYNAMIC, max_position_embeddings=8)
        assert len(answer(model, 4)) == 4
        assert "Qwen3Model has dynamic rotary embeddings, " in self.refusal(model, 5)

    def test_chunks(self) -> None:
        model = tiny_model("Llama4ForCausalLM", attention_chunk_size=8)
        assert len(answer(model, 4)) == 4
        assert "Llama4TextModel attends within chunks of 8 tokens" in self.refusal(model, 5)

    def test_what_a_layer_finds_in_its_pass_is_said_in_words_of_generation(
        self, tiny_qwen3: Callable[..., Any]
    ) -> None:
        model = tiny_qwen3(attn_implementation="eager")
        parts_of(model).decoder.layers[0].self_attn.sinks = 1.0  # and it does not hand them over
        assert "would leave it out; use model.generate" in self.refusal(model)

    def test_a_layer_that_is_not_causal(self) -> None:
        assert "BertSelfAttention of layer 0 is not causal" in self.refusal(tiny_model("BertLMHeadModel"))
