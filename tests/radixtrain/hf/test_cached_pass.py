"""A pass of generation through a model: what is set and set back, what is refused, a layer that is missed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from tiers import cases
from tiny_models import tiny_model
from torch import Tensor, nn

from radixtrain import prepare_model, share_prefixes
from radixtrain.errors import UserError
from radixtrain.generation.store import KeyValueStore, SlotPool
from radixtrain.hf.backbone import parts_of
from radixtrain.hf.cached_pass import StoredPasses, on_stored_rows
from radixtrain.tree.cached_layout import CachedLayout, Paths
from radixtrain.tree.layout import TreeLayout
from radixtrain.tree.plan import build_prefix_plan
from radixtrain.verification.oracle import float64_throughout

PROMPT = [7, 8, 9, 10, 11]
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}


def with_lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    settings = {"target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.5, "init_lora_weights": False}
    return get_peft_model(model, LoraConfig(r=4, **settings))


# How users hand a model over, and its attention inside and outside.
KINDS: dict[str, tuple[Callable[[Any], Any], dict[str, Any], str, str]] = {
    "plain": (lambda model: model, {}, "radix", "sdpa"),
    "eager": (lambda model: model, {"attn_implementation": "eager"}, "radix_eager", "eager"),
    "prepared": (prepare_model, {}, "radix", "radix"),
    "share_prefixes": (share_prefixes, {}, "radix", "radix"),
    "PEFT": (with_lora, {}, "radix", "sdpa"),
    "PEFT, prepared": (lambda model: with_lora(prepare_model(model)), {}, "radix", "radix"),
}
kinds = pytest.mark.parametrize("kind", cases(KINDS, quick=["plain", "prepared", "PEFT"]))


def built(tiny_qwen3: Callable[..., Any], kind: str) -> Any:
    wrap, changes, _, _ = KINDS[kind]
    return wrap(tiny_qwen3(**changes)).train()


def state(model: Any) -> tuple[Any, ...]:
    """All that a pass could leave changed."""
    config = parts_of(model).decoder.config
    hooks = [(len(each._forward_hooks), len(each._forward_pre_hooks)) for each in model.modules()]
    modes = [each.training for each in model.modules()]
    return config._attn_implementation, hooks, modes, torch.is_grad_enabled()


@contextmanager
def entered(model: Any, kernel: str = "auto", longest: int = 10) -> Iterator[StoredPasses]:
    parts, pool = parts_of(model), SlotPool()
    pool.allocate(16)
    with on_stored_rows(model, parts, kernel, longest):
        yield StoredPasses(parts, KeyValueStore(pool))


def logits(passes: StoredPasses, ids: list[int] = PROMPT) -> Tensor:
    """Of the last two tokens of one prompt, whose rows go to the first slots."""
    plan, slots = build_prefix_plan(ids, [0, len(ids)]), np.arange(len(ids))
    layout = CachedLayout(
        num_rows=len(ids),
        max_seqlen=len(ids),
        written_rows=None,
        slots=torch.from_numpy(slots),
        shared=(),
        paths=Paths(np.array([0, len(ids)]), lambda run: slots),
        prompts=TreeLayout.from_plan(plan),
    )
    places = torch.arange(len(ids))
    return passes.logits(torch.tensor(ids), places, places[-2:], layout)


class TestSetAndRestored:
    """After errors too: tests/claims/generation/test_training_after.py."""

    @kinds
    def test_after_a_pass(self, tiny_qwen3: Callable[..., Any], kind: str) -> None:
        model = built(tiny_qwen3, kind)
        before = state(model)
        with float64_throughout(model):
            with entered(model) as passes:
                assert parts_of(model).decoder.config._attn_implementation == KINDS[kind][2]
                assert not any(each.training for each in model.modules()) and not torch.is_grad_enabled()
                found = logits(passes)
            assert state(model) == before and before[0] == KINDS[kind][3]
            assert found.requires_grad is False and found.shape == (2, 50)
            with torch.no_grad():
                ordinary = model.eval()(input_ids=torch.tensor([PROMPT]), use_cache=False).logits[0, -2:]
        torch.testing.assert_close(found, ordinary, rtol=1e-12, atol=1e-12)

    def test_modes_that_differ_come_back_one_by_one(self, tiny_qwen3: Callable[..., Any]) -> None:
        """A user who froze one part keeps it in evaluation mode."""
        model = tiny_qwen3().train()
        model.model.layers[0].eval()
        before = state(model)
        with entered(model) as passes:
            logits(passes)
        assert state(model) == before and True in before[2] and False in before[2]


class TestStoredRows:
    def test_every_layer_stores_keys_and_values(self, tiny_qwen3: Callable[..., Any]) -> None:
        with entered(tiny_qwen3().double()) as passes:
            logits(passes)
            assert [key.shape for key, _ in passes.store.calls] == [(16, 2, 8)] * 2  # type: ignore[attr-defined]
            filled = passes.store.calls[1][1].abs().sum((1, 2)) > 0  # type: ignore[attr-defined]
        assert filled.tolist() == [True] * 5 + [False] * 11
        assert passes.num_layers == 2 and passes.device == torch.device("cpu")

    def test_only_the_rows_that_are_wanted_reach_the_head(self, tiny_qwen3: Callable[..., Any]) -> None:
        model, seen = tiny_qwen3(), []
        model.lm_head.register_forward_pre_hook(lambda head, args: seen.append(args[0].shape))
        with entered(model) as passes:
            logits(passes)
        assert seen == [(1, 2, 32)]

    def test_under_autocast_rows_are_stored_in_its_dtype(self, tiny_qwen3: Callable[..., Any]) -> None:
        with entered(tiny_qwen3()) as passes, torch.autocast("cpu", dtype=torch.bfloat16):
            logits(passes)
            assert {rows.dtype for stored in passes.store.calls for rows in stored} == {torch.bfloat16}  # type: ignore[attr-defined]


class TestMissedLayers:
    MESSAGE = "attention ran in 1 of 2 layers of Qwen3Model: the others did not see the stored rows; use model.generate"

    def test_a_layer_that_does_not_run(self, tiny_qwen3: Callable[..., Any]) -> None:
        model = tiny_qwen3()
        model.model.layers[1].self_attn.forward = lambda hidden_states, **rest: (hidden_states, None)
        with entered(model) as passes, pytest.raises(RuntimeError, match=self.MESSAGE):
            logits(passes)

    def test_layers_that_were_cut_off(self, tiny_qwen3: Callable[..., Any]) -> None:
        model = tiny_qwen3()
        with entered(model) as passes:
            model.model.config.num_hidden_layers = 1
            with pytest.raises(RuntimeError, match=self.MESSAGE):
                logits(passes)


class TestRefused:
    """Before anything is computed, by name, with what to do instead."""

    def refusal(self, model: nn.Module, **options: Any) -> str:
        with pytest.raises(UserError) as raised, entered(model, **options):
            pass
        assert "dedup: false" not in str(raised.value), "that is for training"
        return str(raised.value)

    @pytest.mark.parametrize(
        ("model_class", "message"),
        [
            ("Qwen3_5ForCausalLM", "Qwen3_5ForCausalLM has recurrent layers, whose state is not kept by a cache"),
            ("BambaForCausalLM", "of keys and values; use model.generate"),
            ("T5ForConditionalGeneration", "T5ForConditionalGeneration is not a plain decoder, but an encoder and a"),
            ("Qwen3Model", "Qwen3Model has no head that predicts next tokens; load it with AutoModelForCausalLM"),
            ("Qwen3ForSequenceClassification", "Qwen3ForSequenceClassification is not a causal language model"),
        ],
    )
    def test_a_model(self, model_class: str, message: str) -> None:
        assert message in self.refusal(tiny_model(model_class))

    def test_prompt_tuning(self, tiny_qwen3: Callable[..., Any]) -> None:
        from peft import PromptTuningConfig, get_peft_model

        model = get_peft_model(tiny_qwen3(), PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"))
        with (
            pytest.raises(UserError, match="adapter 'default' is of PEFT's kind PROMPT_TUNING, which puts tokens"),
            entered(model),
        ):
            pass

    def test_rotary_embeddings_that_change(self, tiny_qwen3: Callable[..., Any]) -> None:
        model = tiny_qwen3(rope_parameters=DYNAMIC, max_position_embeddings=8)
        with entered(model, longest=8) as passes:
            assert logits(passes).shape == (2, 50)
        assert "Qwen3Model has dynamic rotary embeddings, " in self.refusal(model, longest=9)

    def test_chunks(self) -> None:
        model = tiny_model("Llama4ForCausalLM", attention_chunk_size=8)
        with entered(model, longest=8):
            pass
        assert "Llama4TextModel attends within chunks of 8 tokens" in self.refusal(model, longest=9)

    def test_a_kernel(self, tiny_qwen3: Callable[..., Any]) -> None:
        assert "kernel='flash_attn' cannot be used" in self.refusal(tiny_qwen3(), kernel="flash_attn")
        assert "kernel must be auto, torch, " in self.refusal(tiny_qwen3(), kernel="fast")

    def test_what_a_layer_finds_in_its_pass_is_said_in_words_of_generation(
        self, tiny_qwen3: Callable[..., Any]
    ) -> None:
        model = tiny_qwen3()
        parts_of(model).decoder.layers[0].self_attn.sinks = 1.0  # and it does not hand them over
        with pytest.raises(UserError, match=r"would leave it out; use model\.generate"), entered(model) as passes:
            logits(passes)

    def test_a_layer_that_is_not_causal(self) -> None:
        model = tiny_model("BertLMHeadModel")
        with entered(model) as passes, pytest.raises(UserError, match="BertSelfAttention of layer 0 is not causal"):
            logits(passes)
