"""Log-probabilities of completions, beside ordinary forward passes in float64."""

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import nn

from radixtrain import score_completions, share_prefixes
from radixtrain.errors import UserError
from radixtrain.generation import score
from radixtrain.hf.backbone import model_inside
from radixtrain.hf.share import options_of
from tests.support.batches import logits_by_the_model
from tests.support.models import tiny_model

Ids = list[int]
PROMPTS = [[7, 8, 9, 1, 2], [30, 31], [7, 8, 9, 3], [5]]
COMPLETIONS = [[1], [2, 3, 4], [2, 3], [1, 2, 3, 4, 5, 6]]
pytestmark = pytest.mark.usefixtures("in_float64")


@pytest.fixture(scope="module")
def model(tiny_qwen3: Callable[..., Any]) -> Any:
    return tiny_qwen3(vocab_size=400).double().eval()


def assert_right(model: Any, prompts: list[Ids], of_prompts: list[list[Ids]], found: list[list[list[float]]]) -> None:
    for prompt, completions, scores in zip(prompts, of_prompts, found, strict=True):
        for completion, logprobs in zip(completions, scores, strict=True):
            logits = logits_by_the_model(model, prompt + completion)[len(prompt) - 1 : -1]
            truth = logits.log_softmax(-1).gather(-1, torch.tensor(completion)[:, None])[:, 0]
            assert logprobs == pytest.approx(truth.tolist(), abs=1e-12)
            assert all(type(logprob) is float for logprob in logprobs)


@pytest.mark.parametrize(
    ("prompts", "completions"),
    [
        (PROMPTS, [COMPLETIONS] * 4),
        (PROMPTS, [COMPLETIONS[:1], [], COMPLETIONS[1:], [[9, 9]]]),
        ([[1, 2], [1, 2], [1]], [[[3, 4], [3, 4]], [[3, 4]], [[2, 3, 4]]]),
        (PROMPTS, [[]] * 4),
    ],
    ids=["the same of each", "of each, none too", "equal ones, and one that reads as another", "none"],
)
def test_scores(model: Any, prompts: Any, completions: Any) -> None:
    assert_right(model, prompts, completions, score_completions(model, prompts, completions))
    assert options_of(model) is None, "it is shared meanwhile only"


@pytest.mark.usefixtures("hooks_that_may_stay", "without_the_trial")
def test_a_prompt_is_computed_once(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each pass, of which there are as many as needed."""
    prompts, completions = [list(range(60)), [*range(60), 99]], [[n, n] for n in range(10)]
    rows: Ids = []
    handle = model.model.layers[0].register_forward_pre_hook(lambda layer, args: rows.append(args[0].shape[1]))
    score_completions(model, prompts, [completions] * 2)
    monkeypatch.setattr(score, "MAX_TOKENS", 80)
    found = score_completions(model, prompts, [completions] * 2)
    handle.remove()
    assert rows[0] == 61 + 2 * 20 and len(rows) > 2 and max(rows[1:]) <= 80
    assert_right(model, prompts, [completions] * 2, found)


@pytest.mark.parametrize(
    ("prompts", "completions", "error", "message"),
    [
        (PROMPTS, [[[1]], [[2]]], UserError, "completions: 2 lists for 4 prompts; give one for each"),
        ([[1], []], [[[1]], [[1]]], UserError, "prompt 1 is empty, so nothing predicts the first token"),
        ([[1], [-3]], [[[1]], [[1]]], ValueError, "feature 1: input_ids must not be negative"),
    ],
)
def test_errors_by_name(model: Any, prompts: Any, completions: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        score_completions(model, prompts, completions)


def mix(module: nn.Module, args: Any, output: Any) -> None:
    """A hook that does not say that it reads one place at a time."""


def with_hook(model: Any, part: Any = None) -> Any:
    (model if part is None else part).register_forward_hook(mix)
    return model


def with_prompts(model: Any) -> Any:
    return peft.get_peft_model(model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))


def with_forward(model: Any) -> Any:
    ordinary = model.forward
    model.forward = lambda *args, **kwargs: ordinary(*args, **kwargs)
    return model


INSTEAD = "or read the logits of ordinary batches"
REFUSED: dict[str, tuple[Callable[[Any], Any], list[Ids], str]] = {
    "a hook on the model": (with_hook, PROMPTS, rf"a hook on Qwen3ForCausalLM .*mix.*; leave it out, {INSTEAD}"),
    "a hook on its wrapper": (
        lambda model: with_hook(nn.Sequential(model)),
        PROMPTS,
        rf"a hook on Sequential .*mix.*; leave it out, {INSTEAD}",
    ),
    "a hook on its head": (
        lambda model: with_hook(model, model.lm_head),
        PROMPTS,
        rf"a hook on Linear .*mix.*, {INSTEAD}",
    ),
    "a forward of its own": (with_forward, PROMPTS, rf"Qwen3ForCausalLM.forward .*; leave it out, {INSTEAD}"),
    "learned prompts": (with_prompts, PROMPTS, "PeftModelForCausalLM puts learned rows or keys before the tokens"),
    "a table of positions": (
        lambda _: tiny_model("GPT2LMHeadModel", n_positions=8),
        [[1] * 6],
        "has a table of 8 positions, and the longest prompt with its answer takes 9 positions; shorten them to 8",
    ),
    "chunks": (
        lambda _: tiny_model("Llama4ForCausalLM", attention_chunk_size=8),
        [[1] * 6],
        "within chunks of 8 tokens, .* takes 9 positions; shorten them to 8",
    ),
    "no head": (lambda model: model.model, PROMPTS, "has no head that predicts next tokens; load it with AutoModelFor"),
    "another head": (lambda _: tiny_model("Qwen3ForSequenceClassification"), PROMPTS, "; load it with AutoModelFor"),
    "no positions": (lambda _: tiny_model("BloomForCausalLM"), PROMPTS, "; read the logits of ordinary batches"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_models_and_ids(tiny_qwen3: Callable[..., Any], name: str) -> None:
    """By name, without advice for training."""
    change, prompts, message = REFUSED[name]
    with pytest.raises(UserError, match=message) as raised:
        score_completions(change(tiny_qwen3(vocab_size=50)), prompts, [[[1, 2, 3]]] * len(prompts))
    assert "train it" not in str(raised.value) and "max_length" not in str(raised.value)


def adapted(model: Any) -> Any:
    """Shared, and wrapped by PEFT."""
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.5, init_lora_weights=False)
    return peft.get_peft_model(share_prefixes(model, attention="path"), config)


MODELS: dict[str, Callable[[Any], Any]] = {
    "what draws only in training": lambda model: model,
    "a module around it": nn.Sequential,
    "shared and adapted": adapted,
    "recurrent layers": lambda _: tiny_model("Qwen3_5ForCausalLM"),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_in_training_mode(tiny_qwen3: Callable[..., Any], name: str) -> None:
    dropout = 0.0 if name == "shared and adapted" else 0.1
    model = MODELS[name](tiny_qwen3(vocab_size=400, attention_dropout=dropout)).double().train()
    inner = model_inside(model)
    options = options_of(inner)
    found = score_completions(model, PROMPTS, [COMPLETIONS] * 4)
    assert model.training and options_of(inner) == options
    assert_right(inner.eval(), PROMPTS, [COMPLETIONS] * 4, found)
