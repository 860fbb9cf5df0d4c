"""Log-probabilities of completions, beside ordinary forward passes in float64."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from radixtrain import score_completions, share_prefixes
from radixtrain.errors import UserError
from radixtrain.generation import prefill
from radixtrain.generation.prefill import CompletionScore
from tests.support.batches import logits_by_the_model

Ids = list[int]
PROMPTS = [[7, 8, 9, 1, 2], [30, 31], [7, 8, 9, 3], [5]]
COMPLETIONS = [[1], [2, 3, 4], [2, 3], [1, 2, 3, 4, 5, 6]]
pytestmark = pytest.mark.usefixtures("in_float64")


@pytest.fixture(scope="module")
def model(tiny_qwen3: Callable[..., Any]) -> Any:
    return tiny_qwen3(vocab_size=400).double().eval()


def assert_right(
    model: Any, found: list[list[CompletionScore]], prompts: list[Ids], of_prompts: list[list[Ids]]
) -> None:
    assert [[each.token_ids for each in scores] for scores in found] == of_prompts
    for prompt, scores in zip(prompts, found, strict=True):
        for each in scores:
            logits = logits_by_the_model(model, prompt + each.token_ids)[len(prompt) - 1 : -1]
            truth = logits.log_softmax(-1).gather(-1, torch.tensor(each.token_ids)[:, None])[:, 0]
            assert each.logprobs == pytest.approx(truth.tolist(), abs=1e-12)


OF_PROMPTS = {
    "the same for each": (PROMPTS, COMPLETIONS),
    "of each, none too": (PROMPTS, [COMPLETIONS[:1], [], COMPLETIONS[1:], [[9, 9]]]),
    "equal ones, and one that reads as another": ([[1, 2], [1, 2], [1]], [[[3, 4], [3, 4]], [[3, 4]], [[2, 3, 4]]]),
}


@pytest.mark.parametrize("name", OF_PROMPTS)
def test_scores(model: Any, name: str) -> None:
    prompts, completions = OF_PROMPTS[name]
    of_prompts = [completions] * 4 if completions is COMPLETIONS else completions
    assert_right(model, score_completions(model, prompts, completions), prompts, of_prompts)


def test_sums_and_means(model: Any) -> None:
    (each,) = score_completions(model, [[7, 8]], [[1, 2, 3]])[0]
    assert each.logprob == pytest.approx(math.fsum(each.logprobs))
    assert each.mean_logprob == pytest.approx(each.logprob / 3) and each.logprob < each.mean_logprob < 0
    assert isinstance(each.logprob, float) and all(type(logprob) is float for logprob in each.logprobs)


def test_shared_and_adapted(tiny_qwen3: Callable[..., Any]) -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.5, init_lora_weights=False)
    model = get_peft_model(share_prefixes(tiny_qwen3().double()), config).double().train()
    found = score_completions(model, PROMPTS, COMPLETIONS)
    assert model.training
    assert_right(model.eval(), found, PROMPTS, [COMPLETIONS] * 4)


@pytest.mark.usefixtures("hooks_that_may_stay", "without_the_trial")
@pytest.mark.parametrize("limit", ["rows", "logits"])
def test_several_passes(model: Any, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(prefill, *{"rows": ("MAX_ROWS", 10), "logits": ("MAX_LOGITS", 4 * 400)}[limit])
    sizes: Ids = []
    handle = model.lm_head.register_forward_pre_hook(lambda head, args: sizes.append(args[0].shape[1]))
    found = score_completions(model, PROMPTS, COMPLETIONS)
    handle.remove()
    assert sum(sizes) == 4 * 12 and len(sizes) >= 4
    assert limit == "rows" or max(sizes) == 4
    assert_right(model, found, PROMPTS, [COMPLETIONS] * 4)


@pytest.mark.usefixtures("hooks_that_may_stay", "without_the_trial")
def test_a_prompt_is_computed_once(model: Any) -> None:
    prompts, completions = [list(range(60)), [*range(60), 99]], [[n, n] for n in range(10)]
    rows: Ids = []
    handle = model.model.layers[0].register_forward_pre_hook(lambda layer, args: rows.append(args[0].shape[1]))
    score_completions(model, prompts, completions)
    handle.remove()
    assert rows == [61 + 20]  # the last token of a completion predicts nothing


@pytest.mark.parametrize(
    ("prompts", "completions", "message"),
    [
        (PROMPTS, "one", "completions must be a list, got str"),
        (PROMPTS, [[[1]], [[2]]], "completions: 2 lists for 4 prompts; give one for each"),
        (PROMPTS, [[1], []], "completion 1 of prompt 0: expected a list of at least one token id"),
        (PROMPTS, ["one"], "completion 0 of prompt 0: expected a list of at least one token id, got 'one'"),
        (PROMPTS, [[1], [2, 400]], "completion 1 of prompt 0 has the token id 400, .* for ids from 0 to 399"),
        ([[1], [-3]], [[1]], "prompt 1 has the token id -3"),
    ],
)
def test_errors_by_name(model: Any, prompts: Any, completions: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        score_completions(model, prompts, completions)
