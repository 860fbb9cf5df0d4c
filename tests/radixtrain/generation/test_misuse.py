"""What users give by mistake, and what they do to a model between two calls or beside one."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import tiny_model
from torch import nn
from transformers import GenerationConfig, Qwen3Model

from radixtrain import RadixCache, generate
from radixtrain.errors import UserError
from radixtrain.verification.oracle import float64_arithmetic

Ids = list[int]
PROMPTS = [[7, 8, 9, 1, 2], [30, 31], [7, 8, 9, 3]]
GREEDY: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
pytestmark = pytest.mark.usefixtures("in_float64")


@pytest.fixture
def model(tiny_qwen3: Callable[..., Any]) -> Any:
    return tiny_qwen3(eos_token_id=None).double().eval()


class TestPaddingWithoutMask:
    """As `model.generate`: the pad token is padding unless it is an end token too."""

    PADDED = torch.tensor([[0, 0, 0, 30, 31], [7, 8, 9, 1, 2]])

    @pytest.mark.parametrize("options", [{"pad_token_id": 0}, {"pad_token_id": 0, "eos_token_id": 0}, {}])
    def test_are_the_answers_of_hugging_face(self, model: Any, options: dict[str, Any]) -> None:
        given = {**GREEDY, "pad_token_id": 49, **options}
        expected = model.generate(self.PADDED, **given)[:, self.PADDED.shape[1] :].tolist()
        found = generate(model, self.PADDED, **given).token_ids
        assert [each[: len(answer)] for each, answer in zip(expected, found, strict=True)] == found


class Wrapped(nn.Module):
    """As DistributedDataParallel: the model is a part of it, and its attributes are not seen."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module


class TestModels:
    @pytest.mark.parametrize("wrap", [Wrapped, lambda model: torch.compile(model, backend="eager")])
    def test_a_wrapped_one(self, model: Any, wrap: Callable[[Any], Any]) -> None:
        """Its own generation config is read: token 3 is suppressed."""
        first = [answer[0] for answer in generate(model, PROMPTS, **GREEDY).token_ids]
        model.generation_config = GenerationConfig(suppress_tokens=first)
        expected = generate(model, PROMPTS, **GREEDY).token_ids
        assert generate(wrap(model), PROMPTS, cache=RadixCache(), **GREEDY).token_ids == expected
        assert not set(first) & {token for answer in expected for token in answer}

    def test_a_backbone(self, model: Any) -> None:
        assert isinstance(model.model, Qwen3Model)
        with pytest.raises(UserError, match="no head that predicts next tokens; load it with AutoModelForCausalLM"):
            generate(model.model, PROMPTS, **GREEDY)

    @pytest.mark.parametrize(
        ("model_class", "message"),
        [
            ("BertForMaskedLM", "BertForMaskedLM is not a causal language model"),
            ("T5ForConditionalGeneration", "an encoder and a decoder; use model"),
        ],
    )
    def test_an_encoder(self, model_class: str, message: str) -> None:
        with pytest.raises(UserError, match=message):
            generate(tiny_model(model_class), PROMPTS, **GREEDY)

    def test_one_that_another_thread_calls(self, model: Any) -> None:
        """It gets all rows, not those of the pass that runs just then."""
        ids, found = torch.tensor([[1, 2, 3, 4]]), []

        def call() -> None:
            with float64_arithmetic():
                found.append(model(input_ids=ids).logits)

        def in_another_thread(*_: Any) -> None:
            if threading.current_thread() is threading.main_thread():
                thread = threading.Thread(target=call)
                thread.start()
                thread.join()

        expected = model(input_ids=ids).logits
        handle = model.model.layers[0].register_forward_pre_hook(in_another_thread)
        try:
            generate(model, PROMPTS, **GREEDY)
        finally:
            handle.remove()
        assert found
        for each in found:
            torch.testing.assert_close(each, expected, rtol=0, atol=1e-12)


class TestBetweenCalls:
    def test_a_hook_that_steers(self, model: Any) -> None:
        """Rows that were stored before it are not used, nor those with it afterwards."""
        cache, vector = RadixCache(), torch.randn(model.config.hidden_size, dtype=torch.float64)

        def steer(layer: nn.Module, args: Any, output: Any) -> Any:
            return output + vector if torch.is_tensor(output) else (output[0] + vector, *output[1:])

        plain = generate(model, PROMPTS, cache=cache, **GREEDY).logprobs
        handle = model.model.layers[0].register_forward_hook(steer)
        steered = generate(model, PROMPTS, cache=cache, **GREEDY).logprobs
        expected = generate(model, PROMPTS, **GREEDY).logprobs
        handle.remove()
        again = generate(model, PROMPTS, cache=cache, **GREEDY).logprobs
        for one, other in ((steered, expected), (again, plain)):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)
        assert not np.allclose(steered, plain)


class TestWhatATokenizerReturned:
    def test_an_image_is_not_lost(self, model: Any) -> None:
        """A processor's placeholders for it would be answered as if they were words."""
        prompts = {"input_ids": torch.tensor([[1, 2]]), "pixel_values": torch.zeros(1, 3, 4, 4)}
        with pytest.raises(UserError, match="prompts: pixel_values is not supported"):
            generate(model, prompts, **GREEDY)

    @pytest.mark.parametrize("name", ["token_type_ids", "mm_token_type_ids"])
    def test_types_of_tokens(self, model: Any, name: str) -> None:
        """Those of plain text are zeros."""
        ids = torch.tensor([[7, 8, 9]])
        found = generate(model, {"input_ids": ids, name: torch.zeros_like(ids)}, **GREEDY)
        assert found.prompt_ids == ids.tolist()
        with pytest.raises(UserError, match=f"prompts: {name} is not supported"):
            generate(model, {"input_ids": ids, name: torch.ones_like(ids)}, **GREEDY)

    @pytest.mark.parametrize("mask", [None, [1, 1, 1], [0, 1, 1]])
    def test_of_one_text(self, model: Any, mask: Ids | None) -> None:
        prompts = {"input_ids": [7, 8, 9], **({} if mask is None else {"attention_mask": mask})}
        assert generate(model, prompts, **GREEDY).prompt_ids == [[7, 8, 9] if mask != [0, 1, 1] else [8, 9]]


class TestArguments:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"cache": True}, "cache: expected a RadixCache, or None to keep nothing, got bool"),
            ({"tokenizer": "gpt2"}, "tokenizer: expected the model's tokenizer, got str"),
            ({"generation_config": {"top_k": 3}}, "generation_config: expected a GenerationConfig, got dict"),
        ],
    )
    def test_by_name(self, model: Any, options: dict[str, Any], message: str) -> None:
        with pytest.raises(UserError, match=message):
            generate(model, PROMPTS, **{**GREEDY, **options})

    def test_no_pad_token(self, model: Any) -> None:
        """Tokenizers of base models often have none."""
        with pytest.raises(UserError, match="pad_token_id: expected a token id to pad with, got None"):
            generate(model, PROMPTS, **GREEDY).sequences(None)  # type: ignore[arg-type]
