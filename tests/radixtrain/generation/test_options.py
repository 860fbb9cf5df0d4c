"""Options are resolved as `model.generate` resolves them, and whatever is not supported is refused by name."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from older_transformers import IS_OLDER
from tiers import TRIES
from transformers import CompileConfig, GenerationConfig, SynthIDTextWatermarkingConfig, WatermarkingConfig

from radixtrain.errors import UserError
from radixtrain.generation.options import (
    INSTEAD,
    REFUSED,
    USED,
    WITHOUT_EFFECT,
    max_new_tokens_of,
    resolve_config,
)

# A value of each refused field that asks for something.
ASKING = {
    **{"num_beams": 4, "num_beam_groups": 2, "constraints": [object()], "force_words_ids": [[3]], "penalty_alpha": 0.6},
    **{"dola_layers": "low", "use_mtp": True, "is_assistant": True, "prompt_lookup_num_tokens": 3},
    **{"assistant_early_exit": 2, "assistant_ensemble_weight": 0.5, "speculation_type": "dflash"},
    **{"guidance_scale": 1.5, "token_healing": True, "encoder_repetition_penalty": 1.2},
    **{"encoder_no_repeat_ngram_size": 2, "cache_implementation": "static", "cache_config": {"nbits": 4}},
    **{"max_cache_len": 64, "prefill_chunk_size": 8, "compile_config": CompileConfig()},
    **{"continuous_batching_config": object(), "output_attentions": True, "output_hidden_states": True},
    **{"output_scores": True, "output_logits": True, "return_dict_in_generate": True},
}


@pytest.fixture
def model(tiny_qwen3: Any) -> Any:
    return tiny_qwen3(eos_token_id=[3, 4]).eval()


@pytest.fixture(scope="module")
def any_model(tiny_qwen3: Any) -> Any:
    return tiny_qwen3()


def test_every_field_of_transformers_is_in_one_table() -> None:
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    tables = [USED, WITHOUT_EFFECT, frozenset(REFUSED)]
    known = frozenset().union(*tables)
    assert fields <= known, "a field is new: decide in radixtrain/generation/options.py"
    assert fields == known or IS_OLDER, "a field is gone: decide in radixtrain/generation/options.py"
    assert sum(map(len, tables)) == len(known), "a field stands in two tables"


class TestRefusals:
    def test_each_is_refused_by_name(self, model: Any) -> None:
        """And what asks for nothing passes."""
        assert ASKING.keys() == REFUSED.keys()
        for name, value in ASKING.items():
            message = rf"^{name}=.* is not supported: .*; leave it out, or call model.generate$"
            with pytest.raises(UserError, match=message):
                resolve_config(model, None, **{name: value})
            for neutral in REFUSED[name].neutral:
                resolve_config(model, None, **{name: neutral})

    def test_a_field_of_the_models_own_config_says_so(self, model: Any) -> None:
        model.generation_config.num_beams = 4
        with pytest.raises(UserError, match=r"num_beams=4 \(in the model's generation_config\).*pass num_beams=1,"):
            resolve_config(model, None)
        assert resolve_config(model, None, num_beams=1).num_beams == 1

    def test_a_watermark_with_a_state_for_each_place(self, model: Any) -> None:
        config = SynthIDTextWatermarkingConfig(ngram_len=3, keys=[1, 2])
        with pytest.raises(UserError, match="SynthIDTextWatermarkingConfig is not supported"):
            resolve_config(model, None, watermarking_config=config)
        resolve_config(model, None, watermarking_config=WatermarkingConfig(greenlist_ratio=0.3))

    def test_other_arguments_of_generate(self, model: Any) -> None:
        for name in INSTEAD:
            with pytest.raises(UserError, match=f"'{name}' is not supported: "):
                resolve_config(model, None, **{name: object()})

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"temprature": 0.5}, "unknown generation option 'temprature', did you mean temperature?"),
            ({"zzz": 1}, "unknown generation option 'zzz'; expected a field of transformers' GenerationConfig"),
            (
                {"enable_thinking": False},
                "; variables of the chat template go into chat_template_kwargs",
            ),
            ({"update": 1}, "unknown generation option 'update'"),  # a method of the class
            ({"max_new_tokens": 0}, "`max_new_tokens` must be greater than 0"),
            ({"max_new_tokens": 2.5}, "max_new_tokens: expected a whole number of at least 1, got 2.5"),
            ({"max_length": -1}, "max_length: expected a whole number of at least 1, got -1"),
            ({"num_return_sequences": 0}, "num_return_sequences: expected a whole number of at least 1, got 0"),
            ({"num_return_sequences": 3}, "Greedy methods"),
            ({"exponential_decay_length_penalty": (2, 1.5), "eos_token_id": None}, "set eos_token_id"),
        ],
    )
    def test_values(self, model: Any, options: dict[str, Any], message: str) -> None:
        with pytest.raises(UserError) as caught:
            resolve_config(model, None, **options)
        assert message in str(caught.value)


FIELDS = {
    "do_sample": st.sampled_from([True, False]),
    "temperature": st.sampled_from([0.5, 2.0]),
    "top_k": st.sampled_from([0, 5]),
    "top_p": st.sampled_from([0.8, 1.0]),
    "repetition_penalty": st.sampled_from([1.0, 1.3]),
    "eos_token_id": st.sampled_from([7, [8, 9]]),
    "min_length": st.sampled_from([0, 4]),
    "no_repeat_ngram_size": st.sampled_from([0, 2]),
}
SOME = st.fixed_dictionaries({}, optional=FIELDS)
GIVEN = st.fixed_dictionaries({}, optional={name: st.one_of(values, st.none()) for name, values in FIELDS.items()})


class TestPrecedence:
    @settings(max_examples=5 * TRIES, deadline=None)
    @given(of_model=SOME, of_config=st.one_of(st.none(), SOME), kwargs=GIVEN)
    def test_is_that_of_transformers(
        self, any_model: Any, of_model: dict[str, Any], of_config: dict[str, Any] | None, kwargs: dict[str, Any]
    ) -> None:
        model = any_model
        model.generation_config = GenerationConfig(**of_model)
        config = None if of_config is None else GenerationConfig(**of_config)
        expected, rest = model._prepare_generation_config(copy.deepcopy(config), **kwargs)
        found = resolve_config(model, config, **kwargs)
        assert not rest
        for name in USED - {"max_length", "max_new_tokens", "num_return_sequences"}:
            assert getattr(found, name) == getattr(expected, name), name

    def test_nothing_of_the_callers_changes(self, model: Any) -> None:
        config = GenerationConfig(max_length=30, bad_words_ids=[[1]])
        before = [config.to_dict(), model.generation_config.to_dict()]
        resolve_config(model, config, max_new_tokens=3).bad_words_ids.append([2])
        assert [config.to_dict(), model.generation_config.to_dict()] == before

    def test_a_wrapper_may_have_its_own_defaults(self, model: Any) -> None:
        from peft import LoraConfig, get_peft_model

        wrapped = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
        assert resolve_config(wrapped, None).eos_token_id == [3, 4]
        wrapped.generation_config = GenerationConfig(eos_token_id=9)
        assert resolve_config(wrapped, None).eos_token_id == 9


class TestLengths:
    """Beside the answers of `model.generate`, which never end by themselves here."""

    @pytest.mark.parametrize(
        ("of_model", "options"),
        [
            ({}, {}),
            ({}, {"max_new_tokens": 3}),
            ({}, {"max_length": 9}),
            ({}, {"max_length": 9, "max_new_tokens": 4}),
            ({"max_length": 12}, {}),
            ({"max_length": 12}, {"max_length": 9}),
            ({"max_length": 12}, {"max_new_tokens": 2}),
            ({"max_new_tokens": 5}, {}),
            ({"max_new_tokens": 5}, {"max_length": 8}),
            ({"max_new_tokens": 5}, {"max_new_tokens": None}),
        ],
    )
    def test_are_those_of_transformers(
        self, tiny_qwen3: Any, of_model: dict[str, Any], options: dict[str, Any]
    ) -> None:
        model = tiny_qwen3(eos_token_id=None, max_position_embeddings=24).eval()
        model.generation_config.update(**of_model)
        for length in (1, 6):
            answer = model.generate(torch.arange(1, length + 1)[None], **options)
            found = max_new_tokens_of(resolve_config(model, None, **options), np.array([length]))
            assert found.dtype == np.int64
            assert found.tolist() == [answer.shape[1] - length]

    def test_a_prompt_without_room_is_named(self, model: Any) -> None:
        config = resolve_config(model, None, max_length=8)
        assert max_new_tokens_of(config, np.array([7, 3])).tolist() == [1, 5]
        with pytest.raises(UserError, match=r"prompt 1 has 8 tokens, and max_length=8 .* set max_new_tokens"):
            max_new_tokens_of(config, np.array([7, 8, 9]))
