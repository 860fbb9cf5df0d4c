"""Loss and log-probabilities are Hugging Face's, whatever the kind of batch and whoever computes the logits."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from radixtrain import RadixCollator, share_prefixes
from radixtrain.collators.steps import PaddedCollator
from radixtrain.hf.predicting_rows import forward_rows
from radixtrain.verification.oracle import float64_arithmetic, float64_truth
from tests.support.models import DECODER, tiny_model

N = -100
FEATURES = [
    {"input_ids": [7, 8, 9, 5], "labels": [7, N, 9, 5]},
    {"input_ids": [7, 8, 9, 4], "labels": [7, N, 9, 4]},
    {"input_ids": [7, 8], "labels": [N, N]},
    {"input_ids": [3, 2, 1], "labels": [3, 2, N]},
]
COLLATORS = {"merged": RadixCollator(merge_labels=True), "listed": RadixCollator(), "padded": PaddedCollator()}


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    with float64_arithmetic():
        yield


HEADS: list[tuple[str, dict[str, Any], bool]] = [
    ("Qwen3ForCausalLM", {}, True),
    ("Qwen3ForCausalLM", {}, False),
    ("PhiForCausalLM", {}, True),  # with a bias
    ("BertLMHeadModel", DECODER, False),
    ("GraniteForCausalLM", {"logits_scaling": 2.0}, False),
]
EVERY = [(name, *head) for name, head in product(COLLATORS, HEADS)]
# Its positions are not those of the collator, and a radix batch is refused.
EVERY.append(("padded", "RobertaForCausalLM", {**DECODER, "pad_token_id": 0}, False))


@pytest.mark.usefixtures("hooks_that_may_stay")
@pytest.mark.parametrize(("name", "model_class", "settings", "plain_head"), EVERY)
def test_the_loss_is_the_sum_over_labelled_tokens(
    name: str, model_class: str, settings: dict[str, Any], plain_head: bool
) -> None:
    """No row goes through the head but those that predict."""
    model, seen = tiny_model(model_class, **settings).double(), list[int]()
    expected = 5 * float64_truth(model, FEATURES).loss  # of the mean over its labels
    shared = model if name == "padded" else share_prefixes(model)
    model.get_output_embeddings().register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[1]))
    predictions = forward_rows(shared, COLLATORS[name](FEATURES), plain_head)
    assert plain_head or seen[-1] == len(predictions.rows)
    assert predictions.rows.shape[1] == (32 if plain_head else 64)
    assert (predictions.head is not None) == plain_head
    assert predictions.loss_sum().item() == pytest.approx(expected, rel=1e-12)
    weights = predictions.targets.weights
    assert -(weights * predictions.logprobs()).sum().item() == pytest.approx(expected, rel=1e-12)
    assert weights.sum() == 5
